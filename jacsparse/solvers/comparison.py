"""All solvers side by side for one module's back-propagation: steps, work, memory and time."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import index
from typing import Any

import torch
from torch import nn

from .complexity import iteration_pays, reduction_pays
from .propagation import propagation
from .solver import Solution, TriangularSolver
from .substitution import Substitution
from .systems import BlockTriangular

#: Multiply-adds from which on a solver is counted but not run.
MOST = 10**11
#: Seconds for which each solver is timed.
SECONDS = 0.3


@dataclass(frozen=True)
class SolverFigures:
    """One solver.

    Attributes
    ----------
    method : str
        The solver's name.
    steps : int or None
        Levels of products that wait for each other; None where it does not apply or was not run.
    multiply_adds, entries : int or None
        The work, and the most entries of blocks that are stored at once beside those of the system.
    iterations : int or None
        Of an iterative solver.
    residual : float or None
        What an iterative solver came to.
    times : dict of int to float
        Predicted seconds by the number of workers, at the rate of substitution on this machine.
    seconds : float or None
        Measured here.
    remark : str
        Why there are no figures, or that it stopped at its limit.
    """

    method: str
    steps: int | None = None
    multiply_adds: int | None = None
    entries: int | None = None
    iterations: int | None = None
    residual: float | None = None
    times: dict[int, float] | None = None
    seconds: float | None = None
    remark: str = ""


@dataclass(frozen=True)
class SolverComparison:
    """What `compare` returns; ``print`` shows it as a table.

    Attributes
    ----------
    rows : tuple of SolverFigures
        A row for each solver.
    layers, units, samples : int
        The system's depth l, its widest block n, and the batch r.
    threads : int
        Threads that the measured times are of.
    """

    rows: tuple[SolverFigures, ...]
    layers: int
    units: int
    samples: int
    threads: int

    @property
    def criterion(self) -> str:
        """The paper's own criterion for this module, in words."""
        bound = self.layers / math.log2(self.layers) if self.layers > 1 else 0.0
        direct = reduction_pays(self.layers, self.units, self.samples)
        settled = (row.iterations for row in self.rows if row.iterations is not None and not row.remark)
        fewest = min(settled, default=None)
        lines = [
            f"Direct methods pay, says the paper, where r = {self.samples} >= n = {self.units} or "
            f"l / log2 l = {bound:.1f} >= n: {'they would' if direct else 'they would not'}."
        ]
        if fewest is not None:
            pays = "they would" if iteration_pays(self.layers, fewest) else "they would not"
            lines.append(f"Iterative ones pay where η < l = {self.layers}: the fewest iterations are {fewest}; {pays}.")
        return " ".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain values."""
        return asdict(self)

    def __rich_console__(self, *_: Any) -> Iterator[Any]:
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("method", no_wrap=True)
        workers = next((list(row.times) for row in self.rows if row.times), [])
        for column in ("steps", "work", "stored", "iterations", "residual", *(f"p = {p}" for p in workers), "here"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("", overflow="fold")
        for row in self.rows:
            figures = [
                _count(row.steps), _count(row.multiply_adds), _count(row.entries), _count(row.iterations),
                "" if row.residual is None else f"{row.residual:.1e}",
                *(_time(row.times[p]) if row.times else "" for p in workers), _time(row.seconds),
            ]  # fmt: skip
            table.add_row(row.method, *figures, row.remark)
        yield table
        yield self.criterion
        yield (
            "steps: products that wait for each other; work: multiply-adds; stored: entries of blocks beside the "
            f"system's; p: predicted time on p workers; here: measured on {self.threads} threads"
        )

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the predicted time over the number of workers, a line for each solver."""
        from ..figures import new_figure, save_figure

        figure, axes = new_figure(6.4, 4.4)
        for row in self.rows:
            if row.times:
                axes.plot(list(row.times), list(row.times.values()), marker="o", markersize=3, label=row.method)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("workers")
        axes.set_ylabel("predicted seconds")
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8, frameon=False)
        save_figure(figure, path)


