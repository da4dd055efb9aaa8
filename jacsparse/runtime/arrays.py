"""Index arrays: their types, and small helpers."""

from __future__ import annotations

from typing import Any

import numpy as np


def index_dtype(nnz: int, rows: int, columns: int) -> type[np.signedinteger]:
    """int32, or int64 once a count or a dimension needs it."""
    return np.int32 if max(nnz, rows, columns) < 2**31 else np.int64


def frozen(array: np.ndarray) -> np.ndarray:
    """The same array, read-only from now on."""
    array.setflags(write=False)
    return array


def row_starts(counts: np.ndarray, dtype: Any) -> np.ndarray:
    """``indptr`` of rows with `counts` entries."""
    starts = np.zeros(len(counts) + 1, dtype=dtype)
    np.cumsum(counts, out=starts[1:])
    return starts


def within_rows(counts: np.ndarray) -> np.ndarray:
    """The place of each entry in its row, for rows with `counts` entries, one row after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def unsigned(indices: np.ndarray) -> np.ndarray:
    """The same memory as unsigned integers; none may be negative.

    Numba checks whether a signed index is negative, which takes a kernel longer than its arithmetic.
    """
    return indices.view(f"u{indices.itemsize}")
