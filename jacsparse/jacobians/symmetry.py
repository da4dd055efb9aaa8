"""The symmetric part of a pattern, which a Hessian's is."""

from __future__ import annotations

import functools

import numpy as np

from ..patterns import Pattern
from .compressed import part


@functools.lru_cache(maxsize=8)
def symmetric_part(pattern: Pattern) -> tuple[Pattern, np.ndarray]:
    """The entries whose mirror images are entries too, and the place of the lower one of each pair in `pattern`.

    Examples
    --------
    >>> lower = Pattern((2, 2), [0, 1, 3], [0, 0, 1])
    >>> symmetric, places = symmetric_part(lower)
    >>> symmetric.indices.tolist(), places.tolist()
    ([0, 1], [0, 2])
    """
    rows, columns = pattern.rows.astype(np.int64), pattern.indices.astype(np.int64)
    symmetric = part(pattern, np.isin(columns * pattern.shape[1] + rows, pattern.places, assume_unique=True))
    rows, columns = symmetric.rows.astype(np.int64), symmetric.indices.astype(np.int64)
    lower = np.maximum(rows, columns) * pattern.shape[1] + np.minimum(rows, columns)
    return symmetric, np.searchsorted(pattern.places, lower)
