"""FLOP accounting: a schedule's steps, run over counts instead of numbers."""

from __future__ import annotations

import csv
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from operator import index
from typing import Any

import numpy as np
import torch
from torch import nn

from ._accumulation import Region, matrix_of
from ._chain import Chains, Record, Stage, check_input, check_shape, recorded, samples_of
from ._layers import LayerFlop, StageLayers, layers_of, unpruned
from ._modules import check_module, undisturbed
from ._stages import Edge
from .patterns import Csr, Diagonal, Full, Identity, Pattern, Pooling
from .patterns._files import replacing
from .patterns._structure import frozen, row_starts
from .schedule import Schedule, Step, balanced, linear, resolve
from .spgemm import meeting, multiply_adds, product_meeting, product_pattern

__all__ = [
    "BackPropagation",
    "BaselineStep",
    "Counted",
    "FlopReport",
    "FlopStep",
    "LayerFlop",
    "ScheduleChoice",
    "Subject",
    "count_flop",
    "without_zeros",
]


@dataclass(frozen=True)
class FlopStep:
    """One product of the schedule. Counts are averaged over samples where the structure is observed.

    Attributes
    ----------
    level : int
        Steps of one level are independent, but for the linear middle.
    phase : {"up", "middle", "down", "input"}
        Of the scan.
    kind : {"mm", "mv"}
        Matrix times matrix, or matrix times vector.
    left, right : str
        The factors: the stages that they span, as in ``J16-17ᵀ``, or a gradient, as in ``∇x15``.
    m, k, n : int
        Shapes: ``(m, k)`` times ``(k, n)``.
    flop : float
        Counted operations: 2 for each pair of stored entries that meets.
    executed : float or None
        Operations that the scan executes: over guaranteed structure, with full vectors. None where not asked for.
    nnz, left_nnz, right_nnz : float
        Entries of the result and of the factors.
    live : bool
        Whether a gradient depends on it: what is not live is counted, but not executed.
    critical : bool
        Whether it is on the critical path.
    """

    level: int
    phase: str
    kind: str
    left: str
    right: str
    m: int
    k: int
    n: int
    flop: float
    executed: float | None
    nnz: float
    live: bool = True
    critical: bool = False
    left_nnz: float = 0.0
    right_nnz: float = 0.0

    @property
    def dense(self) -> int:
        """``m·k·n``: the size of the step if nothing were sparse."""
        return self.m * self.k * self.n

    @property
    def sparsity(self) -> float:
        """Of the result."""
        return 1.0 - self.nnz / max(1, self.m * self.n)

    @property
    def loses_sparsity(self) -> bool:
        """Whether a product of two matrices is less sparse than either of them."""
        left, right = 1.0 - self.left_nnz / max(1, self.m * self.k), 1.0 - self.right_nnz / max(1, self.k * self.n)
        return self.kind == "mm" and self.sparsity < min(left, right)


@dataclass(frozen=True)
class BaselineStep:
    """The gradient operator of one stage in back-propagation, as the thesis' Figure 5.5 counts it.

    Attributes
    ----------
    stage, operator : str
        Path in the model, and ATen operator.
    m, n : int
        Shape of the transposed Jacobian.
    flop : float
        ``2·nnz`` for convolution, linear and average pooling, ``n + nnz`` for an elementwise operator, rows + columns
        for max-pooling: of the structure that the report counts, with full vectors.
    live : bool
        False for the first stage, which only the input's gradient needs.
    unpruned : float
        The same if no weight were pruned: the thesis' own baseline.
    """

    stage: str
    operator: str
    m: int
    n: int
    flop: float
    live: bool
    unpruned: float = 0.0

    @property
    def dense(self) -> int:
        """``m·n``."""
        return self.m * self.n


