"""The report of a FLOP analysis."""

from __future__ import annotations

import csv
import html
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from ..runtime import replacing
from ..terminal import PrintedReport
from .figure import flop_figure
from .layer_flop import LayerFlop
from .summary import FlopSummary, summary_of, warnings_of
from .tables import Page


@dataclass(frozen=True)
class FlopStep:
    """One product of the schedule. Counts are means over the samples if the structure is observed.

    Attributes
    ----------
    level : int
        Steps of one level are independent, except in the linear middle.
    phase : {"up", "middle", "down", "input"}
        The phase of the scan; ``input`` is the product that gives the gradient of the network's input.
    kind : {"mm", "mv"}
        Matrix times matrix, or matrix times vector.
    left, right : str
        The factors: the stages that they span, such as ``J16-17ᵀ``, or a gradient, such as ``∇x15``.
    m, k, n : int
        Shapes: ``(m, k)`` times ``(k, n)``.
    flop : float
        Counted operations: 2 for each pair of stored entries that meets.
    executed : float or None
        Operations that the scan executes: over the guaranteed structure, with full vectors, and, of a schedule by name,
        without products with light matrices, such as diagonals, where these can wait for a vector. None if not
        requested.
    nnz, left_nnz, right_nnz : float
        Entries of the result and of the factors.
    live : bool
        Whether a gradient depends on the step. A dead step is counted, but not executed.
    critical : bool
        Whether the step is on the critical path.
    couples : bool
        Whether the gradient goes through a stage that couples samples, which has no matrix.
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
    couples: bool = False

    @property
    def dense(self) -> int:
        """``m·k·n``: the size of the step if nothing were sparse."""
        return self.m * self.k * self.n

    @property
    def sparsity(self) -> float:
        """Share of zeros in the result."""
        return 1.0 - self.nnz / max(1, self.m * self.n)

    @property
    def loses_sparsity(self) -> bool:
        """Whether the step is a product of two matrices and less sparse than both."""
        left, right = 1.0 - self.left_nnz / max(1, self.m * self.k), 1.0 - self.right_nnz / max(1, self.k * self.n)
        return self.kind == "mm" and self.sparsity < min(left, right)


@dataclass(frozen=True)
class BaselineStep:
    """The gradient operator of one stage in back-propagation, as the thesis' Figure 5.5 counts it.

    Attributes
    ----------
    stage, operator : str
        Path in the model, and name of the ATen operator.
    m, n : int
        Shape of the transposed Jacobian.
    flop : float
        ``2·nnz`` for convolution, linear and average pooling, ``n + nnz`` for an elementwise operator, rows + columns
        for max-pooling: of the structure that the report counts, with full vectors.
    live : bool
        False for the first stage, which only the input's gradient needs.
    unpruned : float
        The same FLOP without any pruning: the thesis' own baseline.
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
    """FLOP of back-propagation for one sample, with one structure."""

    #: ``dense`` is what PyTorch executes: products of matrices and convolutions with all zeros, as `LayerFlop.backward`
    #: counts them, and for each other operator one FLOP for each element of the gradients that it reads and writes.
    #: ``pruned`` and ``observed`` count the steps of the ``linear`` schedule over the guaranteed or observed structure.
    structure: str
    #: FLOP of the gradients that pass from stage to stage, which a schedule computes.
    activations: float
    #: FLOP of the gradient of the network's input.
    input_gradient: float
    #: FLOP of the weights' gradients, which are the same for every schedule: one multiply-add for each entry of the
    #: Jacobian that meets an element of the gradient and, if observed, an element of the input. None for recurrent
    #: layers on observed zeros, which are not counted.
    weights: float | None


@dataclass(frozen=True)
class ScheduleChoice:
    """The schedule that is done first on a number of workers, each of which runs one step at a time."""

    workers: int
    #: The schedule that is done first; among equally fast ones, that of the least work.
    schedule: str
    #: For each schedule, FLOP until its last step is done, over the guaranteed structure, as the scan executes them.
    times: dict[str, float]
    #: For each schedule, FLOP of all its steps.
    work: dict[str, float]
    #: For each schedule, the most entries of matrices that one worker holds at once, as `Schedule.complexity` counts.
    space: dict[str, int]

    @property
    def reason(self) -> str:
        """The reason for the choice, in numbers."""
        if self.schedule == "linear":
            slower = {name: time for name, time in self.times.items() if time > self.times["linear"]}
            if not slower:
                return "nothing is done sooner, with less work"
            nearest = min(slower, key=slower.__getitem__)
            return f"{nearest} takes {slower[nearest] / self.times['linear']:.3g} times as long"
        time, work = self.times[self.schedule] / self.times["linear"], self.work[self.schedule] / self.work["linear"]
        return f"{time:.3g} of linear's time, for {work:.3g} times its work"


