"""Back-propagation as a scan: a schedule's steps, run over numbers."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ._backward import has_hooks, pull_back
from ._chain import Chain, Chains, Record, Run, check_input
from ._jacobian import SparseJacobian
from ._modules import check_module, without_autocast
from .patterns import Pattern
from .patterns._cuda import allocated
from .patterns._values import batch_last
from .schedule import Schedule, Step, resolve
from .spgemm import ProductPlan, matvec, plan_product

__all__ = ["Scanner", "backward", "vjp"]

#: Bytes of values that a scan holds at once, larger batches being run in slices; and bytes of its plans' index arrays.
MEMORY_LIMIT = 2**30


def check_limit(memory_limit: int | None) -> int:
    """`memory_limit`, or what it is where left out; ValueError where it is no number of bytes."""
    if memory_limit is None:
        return MEMORY_LIMIT
    if not isinstance(memory_limit, int) or isinstance(memory_limit, bool) or memory_limit < 0:
        raise ValueError(f"memory_limit is {memory_limit!r}; expected a number of bytes of at least 0, or None")
    return memory_limit


class Scanner:
    """A chain, a schedule for it and the plans of its products: everything that is decided before the numbers.

    Parameters
    ----------
    chain : Chain
        The stages.
    schedule : Schedule or str
        As `jacsparse.schedule.resolve` takes it.
    memory_limit : int, optional
        Bytes of values to hold at once, and of the plans' index arrays; 1 GiB where left out.

    Raises
    ------
    TypeError, ValueError
        Where the schedule is none or does not fit, or the limit is no number of bytes.
    """

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
        """The plan of each live product of two matrices, by the value that it makes."""
        patterns: dict[int, Pattern] = {}
        plans: dict[int, ProductPlan] = {}
        left_over = self.memory_limit
        for step in self.schedule.live_steps():
            if step.kind != "mm":
                continue
            left, right = (
                patterns[value] if value in patterns else self.chain.stages[self.stages_of[value]].pattern
                for value in (step.left, step.right)
            )
            plan = plan_product(left, right, memory_limit=left_over, winners=True)
            plans[step.out], patterns[step.out] = plan, plan.pattern
            left_over = max(0, left_over - plan.nbytes)
        return plans

    def pull_back(
        self, records: Sequence[Record], gradient: torch.Tensor, externals: Iterable[int], *, for_input: bool
    ) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        """Gradients of the chain's input and of what else the run was given, for a gradient of its output.

        Parameters
        ----------
        records : sequence of Record
            What the forward pass left, for the whole batch.
        gradient : Tensor, (batch, *out_shape)
            Of the chain's output.
        externals : iterable of int
            Which, by their places among the recording's.
        for_input : bool
            Whether the input's is wanted too.

        Returns
        -------
        gradient : Tensor or None
            Of the input, ``(batch, *in_shape)``.
        external_gradients : dict of int to Tensor
            By place. One that several stages read gets their sum; one that none reads has none.
        """
        if not records:
            return (gradient.reshape(len(gradient), *self.chain.in_shape) if for_input else None), {}
        asked = set(externals)
        own = [sorted(record.externals & asked) for record in records]
        if not for_input and not any(own):
            return None, {}
        with without_autocast(gradient.device):
            run = _Run(self, records, gradient, own, for_input)
            run.execute()
        return run.input_gradient, run.external_gradients


@dataclass
class _Pass:
    """Stages that autograd goes back through at once.

    Attributes
    ----------
    gradient : int
        The schedule's value that it begins with.
    stages : list of int
        By number, the last one first.
    steps : dict of int to int
        Of those stages that are steps of the schedule, the value that each makes: its input's gradient.
    """

    gradient: int
    stages: list[int]
    steps: dict[int, int]


class _Run:
    """One pass of the steps over a batch.

    Steps that no product of matrices precedes, or that none follows, run on the whole batch by autograd itself, in one
    pass for all of them, which gives the gradients of weights as well. The rest run in slices of samples: only there
    matrices exist.
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
        # Products are taken in the input's dtype, whatever operators compute in.
        self.like = records[0].recording.input.detach()
        # Autograd itself calls the hooks of the nodes that it goes through.
        multiplies = any(step.kind == "mm" for step in scanner.schedule.live_steps())
        self.asked = {
            number
            for number, record in enumerate(records)
            if externals[number] or has_hooks(record, of_nodes=multiplies) or (for_input and number == 0)
        }
        self.wanted = {scanner.gradient_of(number) for number in self.asked}
        self.steps = scanner.schedule.live_steps(self.wanted)
        self.before, self.sliced, self.after = _parts(
            self.steps, {step.out for step in self.steps if step.kind == "mm"}
        )
        # What is asked for of passes of autograd, and the values that are multiplied in slices.
        self.used = self.wanted | _operands([*self.sliced, *self.after])
        self.matrices = _operands(self.sliced)
        products = [step for step in self.sliced if step.kind == "mm"]
        multiplied = _operands(products)
        # Stages of several operators that only vectors meet: no matrix of them is made.
        self.through = {
            step.left
            for step in self.sliced
            if step.left in scanner.stages_of
            and step.left not in multiplied
            and scanner.chain.stages[scanner.stages_of[step.left]].operator is None
        }
        self.memory: dict[int, torch.Tensor] = {}
        self.external_gradients: dict[int, torch.Tensor] = {}
        self.input_gradient: torch.Tensor | None = None
        self.passes_before, self.passes_after = self._passes(self.before), self._passes(self.after)
        taken = {number for each in (*self.passes_before, *self.passes_after) for number in each.stages}
        alone = sorted(self.asked - taken)
        self.passes_after += [_Pass(scanner.gradient_of(number), [number], {}) for number in alone]
        # What several passes read: each must leave out what the others add.
        passes = (*self.passes_before, *self.passes_after)
        readers = Counter(place for each in passes for place in {p for n in each.stages for p in externals[n]})
        self.apart = {place for place, count in readers.items() if count > 1}

    def _passes(self, steps: Sequence[Step]) -> list[_Pass]:
        """Steps of a stage's own matrix and a vector, as passes of autograd through stages that follow each other."""
        passes: list[_Pass] = []
        ends: dict[int, _Pass] = {}
        multiplied = _operands(self.steps)
        for step in steps:
            number = self.scanner.stages_of[step.left]
            own = ends.pop(step.right, None)
            if own is None:
                own = _Pass(step.right, [], {})
                passes.append(own)
            own.stages.append(number)
            own.steps[number] = step.out
            ends[step.out] = own
        for own in passes:
            # The stage before may be wanted only for what it reads, or for the input.
            before = own.stages[-1] - 1
            if before >= 0 and len(self.records) - before not in multiplied and before in self.asked:
                own.stages.append(before)
        return passes

    def execute(self) -> None:
        """Take all steps, and then the gradients that only need their own stage's."""
        for each in self.passes_before:
            self._take(each)
        if self.sliced:
            self._in_slices()
        for each in self.passes_after:
            self._take(each)

    def _take(self, own: _Pass) -> None:
        """Go back through some stages by autograd."""
        inputs = [number for number in own.stages if own.steps.get(number) in self.used]
        if self.for_input and 0 in own.stages:
            inputs.append(0)
        externals = sorted({place for number in own.stages for place in self.externals[number]})
        records = [self.records[number] for number in own.stages]
        inner = [self.records[number] for number in inputs]
        # Matrices know of no hooks: what those would change is found out here.
        strict = [self.records[number] for number in own.stages if len(self.records) - number in self.matrices]
        found, others = pull_back(records, self.vectors[own.gradient], inner, externals, self.apart, strict)
        for place, gradient in others.items():
            known = self.external_gradients.get(place)
            self.external_gradients[place] = gradient if known is None else known + gradient
        for number, gradient in zip(inputs, found, strict=True):
            if number in own.steps:
                self.vectors[own.steps[number]] = gradient
            if number == 0 and self.for_input:
                self.input_gradient = gradient

    def _record(self, value: int) -> Record:
        return self.records[self.scanner.stages_of[value]]

    def _pattern(self, value: int) -> Pattern:
        plan = self.scanner.plans.get(value)
        return self._record(value).stage.pattern if plan is None else plan.pattern

    def _rows(self, value: int) -> int:
        """Of a matrix of the schedule, whether it is made or not."""
        plan = self.scanner.plans.get(value)
        return math.prod(self._record(value).stage.in_shape) if plan is None else plan.pattern.shape[0]

    def _in_slices(self) -> None:
        used_later = self.wanted | {step.right for step in self.after}
        vectors_out = [step.out for step in self.sliced if step.kind == "mv" and step.out in used_later]
        for value in vectors_out:
            step = next(step for step in self.sliced if step.out == value)
            self.vectors[value] = self.like.new_empty((self.batch, self._rows(step.left)))
        shared: dict[int, SparseJacobian] = {}
        size = self._slice_size()
        for begin in range(0, self.batch, size):
            samples = slice(begin, min(begin + size, self.batch))
            self._slice(samples, vectors_out, shared)

    def _slice(self, samples: slice, vectors_out: Sequence[int], shared: dict[int, SparseJacobian]) -> None:
        matrices: dict[int, SparseJacobian] = {}
        vectors: dict[int, torch.Tensor] = {}
        last_use = {value: number for number, step in enumerate(self.sliced) for value in (step.left, step.right)}

        def matrix(value: int) -> SparseJacobian:
            if value in shared:
                return shared[value]
            if value not in matrices:
                record = self._record(value)
                made = record.transposed_jacobian(samples)
                (shared if record.stage.shared else matrices)[value] = made
                return made
            return matrices[value]

        def operand(value: int, selects: bool) -> torch.Tensor:
            if selects:
                winners = self._record(value).winners(samples)
                assert winners is not None
                return winners
            return matrix(value).values

        for number, step in enumerate(self.sliced):
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
                if step.out in vectors_out:
                    self.vectors[step.out][samples] = vectors[step.out].T
            for value in (step.left, step.right):
                if last_use[value] == number:
                    matrices.pop(value, None)
                    vectors.pop(value, None)

    def _memory(self, value: int, shape: tuple[int, int]) -> torch.Tensor:
        """Memory for a product's values, the same in each slice: fresh pages would cost as much as the product."""
        if value not in self.memory:
            like, (m, n) = self.like, self._pattern(value).shape
            what = f"values of a {m:,} × {n:,} product"
            self.memory[value] = allocated(what, shape, like.dtype, like.device, shape[1]).view(-1)
        return self.memory[value][: math.prod(shape)].view(shape)

    def _slice_size(self) -> int:
        """As many samples as fit the memory limit with the values of all matrices."""
        products = {step.out for step in self.sliced if step.kind == "mm"}
        matrices = (
            products | {step.left for step in self.sliced} | {step.right for step in self.sliced if step.kind == "mm"}
        ) - self.through
        total = sum(self._pattern(value).nnz for value in matrices) * self.like.element_size()
        size = max(1, min(self.batch, self.scanner.memory_limit // max(1, total)))
        # Whole vectors of samples, or one at a time.
        return size if size == self.batch else size // 16 * 16 or size // 4 * 4 or 1


def _operands(steps: Iterable[Step]) -> set[int]:
    """The values that steps multiply."""
    return {value for step in steps for value in (step.left, step.right)}


def _parts(steps: Sequence[Step], products: set[int]) -> tuple[list[Step], list[Step], list[Step]]:
    """Steps before any product of matrices, those that touch or lie between products, and those after all."""
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


def scanned(scanner: Scanner, run: Run, x: torch.Tensor) -> torch.Tensor:
    """The output of a forward pass as one node of autograd's graph, whose backward pass is the scan.

    What was recorded lives as long as what autograd saves: until the backward pass, unless the graph is retained.
    """

    def unpack(run: Run) -> torch.Tensor:
        handle = torch.empty(0)
        handle.run = run  # type: ignore[attr-defined]
        return handle

    # No others: autograd would call their hooks.
    places = sorted(set().union(*(record.externals for record in run.records)))
    externals = [run.recording.externals[place] for place in places]
    with torch.autograd.graph.saved_tensors_hooks(lambda _: run, unpack):
        output: torch.Tensor = _Scanned.apply(scanner, places, run.recording.output.detach(), x, *externals)
    return output


class _Scanned(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scanner: Scanner,
        places: Sequence[int],
        output: torch.Tensor,
        x: torch.Tensor,
        *externals: torch.Tensor,
    ) -> torch.Tensor:
        ctx.scanner, ctx.places = scanner, places
        # In whose place the hooks of `scanned` keep the run.
        ctx.save_for_backward(x.new_empty(0))
        # A copy: what follows may change its own in place, and the last stage may need this one.
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True asks for gradients of gradients, which nn.Scan does not give; "
                "call the module without Scan for those"
            )
        (handle,) = ctx.saved_tensors
        *_, for_input = ctx.needs_input_grad[:4]
        needed = [place for place, wants in zip(ctx.places, ctx.needs_input_grad[4:], strict=True) if wants]
        x_gradient, found = ctx.scanner.pull_back(handle.run.records, gradient, needed, for_input=for_input)
        return (None, None, None, x_gradient, *(found.get(place) for place in ctx.places))


def vjp(
    module: nn.Module, x: torch.Tensor, *, schedule: Schedule | str = "auto"
) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor]]]:
    """A module's output and the function that takes gradients back, as ``torch.func.vjp``; parameters are constants.

    Parameters
    ----------
    module : Module
        Any that works on each sample by itself.
    x : Tensor, (batch, *input_shape)
        float32 or float64.
    schedule : Schedule or str
        In which order products are taken.

    Returns
    -------
    y : Tensor, (batch, *output_shape)
        ``module(x)``.
    pullback : callable
        ``pullback(gradient of y) -> (gradient of x,)``.

    Raises
    ------
    TypeError, ValueError, UnsupportedOperatorError
        Where the input does not fit, or an operator has no rule.

    Examples
    --------
    >>> import torch
    >>> y, pullback = vjp(torch.nn.ReLU(), torch.tensor([[1.0, -1.0]]))
    >>> pullback(torch.tensor([[5.0, 5.0]]))
    (tensor([[5., 0.]]),)
    """
    check_input("x", x)
    made, run = Chains(check_module(module)).of(x)
    scanner, y = Scanner(made, schedule), run.recording.output.detach()

    def pullback(gradient: torch.Tensor) -> tuple[torch.Tensor]:
        x_gradient, _ = scanner.pull_back(run.records, _checked(gradient, y), (), for_input=True)
        assert x_gradient is not None
        return (x_gradient,)

    return y, pullback


