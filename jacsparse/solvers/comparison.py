"""All solvers side by side for one module's back-propagation: steps, work, memory and time."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import nn

from .._version import __version__
from ..flop import Effort, estimate_products, nan_weights
from ..patterns import Diagonal, Pattern
from ..runtime import thread_count
from ..schedule import check_workers, fastest_on
from ..stages import check_input
from ..terminal import Report, warnings_on
from ..tracing import check_module, traced, undisturbed
from .blocks import MOST_PLANNED, Level, Work
from .comparison_tables import WORDS, comparison_figure, tables
from .estimates import Estimate, estimates, reduction_pays
from .jacobi import Richardson
from .propagation import stretches_of
from .solver import Solution, TriangularSolver
from .systems import BlockTriangular

#: Multiply-adds from which on a solver is counted but not run.
MOST = 10**10
#: Workers over which `SolverComparison.fewest` goes.
_WORKERS = tuple(2**power for power in range(21))
#: Seconds for which each solver is timed; and from which on its one solution is its time.
SECONDS, _ONCE = 0.3, 2.0


@dataclass(frozen=True)
class SolutionEstimate(Effort):
    """What it takes to plan a direct solution and to time it, about.

    Attributes
    ----------
    on_one_thread : float
        Seconds of the plans and of two solutions, the second of which is timed.
    nbytes : float
        Of the values of blocks and of the plans' indices.
    """

    on_one_thread: float
    nbytes: float

    @property
    def seconds(self) -> float:
        """Time on this machine's threads."""
        return self.on_one_thread / thread_count()

    @classmethod
    def of(cls, work: Work, itemsize: int) -> SolutionEstimate:
        """The estimate for work that has been counted."""
        seconds = math.fsum(level.planning + 2 * level.seconds for level in work.levels)
        planned = math.fsum(level.planned for level in work.levels)
        return cls(seconds, work.entries * itemsize + min(planned, MOST_PLANNED))


@dataclass(frozen=True)
class SolverFigures:
    """One solver.

    Attributes
    ----------
    method : str
        The solver's name.
    options : dict
        Its options that are not the defaults.
    steps : int or None
        Levels of products that wait for each other: the paper's η of an iterative solver, whose steps are products with
        the system's matrix. None where the solver does not apply.
    multiply_adds, entries : int or None
        The work, and the most entries of blocks that are stored at once beside those of the system.
    iterations : int or None
        Of an iterative solver.
    residual : float or None
        The last residual of an iterative solver.
    multiply_adds_until_done : dict of int to float
        By the number of workers, the multiply-adds until the last level is done (`Work.time`). It is no prediction of
        seconds, because products of matrices and of vectors run at different rates. None, as `seconds`, where the
        solver did not settle.
    seconds : float or None
        Measured here.
    remark : str
        Why figures are missing.
    """

    method: str
    options: dict[str, Any] = field(default_factory=dict)
    steps: int | None = None
    multiply_adds: int | None = None
    entries: int | None = None
    iterations: int | None = None
    residual: float | None = None
    multiply_adds_until_done: dict[int, float] | None = None
    seconds: float | None = None
    remark: str = ""

    @property
    def solved(self) -> bool:
        """Whether it solved the system, or would if it ran."""
        return self.multiply_adds_until_done is not None

    @property
    def label(self) -> str:
        """The name and the options, as in ``richardson omega=0.9``."""
        return " ".join((self.method, *(f"{name}={value}" for name, value in self.options.items())))


