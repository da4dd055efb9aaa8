"""A pattern as a picture in braille dots, for a terminal, and patterns side by side as a figure."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..figures import new_figure, save_figure
from ..runtime import kernel
from .structure import Full

if TYPE_CHECKING:
    from .pattern import Pattern

#: Cells of a figure's pattern in each direction, at most.
_CELLS = (800, 800)
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


def pattern_figure(
    patterns: Sequence[tuple[str, Pattern]],
    path: str | os.PathLike[str],
    axes: tuple[str, str] = ("input", "output"),
    title: str = "",
) -> None:
    """Draw patterns side by side, each with its title, and a dark cell where any position has an entry."""
    # A single figure has the matrix' proportions within bounds.
    tallest = max(rows / max(1, columns) for rows, columns in (pattern.shape for _, pattern in patterns))
    width = 7.0 / len(patterns) + (1.5 if len(patterns) > 1 else 0.0)
    figure, _ = new_figure(width * len(patterns), min(9.0, max(2.5, 0.86 * width * tallest)), columns=len(patterns))
    for (name, pattern), panel in zip(patterns, figure.axes, strict=True):
        _draw(pattern, panel, name, axes)
    if title:
        figure.suptitle(title, fontsize=10)
    save_figure(figure, path)


def _draw(pattern: Pattern, panel: Any, name: str, axes: tuple[str, str]) -> None:
    rows, columns = pattern.shape
    extent = (0, max(1, columns), max(1, rows), 0)
    cells = picture(pattern, _CELLS)
    panel.imshow(~cells, cmap="gray", vmin=0, vmax=1, extent=extent, aspect="auto", interpolation="nearest")
    panel.spines[["top", "right"]].set_visible(True)
    panel.set(xlabel=axes[0], ylabel=axes[1])
    panel.set_title(f"{name}{': ' * bool(name)}{rows:,} × {columns:,}, {pattern.nnz:,} entries", fontsize=10)
