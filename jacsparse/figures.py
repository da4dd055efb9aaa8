"""Figures in the style of this project. Drawing a figure imports matplotlib; importing this module does not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

# Colours of Okabe and Ito, which differ in print and for any colour vision.
BLUE, ORANGE, GREEN, SKY, PURPLE = "#0072b2", "#e69f00", "#009e73", "#56b4e9", "#cc79a7"
#: Dots per inch of figures in files.
DPI = 150


def new_figure(
    width: float = 7.0, height: float = 4.5, *, rows: int = 1, columns: int = 1, shown: bool = False
) -> tuple[Any, Any]:
    """A figure, and its axes, or an array of them for several rows or columns.

    Parameters
    ----------
    width, height : float
        Size in inches.
    rows, columns : int
        Number of axes on top of each other, and side by side.
    shown : bool
        Whether ``matplotlib.pyplot`` shows it, as in notebooks; else it needs no display.

    Raises
    ------
    ImportError
        Where matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'jacsparse[plot]'") from error
    figure = (pyplot.figure if shown else Figure)(figsize=(width, height), layout="constrained")
    if not shown:
        FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns)
    for panel in figure.axes:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, axes


def check_figure(path: str | os.PathLike[str]) -> None:
    """Check that a figure can be drawn into a file of that name.

    Raises
    ------
    ImportError
        Where matplotlib is not installed.
    ValueError
        Where the suffix of the file is no format of a figure.
    """
    figure, _ = new_figure()
    formats = figure.canvas.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".") not in formats:
        raise ValueError(f"{path} names no format of a figure; end it in one of {', '.join(sorted(formats))}")


def save_figure(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a figure, in the format of the file's suffix."""
    # It loads Numba, which schedules, and the help of commands, do without.
    from .runtime import replacing

    check_figure(path)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=DPI)
