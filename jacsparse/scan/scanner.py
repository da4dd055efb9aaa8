"""Back-propagation as a scan: the steps of a schedule, run on numbers."""

from __future__ import annotations

import functools
import math
import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import ClassVar

import torch

from ..patterns import Pattern, batch_last
from ..recurrence import ASKED, Report
from ..runtime import allocated, announced_where_long
from ..schedule import Schedule, Step, parse, resolve, run
from ..spgemm import ProductPlan, SparseJacobian, check_limit, matvec, plan_product, unchecked_jacobian
from ..stages import Chain, Record, add_gradients, has_hooks, pull_back
from ..tracing import without_autocast
from .execution_plan import AutogradPass, ExecutionPlan, Slices, WantedGradients
from .looped_chain import LoopedChain, obstacle_in

#: Execution plans that a chain keeps.
_MOST_PLANS = 16
#: What reports say of ``auto``.
BY_AUTOGRAD = "no order of products is faster on one device than autograd's pass, stage after stage"


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
    reports : list of Report, optional
        Is filled by each backward pass: a report for each loop, and for the stages between.

    Raises
    ------
    TypeError, ValueError
        Where the schedule is none or does not fit, or the limit is no number of bytes.
    """

    module: ClassVar[str] = "nn.Scan"

    def __init__(
        self,
        chain: Chain,
        schedule: Schedule | str = "auto",
        memory_limit: int | None = None,
        reports: list[Report] | None = None,
    ) -> None:
        self.chain, self.asked = chain, schedule
        self.schedule = resolve(schedule, len(chain), chain)
        self.memory_limit = check_limit(memory_limit)
        # A schedule of one's own is taken as it stands; by a name, light matrices wait for a vector.
        stages = () if isinstance(schedule, Schedule) else enumerate(chain.stages)
        light = {len(chain) - number for number, stage in stages if stage.light}
        self._executed, _ = self.schedule.deferred(light)
        self._multiplies = any(step.kind == "mm" for step in self._executed.steps)
        self._executions: dict[tuple[WantedGradients, bool], ExecutionPlan] = {}
        self.reports = [] if reports is None else reports
        self._looped: LoopedChain | None = None

    @functools.cached_property
    def plans(self) -> dict[int, ProductPlan]:
        """The plan of each product of two matrices, by the product's value."""
        plans, limit = dict[int, ProductPlan](), self.memory_limit

        def multiply(step: Step, left: Pattern, right: Pattern) -> Pattern:
            nonlocal limit
            plan = plans[step.out] = plan_product(left, right, memory_limit=limit, winners=True)
            limit = max(0, limit - plan.nbytes)
            return plan.pattern

        with announced_where_long(
            f"planning the products of {self.chain.name} by {self.schedule.name}, which are kept"
        ):
            products = [step for step in self._executed.steps if step.kind == "mm"]
            run(products, multiply, element=lambda value: self.chain.stages[-value].transposed_pattern)
        return plans

    def pull_back(
        self,
        records: Sequence[Record],
        gradient: torch.Tensor,
        externals: Iterable[int],
        *,
        for_input: bool,
        apart: Collection[int] = (),
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
        apart : collection of int
            The externals that stages of other records read too.

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
        externals_of = tuple([tuple(sorted(record.externals & places)) for record in records])
        if not for_input and not any(externals_of):
            return None, {}
        with without_autocast(gradient.device):
            looped = self._looped_for(records)
            if looped is not None:
                x_gradient, of_externals, reports = looped.pull_back(
                    records, gradient, externals_of, for_input=for_input
                )
                self.reports[:] = reports
                return x_gradient, of_externals
            wanted = self._wanted(records, externals_of, for_input=for_input)
            plan = self._plan(wanted, at_once=True)
            if self.slice_size(plan.entries, gradient) < len(gradient):
                plan = self._plan(wanted, at_once=False)
            execution = _Execution(self, plan, records, gradient, plan.apart.union(apart))
            execution.run()
        self.reports[:] = self._reports_on(records)
        return execution.input_gradient, execution.external_gradients

    def _looped_for(self, records: Sequence[Record]) -> LoopedChain | None:
        """What goes back through the chain's loops by scans; None where autograd goes through all of them."""
        if isinstance(self.asked, Schedule) or parse(self.asked)[0] in ("auto", "linear"):
            return None
        regions, refusals = self.chain.loops(records[0].trace)
        obstacles = [obstacle_in(each, records[each.first : each.stop], self.memory_limit) for each in regions]
        if any(obstacles):
            regions, refusals = [], [*refusals, *filter(None, obstacles)]
        for refusal in refusals:
            warnings.warn(f"{refusal}; autograd goes back through it", RuntimeWarning, stacklevel=2)
        if self._looped is None and regions:
            self._looped = LoopedChain(self, regions)
        return self._looped if regions else None

    def _reports_on(self, records: Sequence[Record]) -> list[Report]:
        """The reports of a backward pass in which autograd goes through loops."""
        name, reason = self.schedule.name.partition(":")[0], ASKED
        if not isinstance(self.asked, Schedule) and parse(self.asked)[0] == "auto":
            reason = BY_AUTOGRAD
        regions, _ = self.chain.loops(records[0].trace)
        reports: list[Report] = []
        if sum(each.stop - each.first for each in regions) < len(self.chain):
            report = Report("backward", len(self.chain), self.chain.name, [name], tree=self.schedule, reason=reason)
            reports.append(report)
        loops = [loop for each in regions for loop in each.loops]
        return reports + [Report("backward", each.count, each.path, ["sequential"], reason=reason) for each in loops]

    def slice_size(self, entries: int, like: torch.Tensor) -> int:
        """The number of samples, among those of a tensor, whose matrices fit the memory limit together."""
        size = max(1, min(len(like), self.memory_limit // max(1, entries * like.element_size())))
        # Multiples of 16 or 4 samples fill the kernels' vectors.
        return size if size == len(like) else size // 16 * 16 or size // 4 * 4 or 1

    def _wanted(
        self, records: Sequence[Record], externals: tuple[tuple[int, ...], ...], *, for_input: bool
    ) -> WantedGradients:
        """What a backward pass is asked for."""
        # Hooks of nodes matter only where matrices are multiplied: elsewhere autograd calls them itself.
        stages = [
            number
            for number, record in enumerate(records)
            if externals[number] or (for_input and number == 0) or has_hooks(record, of_nodes=self._multiplies)
        ]
        return WantedGradients(externals, frozenset(stages), for_input)

    def _plan(self, wanted: WantedGradients, *, at_once: bool) -> ExecutionPlan:
        """The plan for the gradients that are wanted, made at their first backward pass."""
        plan = self._executions.get((wanted, at_once))
        if plan is None:
            plan = ExecutionPlan(self.chain, self._executed, lambda: self.plans, wanted, at_once=at_once)
            # Weights that are frozen and trained again want others.
            if len(self._executions) >= _MOST_PLANS:
                self._executions.clear()
            self._executions[wanted, at_once] = plan
        return plan


#: Scanners, by the chain, the schedule and the memory limit.
Scanners = OrderedDict[tuple[int, Schedule | str, int | None], Scanner]


def scanner_of(
    scanners: Scanners,
    chain: Chain,
    schedule: Schedule | str,
    memory_limit: int | None = None,
    reports: list[Report] | None = None,
    *,
    most: int,
) -> Scanner:
    """The scanner of a chain among some, or a new one beside them, of which so many stay that were used last."""
    # A scanner holds its chain: no other one has the same number.
    key = id(chain), schedule, memory_limit
    scanner = scanners.pop(key, None) or Scanner(chain, schedule, memory_limit, reports)
    scanners[key] = scanner
    # Plans may be large.
    while len(scanners) > most:
        scanners.popitem(last=False)
    return scanner


class _Execution:
    """One execution of a plan on a batch."""

    def __init__(
        self,
        scanner: Scanner,
        plan: ExecutionPlan,
        records: Sequence[Record],
        gradient: torch.Tensor,
        apart: Collection[int],
    ) -> None:
        self.scanner, self.plan, self.records, self.apart = scanner, plan, records, apart
        self.batch = gradient.shape[0]
        self.vectors = {0: gradient}
        # Products have the input's dtype, although operators may have others.
        self.like = records[0].trace.input.detach()
        self._memory: dict[int, torch.Tensor] = {}
        # The products that later phases read.
        self._matrices: dict[int, SparseJacobian | None] = {}
        self.external_gradients: dict[int, torch.Tensor] = {}
        self.input_gradient: torch.Tensor | None = None

    def run(self) -> None:
        """Take all steps, and compute the gradients that are asked for."""
        for phase in self.plan.phases:
            if not isinstance(phase, Slices):
                for autograd_pass in phase:
                    self._go_back(autograd_pass)
                continue
            shared, size = dict[int, SparseJacobian](), self.scanner.slice_size(phase.entries, self.like)
            if size < self.batch:
                self.vectors |= {value: self.like.new_empty((self.batch, n)) for value, n in phase.kept.items()}
            for begin in range(0, self.batch, size):
                self._run_slice(phase, slice(begin, min(begin + size, self.batch)), shared)

    def _go_back(self, autograd_pass: AutogradPass) -> None:
        record = self.records.__getitem__
        gradients, external_gradients = pull_back(
            [*map(record, autograd_pass.stages)],
            self.vectors[autograd_pass.gradient],
            [record(number) for number, _ in autograd_pass.inputs],
            autograd_pass.externals,
            self.apart,
            strict=[*map(record, autograd_pass.strict)],
        )
        add_gradients(self.external_gradients, external_gradients)
        for (_, value), gradient in zip(autograd_pass.inputs, gradients, strict=True):
            if value is None:
                self.input_gradient = gradient
            else:
                self.vectors[value] = gradient

    def _run_slice(self, slices: Slices, samples: slice, shared: dict[int, SparseJacobian]) -> None:
        """Take the steps for some samples; `shared` caches the matrices that all samples share."""
        whole = samples == slice(0, self.batch)

        def element(value: int) -> SparseJacobian | torch.Tensor | None:
            if value in self.vectors:
                return batch_last(self.vectors[value][samples].to(self.like.dtype))
            if value not in slices.formed or value in shared:
                return shared.get(value)
            record = self.records[-value]
            matrix = record.transposed_jacobian(samples)
            if record.stage.shared:
                shared[value] = matrix
            return matrix

        def operand(value: int, matrix: SparseJacobian | None, selects: bool) -> torch.Tensor:
            values = None if matrix is None else matrix.values
            selected = self.records[-value].winners(samples) if selects else values
            assert selected is not None
            return selected

        def multiply(step: Step, left: SparseJacobian | None, right: SparseJacobian | None) -> SparseJacobian:
            plan = slices.plans[step.out]
            a, b = operand(step.left, left, plan.selects_left), operand(step.right, right, plan.selects_right)
            out = None if whole else self._memory_for(step.out, plan.pattern, max(a.shape[1], b.shape[1]))
            return unchecked_jacobian(plan.pattern, plan.multiply(a, b, out=out), None, None)

        def apply(step: Step, left: SparseJacobian | None, right: torch.Tensor) -> torch.Tensor:
            if left is None:
                vectors = _through(self.records[-step.left], right, samples)
            else:
                vectors = matvec(left.pattern, left.values, right)
            if step.out in slices.kept and whole:
                self.vectors[step.out] = vectors.T
            elif step.out in slices.kept:
                self.vectors[step.out][samples] = vectors.T
            return vectors

        values = self._matrices if whole else None
        run(slices.steps, multiply, apply, element, values=values, kept=slices.matrices)

    def _memory_for(self, value: int, pattern: Pattern, batch: int) -> torch.Tensor:
        """Memory for a product's values, which several slices use: fresh pages would cost as much as the product."""
        shape = (pattern.nnz, batch)
        if value not in self._memory:
            like, (m, n) = self.like, pattern.shape
            what = f"values of a {m:,} × {n:,} product"
            self._memory[value] = allocated(what, shape, like.dtype, like.device, batch).view(-1)
        return self._memory[value][: math.prod(shape)].view(shape)


def _through(record: Record, vectors: torch.Tensor, samples: slice) -> torch.Tensor:
    """``Jᵀ g``, ``(elements, batch)``, for a slice of the batch, by the operators' sparse Jacobians one by one."""
    stage, gradients = record.stage, {record.stage.stop: vectors}
    for edge in reversed(stage.edges):
        if edge.target in gradients:
            product = matvec(edge.transposed_pattern, record.transposed_values(edge, samples), gradients[edge.target])
            gradients[edge.source] = gradients[edge.source] + product if edge.source in gradients else product
    if stage.start not in gradients:
        return vectors.new_zeros((math.prod(stage.in_shape), vectors.shape[1]))
    return gradients[stage.start]