@dataclass(frozen=True)
class BackPropagation:
    """FLOP of back-propagation for one sample, with one structure.

    Attributes
    ----------
    structure : {"dense", "pruned", "observed"}
        ``dense`` is what PyTorch executes: products of matrices and convolutions without any zero left out, as
        `LayerFlop.backward` counts them, and for each other operator one FLOP for each element of the gradients that
        it reads and writes. ``pruned`` and ``observed`` count as the steps of the ``linear`` schedule do, over the
        guaranteed and over the observed structure.
    activations : float
        Of the gradients of what passes from stage to stage: what a schedule finds.
    input_gradient : float
        Of the gradient of the network's input.
    weights : float or None
        Of the weights' gradients, which every schedule leaves to be found in the same way: one multiply-add for each
        entry of the Jacobian that meets an element of the gradient and, where observed, an element of the input. None
        where that is not counted: for recurrent layers on observed zeros.
    """

    structure: str
    activations: float
    input_gradient: float
    weights: float | None


@dataclass(frozen=True)
class ScheduleChoice:
    """Which schedule is done first by a number of workers, each of which does one step at a time.

    Attributes
    ----------
    workers : int
        How many.
    schedule : str
        Of those that are compared the one that is done first; of equal ones that of the least work.
    times : dict of str to float
        FLOP that pass until each schedule's last step is done, over guaranteed structure, as the scan executes them.
    work : dict of str to float
        FLOP of all steps of each.
    space : dict of str to int
        Entries of matrices that the fullest worker holds at once by each, as `Schedule.complexity` says.
    """

    workers: int
    schedule: str
    times: dict[str, float]
    work: dict[str, float]
    space: dict[str, int]

    @property
    def reason(self) -> str:
        """What speaks for the schedule, in numbers."""
        if self.schedule == "linear":
            others = {
                name: time for name, time in self.times.items() if name != "linear" and time > self.times["linear"]
            }
            if not others:
                return "nothing is done sooner, with less work"
            nearest = min(others, key=others.__getitem__)
            return f"{nearest} takes {others[nearest] / self.times['linear']:.3g} times as long"
        time, work = self.times[self.schedule] / self.times["linear"], self.work[self.schedule] / self.work["linear"]
        return f"{time:.3g} of linear's time, for {work:.3g} times its work"


