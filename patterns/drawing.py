"""Pictures of patterns: braille dots for a terminal, SVG for a notebook, figures, also of values' magnitudes."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..figures import DPI, new_figure, save_figure
from ..runtime import kernel
from .structure import Full

if TYPE_CHECKING:
    from .pattern import Pattern

#: Cells of a figure's pattern in each direction, at most.
_CELLS = 800
# Bit of each dot of a braille character, 4 rows by 2 columns.
_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])


@kernel
def _mark(first, last, indptr, indices, rows, columns, dots):
    for row in range(first, last):
        line = row * dots.shape[0] // rows
        for entry in range(indptr[row], indptr[row + 1]):
            dots[line, indices[entry] * dots.shape[1] // columns] = True


def picture(pattern: Pattern, limit: tuple[int, int]) -> np.ndarray:
    """Which cells of a grid over the matrix have an entry; it has the matrix' proportions and at most `limit` cells."""
    rows, columns = pattern.shape
    scale = max(rows / limit[0], columns / limit[1], 1.0)
    shape = (max(1, round(rows / scale)), max(1, round(columns / scale)))
    if 0 in pattern.shape or isinstance(pattern.structure, Full):
        return np.full(shape, pattern.nnz > 0)
    grid = np.zeros(shape, dtype=np.bool_)
    # In one range: several threads would write the same cells.
    _mark(0, rows, pattern.indptr, pattern.indices, rows, columns, grid)
    return grid


def braille(grid: np.ndarray) -> str:
    """A grid of bools as lines of braille characters of 4 × 2 dots each.

    Examples
    --------
    >>> print(braille(np.eye(4, dtype=bool)))
    ⠑⢄
    """
    grid = np.pad(grid, ((0, -grid.shape[0] % 4), (0, -grid.shape[1] % 2)))
    cells = grid.reshape(grid.shape[0] // 4, 4, grid.shape[1] // 2, 2)
    codes = 0x2800 + np.einsum("rycx,yx->rc", cells, _DOTS)
    return "\n".join("".join(map(chr, line)) for line in codes)


def as_html(line: str, pattern: Pattern) -> str:
    """A line of text and a small picture of a pattern, in the colour of the text, for a notebook."""
    cells = picture(pattern, (100, 100))
    rows, columns = cells.shape
    scale = min(16.0, 200 / max(rows, columns))
    height, width = (max(8, round(scale * size)) for size in (rows, columns))
    # Each run of dark cells in a row is a line.
    steps = np.diff(np.pad(cells.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    lines, starts = np.nonzero(steps == 1)
    runs = zip(lines, starts, np.nonzero(steps == -1)[1], strict=True)
    path = "".join(f"M{start} {line}.5H{end}" for line, start, end in runs)
    return (
        f'<code>{html.escape(line)}</code><br><svg width="{width}" height="{height}" '
        f'viewBox="0 0 {columns} {rows}" preserveAspectRatio="none" style="border: 1px solid">'
        f'<path d="{path}" stroke="currentColor" shape-rendering="crispEdges"/></svg>'
    )


def plot_pattern(
    pattern: Pattern,
    path: str | os.PathLike[str] | None,
    ax: Any,
    title: str,
    axes: tuple[str, str],
    values: np.ndarray | None = None,
) -> Any:
    """Draw a pattern or the magnitudes of values on `ax`, or else new axes, and into a file; returns the axes."""
    if ax is None:
        _, ax = new_figure(7.0, _height(7.0, pattern), shown=path is None)
    _draw(pattern, ax, title, axes, ax.figure.dpi if path is None else DPI, values)
    if path is not None:
        save_figure(ax.figure, path)
    return ax


def pattern_figure(
    patterns: Sequence[tuple[str, Pattern]],
    path: str | os.PathLike[str],
    axes: tuple[str, str] = ("input", "output"),
    title: str = "",
) -> None:
    """Draw patterns side by side, each with its title, and a dark cell where any position has an entry."""
    width = 7.0 / len(patterns) + 1.5
    height = max(_height(width, pattern) for _, pattern in patterns)
    figure, _ = new_figure(width * len(patterns), height, columns=len(patterns))
    for (name, pattern), panel in zip(patterns, figure.axes, strict=True):
        _draw(pattern, panel, name, axes, DPI)
    if title:
        figure.suptitle(title, fontsize=10)
    save_figure(figure, path)


def _height(width: float, pattern: Pattern) -> float:
    """The height of a figure with a matrix' proportions, within bounds."""
    rows, columns = pattern.shape
    return min(9.0, max(2.5, 0.86 * width * rows / max(1, columns)))


def _draw(
    pattern: Pattern, panel: Any, name: str, axes: tuple[str, str], dpi: float, values: np.ndarray | None = None
) -> None:
    rows, columns = pattern.shape
    inches = panel.get_window_extent().transformed(panel.figure.dpi_scale_trans.inverted())
    # Cells are larger than pixels, of which none is left out then, also where the layout takes some room away.
    height, width = (min(_CELLS, int(0.8 * dpi * size) + 1) for size in (inches.height, inches.width))
    grid = picture(pattern, (height, width))
    options = {"extent": (0, max(1, columns), max(1, rows), 0), "aspect": "auto", "interpolation": "nearest"}
    if values is None:
        panel.imshow(~grid, cmap="gray", vmin=0, vmax=1, **options)
    else:
        _draw_magnitudes(_magnitudes(pattern, values, grid), panel, options)
    panel.spines[["top", "right"]].set_visible(True)
    panel.set(xlabel=axes[0], ylabel=axes[1])
    panel.set_title(f"{name}{': ' * bool(name)}{rows:,} × {columns:,}, {pattern.nnz:,} entries", fontsize=10)


def _magnitudes(pattern: Pattern, values: np.ndarray, dark: np.ndarray) -> np.ndarray:
    """The largest magnitude of the entries in each dark cell, infinite for NaN; -1 in the others."""
    grid = np.where(dark, 0.0, -1.0)
    rows, columns = (np.arange(size) * cells // size for size, cells in zip(pattern.shape, grid.shape, strict=True))
    magnitudes = np.nan_to_num(np.abs(values), nan=np.inf, posinf=np.inf)
    if isinstance(pattern.structure, Full):
        np.maximum.at(grid, np.ix_(rows, columns), magnitudes.reshape(pattern.shape))
    else:
        np.maximum.at(grid, (rows[pattern.rows], columns[pattern.indices]), magnitudes)
    return grid


def _draw_magnitudes(grid: np.ndarray, panel: Any, options: dict[str, Any]) -> None:
    import matplotlib
    from matplotlib.colors import LogNorm

    finite = np.isfinite(grid)
    largest = grid[finite].max(initial=0.0) or 1.0
    # Other magnitudes count as zero, so that the scale has 16 decades at most.
    counted = grid > largest * np.finfo(np.float64).eps
    smallest = grid[finite & counted].min(initial=largest / 10)
    colors = matplotlib.colormaps["viridis_r"].with_extremes(bad="white", under="0.8", over="red")
    zeros, infinite = bool(((grid >= 0) & ~counted).any()), not bool(finite.all())
    cells = np.ma.masked_array(np.clip(grid, smallest / 2, largest * 2), grid < 0)
    image = panel.imshow(cells, cmap=colors, norm=LogNorm(smallest, largest), **options)
    bar = panel.figure.colorbar(image, ax=panel, extend=("neither", "min", "max", "both")[zeros + 2 * infinite])
    notes = [note for note, holds in (("grey: zero", zeros), ("red: not finite", infinite)) if holds]
    bar.set_label(", ".join(["magnitude", *notes]))
