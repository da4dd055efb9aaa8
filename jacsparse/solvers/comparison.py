"""All solvers side by side for one module's back-propagation: steps, work, memory and time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from .._version import __version__
from ..flop import estimate_count
from ..patterns import Diagonal, Pattern
from ..runtime import run_times
from ..schedule import check_workers, fastest_on
from ..stages import check_input
from ..terminal import Fitted, PrintedReport, glossary, short, short_time
from ..tracing import check_module, traced, undisturbed
from .blocks import Work
from .jacobi import Richardson
from .methods import SOLVERS, solver_of
from .propagation import propagation
from .solver import TriangularSolver
from .systems import BlockTriangular

#: Multiply-adds from which on a solver is counted but not timed: more take plans of gigabytes, and many seconds.
MOST = 10**9
#: Numbers of workers over which `SolverComparison.fewest` goes.
_WORKERS = tuple(2**power for power in range(21))
#: The meaning of words and columns.
WORDS = {
    "layers": "matrices between elementwise stages; a residual block is one",
    "steps": "products with matrices that wait for each other",
    "work": "multiply-adds of all products",
    "stored": "the most entries of blocks at once, beside the system's",
    "iter.": "iterations: one step each in jacobi and gmres, two in bicgstab",
    "here": "measured time of a solution, without making plans",
    "workers": "multiply-adds until they are done, where they share each result's elements",
    "substitution": "back-propagation, one layer after the other",
    "scan": "products of matrices by the levels of a tree (BPPSA)",
    "cyclic_reduction": "each layer takes in twice as many at each level",
    "jacobi": "all layers at once, from a guess, until nothing changes",
    "richardson": "jacobi with a share of each change",
    "bicgstab": "a Krylov method of general linear systems",
    "gmres": "a Krylov method that stores a vector for each iteration",
    "hybrid": "substitution within groups of layers, jacobi between them",
}


@dataclass(frozen=True)
class SolverFigures:
    """One solver.

    Attributes
    ----------
    method : str
        The solver's name.
    steps : int or None
        Levels of products that wait for each other; None where the solver does not apply.
    multiply_adds, entries : int or None
        The work, and the most entries of blocks that are stored at once beside those of the system.
    iterations : int or None
        Of an iterative solver.
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
    steps: int | None = None
    multiply_adds: int | None = None
    entries: int | None = None
    iterations: int | None = None
    multiply_adds_until_done: dict[int, float] | None = None
    seconds: float | None = None
    remark: str = ""


