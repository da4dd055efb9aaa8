"""Back-propagation as a scan: the steps of a schedule, run on numbers."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..patterns import Pattern, batch_last
from ..runtime import allocated
from ..schedule import Schedule, Step, resolve
from ..spgemm import ProductPlan, SparseJacobian, check_limit, matvec, plan_product
from ..stages import Chain, Record, has_hooks, pull_back
from ..tracing import without_autocast


class Scanner:
    """A chain, a schedule for it and the plans of its products, which no batch changes.

    Parameters
    ----------
    chain : Chain
        The stages.
    schedule : Schedule or str
        A schedule, as `jacsparse.schedule.resolve` takes it.
    memory_limit : int, optional
        Bytes of values to hold at once, and of the plans' index arrays; 1 GiB by default.

    Raises
    ------
    TypeError, ValueError
        Where the schedule is none or does not fit, or the limit is no number of bytes.
    """

    module: ClassVar[str] = "nn.Scan"

    def __init__(self, chain: Chain, schedule: Schedule | str = "auto", memory_limit: int | None = None) -> None:
        self.chain = chain
        self.schedule = resolve(schedule, len(chain), chain)
        self.memory_limit = check_limit(memory_limit)

    @functools.cached_property
    def stages_of(self) -> dict[int, int]:
        """The stage, from 0, of each value of the schedule that is a stage's transposed Jacobian."""
        return {value: len(self.chain) - value for value in range(1, len(self.chain) + 1)}

    def gradient_of(self, stage: int) -> int:
        """The value of the schedule that is the gradient of a stage's output."""
        return self.schedule.gradients[len(self.chain) - 1 - stage]

    @functools.cached_property
    def plans(self) -> dict[int, ProductPlan]:
        """The plan of each live product of two matrices, by the product's value."""
        patterns: dict[int, Pattern] = {}
        plans: dict[int, ProductPlan] = {}
        limit = self.memory_limit
        for step in self.schedule.live_steps():
            if step.kind != "mm":
                continue
            left, right = (
                patterns[value] if value in patterns else self.chain.stages[self.stages_of[value]].transposed_pattern
                for value in (step.left, step.right)
            )
            plan = plan_product(left, right, memory_limit=limit, winners=True)
            plans[step.out], patterns[step.out] = plan, plan.pattern
            limit = max(0, limit - plan.nbytes)
        return plans

    def pull_back(
        self, records: Sequence[Record], gradient: torch.Tensor, externals: Iterable[int], *, for_input: bool
    ) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        """Gradients of the chain's input and of externals, for a gradient of its output.

        Parameters
        ----------
        records : sequence of Record
            Records of the forward pass, for the whole batch.
        gradient : Tensor, (batch, *out_shape)
            Gradient of the chain's output.
        externals : iterable of int
            The externals whose gradients are returned, by their places in the trace.
        for_input : bool
            Whether the input's gradient is returned too.

        Returns
        -------
        gradient : Tensor or None
            Gradient of the input, ``(batch, *in_shape)``.
        external_gradients : dict of int to Tensor
            Gradients by place, summed over all stages; an external that no stage reads has none.
        """
        if not records:
            return (gradient.reshape(len(gradient), *self.chain.in_shape) if for_input else None), {}
        places = set(externals)
        externals_of = [sorted(record.externals & places) for record in records]
        if not for_input and not any(externals_of):
            return None, {}
        with without_autocast(gradient.device):
            execution = _Execution(self, records, gradient, externals_of, for_input)
            execution.run()
        return execution.input_gradient, execution.external_gradients


@dataclass
class _AutogradPass:
    """A pass of autograd through successive stages."""

    #: The value of the schedule that is the gradient of the last stage's output.
    gradient: int
    #: Numbers of the stages, the last one first.
    stages: list[int]
    #: For each stage that is a step of the schedule, the value that is the gradient of its input.
    steps: dict[int, int]


