"""A pattern as a picture in braille dots, for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..runtime import kernel
from .structure import Full

if TYPE_CHECKING:
    from .pattern import Pattern

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