@dataclass(frozen=True, repr=False)
class FlopReport:
    """What a backward pass costs for one sample, by scan and by back-propagation. ``print`` shows its tables.

    Attributes
    ----------
    schedule : str
        The schedule's name.
    structure : {"guaranteed", "observed"}
        What was counted as zero: what is so for any input, or what was so on the given ones.
    samples : int
        Over how many samples counts are averaged; 0 for guaranteed structure.
    steps : tuple of FlopStep
        The schedule's products, dead ones included and marked.
    input_gradient : FlopStep
        The one product more that gives the gradient of the network's input.
    baseline : tuple of BaselineStep
        Back-propagation's gradient operators, from the last stage to the first.
    layers : tuple of LayerFlop
        What each operator with weights costs forward and back, dense and sparse, over guaranteed structure.
    choices : tuple of ScheduleChoice
        For each number of workers that was asked for.
    backpropagation : tuple of BackPropagation
        Dense, pruned and, where the structure is observed, observed.
    name : str
        What was counted: the module's class, or what the command line was given.
    """

    schedule: str
    structure: str
    samples: int
    steps: tuple[FlopStep, ...]
    input_gradient: FlopStep | None
    baseline: tuple[BaselineStep, ...]
    layers: tuple[LayerFlop, ...] = ()
    choices: tuple[ScheduleChoice, ...] = ()
    backpropagation: tuple[BackPropagation, ...] = ()
    name: str = ""

    def __str__(self) -> str:
        from ._tables import text

        return text(self)

    def __repr__(self) -> str:
        live = sum(step.live for step in self.steps)
        return (
            f"<FlopReport of {self.name}: {self.schedule}, {self.structure} structure, {live} live steps, "
            f"{self.total:,.0f} FLOP, critical path {self.critical_path:,.0f}>"
        )

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from ._tables import tables

        yield from tables(self)

    @property
    def executed(self) -> float | None:
        """FLOP of all live steps as the scan executes them; None where that was not counted."""
        live = [step.executed for step in self.steps if step.live]
        known = [flop for flop in live if flop is not None]
        return math.fsum(known) if len(known) == len(live) else None

    @property
    def total(self) -> float:
        """FLOP of all live steps."""
        return math.fsum(step.flop for step in self.steps if step.live)

    @property
    def critical_path(self) -> float:
        """FLOP along the critical path: the largest step of each level, and every step of the linear middle."""
        return math.fsum(step.flop for step in self.steps if step.critical)

    @property
    def baseline_total(self) -> float:
        """FLOP of the live gradient operators, as the thesis' Figure 5.5 counts them."""
        return math.fsum(step.flop for step in self.baseline if step.live)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        return {
            **asdict(self),
            "choices": [{**asdict(choice), "reason": choice.reason} for choice in self.choices],
            "total": self.total,
            "executed": self.executed,
            "critical_path": self.critical_path,
            "baseline_total": self.baseline_total,
        }

    def save_json(self, path: str | os.PathLike[str]) -> None:
        """Write `to_dict` to a file."""
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    def save_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the steps to a file, a line each; the input's gradient last."""
        steps = [*self.steps, *([self.input_gradient] if self.input_gradient else [])]
        with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(FlopStep.__dataclass_fields__))
            writer.writeheader()
            writer.writerows(asdict(step) for step in steps)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the steps as the thesis' Figure 5.5 does.

        Raises
        ------
        ImportError
            Where matplotlib is not installed.
        """
        from ._figures import flop_figure

        flop_figure(self, path)


def count_flop(
    module: nn.Module,
    input_shape: Sequence[int],
    *,
    schedule: Schedule | str = "blelloch:2",
    structure: str = "guaranteed",
    inputs: torch.Tensor | None = None,
    executed: bool | None = None,
    workers: Sequence[int] = (),
    progress: Callable[[int, int], None] | None = None,
    announce: Callable[[float], None] | None = None,
) -> FlopReport:
    """Count the FLOP of one sample's backward pass, step by step.

    Parameters
    ----------
    module : Module
        Any that works on each sample by itself. Or an ``nn.RNN``, ``nn.GRU`` or ``nn.LSTM`` of one layer in one
        direction: a chain of its steps.
    input_shape : sequence of int
        Without the batch axis; ``(time, features)`` for a recurrent layer.
    schedule : Schedule or str
        Whose steps are counted.
    structure : {"guaranteed", "observed"}
        ``guaranteed`` counts what may be other than zero on any input, ``observed`` what is so on `inputs`: the zeros
        of ReLU and pooling are left out, sample by sample, and counts averaged (Figure 5.5 does so).
    inputs : Tensor, (batch, *input_shape), optional
        For the observed structure.
    executed : bool, optional
        Whether to count what the scan executes too; where left out, for the guaranteed structure only, since for the
        observed one it means planning the guaranteed products as well.
    workers : sequence of int
        For each the report says, once, which is done first: ``linear``, ``balanced`` for as many workers, or
        `schedule`.
    progress : callable, optional
        Called after each product with how many are done, of all samples together, and how many there are.
    announce : callable, optional
        Called before anything is counted with the pairs of entries, at least, that have to be looked at one by one to
        find the patterns of products of matrices: an estimate of the time that counting takes. Of ``linear`` it is 0.

    Raises
    ------
    TypeError
        Where `workers` is no sequence of integers.
    ValueError
        Where the structure is unknown, or needs inputs that are missing, empty or do not fit, or there is no worker.
    UnsupportedOperatorError
        Where an operator has no rule.

    Notes
    -----
    Thesis, sections 4.3 and 5.3. The gradient that enters is full; later ones hold what their product reaches.

    Examples
    --------
    >>> report = count_flop(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), (4,), schedule="linear")
    >>> [(step.kind, step.flop) for step in report.steps], report.input_gradient.flop
    ([('mv', 12.0), ('mv', 6.0)], 24.0)
    >>> [(each.structure, each.activations, each.weights) for each in report.backpropagation]
    [('dense', 18.0, 36.0), ('pruned', 18.0, 36.0)]
    """
    if structure not in ("guaranteed", "observed"):
        raise ValueError(f"structure is {structure!r}; expected 'guaranteed' or 'observed'")
    workers = _numbers(workers)
    if isinstance(module, nn.RNNBase):
        from .recurrence import flop_subject

        subject = flop_subject(module, input_shape)
    else:
        subject = _chain_subject(module, input_shape)
    plan, name = resolve(schedule, len(subject.factors), subject), type(module).__name__
    observed_only = structure == "observed" and not (executed or workers)
    runs = 1 if structure == "guaranteed" or inputs is None else len(inputs) + (not observed_only)
    done = _Done(progress, runs * len(plan.products))
    if announce is not None:
        announce(_least_pairs(plan, subject.factors))
    if structure == "guaranteed":
        if inputs is not None:
            raise ValueError(
                "inputs are given, but the guaranteed structure does not depend on them; pass structure='observed'"
            )
        counts = _Counts(plan, subject.factors).run(done)
        report = _report(plan, subject, [counts], counts if executed is not False else None)
        return replace(report, choices=_choices(subject, plan, counts, workers), name=name)
    if inputs is None:
        raise ValueError("structure='observed' needs inputs: a batch to observe")
    check_input("inputs", inputs, subject.in_shape)
    if not len(inputs):
        raise ValueError("inputs is an empty batch; the observed structure needs at least one sample")
    guaranteed = None if observed_only else _Counts(plan, subject.factors).run(done)
    samples, observed = [], []
    for number in range(len(inputs)):
        factors, operands = subject.observe(inputs[number : number + 1])
        samples.append(_Counts(plan, factors).run(done))
        observed.append(_backpropagated(subject, "observed", factors, operands))
    report = _report(plan, subject, samples, guaranteed if executed else None, observed)
    return replace(report, choices=_choices(subject, plan, guaranteed, workers), name=name)


def _numbers(workers: Sequence[int]) -> tuple[int, ...]:
    """Numbers of workers, each once."""
    try:
        found = tuple(dict.fromkeys(index(number) for number in workers))
    except TypeError:
        raise TypeError(f"workers is {workers!r}; expected integers, as in (1, 2, 4)") from None
    if min(found, default=1) < 1:
        raise ValueError(f"workers is {workers!r}; expected integers of at least 1, as in (1, 2, 4)")
    return found


def _choices(
    subject: Subject, plan: Schedule, counts: _Counts | None, workers: Sequence[int]
) -> tuple[ScheduleChoice, ...]:
    """Which schedule is done first, for each number of workers."""
    if not workers:
        return ()
    assert counts is not None
    n = len(subject.factors)
    known = {"linear": linear(n), plan.name: plan}
    # What steps execute, and matrices' entries: no patterns, of which a schedule's products may have many.
    counted = {plan.name: (counts.executed(), counts.sizes())}

    def choice(number: int) -> ScheduleChoice:
        name = f"balanced:{number}"
        schedules = {**known, name: balanced(subject, number)}
        for each, schedule in schedules.items():
            if each not in counted:
                count = _Counts(schedule, subject.factors).run()
                counted[each] = count.executed(), count.sizes()
        times = {each: schedule.makespan(counted[each][0], number) for each, schedule in schedules.items()}
        work = {each: math.fsum(counted[each][0]) for each in schedules}
        space = {each: schedule.complexity(number, counted[each][1]).space for each, schedule in schedules.items()}
        # Of equal ones the first: linear.
        best = min(times, key=lambda each: (times[each], work[each]))
        return ScheduleChoice(number, best, times, work, space)

    return tuple(choice(number) for number in workers)


@dataclass(frozen=True)
class Counted:
    """One operator of a `Subject`, besides its transposed Jacobian.

    Attributes
    ----------
    path, name : str
        In the model, and as ATen names it.
    gradient_flop : callable
        What the thesis' gradient operator takes for observed entries.
    unpruned : float
        The same for all entries that there would be without pruning.
    executed : float
        FLOP of PyTorch's own gradient operator.
    entrywise : tuple of int
        The edges of the factor whose weights' gradient takes a multiply-add for each entry.
    """

    path: str
    name: str
    gradient_flop: Callable[[Pattern | Region], float]
    unpruned: float
    executed: float
    entrywise: tuple[int, ...] = ()


#: Factors as they are for one sample; and, of the entrywise edges of each, which elements of the operand are not zero.
Observation = tuple[Sequence["Pattern | Region"], Sequence[Mapping[int, np.ndarray]]]


@dataclass(frozen=True)
class Subject:
    """What is counted: a sequence of operators, the one next to the input first.

    Attributes
    ----------
    in_shape : tuple of int
        Of a sample.
    factors : list of Pattern or Region
        The transposed Jacobians.
    operators : list of Counted
        The rest of each.
    observe : callable
        The factors that hold for one sample, ``(1, *in_shape)``: the entries that are not zero.
    layers : tuple of LayerFlop
        The operators that have weights.
    weights : dict of str to float or None
        FLOP of the weights' gradients that no entries tell, by `BackPropagation.structure`.
    """

    in_shape: tuple[int, ...]
    factors: Sequence[Pattern | Region]
    operators: Sequence[Counted]
    observe: Callable[[torch.Tensor], Observation]
    layers: tuple[LayerFlop, ...] = ()
    weights: Mapping[str, float | None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.factors)


def _chain_subject(module: nn.Module, input_shape: Sequence[int]) -> Subject:
    check_module(module)
    shape = check_shape(input_shape)
    chains = Chains(module)
    with undisturbed(module):
        chain, records = chains.matching(recorded(module, samples_of(module, shape), readable=False))
        stages = layers_of(records)

    def observed(record: Record, edge: Edge) -> Pattern:
        if edge.shared:
            return edge.pattern
        return without_zeros(edge.pattern, record.values(edge, slice(0, 1))[:, 0].cpu().numpy())

    def operands(record: Record, own: StageLayers) -> dict[int, np.ndarray]:
        operator = record.stage.operator
        edges = record.stage.edges if operator is None else (operator,)
        return {number: (record.operand(edges[number])[0] != 0).flatten().cpu().numpy() for number in own.entrywise}

    def observe(x: torch.Tensor) -> Observation:
        # Twice: a sample by itself would not show where samples are, and be cut into other stages.
        with undisturbed(module):
            _, (_, records) = chains.of(x.repeat(2, *[1] * (x.ndim - 1)))
            factors = [
                record.stage.factor([observed(record, edge) for edge in record.stage.edges]) for record in records
            ]
            return factors, [operands(record, own) for record, own in zip(records, stages, strict=True)]

    operators = [
        Counted(stage.path, stage.name, partial(_stage_flop, stage), _unpruned_flop(stage), own.executed, own.entrywise)
        for stage, own in zip(chain, stages, strict=True)
    ]
    otherwise = float(sum(own.otherwise for own in stages))
    weights = dict.fromkeys(("pruned", "observed"), otherwise)
    layers = tuple(layer for own in stages for layer in own.layers)
    return Subject(chain.in_shape, chain.factors, operators, observe, layers, weights)


def without_zeros(pattern: Pattern, values: np.ndarray) -> Pattern:
    """The entries of a pattern whose values are not zero."""
    kept = values != 0
    # How many are kept before each entry, taken where rows start.
    indptr = row_starts(kept, pattern.indptr.dtype)[pattern.indptr]
    return Pattern.of(Csr(*pattern.shape, frozen(indptr), frozen(pattern.indices[kept])))


@dataclass
class _Count:
    """Of one step: counted and executed multiply-adds, the result's entries and the factors'."""

    pairs: int
    executed: int
    nnz: int
    left_nnz: int
    right_nnz: int


class _Done:
    """Counts its calls, and passes the count on."""

    def __init__(self, progress: Callable[[int, int], None] | None, total: int) -> None:
        self.progress, self.count, self.total = progress, 0, total

    def __call__(self) -> None:
        self.count += 1
        if self.progress is not None:
            self.progress(self.count, self.total)


def _least_pairs(plan: Schedule, factors: Sequence[Pattern | Region]) -> float:
    """Pairs of entries that are looked at, at least, for products of matrices.

    Those that make the matrices of regions, and those that meet in products of two operators' own matrices. Products of
    products come on top; of them nothing is known before the first ones are made.
    """
    own = {plan.n - stage: factor for stage, factor in enumerate(factors)}
    # Whose products need no index.
    closed = (Diagonal, Full)
    total, regions = 0.0, set()
    for step in plan.products:
        if step.kind != "mm":
            continue
        values = (step.left, step.right)
        regions |= {value for value in values if isinstance(own.get(value), Region)}
        given = [own[value] for value in values if value in own]
        patterns = [factor for factor in given if isinstance(factor, Pattern)]
        if len(patterns) == 2 and not any(isinstance(pattern.structure, closed) for pattern in patterns):
            left, right = patterns
            total += float(left.structure.column_counts() @ right.structure.row_counts())
    return total + sum(factor.estimate for value in regions if isinstance(factor := own[value], Region))


class _Counts:
    """The schedule run over patterns: matrices are patterns, vectors are which of their rows hold anything.

    A product that only one vector will meet is not written down: it is run through when the vector is there.
    """

    def __init__(self, schedule: Schedule, factors: Sequence[Pattern | Region]) -> None:
        self.schedule = schedule
        n = schedule.n
        self.factors = factors
        self.matrices: dict[int, Pattern | Region] = {n - stage: factor for stage, factor in enumerate(factors)}
        self.made: set[int] = set()
        self.waiting: dict[int, tuple[Pattern, Pattern, _Count]] = {}
        size = factors[-1].shape[1] if factors else 0
        self.vectors = {0: np.ones(size, dtype=np.bool_)}
        users = Counter(value for step in schedule.products for value in (step.left, step.right))
        self.used_once = {step.left for step in schedule.products if step.kind == "mv" and users[step.left] == 1}
        self.steps: list[_Count] = []
        self.input_gradient: _Count | None = None

    def run(self, done: Callable[[], None] = lambda: None) -> _Counts:
        """Count all products, dead ones included, and the input's gradient; `done` is called after each."""
        for step in self.schedule.products:
            self.steps.append(
                self._product(step) if step.kind == "mm" else self._apply(step.left, step.right, step.out)
            )
            done()
        if self.schedule.n:
            self.input_gradient = self._apply(self.schedule.n, self.schedule.gradients[-1], None)
        return self

    def executed(self) -> list[float]:
        """FLOP of the live steps, as the scan executes them."""
        steps = zip(self.schedule.products, self.steps, strict=True)
        return [2.0 * count.executed for step, count in steps if step.live]

    def sizes(self) -> dict[int, int]:
        """Entries of each matrix, by value."""
        n = self.schedule.n
        products = zip(self.schedule.products, self.steps, strict=True)
        return {n - stage: factor.nnz for stage, factor in enumerate(self.factors)} | {
            step.out: count.nnz for step, count in products if step.kind == "mm"
        }

    def _product(self, step: Step) -> _Count:
        left, right = (matrix_of(self.matrices[value]) for value in (step.left, step.right))
        pairs = multiply_adds(left, right) + self._making(step.left) + self._making(step.right)
        count = _Count(pairs, pairs, 0, left.nnz, right.nnz)
        if step.out in self.used_once:
            self.waiting[step.out] = (left, right, count)
        else:
            product = self.matrices[step.out] = product_pattern(left, right)
            count.nnz = product.nnz
        return count

    def _making(self, value: int) -> int:
        """Multiply-adds that it takes to make a matrix of a stage of several operators, where nothing has yet."""
        factor = self.matrices[value]
        if not isinstance(factor, Region) or value in self.made:
            return 0
        self.made.add(value)
        return factor.multiply_adds

    def _apply(self, left: int, right: int, out: int | None) -> _Count:
        held = self.vectors[right]
        if left in self.waiting:
            first, second, product = self.waiting.pop(left)
            product.nnz, pairs = product_meeting(first, second, held)
            nnz, total, reached = product.nnz, int(pairs.sum()), pairs > 0
        else:
            factor = self.matrices[left]
            nnz = factor.nnz
            if isinstance(factor, Region):
                # Operator by operator, as back-propagation goes: no matrix of it all is made.
                total, reached = factor.meeting(held)
            else:
                pairs = meeting(factor, held)
                total, reached = int(pairs.sum()), pairs > 0
        if out is not None:
            self.vectors[out] = reached
        return _Count(total, nnz, int(reached.sum()), nnz, int(held.sum()))