@dataclass(frozen=True, repr=False)
class SolverComparison(Report):
    """What `compare` returns; ``print`` shows it as tables.

    Attributes
    ----------
    rows : tuple of SolverFigures
        A row for each solver.
    estimates : tuple of Estimate
        The paper's equations beside counts, for equally wide, fully connected layers; else empty.
    layers, units, samples : int
        The system's depth l, its widest block n, and the batch r.
    workers : tuple of int
        The numbers of workers.
    fewest : tuple of (int, str)
        Which solver has the fewest multiply-adds until the last level is done: from which number of workers on, of
        powers of two up to 2^20, and its label.
    input_shape : tuple of int
        Of the input, with the batch.
    dtype, device : str
        Of the input.
    threads : int
        PyTorch's threads during the measurement.
    name : str
        What was compared: the module's class, or the model as named on the command line.
    cut : tuple of str
        The paths of layers whose block has no entry, so that no gradient passes them; empty ones for those of an RNN.
    nan_weights : dict of str to int
        How many weights are NaN, by the paths of their modules.
    settings : dict
        What else the figures depend on, such as the seed of the command line; part of `to_dict`.
    """

    rows: tuple[SolverFigures, ...]
    estimates: tuple[Estimate, ...]
    layers: int
    units: int
    samples: int
    workers: tuple[int, ...]
    fewest: tuple[tuple[int, str], ...]
    input_shape: tuple[int, ...]
    dtype: str
    device: str
    threads: int
    name: str = ""
    cut: tuple[str, ...] = ()
    nan_weights: dict[str, int] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<SolverComparison of {self.name}: {', '.join(row.label for row in self.rows)}>"

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        yield from tables(self)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is wrong with the network, in words that name layers."""
        return warnings_on(self.cut, self.layers, "layer", self.nan_weights)

    @property
    def depth_bound(self) -> float:
        """``l / log2 l`` of the paper's criterion of direct methods; 0 for one layer."""
        return self.layers / math.log2(self.layers) if self.layers > 1 else 0.0

    @property
    def criterion(self) -> str:
        """The paper's own criteria for this module (sections 4.1 and 4.2), in words."""
        if self.layers == 1:
            return "With one layer, direct and iterative methods have nothing to do at once: they do not pay."
        direct = reduction_pays(self.layers, self.units, self.samples)
        lines = [
            f"By Naumov's criteria, direct methods (scan, cyclic_reduction) pay where samples r = {self.samples} >= "
            f"the widest layer's units n = {self.units:,}, or l / log2 l = {self.depth_bound:.1f} >= n for "
            f"l = {self.layers} layers: {_verdict(direct)}."
        ]
        settled = [row for row in self.rows if row.solved and row.iterations is not None and row.steps]
        if settled:
            best = min(settled, key=lambda row: row.steps or 0)
            lines.append(
                f"Iterative ones pay where their steps (η) are fewer than the layers l = {self.layers}: the fewest are "
                f"{best.steps}, by {best.label}; {_verdict((best.steps or 0) < self.layers)}."
            )
        return " ".join(lines)

    @property
    def conclusion(self) -> str:
        """Which solver is done after the fewest multiply-adds, by the number of workers, in words."""
        if not self.fewest:
            return "No solver settled."
        (_, first), *others = self.fewest
        first += ", which is back-propagation" if first == "substitution" else ""
        if len(self.rows) == 1:
            return f"There is nothing to compare with: the one method is {first}."
        parts = [first, *(f"from {workers:,} workers on {label}" for workers, label in others)]
        end = (
            ", if workers share each result's elements and messages take no time"
            if others
            else f", for any number of workers up to {_WORKERS[-1]:,}"
        )
        return f"Fewest multiply-adds until done: {', '.join(parts)}{end}."

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain values, what they depend on, and what the words mean."""
        versions = {"jacsparse": __version__, "torch": torch.__version__}
        words = {"criterion": self.criterion, "conclusion": self.conclusion, "words": WORDS}
        counted = [{**asdict(each), "ratio": each.ratio} for each in self.estimates]
        figures = {
            "estimates": counted,
            "depth_bound": self.depth_bound,
            "fewest_up_to": _WORKERS[-1],
            "cut_count": len(self.cut),
            "warnings": list(self.warnings),
        }
        return {**asdict(self), **figures, **words, "versions": versions}

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw multiply-adds until the last level is done over the number of workers, a line for each solver.

        Raises
        ------
        ImportError
            Where matplotlib is not installed.
        ValueError
            Where no solver solved the system.
        """
        comparison_figure(self, path)