class _Execution:
    """One execution of the steps on a batch.

    Steps before all products of matrices, or after them, run on the whole batch: autograd goes through all their stages
    in one pass, which computes the gradients of weights as well. The other steps run in slices of samples, because only
    they need matrices. Stages that couple samples are steps on the whole batch, between such products.
    """

    def __init__(
        self,
        scanner: Scanner,
        records: Sequence[Record],
        gradient: torch.Tensor,
        externals: Sequence[Sequence[int]],
        for_input: bool,
    ) -> None:
        self.scanner, self.records, self.externals, self.for_input = scanner, records, externals, for_input
        self.batch = gradient.shape[0]
        self.vectors = {0: gradient}
        # Products have the input's dtype, although operators may have others.
        self.like = records[0].trace.input.detach()
        # Hooks of nodes matter only where matrices are multiplied: elsewhere autograd calls them itself.
        multiplies = any(step.kind == "mm" for step in scanner.schedule.live_steps())
        # The stages that autograd goes through, whatever the schedule.
        self.asked = {
            number
            for number, record in enumerate(records)
            if externals[number] or has_hooks(record, of_nodes=multiplies) or (for_input and number == 0)
        }
        self.wanted = {scanner.gradient_of(number) for number in self.asked}
        self.steps = scanner.schedule.live_steps(self.wanted)
        coupling = {len(records) - number for number in scanner.chain.coupling}
        #: In turn, steps on the whole batch and steps in slices; the last ones are on the whole batch.
        self.phases = _phases(self.steps, coupling)
        sliced = [step for steps in self.phases[1::2] for step in steps]
        # The values that are multiplied in slices.
        self.matrices = _operands(sliced)
        multiplied = _operands(step for step in sliced if step.kind == "mm")
        # Stages of several operators that are multiplied by vectors only: their matrices are not computed.
        self.through = {
            step.left
            for step in sliced
            if step.left in scanner.stages_of
            and step.left not in multiplied
            and scanner.chain.stages[scanner.stages_of[step.left]].operator is None
        }
        self.memory: dict[int, torch.Tensor] = {}
        self.external_gradients: dict[int, torch.Tensor] = {}
        self.input_gradient: torch.Tensor | None = None
        #: The passes of autograd in each phase of the whole batch.
        self.passes = [self._passes(steps) for steps in self.phases[::2]]
        passes = [each for phase in self.passes for each in phase]
        remaining = sorted(self.asked - {number for each in passes for number in each.stages})
        alone = [_AutogradPass(scanner.gradient_of(number), [number], {}) for number in remaining]
        self.passes[-1] += alone
        passes += alone
        # Externals that several passes read: each pass leaves out the others' gradients.
        readers = Counter(place for each in passes for place in {p for n in each.stages for p in externals[n]})
        self.apart = {place for place, count in readers.items() if count > 1}

    def _passes(self, steps: Sequence[Step]) -> list[_AutogradPass]:
        """Products of a stage's matrix and a vector, as passes of autograd through successive stages."""
        passes: list[_AutogradPass] = []
        ends: dict[int, _AutogradPass] = {}
        multiplied = _operands(self.steps)
        for step in steps:
            number = self.scanner.stages_of[step.left]
            autograd_pass = ends.pop(step.right, None)
            if autograd_pass is None:
                autograd_pass = _AutogradPass(step.right, [], {})
                passes.append(autograd_pass)
            autograd_pass.stages.append(number)
            autograd_pass.steps[number] = step.out
            ends[step.out] = autograd_pass
        for autograd_pass in passes:
            # The stage before may be asked only for its externals, or for the input.
            before = autograd_pass.stages[-1] - 1
            if before >= 0 and len(self.records) - before not in multiplied and before in self.asked:
                autograd_pass.stages.append(before)
        return passes

    def run(self) -> None:
        """Take all steps, and compute the gradients that are asked for."""
        for phase, steps in enumerate(self.phases):
            # The values that later phases multiply, or that are asked for.
            used = self.wanted.union(*map(_operands, self.phases[phase + 1 :]))
            if phase % 2:
                self._run_slices(steps, used)
                continue
            for autograd_pass in self.passes[phase // 2]:
                self._go_back(autograd_pass, used)

    def _go_back(self, autograd_pass: _AutogradPass, used: set[int]) -> None:
        numbers, steps = autograd_pass.stages, autograd_pass.steps
        inputs = [number for number in numbers if steps.get(number) in used]
        if self.for_input and 0 in numbers:
            inputs.append(0)
        gradients, external_gradients = pull_back(
            [self.records[number] for number in numbers],
            self.vectors[autograd_pass.gradient],
            [self.records[number] for number in inputs],
            sorted({place for number in numbers for place in self.externals[number]}),
            self.apart,
            # Matrices know of no hooks: a hook that changes a gradient here is an error.
            strict=[self.records[number] for number in numbers if len(self.records) - number in self.matrices],
        )
        for place, gradient in external_gradients.items():
            total = self.external_gradients.get(place)
            self.external_gradients[place] = gradient if total is None else total + gradient
        for number, gradient in zip(inputs, gradients, strict=True):
            if number in steps:
                self.vectors[steps[number]] = gradient
            if number == 0 and self.for_input:
                self.input_gradient = gradient

    def _record(self, value: int) -> Record:
        return self.records[self.scanner.stages_of[value]]

    def _pattern(self, value: int) -> Pattern:
        plan = self.scanner.plans.get(value)
        return self._record(value).stage.transposed_pattern if plan is None else plan.pattern

    def _rows(self, value: int) -> int:
        """The number of rows of a matrix, without the pattern of a stage, which may be slow to compute."""
        plan = self.scanner.plans.get(value)
        return math.prod(self._record(value).stage.in_shape) if plan is None else plan.pattern.shape[0]

    def _run_slices(self, steps: Sequence[Step], used: set[int]) -> None:
        for step in steps:
            if step.kind == "mv" and step.out in used:
                self.vectors[step.out] = self.like.new_empty((self.batch, self._rows(step.left)))
        shared: dict[int, SparseJacobian] = {}
        size = self._slice_size(steps)
        for begin in range(0, self.batch, size):
            self._run_slice(steps, slice(begin, min(begin + size, self.batch)), shared)

    def _run_slice(self, steps: Sequence[Step], samples: slice, shared: dict[int, SparseJacobian]) -> None:
        """Take the steps for some samples; `shared` caches the matrices that all samples share."""
        matrices: dict[int, SparseJacobian] = {}
        vectors: dict[int, torch.Tensor] = {}
        last_use = {value: number for number, step in enumerate(steps) for value in (step.left, step.right)}

        def matrix(value: int) -> SparseJacobian:
            if value not in shared and value not in matrices:
                record = self._record(value)
                (shared if record.stage.shared else matrices)[value] = record.transposed_jacobian(samples)
            return shared[value] if value in shared else matrices[value]

        def operand(value: int, selects: bool) -> torch.Tensor:
            if selects:
                winners = self._record(value).winners(samples)
                assert winners is not None
                return winners
            return matrix(value).values

        for number, step in enumerate(steps):
            if step.kind == "mm":
                plan = self.scanner.plans[step.out]
                left, right = operand(step.left, plan.selects_left), operand(step.right, plan.selects_right)
                out = self._memory(step.out, (plan.pattern.nnz, max(left.shape[1], right.shape[1])))
                matrices[step.out] = SparseJacobian(plan.pattern, plan.multiply(left, right, out=out))
            else:
                if step.right not in vectors:
                    vectors[step.right] = batch_last(self.vectors[step.right][samples].to(self.like.dtype))
                if step.left in self.through:
                    vectors[step.out] = self._record(step.left).pull_back_sparse(vectors[step.right], samples)
                else:
                    left_matrix = matrix(step.left)
                    vectors[step.out] = matvec(left_matrix.pattern, left_matrix.values, vectors[step.right])
                if step.out in self.vectors:
                    self.vectors[step.out][samples] = vectors[step.out].T
            for value in (step.left, step.right):
                if last_use[value] == number:
                    matrices.pop(value, None)
                    vectors.pop(value, None)

    def _memory(self, value: int, shape: tuple[int, int]) -> torch.Tensor:
        """Memory for a product's values, which all slices use: fresh pages would cost as much as the product."""
        if value not in self.memory:
            like, (m, n) = self.like, self._pattern(value).shape
            what = f"values of a {m:,} × {n:,} product"
            self.memory[value] = allocated(what, shape, like.dtype, like.device, shape[1]).view(-1)
        return self.memory[value][: math.prod(shape)].view(shape)

    def _slice_size(self, steps: Sequence[Step]) -> int:
        """The number of samples whose matrices fit the memory limit together."""
        values = ((step.left, step.right, step.out) if step.kind == "mm" else (step.left,) for step in steps)
        matrices = set[int]().union(*values) - self.through
        total = sum(self._pattern(value).nnz for value in matrices) * self.like.element_size()
        size = max(1, min(self.batch, self.scanner.memory_limit // max(1, total)))
        # Multiples of 16 or 4 samples fill the kernels' vectors.
        return size if size == self.batch else size // 16 * 16 or size // 4 * 4 or 1


def _operands(steps: Iterable[Step]) -> set[int]:
    """The values that steps multiply."""
    return {value for step in steps for value in (step.left, step.right)}


def _phases(steps: Sequence[Step], coupling: Collection[int]) -> list[list[Step]]:
    """Steps on the whole batch, steps in slices, and so on; `coupling` are the values of stages that couple samples."""
    parts: list[list[Step]] = [[]]
    for step in steps:
        if step.left in coupling:
            parts.append([])
        parts[-1].append(step)
    phases: list[list[Step]] = [[]]
    for part in parts:
        before, sliced, after = _split(part)
        phases[-1] += before
        phases += [sliced, after] if sliced else []
    return phases


def _split(steps: Sequence[Step]) -> tuple[list[Step], list[Step], list[Step]]:
    """The steps before all products of matrices, those in or between such products, and the steps after them."""
    products = {step.out for step in steps if step.kind == "mm"}
    touches = {step.out for step in steps if step.kind == "mm" or step.left in products}
    depends: set[int] = set()
    for step in steps:
        if step.out in touches or step.right in depends or step.left in depends:
            depends.add(step.out)
    leads: set[int] = set()
    for step in reversed(steps):
        if step.out in touches or step.out in leads:
            leads.update((step.left, step.right))
    between = {step.out for step in steps if step.out in touches or (step.out in depends and step.out in leads)}
    before = [step for step in steps if step.out not in between and step.out not in depends]
    after = [step for step in steps if step.out not in between and step.out in depends]
    return before, [step for step in steps if step.out in between], after