@dataclass(frozen=True, repr=False)
class FlopReport(PrintedReport):
    """The FLOP of one sample's backward pass, by scan and by back-propagation. ``print`` shows them as tables.

    Attributes
    ----------
    schedule : str
        The schedule's name.
    structure : {"guaranteed", "observed"}
        Which zeros are not counted: those that are zero for any input, or those that are zero on the given inputs.
    samples : int
        The number of samples over which counts are averaged; 0 for the guaranteed structure.
    steps : tuple of FlopStep
        The schedule's products, including dead ones, which are marked.
    input_gradient : FlopStep or None
        The additional product that gives the gradient of the network's input.
    baseline : tuple of BaselineStep
        Back-propagation's gradient operators, from the last stage to the first.
    operators : tuple of LayerFlop
        FLOP of each operator with weights, forward and backward, dense and sparse, over the guaranteed structure.
    layers : tuple of dict
        A record for each module that multiplies by weights and one for all other operators, of which tables are made:
        ``pandas.DataFrame(report.layers)``. Weights and their zeros, entries of the Jacobian and, for each structure,
        the FLOP of a training step, whose sums over records are those of `summary`.
    choices : tuple of ScheduleChoice
        The schedule that is done first, for each requested number of workers.
    backpropagation : tuple of BackPropagation
        Back-propagation with dense and pruned structure and, if the structure is observed, with that.
    name : str
        What was counted: the module's class, or the model as named on the command line.
    pays_from : int or None
        The least power of two of workers with which the schedule is done before back-propagation of the same structure.
    counted : str
        Which inputs and which entry of the output were counted, in words; empty for one tensor of one.
    note : str
        Why no scan was counted, in words.
    constant : bool
        Whether no gradient gets to the network's input, because pruned weights cut all ways from it to the output.
    nan_weights : dict of str to int
        How many weights are NaN, by the paths of their modules.
    """

    schedule: str
    structure: str
    samples: int
    steps: tuple[FlopStep, ...]
    input_gradient: FlopStep | None
    baseline: tuple[BaselineStep, ...]
    operators: tuple[LayerFlop, ...] = ()
    layers: tuple[dict[str, Any], ...] = ()
    choices: tuple[ScheduleChoice, ...] = ()
    backpropagation: tuple[BackPropagation, ...] = ()
    name: str = ""
    pays_from: int | None = None
    counted: str = ""
    note: str = ""
    constant: bool = False
    nan_weights: dict[str, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        live = sum(step.live for step in self.steps)
        return (
            f"<FlopReport of {self.name}: {self.schedule}, {self.structure} structure, {live} live steps, "
            f"{self.total:,.0f} FLOP, critical path {self.critical_path:,.0f}>"
        )

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        yield Page(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def summary(self) -> FlopSummary:
        """What the figures come to: a training step's FLOP, and whether a scan pays."""
        return summary_of(self)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is wrong with the network, in words that name the layers."""
        return warnings_of(self)

    @property
    def executed(self) -> float | None:
        """FLOP of all live steps as the scan executes them; None if they were not counted."""
        executed = [step.executed for step in self.steps if step.live]
        counted = [flop for flop in executed if flop is not None]
        return math.fsum(counted) if len(counted) == len(executed) else None

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
            "summary": self.summary().to_dict(),
            "warnings": list(self.warnings),
            "choices": [{**asdict(choice), "reason": choice.reason} for choice in self.choices],
            "total": self.total,
            "executed": self.executed,
            "critical_path": self.critical_path,
            "baseline_total": self.baseline_total,
        }

    def save_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the steps to a file, one per line; the last is the gradient of the network's input."""
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
            If matplotlib is not installed.
        """
        flop_figure(self, path)