def compare(
    module: nn.Module,
    x: torch.Tensor,
    gradient: torch.Tensor | None = None,
    *,
    workers: Sequence[int] = (1, 4, 16, 64),
    methods: Sequence[TriangularSolver | str] | None = None,
    seconds: float = SECONDS,
    progress: Callable[[str], None] | None = None,
    accept: Callable[[str, Effort], bool] = lambda *_: True,
) -> SolverComparison:
    """Solve a module's back-propagation by each solver, and count and time it.

    The module's buffers and the state of random numbers are left as they are.

    Parameters
    ----------
    module : Module
        A chain of stages, or an ``nn.RNN``. Stages may couple the samples of a batch, as batch normalisation in
        training mode does: each solver then solves the stretches between these in turn, and autograd's operators count.
    x : Tensor, (batch, *input_shape)
        The input.
    gradient : Tensor, optional
        Of the output; random numbers where left out.
    workers : sequence of int
        The numbers of workers to count for.
    methods : sequence of TriangularSolver or str, optional
        The solvers, or their names. By default all but ``richardson``: with ω = 1 that is ``jacobi``, and with another
        ω its error never becomes zero: in the long run each iteration multiplies it by ``|1 - ω|``.
    seconds : float
        For how long each solver is timed.
    progress : callable, optional
        Called with the name of each solver before it runs.
    accept : callable
        Called with the name of each solver that multiplies matrices along a chain, and a `CountEstimate` of what it
        takes to find their patterns. Where it returns False, the solver is left out. Called again with the name of each
        direct solver, and a `SolutionEstimate`. Where it returns False, the solver is counted, but not timed.

    Raises
    ------
    TypeError, ValueError
        Where workers are no positive integers, there is no such solver, or the module or the input do not fit.

    Examples
    --------
    >>> net = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(6, 6), nn.Tanh())])
    >>> rows = {row.method: row for row in compare(net, torch.randn(2, 6), seconds=0.0).rows}
    >>> rows["substitution"].steps, rows["cyclic_reduction"].steps
    (4, 3)
    """
    numbers, solvers = check_workers(workers), _solvers(methods)
    check_input("x", x)
    with undisturbed(check_module(module)):
        if gradient is None:
            shape = _output_shape(module, x)
            gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(x)
        stretches, cut = stretches_of(module, x, gradient)
    systems = [part for part in stretches if isinstance(part, BlockTriangular)]
    if not any(system.depth for system in systems):
        raise ValueError(f"{type(module).__name__} has no stage with a matrix, so that there is no system to solve")
    rows, iterative, works = [], dict[str, Work](), dict[str, Work]()
    for method in solvers:
        name = SolverFigures(method.name, _options(method)).label
        if progress is not None:
            progress(name)
        row, work = _figures(method, stretches, numbers, seconds, accept)
        rows.append(row)
        if work is not None and row.solved:
            works[name] = work
            if row.iterations is not None:
                iterative[name] = work
    return SolverComparison(
        tuple(rows),
        estimates(systems[0], iterative) if len(stretches) == 1 else (),
        sum(system.depth for system in systems),
        max(size for system in systems for size in system.sizes),
        len(x) if len(stretches) > 1 else systems[0].batch,
        numbers,
        fastest_on(_WORKERS if works else (), lambda p: {label: work.time(p) for label, work in works.items()}),
        tuple(x.shape),
        str(x.dtype).removeprefix("torch."),
        str(x.device),
        torch.get_num_threads(),
        type(module).__name__,
        tuple(cut),
        nan_weights(module),
    )


def _verdict(pays: bool) -> str:
    return "they would" if pays else "they would not"


def _solvers(methods: Sequence[TriangularSolver | str] | None) -> list[TriangularSolver]:
    from .methods import SOLVERS, solver_of

    if methods is None:
        return [solver() for solver in SOLVERS.values() if solver is not Richardson]
    if isinstance(methods, str) or not methods:
        raise ValueError(f"methods is {methods!r}; expected a sequence of solvers or names, as in ['jacobi']")
    return [solver_of(method) for method in methods]


def _options(method: TriangularSolver) -> dict[str, Any]:
    """The options of a solver that are not the defaults; those that are no plain value by their names or types."""
    if not is_dataclass(method):
        return {}
    plain, options = int | float | str, {}
    for option in fields(method):
        value = getattr(method, option.name)
        if value is not option.default and not (isinstance(value, plain) and value == option.default):
            options[option.name] = value if isinstance(value, plain) else getattr(value, "name", type(value).__name__)
    return options


