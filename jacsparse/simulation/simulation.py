"""Which way of training in parallel pays for a model: all of them, from one worker to a million."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from .._version import __version__
from ..figures import new_figure, save_figure
from ..interconnect import Interconnect
from ..schedule import check_workers, fastest_on
from ..terminal import Fitted, PrintedReport, glossary, layer_in_words, nbytes, percent, ratio, short, short_time
from .across_processes import AcrossRanks
from .costs import counted_workload, measured_workload
from .pipelines import DelayedPipeline, GPipe, PipeDream
from .training_method import OneWorker, TrainingMethod
from .workload import Workload

#: The ways of training by their names.
TRAINING_METHODS: dict[str, type[TrainingMethod]] = {
    method.name: method for method in (OneWorker, AcrossRanks, GPipe, PipeDream, DelayedPipeline)
}
#: Numbers of workers by default: the powers of two up to 2^20.
WORKERS = tuple(2**power for power in range(21))
#: The meaning of words and columns.
WORDS = {
    "stage": "what lies between two points that all data pass; a step of a recurrent layer",
    "workers": "further ones are idle",
    "total": "an iteration over a mini-batch, without the optimiser; passes are dense, as PyTorch's",
    "memory": "the most bytes that one worker holds",
    "sent": "bytes of all messages of an iteration",
    "bp": "back-propagation on one worker",
    "ranks": "processes with consecutive stages, as process_group= of nn.Scan and nn.GRU",
    "gpipe": "micro-batches forward, then back; stages run forward twice",
    "1f1b": "PipeDream: mini-batches in a pipeline; gradients are late",
    "ddg": "delayed gradients: those of an earlier mini-batch",
}


@dataclass(frozen=True)
class WorkerFigures:
    """One method on one number of workers.

    Attributes
    ----------
    method : str
        The method's name.
    workers : int
        The number of workers; those that the method cannot use are idle.
    seconds : float
        The time of the iteration.
    memory : float
        The most bytes that one worker holds at once.
    sent : float
        Bytes of an iteration's messages.
    exact : bool
        Whether the gradients are those of back-propagation, at the weights that are updated.
    choice : str
        What the method has chosen, as across ranks an exchange.
    """

    method: str
    workers: int
    seconds: float
    memory: float
    sent: float
    exact: bool
    choice: str = ""


@dataclass(frozen=True, repr=False)
class Simulation(PrintedReport):
    """What `simulate` returns; ``print`` shows it as a table.

    Attributes
    ----------
    rows : tuple of WorkerFigures
        Each method, up to the first number of workers of which some are idle.
    obstacles : dict of str to str
        Why methods cannot train the model, by their names.
    stages, samples : int
        The stages of the chain or steps of the sequence, and the mini-batch.
    latency, bandwidth : float
        Seconds and bytes per second of messages.
    costs : str
        Where the stages' times come from, in words.
    slowest : (str, float)
        The path of the stage that takes longest, and its share of back-propagation; no path for steps of a sequence.
    name : str
        What was simulated: the module's class, or the model as named on the command line.
    settings : dict
        What else the figures depend on, such as the seed of the command line; part of `to_dict`.
    """

    rows: tuple[WorkerFigures, ...]
    obstacles: dict[str, str]
    stages: int
    samples: int
    latency: float
    bandwidth: float
    costs: str
    slowest: tuple[str, float] = ("", 0.0)
    name: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<Simulation of {self.name}: {', '.join(self.methods)}>"

    @property
    def methods(self) -> dict[str, tuple[WorkerFigures, ...]]:
        """The rows of each method."""
        names = dict.fromkeys(row.method for row in self.rows)
        return {name: tuple(row for row in self.rows if row.method == name) for name in names}

    @property
    def fastest(self) -> tuple[tuple[int, str], ...]:
        """The fastest method with as many workers or fewer, from each number of workers on at which it changes."""
        return self._fastest(self.rows)

    @property
    def fastest_exact(self) -> tuple[tuple[int, str], ...]:
        """The same among the methods whose gradients are those of back-propagation."""
        return self._fastest([row for row in self.rows if row.exact])

    def _fastest(self, rows: Sequence[WorkerFigures]) -> tuple[tuple[int, str], ...]:
        def times_on(workers: int) -> dict[str, float]:
            # Sorted, so that each method's shortest time comes last; the methods stay in the order of `rows`.
            possible = sorted((row for row in rows if row.workers <= workers), key=lambda row: -row.seconds)
            times = {row.method: row.seconds for row in possible}
            return {row.method: times[row.method] for row in rows if row.method in times}

        return fastest_on(sorted({row.workers for row in rows}), times_on)

    @property
    def gain(self) -> tuple[str, int, float] | None:
        """The fastest method with exact gradients, on how many workers, and how many times faster than ``bp`` it is.

        None where ``bp`` is not simulated.
        """
        if "bp" not in self.methods:
            return None
        best = min((row for row in self.rows if row.exact), key=lambda row: row.seconds)
        return best.method, best.workers, self.methods["bp"][0].seconds / best.seconds

    @property
    def pipeline_bound(self) -> float | None:
        """How many times faster than ``bp`` a pipeline is at most, because one worker runs its slowest stage."""
        return 1 / self.slowest[1] if self.slowest[1] else None

    @property
    def verdict(self) -> str:
        """Which method to take, by the number of workers, in words."""
        reasons = [f"{name} is not possible: {reason}." for name, reason in self.obstacles.items()]
        if not self.rows:
            return " ".join(["No method can train it.", *reasons])
        sentences = [f"Fastest: {_changes(self.fastest)}."]
        late = dict.fromkeys(name for _, name in self.fastest if not self.methods[name][0].exact)
        if late:
            sentences.append(f"The gradients of {' and '.join(late)} are late, those of earlier weights.")
        if self.gain is not None and self.gain[2] >= 1.005:
            method, workers, times = self.gain
            sentences.append(f"Exact gradients are at most {ratio(times)} times faster, by {method} on {workers:,}.")
        elif self.gain is not None and len(self.methods) > 1:
            sentences.append("No way to exact gradients is faster than back-propagation on one worker.")
        path, share = self.slowest
        if path and self.pipeline_bound:
            sentences.append(
                f"The slowest stage, {layer_in_words(path)}, takes {percent(share)} of dense back-propagation: no "
                f"pipeline is more than {ratio(self.pipeline_bound)} times faster."
            )
        return " ".join([*sentences, *reasons])

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        yield self.verdict
        yield (f"{self._heading}; {self.costs}; messages {short_time(self.latency)}, {short(self.bandwidth)}B/s")
        lines, ends = [], []
        for name, rows in self.methods.items():
            for row in rows:
                figures = (short_time(row.seconds), nbytes(row.memory), nbytes(row.sent), row.choice)
                lines.append((name if row is rows[0] else "", f"{row.workers:,}", *figures))
            ends.append(len(lines) - 1)
        columns = ("", "workers", "total", "memory", "sent", "by")
        yield Fitted("", columns, lines, keys=2, left=frozenset([0, 5]), sections=frozenset(ends))
        hidden = {*TRAINING_METHODS} - {*self.methods}
        yield glossary({word: meaning for word, meaning in WORDS.items() if word not in hidden})

    @property
    def _heading(self) -> str:
        return f"{self.name}: {self.stages:,} stage{'s' if self.stages > 1 else ''}, batch {self.samples:,}"

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain values, what they depend on, and what the words mean."""
        conclusions = {name: getattr(self, name) for name in ("fastest", "fastest_exact", "gain", "pipeline_bound")}
        versions = {"jacsparse": __version__, "torch": torch.__version__}
        return {**asdict(self), **conclusions, "verdict": self.verdict, "words": WORDS, "versions": versions}

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw time and memory over the number of workers, a line for each method.

        Raises
        ------
        ImportError
            Where matplotlib is not installed.
        ValueError
            Where no method can train the model.
        """
        if not self.rows:
            raise ValueError(f"there is nothing to draw into {path}: {self.verdict}")
        figure, panels = new_figure(10.0, 4.4, columns=2)
        for axes, column, unit, label in (
            (panels[0], "seconds", 1, "seconds of an iteration"),
            (panels[1], "memory", 2**20, "MiB on the fullest worker"),
        ):
            for name, rows in self.methods.items():
                values = [getattr(row, column) / unit for row in rows]
                axes.plot([row.workers for row in rows], values, marker="o", markersize=3, label=name)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xlabel("workers p")
            axes.set_ylabel(label)
            axes.grid(alpha=0.25)
        panels[0].legend(fontsize=8, frameon=False)
        figure.suptitle(f"{self._heading}; {self.costs}", fontsize=9)
        save_figure(figure, path)


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
        For how long each pass of each stage is measured, at most, once it has run three times.
    progress : callable
        Called with what is measured or simulated next.

    Returns
    -------
    Simulation
        The figures, which ``print`` shows as a table.

    Raises
    ------
    TypeError, ValueError, UnsupportedOperatorError
        Where an argument does not fit, there is no such method, or an operator has no rule.

    Examples
    --------
    >>> net = nn.Sequential(*[part for _ in range(8) for part in (nn.Linear(4, 4), nn.Tanh())])
    >>> simulation = simulate(net, torch.randn(8, 4), workers=(1, 16), latency=0.0, rate=1e9)
    >>> simulation.fastest_exact
    ((1, 'bp'), (16, 'gpipe'))
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
    return plan(workload, interconnect, numbers, chosen, **names, progress=progress)


def plan(
    workload: Workload,
    interconnect: Interconnect,
    workers: Sequence[int] = WORKERS,
    methods: Sequence[TrainingMethod | str] | None = None,
    *,
    costs: str = "given",
    name: str = "",
    progress: Callable[[str], None] = lambda _: None,
) -> Simulation:
    """The simulation of a workload, as `simulate` does it for a module."""
    rows, obstacles, numbers = [], dict[str, str](), sorted(check_workers(workers))
    for method in _methods(methods):
        obstacle = method.obstacle(workload)
        if obstacle is not None:
            obstacles[method.name] = obstacle
            continue
        most = method.most(workload)
        # The first number of workers of which some are idle is the last that changes anything.
        useful = [number for number in numbers if number < most] + [number for number in numbers if number >= most][:1]
        for number in useful:
            progress(f"{method.name} on {number:,} workers")
            outcome, choice = method.plan(workload, interconnect, min(number, most))
            figures = (outcome.seconds, outcome.memory, outcome.sent)
            rows.append(WorkerFigures(method.name, number, *figures, method.exact, choice))
    sizes = (len(workload), workload.samples, interconnect.latency, interconnect.bandwidth)
    return Simulation(tuple(rows), obstacles, *sizes, costs, workload.slowest, name)


def _changes(changes: Sequence[tuple[int, str]]) -> str:
    """The methods from each number of workers on."""
    (first, method), *others = changes
    on = f"{method} on {first:,} worker{'s' if first > 1 else ''}"
    return ", ".join([on, *(f"{other} from {workers:,} on" for workers, other in others)])


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
