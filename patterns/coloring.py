"""Values by compression: an operator's own derivative, one pass for each colour of its Jacobian's pattern.

Rows without a common column may share a pass of the vector-Jacobian product: its result at column `j` belongs to the
one row among them that has an entry there. Columns may share a pass of the Jacobian-vector product in the same way.
Rows are coloured greedily in their order so that no two of one colour share a column (Curtis, Powell and Reid, 1974;
Gebremedhin, Manne and Pothen, 2005, section 3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from ..runtime import cached_arrays, frozen, kernel
from .alike import pattern_of_rows, rows_alike
from .pattern import Pattern
from .structure import Blocks, Diagonal, Full

if TYPE_CHECKING:
    from .rules import Call


#: Entries of a column on average from which on a look for columns that are alike pays.
MANY = 32


@kernel
def _greedy(first, last, indptr, indices, transposed_indptr, transposed_indices, colors):
    forbidden = np.full(last - first + 1, -1, np.int64)
    for row in range(first, last):
        for entry in range(indptr[row], indptr[row + 1]):
            column = indices[entry]
            for other in range(transposed_indptr[column], transposed_indptr[column + 1]):
                neighbour = transposed_indices[other]
                if neighbour >= row:
                    break
                forbidden[colors[neighbour]] = row
        color = 0
        while forbidden[color] == row:
            color += 1
        colors[row] = color


def row_colors(pattern: Pattern) -> np.ndarray:
    """A colour for each row, from 0 on, such that rows of one colour have no column in common; int64, ``(rows,)``.

    Examples
    --------
    >>> row_colors(Pattern((3, 4), [0, 2, 4, 6], [0, 1, 1, 2, 2, 3]))
    array([0, 1, 0])
    """
    structure, rows = pattern.structure, pattern.shape[0]
    if isinstance(structure, Diagonal):
        return np.zeros(rows, dtype=np.int64)
    if isinstance(structure, Full):
        return np.arange(rows)
    if isinstance(structure, Blocks):
        line = np.repeat(np.arange(structure.rows), structure.inner)
        return np.tile(line, structure.outer)
    # Stored on the structure for later calls, like its digest.
    if "row_colors" not in structure.__dict__:
        colors = np.zeros(rows, dtype=np.int64)
        if structure.column_counts().max(initial=0) > 1:
            key, packages = f"colors {pattern.digest}", (__package__,)
            colors = cached_arrays(key, lambda: {"colors": _greedy_colors(pattern)}, packages=packages)["colors"]
        structure.__dict__["row_colors"] = frozen(colors)
    return cast(np.ndarray, structure.__dict__["row_colors"])


def _greedy_colors(pattern: Pattern) -> np.ndarray:
    colors, columns = np.zeros(pattern.shape[0], dtype=np.int64), pattern.T
    if columns.nnz > MANY * columns.shape[0]:
        # Columns with the same rows, as of the channels of a pixel, tell the same.
        columns = pattern_of_rows(columns, rows_alike(columns)[0])
    rows = columns.T
    # Each row waits for those before it: one range, on one thread.
    _greedy(0, len(colors), rows.indptr, rows.indices, columns.indptr, columns.indices, colors)
    return colors


def compressed_values(pattern: Pattern, call: Call) -> torch.Tensor:
    """Values of a call's Jacobian on its pattern, ``(nnz, batch)``: by rows or by columns, in the fewer passes.

    Notes
    -----
    A pass also adds the products with entries outside of the pattern. These are zero, and change a value only where
    they are not finite.
    """
    colors = row_colors(pattern)
    if call.jvp is not None and colors.max(initial=0) > 0:
        column_colors = row_colors(pattern.T)
        if column_colors.max(initial=0) < colors.max():
            return _passes(call.jvp, call, call.in_shape, column_colors[pattern.indices], column_colors, pattern.rows)
    entry_colors = np.repeat(colors, pattern.structure.row_counts())
    return _passes(call.vjp, call, call.out_shape, entry_colors, colors, pattern.indices)


def _passes(
    product: Callable[[torch.Tensor], torch.Tensor],
    call: Call,
    shape: tuple[int, ...],
    entry_colors: np.ndarray,
    colors: np.ndarray,
    entry_places: np.ndarray,
) -> torch.Tensor:
    """Values by one product for each colour; an entry's value is at its place in the product of its colour."""
    batch, device, dtype = len(call.input), call.input.device, call.input.dtype
    parts, entries = list[torch.Tensor](), list[np.ndarray]()
    for color in range(int(colors.max(initial=-1)) + 1):
        seed = torch.from_numpy((colors == color).astype(np.float64)).to(device, dtype).reshape(1, *shape)
        result = product(seed.expand(batch, *shape)).reshape(batch, -1)
        entries.append(np.flatnonzero(entry_colors == color))
        places = torch.from_numpy(entry_places[entries[-1]].astype(np.int64)).to(device)
        parts.append(result.T.index_select(0, places))
    if len(parts) < 2:
        return parts[0] if parts else call.input.new_empty((0, batch))
    return torch.cat(parts).index_select(0, torch.from_numpy(np.argsort(np.concatenate(entries))).to(device))
