"""Figures; matplotlib is loaded only here, and only when one is drawn."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .patterns._files import replacing

if TYPE_CHECKING:
    from ._flop import FlopReport

__all__ = ["check_figure", "flop_figure", "new_figure", "save_figure"]

# Distinguishable in print and with any colour vision (Okabe and Ito).
BLUE, ORANGE, GREEN = "#0072b2", "#e69f00", "#009e73"


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
    """The thesis' Figure 5.5: each step's FLOP over the size that it would have if nothing were sparse."""
    figure, axes = new_figure()
    kinds = (("mm", BLUE, "matrix × matrix"), ("mv", ORANGE, "matrix × vector"))
    for kind, colour, label in kinds:
        for critical in (False, True):
            steps = [step for step in report.steps if (step.kind, step.critical) == (kind, critical) and step.live]
            axes.scatter(
                [step.dense for step in steps],
                [step.flop for step in steps],
                s=42,
                facecolors=colour if critical else "none",
                edgecolors=colour,
                label=f"scan, {label}{', critical path' if critical else ''}" if steps else None,
            )
    live = [step for step in report.baseline if step.live]
    axes.scatter(
        [step.dense for step in live],
        [step.flop for step in live],
        s=42,
        facecolors="none",
        edgecolors=GREEN,
        marker="s",
        label="back-propagation, gradient operator",
    )
    # Logarithms of something: a single operator has no step.
    counts = [step.flop for step in report.steps if step.live] + [step.flop for step in live]
    if max(counts, default=0) > 0:
        axes.set(xscale="log", yscale="log")
    axes.set_xlabel("size of the step if nothing were sparse (m·k·n; m·n for back-propagation)")
    axes.set_ylabel("FLOP per sample")
    counted = "guaranteed structure" if not report.samples else f"structure observed on {report.samples} sample(s)"
    axes.set_title(f"{report.schedule}: {len(report.steps)} steps, {counted}", fontsize=10)
    axes.grid(alpha=0.25, which="major")
    axes.legend(fontsize=8, frameon=False)
    save_figure(figure, path)
