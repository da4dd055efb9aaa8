"""Figures; matplotlib is loaded only here, and only when one is drawn."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .patterns._files import replacing

if TYPE_CHECKING:
    from ._flop import FlopReport
    from .patterns import Pattern

__all__ = ["check_figure", "flop_figure", "new_figure", "pattern_figure", "save_figure"]

# Distinguishable in print and with any colour vision (Okabe and Ito).
BLUE, ORANGE, GREEN, SKY, PURPLE = "#0072b2", "#e69f00", "#009e73", "#56b4e9", "#cc79a7"


def new_figure(width: float = 7.0, height: float = 4.5, *, columns: int = 1) -> tuple[Any, Any]:
    """A figure and its axes, drawn without a display; an array of axes where there are several side by side.

    Raises
    ------
    ImportError
        Where matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'jacsparse[plot]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns)
    for panel in figure.axes:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, axes


def check_figure(path: str | os.PathLike[str]) -> None:
    """Raise where no figure can be drawn into a file of that name.

    Raises
    ------
    ImportError
        Where matplotlib is not installed.
    ValueError
        Where the file's ending names no format.
    """
    figure, _ = new_figure()
    formats = figure.canvas.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".") not in formats:
        raise ValueError(f"{path} names no format of a figure; end it in one of {', '.join(sorted(formats))}")


def save_figure(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write the figure; the file's ending says in which format."""
    check_figure(path)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150)


def flop_figure(report: FlopReport, path: str | os.PathLike[str]) -> None:
    """The thesis' Figure 5.5: each step's FLOP over the size that it would have if nothing were sparse.

    All steps and gradient operators are drawn: dead steps as crosses, those of the critical path filled. The thesis
    compares the scan of a pruned network with the gradient operators of the unpruned one; here are those of both.
    """
    figure, axes = new_figure(height=5.5)
    kinds = (("mm", BLUE, "matrix × matrix"), ("mv", ORANGE, "matrix × vector"))
    for kind, colour, label in kinds:
        steps = [step for step in report.steps if step.kind == kind]
        for chosen, look, more in (
            ([step for step in steps if step.critical], {"facecolors": colour}, ", critical path"),
            ([step for step in steps if step.live and not step.critical], {"facecolors": "none"}, ""),
            ([step for step in steps if not step.live], {"marker": "x"}, ", dead: counted, not run"),
        ):
            if chosen:
                colours = {"color": colour} if "marker" in look else {"edgecolors": colour}
                points = [step.dense for step in chosen], [step.flop for step in chosen]
                axes.scatter(*points, s=42, label=f"scan, {label}{more}", **look, **colours)
    sizes = [step.dense for step in report.baseline]
    pruned = [step.flop for step in report.baseline]
    unpruned = [step.unpruned for step in report.baseline]
    differ = any(unpruned) and unpruned != pruned
    name = "back-propagation's gradient operators"
    if differ:
        axes.scatter(sizes, unpruned, s=42, color=GREEN, marker="+", label=f"{name}, unpruned")
    more = ", pruned" if differ else ""
    axes.scatter(sizes, pruned, s=42, facecolors="none", edgecolors=GREEN, marker="s", label=f"{name}{more}")
    # Logarithms of something: a single operator has no step.
    counts = [step.flop for step in report.steps] + pruned
    if max(counts, default=0) > 0:
        axes.set(xscale="log", yscale="log")
    axes.set_xlabel("size of the step if nothing were sparse (m·k·n; m·n for back-propagation)")
    axes.set_ylabel("FLOP per sample")
    plural = "s" if report.samples > 1 else ""
    counted = "guaranteed structure" if not report.samples else f"structure observed on {report.samples} sample{plural}"
    live = sum(step.live for step in report.steps)
    title = f"{report.schedule}: {live} live steps of {len(report.steps)}, {len(report.baseline)} operators; {counted}"
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.25, which="major")
    # Points may be anywhere.
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    save_figure(figure, path)


#: Cells of a pattern's picture, in each direction.
_CELLS = (800, 800)


def pattern_figure(pattern: Pattern, title: str, path: str | os.PathLike[str]) -> None:
    """A pattern's picture: a cell is dark where any of its positions has an entry."""
    from .patterns._picture import picture

    rows, columns = pattern.shape
    cells = picture(pattern, _CELLS)
    # As the matrix is, but neither a strip nor a pillar.
    height = min(9.0, max(2.5, 6.0 * rows / max(1, columns)))
    figure, axes = new_figure(7.0, height)
    extent = (0, max(1, columns), max(1, rows), 0)
    axes.imshow(~cells, cmap="gray", vmin=0, vmax=1, extent=extent, aspect="auto", interpolation="nearest")
    axes.spines[["top", "right"]].set_visible(True)
    axes.set(xlabel="input", ylabel="output")
    if "transposed" in title:
        axes.set(xlabel="output", ylabel="input")
    axes.set_title(f"{title}: {rows:,} × {columns:,}, {pattern.nnz:,} entries", fontsize=10)
    save_figure(figure, path)
