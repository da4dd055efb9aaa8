"""How full products of patterns will be, without making them.

Each column gets random keys; a row of a product can reach a column where a path of entries leads to it, and the least
key that it reaches tells how many columns it reaches (Cohen, 1998: *Structure prediction and the order of optimization
for sparse matrix products*). With `r` keys, exponentially distributed, whose least are ``m_1, ..., m_r``, the number
is estimated by ``(r - 1) / Σ m``, with a relative error of about ``1/√(r - 2)`` for one row, and much less for a sum.
"""

from __future__ import annotations

import numpy as np

from ..patterns import Diagonal, Full, Pattern
from ..patterns._runtime import kernel, run_rows

__all__ = ["KEYS", "counts", "fresh_keys", "least"]

#: Keys of each column.
KEYS = 8


@kernel
def _least(first, last, indptr, indices, keys, out):
    for row in range(first, last):
        own = out[row]
        own[:] = np.inf
        for entry in range(indptr[row], indptr[row + 1]):
            other = keys[indices[entry]]
            for lane in range(len(own)):
                own[lane] = min(own[lane], other[lane])


def fresh_keys(columns: int, seed: int) -> np.ndarray:
    """Keys of columns that are the ends of products: float32, ``(columns, KEYS)``."""
    return np.random.default_rng(seed).standard_exponential((columns, KEYS), dtype=np.float32)


def least(pattern: Pattern, keys: np.ndarray) -> np.ndarray:
    """For each row of a pattern the least keys among its columns: float32, ``(rows, lanes)``; infinite for none."""
    if isinstance(pattern.structure, Diagonal):
        return keys
    rows, lanes = pattern.shape[0], keys.shape[1]
    if isinstance(pattern.structure, Full):
        return np.broadcast_to(keys.min(axis=0, initial=np.inf), (rows, lanes))
    out = np.empty((rows, lanes), dtype=np.float32)
    run_rows(_least, pattern.indptr, pattern.indptr, pattern.indices, np.ascontiguousarray(keys), out, lanes=lanes)
    return out


def counts(keys: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """How many columns each row reaches, of as many as `columns` says for each product: ``(rows, products)``."""
    # A product with ones, which BLAS takes: NumPy's sum over so short an axis is ten times slower.
    sums = (keys.reshape(-1, KEYS) @ np.ones(KEYS, dtype=keys.dtype)).reshape(len(keys), -1)
    with np.errstate(divide="ignore"):
        return np.minimum(np.where(np.isinf(sums), 0, (KEYS - 1) / sums), columns)