def _backpropagated(
    subject: Subject,
    structure: str,
    factors: Sequence[Pattern | Region],
    operands: Sequence[Mapping[int, np.ndarray]] | None = None,
) -> BackPropagation:
    """Back-propagation over counts, as the ``linear`` schedule goes; operands are full where they are not given."""
    otherwise = subject.weights.get(structure, 0.0)
    held = np.ones(factors[-1].shape[1] if factors else 0, dtype=np.bool_)
    pairs_of_weights, through = 0, []
    for number in reversed(range(len(factors))):
        pairs, held = _met(factors[number], held)
        through.append(sum(int(own.sum()) for own in pairs.values()))
        for edge in subject.operators[number].entrywise:
            own = pairs.get(edge, np.zeros(0, dtype=np.int64))
            pairs_of_weights += int((own if operands is None else own[operands[number][edge]]).sum())
    *between, first = through or [0]
    weights = None if otherwise is None else otherwise + 2.0 * pairs_of_weights
    return BackPropagation(structure, 2.0 * sum(between), 2.0 * first, weights)


def _met(factor: Pattern | Region, held: np.ndarray) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """Of a vector that is taken through a factor: the pairs that meet in each edge; and which rows are reached."""
    if isinstance(factor, Region):
        return factor.pairs(held)
    pairs = meeting(factor, held)
    return {0: pairs}, pairs > 0


