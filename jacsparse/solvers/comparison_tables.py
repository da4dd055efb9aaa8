"""The tables and the figure of a comparison of solvers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..terminal import Fitted, glossary, ratio, short, short_time

if TYPE_CHECKING:
    from .comparison import SolverComparison, SolverFigures

#: The meaning of words and columns.
WORDS = {
    "layers": "stages of simulate, as a residual block; elementwise ones with the former",
    "steps": "non-diagonal products that wait for each other; η if iterative",
    "work": "multiply-adds of all products; they are not seconds. Substitution's are half the FLOP of activations and "
    "input in flop --steps, pruned; a layer of several operators is one block, which is multiplied whole",
    "stored": "the most entries of blocks at once, beside the system's",
    "iter.": "iterations: one step each in jacobi and gmres, two in bicgstab",
    "residual": "largest change of a block row in one more sweep, relative",
    "here": "measured time of a solution, without making plans",
    "workers": "they share each result's elements; in simulate, whole products",
    "substitution": "back-propagation, one layer after the other",
    "scan": "products of matrices by the levels of a tree (BPPSA)",
    "cyclic_reduction": "each layer takes in twice as many at each level",
    "jacobi": "all layers at once, from a guess, until nothing changes",
    "richardson": "jacobi with a share of each change",
    "bicgstab": "a Krylov method of general linear systems",
    "gmres": "a Krylov method that stores a vector for each iteration",
    "hybrid": "substitution within groups of layers, jacobi between them",
}
#: Those of the words that name solvers.
SOLVER_NAMES = ("substitution", "scan", "cyclic_reduction", "jacobi", "richardson", "bicgstab", "gmres", "hybrid")
#: Of the table of estimates.
_ESTIMATE_WORDS = {
    "paper": "the equation, with γ = 1 and, in 46 and 47, η = steps; of time, on l workers",
    "counted": "what runs: samples have reduced blocks of their own, and the paper counts one product for all",
}


def tables(comparison: SolverComparison) -> Iterator[Any]:
    """Everything that a comparison shows, in order."""
    yield comparison.conclusion
    yield comparison.criterion
    yield from (f"Warning: {warning}" for warning in comparison.warnings)
    yield from _solvers(comparison)
    yield from (f"{row.label}: {row.remark}." for row in comparison.rows if row.remark)
    yield ""
    used = {row.method for row in comparison.rows if row.steps is not None}
    hidden = {*SOLVER_NAMES} - used
    if all(row.iterations is None for row in comparison.rows):
        hidden |= {"iter.", "residual"}
    words = {word: meaning for word, meaning in WORDS.items() if word not in hidden}
    if any(row.solved for row in comparison.rows):
        yield _workers(comparison)
    if comparison.estimates:
        yield _estimates(comparison)
        words = words | _ESTIMATE_WORDS
    yield glossary(words)


def _solvers(comparison: SolverComparison) -> Iterator[Any]:
    """What is solved, and a table with a line for each solver."""
    threads = f"{comparison.threads} thread{'s' if comparison.threads > 1 else ''}"
    where = threads if comparison.device == "cpu" else comparison.device
    count = f"{comparison.layers} layer{'s' if comparison.layers > 1 else ''}"
    yield (
        f"{comparison.name}: {count} of up to {comparison.units:,} units, "
        f"batch {comparison.samples}, {comparison.dtype}, {where}"
    )
    iterative, lines = any(row.iterations is not None for row in comparison.rows), []
    for row in (row for row in comparison.rows if row.steps is not None):
        counts = map(_count, (row.steps, row.multiply_adds, row.entries))
        residual = "" if row.residual is None else f"{row.residual:.1e}"
        settled = (_count(row.iterations), residual) if iterative else ()
        lines.append((row.label, *counts, *settled, "" if row.seconds is None else short_time(row.seconds)))
    yield Fitted("", ("", "steps", "work", "stored", *(("iter.", "residual") if iterative else ()), "here"), lines)


def _workers(comparison: SolverComparison) -> Any:
    """A table with a line for each number of workers, and a column for each solver that solved the system."""
    columns: list[SolverFigures] = [row for row in comparison.rows if row.solved]
    lines = []
    for workers in comparison.workers:
        counts = ((row.multiply_adds_until_done or {})[workers] for row in columns)
        lines.append((f"{workers:,} worker{'s' if workers > 1 else ''}", *(short(round(count)) for count in counts)))
    return Fitted("multiply-adds until the last level is done", ("", *(row.label for row in columns)), lines)


def _estimates(comparison: SolverComparison) -> Any:
    """A table with a line for each of the paper's equations."""
    lines = [
        (str(each.equation), each.method, each.quantity, short(round(each.paper)), short(round(each.counted)),
         ratio(each.ratio))
        for each in comparison.estimates
    ]  # fmt: skip
    columns = ("equation", "", "", "paper", "counted", "counted / paper")
    title = "multiply-adds by the paper's equations, and as counted"
    return Fitted(title, columns, lines, keys=3, left=frozenset([1, 2]))


def comparison_figure(comparison: SolverComparison, path: str | os.PathLike[str]) -> None:
    """Draw multiply-adds until the last level is done over the number of workers, a line for each solver."""
    from ..figures import new_figure, save_figure

    rows = [row for row in comparison.rows if row.solved]
    if not rows:
        reasons = "; ".join(f"{row.label}: {row.remark}" for row in comparison.rows)
        raise ValueError(f"there is nothing to draw into {path}: no solver solved the system ({reasons})")
    figure, axes = new_figure(6.4, 4.4)
    for row in rows:
        counts = row.multiply_adds_until_done or {}
        workers = sorted(counts)
        axes.plot(workers, [counts[p] for p in workers], marker="o", markersize=3, label=row.label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("workers p")
    axes.set_ylabel("multiply-adds until the last level is done")
    axes.set_title(f"{comparison.name}, batch {comparison.samples}", fontsize=9)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False)
    save_figure(figure, path)


def _count(count: int | None) -> str:
    return "" if count is None else short(count)