def compare(
    module: nn.Module,
    x: torch.Tensor,
    gradient: torch.Tensor | None = None,
    *,
    workers: Sequence[int] = (1, 4, 16, 64),
    methods: Sequence[TriangularSolver] | None = None,
    seconds: float = SECONDS,
    progress: Callable[[str], None] | None = None,
) -> SolverComparison:
    """Solve a module's back-propagation by each solver, and count and time it.

    Parameters
    ----------
    module : Module
        A chain of stages, or an ``nn.RNN``.
    x : Tensor, (batch, *input_shape)
        The input.
    gradient : Tensor, optional
        Of the output; random numbers where left out.
    workers : sequence of int
        The numbers of workers to predict times for.
    methods : sequence of TriangularSolver, optional
        The solvers; by default, each with its default arguments.
    seconds : float
        For how long each solver is timed.
    progress : callable, optional
        Called with the name of each solver before it runs.

    Raises
    ------
    TypeError, ValueError
        Where workers are no positive integers, or the module or the input do not fit.

    Examples
    --------
    >>> net = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(6, 6), nn.Tanh())])
    >>> rows = {row.method: row for row in compare(net, torch.randn(2, 6), seconds=0.0).rows}
    >>> rows["substitution"].steps, rows["cyclic_reduction"].steps
    (4, 3)
    """
    workers = _workers(workers)
    if methods is None:
        from . import SOLVERS

        methods = [solver() for solver in SOLVERS.values()]
    if gradient is None:
        with torch.no_grad():
            output = module(x)
        output = output[0] if isinstance(output, tuple) else output
        gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)
    system = propagation(module, x, gradient).system
    rate = _measured(lambda: Substitution().solve(system), seconds) / max(
        1, _counted(Substitution(), system).work.multiply_adds
    )
    rows = []
    for method in methods:
        if progress is not None:
            progress(method.name)
        rows.append(_figures(method, system, workers, rate, seconds))
    return SolverComparison(tuple(rows), system.depth, max(system.sizes), system.batch, torch.get_num_threads())


def _workers(workers: Sequence[int]) -> tuple[int, ...]:
    try:
        numbers = tuple(dict.fromkeys(index(number) for number in workers))
    except TypeError:
        raise TypeError(f"workers is {workers!r}; expected integers, as in (1, 4, 16)") from None
    if not numbers or min(numbers) < 1:
        raise ValueError(f"workers is {workers!r}; expected integers of at least 1, as in (1, 4, 16)")
    return numbers


def _counted(method: TriangularSolver, system: BlockTriangular) -> Solution:
    return method.solve(system.on_meta())


def _measured(solve: Callable[[], object], seconds: float) -> float:
    """The median time of a call; of one call where there is no time."""
    from torch.utils.benchmark import Timer

    timer = Timer("solve()", globals={"solve": solve}, num_threads=torch.get_num_threads())
    solve()
    measurement = timer.blocked_autorange(min_run_time=seconds) if seconds else timer.timeit(1)
    return float(measurement.median)


def _figures(
    method: TriangularSolver, system: BlockTriangular, workers: Sequence[int], rate: float, seconds: float
) -> SolverFigures:
    obstacle = method.obstacle(system)
    if obstacle:
        return SolverFigures(method.name, remark=obstacle)
    solution = _counted(method, system) if method.direct else method.solve(system)
    work, measured, remark = solution.work, None, "" if solution.converged else "did not settle"
    if work.multiply_adds <= MOST:
        measured = _measured(lambda: method.solve(system), seconds)
    else:
        remark = f"not timed: more than {MOST:.0e} multiply-adds"
    return SolverFigures(
        method.name,
        work.steps,
        work.multiply_adds,
        work.entries,
        None if method.direct else solution.iterations,
        None if method.direct else solution.residual,
        {p: work.time(p) * rate for p in workers},
        measured,
        remark,
    )


def _count(count: int | None) -> str:
    if count is None:
        return ""
    for scale, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if count >= 0.9995 * scale:
            return f"{count / scale:.3g}{unit}"
    return str(count)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    for scale, unit in ((1.0, " s"), (1e-3, " ms"), (1e-6, " µs")):
        if seconds >= scale:
            return f"{seconds / scale:.3g}{unit}"
    return f"{seconds / 1e-9:.3g} ns"
