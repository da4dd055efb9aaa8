"""Rows of a pattern with the same columns."""

from __future__ import annotations

import numpy as np

from ..runtime import row_starts, within_rows
from .pattern import Pattern
from .structure import Csr


def rows_alike(pattern: Pattern) -> tuple[np.ndarray, np.ndarray]:
    """The first row of each set of rows with the same columns, in order, and for each row the number of its set.

    Examples
    --------
    >>> firsts, sets = rows_alike(Pattern((3, 2), [0, 1, 3, 4], [1, 0, 1, 1]))
    >>> firsts.tolist(), sets.tolist()
    ([0, 1], [0, 1, 0])
    """
    # Sums of random numbers tell sets of columns apart, but for one pair in 2**64.
    keys = np.random.default_rng(0).integers(2**64, size=pattern.shape[1], dtype=np.uint64)
    sums = np.append(np.uint64(0), np.cumsum(keys[pattern.indices], dtype=np.uint64))[pattern.indptr]
    _, firsts, sets = np.unique(np.diff(sums), return_index=True, return_inverse=True)
    order = np.argsort(firsts)
    firsts, sets = firsts[order], np.argsort(order)[sets]
    of_sets = pattern_of_rows(pattern, firsts[sets])
    if np.array_equal(of_sets.indptr, pattern.indptr) and np.array_equal(of_sets.indices, pattern.indices):
        return firsts, sets
    return np.arange(pattern.shape[0]), np.arange(pattern.shape[0])


def entries_of_rows(pattern: Pattern, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The entries of some rows, one row after the other; and the place of each one's row among these."""
    counts = np.diff(pattern.indptr)[rows]
    begins = np.repeat(pattern.indptr[rows].astype(np.int64), counts)
    return begins + within_rows(counts), np.repeat(np.arange(len(rows)), counts)


def pattern_of_rows(pattern: Pattern, rows: np.ndarray) -> Pattern:
    """The pattern of some rows of another one."""
    indptr = row_starts(np.diff(pattern.indptr)[rows], pattern.indptr.dtype)
    return Pattern.of(Csr(len(rows), pattern.shape[1], indptr, pattern.indices[entries_of_rows(pattern, rows)[0]]))