@dataclass(frozen=True, repr=False)
class SolverComparison(PrintedReport):
    """What `compare` returns; ``print`` shows it as a table.

    Attributes
    ----------
    rows : tuple of SolverFigures
        A row for each solver.
    layers, units, samples : int
        The system's depth, its widest block, and the batch.
    workers : tuple of int
        The numbers of workers.
    fewest : tuple of (int, str)
        Which solver has the fewest multiply-adds until the last level is done: from which number of workers on, of
        powers of two up to 2^20, and its name.
    name : str
        What was compared: the module's class, or the model as named on the command line.
    settings : dict
        What else the figures depend on, such as the seed of the command line; part of `to_dict`.
    """

    rows: tuple[SolverFigures, ...]
    layers: int
    units: int
    samples: int
    workers: tuple[int, ...]
    fewest: tuple[tuple[int, str], ...]
    name: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<SolverComparison of {self.name}: {', '.join(row.method for row in self.rows)}>"

    @property
    def conclusion(self) -> str:
        """Which solver is done after the fewest multiply-adds, by the number of workers, in words."""
        if not self.fewest:
            return "No solver settled."
        (_, first), *others = self.fewest
        first += ", which is back-propagation" if first == "substitution" else ""
        parts = [first, *(f"from {workers:,} workers on {method}" for workers, method in others)]
        return f"Fewest multiply-adds until done, for up to {_WORKERS[-1]:,} workers: {', '.join(parts)}."

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        yield self.conclusion
        layers = f"{self.layers} layer{'s' if self.layers > 1 else ''}"
        yield f"{self.name}: {layers} of up to {self.units:,} units, batch {self.samples}"
        lines = []
        for row in (row for row in self.rows if row.steps is not None):
            counts = (row.steps, row.multiply_adds, row.entries, row.iterations)
            until_done = [(row.multiply_adds_until_done or {}).get(workers) for workers in self.workers]
            cells = ["" if count is None else short(round(count)) for count in (*counts, *until_done)]
            seconds = "" if row.seconds is None else short_time(row.seconds)
            lines.append((row.method, *cells[:4], seconds, *cells[4:]))
        workers = [f"{number:,} worker{'s' if number > 1 else ''}" for number in self.workers]
        yield Fitted("", ("", "steps", "work", "stored", "iter.", "here", *workers), lines)
        yield from (f"{row.method}: {row.remark}." for row in self.rows if row.remark)
        hidden = {*SOLVERS} - {line[0] for line in lines}
        yield glossary({word: meaning for word, meaning in WORDS.items() if word not in hidden})

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain values, what they depend on, and what the words mean."""
        versions = {"jacsparse": __version__, "torch": torch.__version__}
        words = {"conclusion": self.conclusion, "fewest_up_to": _WORKERS[-1], "words": WORDS}
        return {**asdict(self), **words, "versions": versions}


def compare(
    module: nn.Module,
    x: torch.Tensor,
    gradient: torch.Tensor | None = None,
    *,
    workers: Sequence[int] = (1, 4, 16, 64),
    methods: Sequence[TriangularSolver | str] | None = None,
    seconds: float = 0.3,
    progress: Callable[[str], None] = lambda _: None,
) -> SolverComparison:
    """Solve a module's back-propagation by each solver, and count and time it.

    The module's buffers and the state of random numbers are left as they are.

    Parameters
    ----------
    module : Module
        A chain of stages, or an ``nn.RNN``.
    x : Tensor, (batch, *input_shape)
        The input.
    gradient : Tensor, optional
        Of the output; random numbers where left out.
    workers : sequence of int
        The numbers of workers to count for.
    methods : sequence of TriangularSolver or str, optional
        The solvers, or their names. By default all but ``richardson``, which is ``jacobi`` with ω = 1, and those that
        multiply matrices along a chain where it takes more than 20 seconds or 4 GiB to find their patterns.
    seconds : float
        For how long each solver is timed, at most, once it has run three times.
    progress : callable
        Called with the name of each solver before it runs.

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
            recurrent = isinstance(module, nn.RNN)
            shape = (*x.shape[:2], module.hidden_size) if recurrent else traced(module, x).output.shape
            gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(x)
        system = propagation(module, x, gradient).system
    if not system.depth:
        raise ValueError(f"{type(module).__name__} has no stage with a matrix, so that there is no system to solve")
    rows, works = [], dict[str, Work]()
    for method in solvers:
        progress(method.name)
        long = "" if methods is not None else _takes_long(method, system)
        if obstacle := method.obstacle(system) or long:
            rows.append(SolverFigures(method.name, remark=obstacle))
            continue
        row, work = _figures(method, system, numbers, seconds)
        rows.append(row)
        if row.multiply_adds_until_done is not None:
            works[method.name] = work
    fewest = fastest_on(_WORKERS if works else (), lambda p: {name: work.time(p) for name, work in works.items()})
    sizes = (system.depth, max(system.sizes), system.batch)
    return SolverComparison(tuple(rows), *sizes, numbers, fewest, type(module).__name__)


def _solvers(methods: Sequence[TriangularSolver | str] | None) -> list[TriangularSolver]:
    if methods is None:
        return [solver() for solver in SOLVERS.values() if solver is not Richardson]
    if isinstance(methods, str) or not methods:
        raise ValueError(f"methods is {methods!r}; expected a sequence of solvers or names, as in ['jacobi']")
    return [solver_of(method) for method in methods]


def _takes_long(method: TriangularSolver, system: BlockTriangular) -> str:
    """What it takes to find the patterns of a solver's products, where that is much; else nothing."""
    schedule, blocks = method.chain_schedule(system), system.off_diagonal.blocks
    if schedule is None:
        return ""
    # The last node's block, which no solver multiplies by, comes first.
    chain = [Pattern.of(Diagonal(system.sizes[0])), *(blocks[place].pattern for place in sorted(blocks))]
    estimate = estimate_count(schedule, chain)
    return f"to count its products takes {estimate}; ask for it by name" if estimate.is_long else ""


def _figures(
    method: TriangularSolver, system: BlockTriangular, workers: Sequence[int], seconds: float
) -> tuple[SolverFigures, Work]:
    """A solver's figures, and the work that they count."""
    solution = method.solve(system.on_meta() if method.direct else system)
    work, iterations = solution.work, None if method.direct else solution.iterations
    figures = SolverFigures(method.name, work.steps, work.multiply_adds, work.entries, iterations)
    is_timed = work.multiply_adds <= MOST
    if method.direct and is_timed:
        solution = method.solve(system)
    if not solution.converged:
        remark = "its solution is not finite" if method.direct else f"did not settle in {iterations} iterations"
        return replace(figures, remark=remark), work
    figures = replace(figures, multiply_adds_until_done={p: work.time(p) for p in workers})
    if not is_timed:
        return replace(figures, remark=f"not timed: more than {MOST:.0e} multiply-adds"), work
    (time,) = run_times(lambda: method.solve(system), most=seconds)
    return replace(figures, seconds=time.fastest), work