def _output_shape(module: nn.Module, x: torch.Tensor) -> tuple[int, ...]:
    """The shape of the output of which the gradient is taken; ValueError where the input does not fit."""
    if not isinstance(module, nn.RNN):
        return tuple(traced(module, x).output.shape)
    if x.ndim != 3 or x.shape[2] != module.input_size:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected three axes, the last of {module.input_size} features")
    return (*x.shape[:2], module.hidden_size)


def _median(solve: Callable[[], object], seconds: float) -> float:
    """The median time of a call; of one call where there is no time."""
    from torch.utils.benchmark import Timer

    if not seconds:
        # A timer would call it three times.
        begin = perf_counter()
        solve()
        return perf_counter() - begin
    timer = Timer("solve()", globals={"solve": solve}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=seconds).median)


def _figures(
    method: TriangularSolver,
    stretches: Sequence[BlockTriangular | int],
    workers: Sequence[int],
    seconds: float,
    accept: Callable[[str, Effort], bool],
) -> tuple[SolverFigures, Work | None]:
    """A solver's figures, and the work that they count."""
    figures = SolverFigures(method.name, _options(method))
    for system in (part for part in stretches if isinstance(part, BlockTriangular)):
        obstacle = method.obstacle(system)
        if obstacle:
            return replace(figures, remark=obstacle), None
        schedules = method.schedules(system)
        if not schedules:
            continue
        estimate = estimate_products(schedules, _chain_patterns(system))
        if not accept(method.name, estimate):
            return replace(figures, remark=f"left out, as to count its products takes {estimate}"), None
    begin = perf_counter()
    solution = _solved(method, stretches, on_meta=method.direct)
    work, iterations = solution.work, None if method.direct else solution.iterations
    figures = replace(
        figures,
        steps=work.steps,
        multiply_adds=work.multiply_adds,
        entries=work.entries,
        iterations=iterations,
        residual=solution.residual,
        multiply_adds_until_done={p: work.time(p) for p in workers},
    )
    untimed = f"not timed: more than {MOST:.0e} multiply-adds" if work.multiply_adds > MOST else ""
    if method.direct and not untimed:
        solving = SolutionEstimate.of(work, _itemsize(stretches))
        untimed = "" if accept(method.name, solving) else f"not timed, as to solve by it takes {solving}"
    if method.direct and not untimed:
        begin = perf_counter()
        solution = _solved(method, stretches)
    took = perf_counter() - begin
    if not solution.converged:
        remark = "its solution is not finite" if method.direct else f"did not settle in {iterations} iterations"
        return replace(figures, multiply_adds_until_done=None, remark=remark), work
    if untimed:
        return replace(figures, remark=untimed), work
    if method.direct or took < _ONCE:
        # The first solution of a direct one has made plans.
        took = _median(lambda: _solved(method, stretches), seconds if took < _ONCE else 0.0)
    return replace(figures, seconds=took), work


def _solved(method: TriangularSolver, stretches: Sequence[BlockTriangular | int], *, on_meta: bool = False) -> Solution:
    """The solutions of all systems in turn as one, whose values are left out; operators between them are counted."""
    solutions, work = [], Work()
    for part in stretches:
        if isinstance(part, BlockTriangular):
            solutions.append(method.solve(part.on_meta() if on_meta else part))
            work.levels += solutions[-1].work.levels
        else:
            work.levels.append(Level([part]))
    residuals = [solution.residual for solution in solutions if solution.residual is not None]
    iterations, converged = sum(each.iterations for each in solutions), all(each.converged for each in solutions)
    return Solution(method.name, [], work, iterations, max(residuals, default=None), converged)


def _itemsize(stretches: Sequence[BlockTriangular | int]) -> int:
    """Bytes of an element of the systems."""
    return next(part.right[0].element_size() for part in stretches if isinstance(part, BlockTriangular))


def _chain_patterns(system: BlockTriangular) -> list[Pattern]:
    """The patterns of a chain's blocks, after one for its last node, which no solver multiplies by."""
    blocks = system.off_diagonal.blocks
    return [Pattern.of(Diagonal(system.sizes[0])), *(blocks[place].pattern for place in sorted(blocks))]