def _dense(subject: Subject) -> BackPropagation:
    """Back-propagation as PyTorch executes it."""
    executed = [operator.executed for operator in subject.operators] or [0.0]
    weights = math.fsum(layer.weight_gradient for layer in subject.layers)
    return BackPropagation("dense", math.fsum(executed[1:]), float(executed[0]), weights)


def _mean(found: Sequence[BackPropagation]) -> BackPropagation:
    """Of several samples."""
    weights = [each.weights for each in found if each.weights is not None]
    return BackPropagation(
        found[0].structure,
        float(np.mean([each.activations for each in found])),
        float(np.mean([each.input_gradient for each in found])),
        float(np.mean(weights)) if weights else None,
    )


def _report(
    plan: Schedule,
    subject: Subject,
    counts: Sequence[_Counts],
    guaranteed: _Counts | None,
    observed: Sequence[BackPropagation] = (),
) -> FlopReport:
    names = _names(plan)

    shapes = {value: pattern.shape for value, pattern in counts[0].matrices.items()}
    for step in plan.products:
        if step.kind == "mm":
            shapes[step.out] = (shapes[step.left][0], shapes[step.right][1])

    def step_of(step: Step, mine: Sequence[_Count], sure: _Count | None, phase: str) -> FlopStep:
        (m, k), n = shapes[step.left], 1 if step.kind == "mv" else shapes[step.right][1]
        return FlopStep(
            level=step.level,
            phase=phase,
            kind=step.kind,
            left=names[step.left],
            right=names[step.right],
            m=m,
            k=k,
            n=n,
            flop=2.0 * float(np.mean([count.pairs for count in mine])),
            executed=None if sure is None else 2.0 * sure.executed,
            nnz=float(np.mean([count.nnz for count in mine])),
            live=step.live,
            left_nnz=float(np.mean([count.left_nnz for count in mine])),
            right_nnz=float(np.mean([count.right_nnz for count in mine])),
        )

    steps = [
        step_of(step, [c.steps[number] for c in counts], guaranteed.steps[number] if guaranteed else None, step.phase)
        for number, step in enumerate(plan.products)
    ]
    last = None
    if plan.n:
        depth = max((step.level for step in plan.steps), default=-1) + 1
        final = Step(-2, plan.n, plan.gradients[-1], "mv", depth, "down")
        mine = [count.input_gradient for count in counts if count.input_gradient is not None]
        last = step_of(final, mine, guaranteed.input_gradient if guaranteed else None, "input")
    baseline = tuple(_baseline(subject, [count.factors for count in counts]))
    found = [_dense(subject), _backpropagated(subject, "pruned", subject.factors)]
    found += [_mean(observed)] if observed else []
    structure = "observed" if observed else "guaranteed"
    return FlopReport(
        plan.name,
        structure,
        len(observed),
        tuple(_critical(steps)),
        last,
        baseline,
        subject.layers,
        backpropagation=tuple(found),
    )