def _checked(gradient: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if not isinstance(gradient, torch.Tensor):
        raise TypeError(f"the gradient is a {type(gradient).__name__}; expected a torch.Tensor")
    ours, expected = ((tensor.dtype, tuple(tensor.shape), str(tensor.device)) for tensor in (gradient, y))
    if ours != expected:
        raise ValueError(
            f"the gradient is {ours[0]} {ours[1]} on {ours[2]}; expected that of the output: "
            f"{expected[0]} {expected[1]} on {expected[2]}"
        )
    return gradient.detach()


def backward(
    module: nn.Module, x: torch.Tensor, grad_output: torch.Tensor, *, schedule: Schedule | str = "auto"
) -> torch.Tensor:
    """Run a module forward and back: the gradient of `x` is returned, those of the parameters are added to ``.grad``.

    Parameters
    ----------
    module : Module
        Any that works on each sample by itself and draws no random numbers: the forward pass is run here once more.
    x : Tensor, (batch, *input_shape)
        float32 or float64.
    grad_output : Tensor, (batch, *output_shape)
        Of the module's output.
    schedule : Schedule or str
        In which order products are taken.

    Returns
    -------
    Tensor, (batch, *input_shape)

    Raises
    ------
    ValueError
        Where the module draws random numbers, or a shape does not fit.
    """
    check_input("x", x)
    made, run = Chains(check_module(module)).of(x)
    if run.recording.draws:
        paths = {id(part): path for path, part in module.named_modules()}
        drawing = run.recording.draws[0]
        where = paths.get(id(drawing)) or type(drawing or module).__name__
        raise ValueError(f"{where}: backward runs the forward again, which would draw other numbers; call .eval()")
    given = x.detach().requires_grad_()
    y = scanned(Scanner(made, schedule), run, given)
    y.backward(_checked(grad_output, y))
    assert given.grad is not None
    return given.grad
