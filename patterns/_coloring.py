"""Values by compression: an operator's own derivative, one pass for each colour of its Jacobian's pattern.

Rows that have no column in common may share a pass of the vector-Jacobian product: what comes back at column `j`
belongs to the one row of them that has an entry there. Columns may share a pass of the Jacobian-vector product in the
same way. Rows are coloured greedily in their order so that no two of one colour share a column (Curtis, Powell and
Reid, 1974; Gebremedhin, Manne and Pothen, 2005, section 3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from ._pattern import Pattern
from ._runtime import kernel
from ._store import remembered
from ._structure import Blocks, Diagonal, Full, frozen

if TYPE_CHECKING:
    from ._rules import Call

__all__ = ["compressed_values", "row_colors"]


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
    # As the structure keeps its digest: for later calls.
    if "row_colors" not in structure.__dict__:
        colors = np.zeros(rows, dtype=np.int64)
        if structure.column_counts().max(initial=0) > 1:
            colors = remembered(f"colors {pattern.digest}", lambda: {"colors": _greedy_colors(pattern)})["colors"]
        structure.__dict__["row_colors"] = frozen(colors)
    return cast(np.ndarray, structure.__dict__["row_colors"])


def _greedy_colors(pattern: Pattern) -> np.ndarray:
    colors = np.zeros(pattern.shape[0], dtype=np.int64)
    # Each row waits for those before it: one range, on one thread.
    _greedy(0, len(colors), pattern.indptr, pattern.indices, pattern.T.indptr, pattern.T.indices, colors)
    return colors


def compressed_values(pattern: Pattern, call: Call) -> torch.Tensor:
    """Values of a call's Jacobian on its pattern, ``(nnz, batch)``: by rows or by columns, whichever takes less.

    Notes
    -----
    Sums that the operator's derivative makes over entries that the pattern leaves out, and that are zero, are part of
    a value only where they are not finite.
    """
    assert call.input is not None and call.vjp is not None
    colors = row_colors(pattern)
    if call.jvp is not None and colors.max(initial=0) > 0:
        of_columns = row_colors(pattern.T)
        if of_columns.max(initial=0) < colors.max():
            entry_columns = of_columns[pattern.indices]
            return _passes(call.jvp, call, call.in_shape, entry_columns, of_columns, pattern.rows, pattern.nnz)
    of_entries = np.repeat(colors, pattern.structure.row_counts())
    return _passes(call.vjp, call, call.out_shape, of_entries, colors, pattern.indices, pattern.nnz)


def _passes(
    product: Callable[[torch.Tensor], torch.Tensor],
    call: Call,
    shape: tuple[int, ...],
    of_entries: np.ndarray,
    colors: np.ndarray,
    places: np.ndarray,
    nnz: int,
) -> torch.Tensor:
    """One product for each colour; each entry is found at its place in the pass of its colour."""
    assert call.input is not None
    batch, device = len(call.input), call.input.device
    values = call.input.new_empty((nnz, batch))
    entry_colors, seeds, found_at = (
        torch.from_numpy(array.astype(np.int64)).to(device) for array in (of_entries, colors, places)
    )
    for color in range(int(colors.max(initial=-1)) + 1):
        seed = (seeds == color).to(values.dtype).reshape(1, *shape).expand(batch, *shape)
        result = product(seed).reshape(batch, -1)
        mine = (entry_colors == color).nonzero()[:, 0]
        values[mine] = result[:, found_at[mine]].T
    return values