def _critical(steps: Sequence[FlopStep]) -> Iterable[FlopStep]:
    largest: dict[int, int] = {}
    for number, step in enumerate(steps):
        if step.live and (step.level not in largest or step.flop > steps[largest[step.level]].flop):
            largest[step.level] = number
    chosen = set(largest.values())
    for number, step in enumerate(steps):
        yield replace(step, critical=step.live and (number in chosen or step.phase == "middle"))


def _names(plan: Schedule) -> dict[int, str]:
    """Each value by the Jacobians that it spans, numbered by their stages from 1; vectors as the gradient of x_i."""
    names = {0: f"∇x{plan.n}"}
    spans = {place: (plan.n + 1 - place, plan.n + 1 - place) for place in range(1, plan.n + 1)}
    for step in plan.products:
        if step.kind == "mm":
            spans[step.out] = (spans[step.left][0], spans[step.right][1])
        else:
            names[step.out] = f"∇x{spans[step.left][0] - 1}"
    for value, (low, high) in spans.items():
        names[value] = f"J{low}ᵀ" if low == high else f"J{low}-{high}ᵀ"
    return names


def _baseline(subject: Subject, observed: Sequence[Sequence[Pattern | Region]]) -> Iterable[BaselineStep]:
    for number in reversed(range(len(subject.operators))):
        own = subject.operators[number]
        mean = float(np.mean([own.gradient_flop(factors[number]) for factors in observed]))
        shape = subject.factors[number].shape
        yield BaselineStep(own.path, own.name, *shape, mean, number > 0, own.unpruned)


def _stage_flop(stage: Stage, observed: Pattern | Region) -> float:
    """Of a stage's gradient operators, over observed entries."""
    if not isinstance(observed, Region):
        assert stage.operator is not None
        return _operator_flop(stage.operator.pattern, observed.nnz)
    own = zip(stage.edges, observed.edges, strict=True)
    return math.fsum(_operator_flop(edge.pattern, pattern.nnz) for edge, (_, _, pattern) in own)


def _unpruned_flop(stage: Stage) -> float:
    """Of a stage's gradient operators, were no weight pruned."""
    edges = stage.edges if stage.operator is None else (stage.operator,)
    return math.fsum(_operator_flop(edge.pattern, unpruned(edge)) for edge in edges)


def _operator_flop(pattern: Pattern, nnz: float) -> float:
    rows, columns = pattern.shape
    if isinstance(pattern.structure, Identity):
        # Nothing is computed.
        return 0.0
    if isinstance(pattern.structure, Diagonal):
        return rows + nnz
    if isinstance(pattern.structure, Pooling) and pattern.structure.selects:
        return float(rows + columns)
    return 2.0 * nnz
