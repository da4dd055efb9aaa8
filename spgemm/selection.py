"""Parts of sparse matrices: rows, columns and elements, by indices as NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse
import torch

from ..patterns import Csr, Full, Pattern, gathered
from ..runtime import frozen


def places(key: Any, shape: tuple[int, int]) -> tuple[Any, Any, bool]:
    """The rows and the columns of ``J[key]``, and whether they are pairs: one element for each.

    They are arrays of numbers, or None for all of them in order.

    Raises
    ------
    TypeError
        Where the key holds no integers, slices or truth values.
    IndexError
        Where it has other axes than a matrix, or names a place outside.
    """
    keys = key if isinstance(key, tuple) else (key, slice(None))
    if len(keys) != 2:
        raise IndexError(f"the index has {len(keys)} parts; expected J[rows] or J[rows, columns]")
    rows, columns = map(_places, ("rows", "columns"), keys, shape)
    if rows is None or columns is None or any(isinstance(each, slice) for each in keys):
        for name, each in (("rows", rows), ("columns", columns)):
            if each is not None and each.ndim > 1:
                raise IndexError(f"the index of {name} has shape {each.shape}; expected one axis")
        return rows, columns, False
    if rows.ndim == columns.ndim == 2 and rows.shape[1] == columns.shape[0] == 1:
        # As np.ix_ has them.
        return rows, columns, False
    try:
        rows, columns = np.broadcast_arrays(rows, columns)
    except ValueError:
        raise IndexError(
            f"the rows have shape {rows.shape} and the columns {columns.shape}, which are no pairs; each row with each "
            "column is J[np.ix_(rows, columns)]"
        ) from None
    return rows, columns, True


def _places(name: str, key: Any, size: int) -> np.ndarray | None:
    if isinstance(key, slice):
        return None if key == slice(None) else np.arange(*key.indices(size))
    array = key.numpy(force=True) if isinstance(key, torch.Tensor) else np.asarray(key)
    if array.dtype == np.bool_ and array.shape == (size,):
        return np.flatnonzero(array)
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"the index of {name} is {key!r}; expected a slice, integers or {size} truth values")
    array = array.astype(np.int64)
    outside = array[(array < -size) | (array >= size)]
    if outside.size:
        raise IndexError(f"the index of {name} has {outside[0]}; this matrix has {size} {name}")
    return np.where(array < 0, array + size, array)


def submatrix(
    pattern: Pattern, values: torch.Tensor, rows: np.ndarray | None, columns: np.ndarray | None
) -> tuple[Pattern, torch.Tensor]:
    """The pattern of rows and columns of a matrix, each row with each column, and the values of its entries."""
    # Of a matrix that holds the numbers of its entries, SciPy selects those of the part.
    part = scipy.sparse.csr_array((np.arange(pattern.nnz), pattern.indices, pattern.indptr), shape=pattern.shape)
    part = part if rows is None else part[rows.reshape(-1)]
    part = part if columns is None else part[:, columns.reshape(-1)]
    part.sort_indices()
    m, n = part.shape
    structure = Full(m, n) if part.nnz == m * n else Csr.checked((m, n), part.indptr, part.indices)
    return Pattern.of(structure), gathered(values, frozen(part.data))


def elements(pattern: Pattern, values: torch.Tensor, rows: np.ndarray, columns: np.ndarray) -> torch.Tensor:
    """The elements at pairs of rows and columns of one shape, ``(*shape, batch)``; zeros where there is no entry."""
    wanted = (rows * pattern.shape[1] + columns).reshape(-1)
    if isinstance(pattern.structure, Full):
        # Its indices are never made.
        chosen = gathered(values, frozen(wanted))
    else:
        first, last = (np.searchsorted(pattern.places, wanted, side=side) for side in ("left", "right"))
        found = np.flatnonzero(first < last)
        chosen = _placed(values, first[found], found, len(wanted))
    return chosen.reshape(*rows.shape, values.shape[1])


def diagonal(pattern: Pattern, values: torch.Tensor) -> torch.Tensor:
    """The elements of the diagonal, ``(min(shape), batch)``, in one pass over the entries."""
    if isinstance(pattern.structure, Full):
        return values.reshape(*pattern.shape, values.shape[1]).diagonal().T.contiguous()
    entries = np.flatnonzero(pattern.rows == pattern.indices)
    return _placed(values, entries, pattern.rows[entries], min(pattern.shape))


def _placed(values: torch.Tensor, entries: np.ndarray, rows: np.ndarray, size: int) -> torch.Tensor:
    """The values of entries in rows of their own among `size`; the others are zero."""
    places = torch.from_numpy(rows.astype(np.int64)).to(values.device)
    return values.new_zeros((size, values.shape[1])).index_copy(0, places, gathered(values, frozen(entries)))
