"""A pattern as a picture in braille dots, for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ._runtime import kernel
from ._structure import Full

if TYPE_CHECKING:
    from ._pattern import Pattern

__all__ = ["braille", "picture"]

# Bit of each dot of a braille character, 4 rows by 2 columns.
_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])


@kernel
def _mark(first, last, indptr, indices, rows, columns, dots):
    for row in range(first, last):
        line = row * dots.shape[0] // rows
        for entry in range(indptr[row], indptr[row + 1]):
            dots[line, indices[entry] * dots.shape[1] // columns] = True


def dots(shape: tuple[int, int], indptr: np.ndarray, indices: np.ndarray, limit: tuple[int, int]) -> np.ndarray:
    """Which cells of a grid over the matrix hold an entry; it has the matrix' proportions and at most `limit` cells."""
    rows, columns = shape
    scale = max(rows / limit[0], columns / limit[1], 1.0)
    grid = np.zeros((max(1, round(rows / scale)), max(1, round(columns / scale))), dtype=np.bool_)
    # In one range: several threads would write the same cells.
    _mark(0, rows, indptr, indices, rows, columns, grid)
    return grid


def picture(pattern: Pattern, limit: tuple[int, int]) -> np.ndarray:
    """`dots` of a pattern; of a full one no index is needed."""
    rows, columns = pattern.shape
    if 0 in pattern.shape or isinstance(pattern.structure, Full):
        scale = max(rows / limit[0], columns / limit[1], 1.0)
        return np.full((max(1, round(rows / scale)), max(1, round(columns / scale))), pattern.nnz > 0)
    return dots(pattern.shape, pattern.indptr, pattern.indices, limit)


def braille(shape: tuple[int, int], indptr: np.ndarray, indices: np.ndarray, limit: tuple[int, int] = (64, 80)) -> str:
    """The pattern as lines of braille characters, each of 4 × 2 dots, at most `limit` dots high and wide.

    Examples
    --------
    >>> print(braille((4, 4), np.arange(5), np.arange(4)))
    ⠑⢄
    """
    if 0 in shape:
        return "(empty)"
    grid = dots(shape, indptr, indices, limit)
    grid = np.pad(grid, ((0, -grid.shape[0] % 4), (0, -grid.shape[1] % 2)))
    cells = grid.reshape(grid.shape[0] // 4, 4, grid.shape[1] // 2, 2)
    codes = 0x2800 + np.einsum("rycx,yx->rc", cells, _DOTS)
    return "\n".join("".join(map(chr, line)) for line in codes)
