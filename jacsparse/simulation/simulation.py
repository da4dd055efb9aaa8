"""Which way of training in parallel pays for a model: all of them, from one worker to a million."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn

from .._version import __version__
from ..flop import CountEstimate, nan_weights
from ..interconnect import Interconnect
from ..runtime import replacing
from ..schedule import SURELY, blelloch, check_workers, fastest_on, linear
from ..terminal import Report, warnings_on
from .across_processes import AcrossRanks
from .costs import counted_workload, measured_workload
from .leapfrogging import LeapfroggingWorkers
from .one_worker import OneWorker
from .pipelines import DelayedPipeline, GPipe, PipeDream
from .scanned import Bppsa, ReducedBackward
from .tables import WORDS, in_workers, simulation_figure, tables, verdict
from .training_method import Prediction, TrainingMethod
from .workload import Workload

#: The ways of training by their names.
TRAINING_METHODS: dict[str, type[TrainingMethod]] = {
    method.name: method
    for method in (
        OneWorker, Bppsa, ReducedBackward, AcrossRanks, GPipe, PipeDream, DelayedPipeline, LeapfroggingWorkers
    )
}  # fmt: skip
#: Numbers of workers by default: the powers of two up to 2^20.
WORKERS = tuple(2**power for power in range(21))


@dataclass(frozen=True)
class WorkerFigures:
    """One method on one number of workers.

    Attributes
    ----------
    method : str
        The method's name.
    workers : int
        The number of workers; those that the method cannot use are idle.
    steps : float
        Steps of an iteration on the critical path.
    step_seconds, seconds : float
        The mean time of such a step with the messages that it waits for, and the time of the iteration.
    memory : float
        The most bytes that one worker holds at once.
    sent : float
        Bytes of an iteration's messages.
    exact : bool
        Whether the gradients are those of back-propagation, at the weights that are updated.
    choice : str
        What the method has chosen, as BPPSA a schedule.
    """

    method: str
    workers: int
    steps: float
    step_seconds: float
    seconds: float
    memory: float
    sent: float
    exact: bool
    choice: str = ""


@dataclass(frozen=True)
class BreakEven:
    """The poster's criterion of BPPSA, ``C_BPPSA / C_Base < n / log2 n``.

    Attributes
    ----------
    n : int
        The stages at hand.
    scan_step, base_step : float
        C_BPPSA, seconds of a step on the critical path of a full scan with as many workers as stages; and C_Base, mean
        seconds of the gradient of a stage's input.
    starts : int
        The n, of more stages like these, from which on the criterion holds.
    """

    n: int
    scan_step: float
    base_step: float
    starts: int

    @property
    def ratio(self) -> float:
        """``C_BPPSA / C_Base``."""
        return self.scan_step / self.base_step

    @property
    def holds(self) -> bool:
        """Whether the criterion holds for the stages at hand."""
        return self.n >= self.starts


def break_even(ratio: float) -> int:
    """The least n from which on ``ratio < n / log2 n`` holds.

    Examples
    --------
    >>> [break_even(ratio) for ratio in (1.0, 1.9, 2.0, 10.0, 1000.0)]
    [2, 4, 5, 59, 13747]
    """
    # n / log2 n is least at 3, and grows from there.
    if ratio < 3 / math.log2(3):
        return 2
    high = 4
    while high / math.log2(high) <= ratio:
        high *= 2
    low = max(3, high // 2)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if middle / math.log2(middle) > ratio else (middle, high)
    return high


@dataclass(frozen=True, repr=False)
class Simulation(Report):
    """What `simulate` returns; ``print`` shows it as tables.

    Attributes
    ----------
    rows : tuple of WorkerFigures
        Each method, up to the first number of workers of which some are idle.
    most : dict of str to int
        The workers that each method can use; more are idle.
    obstacles : dict of str to str
        Why methods cannot train the model, by their names.
    predictions : tuple of Prediction
        The papers' formulas beside what is simulated.
    break_even : BreakEven or None
        The poster's criterion; None where there is no scan.
    largest_factor, largest_product : int
        Entries of the largest Jacobian of a stage that a full scan multiplies by, and of its largest product.
    bounded : bool
        Whether products were too large to count, so that `largest_product` and times of full scans are upper bounds.
    workers : tuple of int
        The numbers of workers.
    stages, samples : int
        The stages of the chain or steps of the sequence, and the mini-batch.
    latency, bandwidth : float
        Seconds and bytes per second of messages.
    costs : str
        Where the stages' times come from, in words.
    slowest : (str, float)
        The path of the stage that takes longest, and its share of back-propagation; no path for steps of a sequence.
    cut : tuple of str
        The paths of stages whose Jacobian has no entry, so that no gradient passes them; empty ones for steps of a
        sequence.
    name : str
        What was simulated: the module's class, or the model as named on the command line.
    note : str
        What was left out, in words.
    nan_weights : dict of str to int
        How many weights are NaN, by the paths of their modules.
    settings : dict
        What else the figures depend on, such as the seed of the command line; part of `to_dict`.
    """

    rows: tuple[WorkerFigures, ...]
    most: dict[str, int]
    obstacles: dict[str, str]
    predictions: tuple[Prediction, ...]
    break_even: BreakEven | None
    largest_factor: int
    largest_product: int
    bounded: bool
    workers: tuple[int, ...]
    stages: int
    samples: int
    latency: float
    bandwidth: float
    costs: str
    slowest: tuple[str, float] = ("", 0.0)
    cut: tuple[str, ...] = ()
    name: str = ""
    note: str = ""
    nan_weights: dict[str, int] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<Simulation of {self.name}: {', '.join(self.methods)}>"

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        yield from tables(self)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is wrong with the network, in words that name stages."""
        return warnings_on(self.cut, self.stages, "stage", self.nan_weights)

    @property
    def methods(self) -> dict[str, tuple[WorkerFigures, ...]]:
        """The rows of each method."""
        names = dict.fromkeys(row.method for row in self.rows)
        return {name: tuple(row for row in self.rows if row.method == name) for name in names}

    def figures(self, method: str, workers: int) -> WorkerFigures:
        """A method on so many workers, of which some may be idle.

        Raises
        ------
        ValueError
            Where there are no figures of the method.
        """
        if method not in self.methods:
            raise ValueError(f"method is {method!r}; expected one of those simulated: {', '.join(self.methods)}")
        rows = self.methods[method]
        return next((row for row in rows if row.workers >= workers), rows[-1])

    @property
    def fastest(self) -> tuple[tuple[int, str], ...]:
        """The fastest method with as many workers or fewer, from each number of workers on at which it changes."""
        return self._fastest([*self.methods])

    @property
    def fastest_exact(self) -> tuple[tuple[int, str], ...]:
        """The same among the methods whose gradients are those of back-propagation."""
        return self._fastest([name for name, rows in self.methods.items() if rows[0].exact])

    def _fastest(self, methods: Sequence[str]) -> tuple[tuple[int, str], ...]:
        def times_on(workers: int) -> dict[str, float]:
            return {
                name: min(row.seconds for row in rows if row.workers <= workers or row is rows[0])
                for name, rows in self.methods.items()
                if name in methods
            }

        return fastest_on(sorted(self.workers) if methods else (), times_on)

    @property
    def pays(self) -> dict[str, int | None]:
        """By method, the least workers on which it is faster than back-propagation; None where it never is."""
        if "bp" not in self.methods:
            return {}
        base = self.methods["bp"][0].seconds
        return {
            name: next((row.workers for row in rows if row.seconds < base * SURELY), None)
            for name, rows in self.methods.items()
            if name != "bp"
        }

    @property
    def gain(self) -> tuple[str, int, float] | None:
        """The fastest method with exact gradients, on how many workers, and how many times faster than ``bp`` it is.

        None where it is ``bp`` itself, or as fast in three digits, or where there is nothing to compare.
        """
        return self._gain([row for row in self.rows if row.exact])

    @property
    def gain_of_any(self) -> tuple[str, int, float] | None:
        """The same of all methods, those with late gradients included."""
        return self._gain(self.rows)

    def _gain(self, rows: Sequence[WorkerFigures]) -> tuple[str, int, float] | None:
        if "bp" not in self.methods or len(rows) < 2:
            return None
        best = min(rows, key=lambda row: row.seconds)
        times = self.methods["bp"][0].seconds / best.seconds
        return (best.method, best.workers, times) if best.method != "bp" and times >= 1.005 else None

    @property
    def fill_in(self) -> float:
        """The entries of a full scan's largest product, as a multiple of those of the largest Jacobian."""
        return self.largest_product / max(1, self.largest_factor)

    @property
    def verdict(self) -> str:
        """Which method to take, by the number of workers, and whether products of matrices pay, in words."""
        return verdict(self)

    @property
    def pipeline_bound(self) -> float | None:
        """How many times faster than ``bp`` a pipeline is at most, because one worker runs its slowest stage."""
        share = self.slowest[1]
        return 1 / share if share else None

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain values, what they depend on, and what the words mean."""
        versions = {"jacsparse": __version__, "torch": torch.__version__}
        conclusions = {"fastest": self.fastest, "fastest_exact": self.fastest_exact, "pays": self.pays}
        ratios: dict[str, Any] = {"gain": self.gain, "gain_of_any": self.gain_of_any}
        ratios |= {"pipeline_bound": self.pipeline_bound, "fill_in": self.fill_in, "cut_count": len(self.cut)}
        if self.break_even is not None:
            ratios["break_even"] = {**asdict(self.break_even), "ratio": self.break_even.ratio}
        words = {"verdict": self.verdict, "words": WORDS, "warnings": list(self.warnings)}
        return {**asdict(self), **conclusions, **ratios, **words, "versions": versions}

    def save_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the rows to a file."""
        with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=[column.name for column in fields(WorkerFigures)])
            writer.writeheader()
            writer.writerows(asdict(row) for row in self.rows)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw time and memory over the number of workers, a line for each method.

        Raises
        ------
        ImportError
            Where matplotlib is not installed.
        ValueError
            Where no method can train the model.
        """
        simulation_figure(self, path)


def simulate(
    module: nn.Module,
    x: torch.Tensor,
    *,
    workers: Sequence[int] = WORKERS,
    methods: Sequence[TrainingMethod | str] | None = None,
    latency: float = 1e-5,
    bandwidth: float = 1e10,
    rate: float | None = None,
    seconds: float = 0.05,
    progress: Callable[[str], None] = lambda _: None,
    accept: Callable[[CountEstimate], bool] = lambda _: True,
) -> Simulation:
    """Predict time, memory and messages of an iteration of training, by each method and number of workers.

    Each method's jobs are simulated event by event. What a job takes is measured on this machine, as if each worker
    were such a machine, or counted. The module's buffers and the state of random numbers are left as they are.

    Parameters
    ----------
    module : Module
        A chain of stages, or an ``nn.RNN``, ``nn.GRU`` or ``nn.LSTM`` of one layer in one direction.
    x : Tensor, (batch, *input_shape)
        The mini-batch.
    workers : sequence of int
        The numbers of workers.
    methods : sequence of TrainingMethod or str, optional
        The methods or their names; by default all.
    latency, bandwidth : float
        Seconds and bytes per second of messages between workers.
    rate : float, optional
        FLOP per second of a worker. All times are then counted in FLOP, and nothing is measured.
    seconds : float
        For how long each pass of each stage is measured.
    progress : callable
        Called with what is measured or simulated next.
    accept : callable
        Called with an estimate of what it takes to find the patterns of products of Jacobians. Where it returns False,
        these are left out: of ``bppsa`` and ``ranks`` all but ``linear`` schedules, and ``cyclic_reduction``.

    Returns
    -------
    Simulation
        The figures, which ``print`` shows as tables.

    Raises
    ------
    TypeError, ValueError, UnsupportedOperatorError
        Where an argument does not fit, there is no such method, or an operator has no rule.

    Examples
    --------
    >>> net = nn.Sequential(*[part for _ in range(8) for part in (nn.Linear(4, 4), nn.Tanh())])
    >>> simulation = simulate(net, torch.randn(8, 4), workers=(1, 16), latency=0.0, rate=1e9)
    >>> [(row.workers, row.steps) for row in simulation.methods["bp"]]
    [(1, 39)]
    >>> simulation.figures("gpipe", 16).seconds < simulation.figures("bp", 16).seconds
    True
    """
    numbers, chosen, interconnect = check_workers(workers), _methods(methods), Interconnect(latency, bandwidth)
    if rate is None:
        workload = measured_workload(module, x, seconds, progress)
        threads = torch.get_num_threads()
        costs = f"measured, {threads} thread{'s' if threads > 1 else ''}"
    else:
        if not 0 < rate < math.inf:
            raise ValueError(f"rate is {rate}; expected FLOP per second above 0, as in 1e12")
        workload = counted_workload(module, x, rate)
        costs = f"counted dense, {rate:.3g} FLOP/s"
    names = {"costs": costs, "name": type(module).__name__}
    simulation = plan(workload, interconnect, numbers, chosen, **names, progress=progress, accept=accept)
    return replace(simulation, nan_weights=nan_weights(module))


def plan(
    workload: Workload,
    interconnect: Interconnect,
    workers: Sequence[int] = WORKERS,
    methods: Sequence[TrainingMethod | str] | None = None,
    *,
    costs: str = "given",
    name: str = "",
    progress: Callable[[str], None] = lambda _: None,
    accept: Callable[[CountEstimate], bool] = lambda _: True,
) -> Simulation:
    """The simulation of a workload, as `simulate` does it for a module."""
    rows, usable, obstacles, predictions = [], dict[str, int](), dict[str, str](), list[Prediction]()
    numbers, chosen, n = check_workers(workers), _methods(methods), len(workload)
    scans = [
        schedule
        for method in chosen
        if method.obstacle(workload) is None
        for number in numbers
        for schedule in method.scans(workload, min(number, method.most(workload)))
    ]
    multiplies = accept(workload.estimate([workload.scheduled(blelloch), *dict.fromkeys(scans)]))
    workload = replace(workload, multiplies=multiplies)
    for method in (method for method in chosen if multiplies or not method.multiplies):
        obstacle = method.obstacle(workload)
        if obstacle is not None:
            obstacles[method.name] = obstacle
            continue
        most = usable[method.name] = method.most(workload)
        # The first number of workers of which some are idle is the last that changes anything.
        useful = [number for number in sorted(numbers) if number < most] + sorted(n for n in numbers if n >= most)[:1]
        for number in useful:
            progress(f"{method.name} on {in_workers(number)}")
            outcome, choice = method.plan(workload, interconnect, min(number, most))
            step = outcome.seconds / max(1, outcome.steps)
            figures = (outcome.steps, step, outcome.seconds, outcome.memory, outcome.sent)
            rows.append(WorkerFigures(method.name, number, *figures, method.exact, choice))
        predictions += method.predictions(workload, min(number, most), outcome)
    scan = workload.scan(workload.scheduled(blelloch) if multiplies else linear(n))
    return Simulation(
        tuple(rows),
        usable,
        obstacles,
        tuple(predictions),
        _break_even(workload) if multiplies else None,
        workload.largest_factor,
        scan.largest,
        scan.bounded > 0,
        numbers,
        len(workload),
        workload.samples,
        interconnect.latency,
        interconnect.bandwidth,
        costs,
        workload.slowest,
        tuple(stage.path for stage in workload.stages if not stage.factor.nnz),
        name,
    )


def _break_even(workload: Workload) -> BreakEven | None:
    n = len(workload)
    if workload.coupling:
        # The poster's is of a chain of matrices.
        return None
    base = math.fsum(stage.errors for stage in workload.stages) / max(1, n - 1)
    schedule = blelloch(n)
    steps = schedule.complexity(n).steps if n else 0
    if not base or not steps:
        return None
    step = schedule.makespan(workload.scan(schedule).seconds, n) / steps
    return BreakEven(n, step, base, break_even(step / base))


def _methods(methods: Sequence[TrainingMethod | str] | None) -> list[TrainingMethod]:
    if methods is None:
        return [method() for method in TRAINING_METHODS.values()]
    if isinstance(methods, str) or not methods:
        raise ValueError(f"methods is {methods!r}; expected a sequence of methods or names, as in ['gpipe']")
    chosen = list[TrainingMethod]()
    for method in methods:
        if isinstance(method, TrainingMethod):
            chosen.append(method)
        elif isinstance(method, str) and method in TRAINING_METHODS:
            chosen.append(TRAINING_METHODS[method]())
        else:
            raise ValueError(
                f"method is {method!r}; expected one of {', '.join(TRAINING_METHODS)}, or a TrainingMethod"
            )
    names = [method.name for method in chosen]
    if len(set(names)) < len(names):
        raise ValueError(f"methods are {', '.join(names)}; expected each name once")
    return chosen
