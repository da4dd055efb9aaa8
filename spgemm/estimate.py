"""Estimates of how full products of patterns will be, without making them.

Each column gets random keys. A row of a product reaches a column where a path of entries leads to it, and the least key
that a row reaches tells how many columns it reaches (Cohen, 1998: *Structure prediction and the order of optimization
for sparse matrix products*). With `r` exponentially distributed keys per column and the least keys ``m_1, ..., m_r``,
the number is estimated by ``(r - 1) / Σ m``, with a relative error of about ``1/√(r - 2)`` for one row, and much less
for a sum of rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from ..patterns import Blocks, Convolution, Diagonal, Full, Pattern, Pooling, Structure
from ..runtime import kernel, run_rows

#: Keys of each column.
KEYS = 8
#: Share of a convolution's entries from which on it is taken for an unpruned one.
NEARLY = 0.9


@kernel
def _least(first, last, indptr, indices, keys, out):
    for row in range(first, last):
        least_keys = out[row]
        least_keys[:] = np.inf
        for entry in range(indptr[row], indptr[row + 1]):
            column_keys = keys[indices[entry]]
            for lane in range(len(least_keys)):
                least_keys[lane] = min(least_keys[lane], column_keys[lane])


@kernel
def _counts(first, last, keys, columns, out):
    for row in range(first, last):
        row_keys, estimates = keys[row], out[row]
        for product in range(len(columns)):
            total = np.float32(0)
            for key in range(product * KEYS, (product + 1) * KEYS):
                total += row_keys[key]
            # A row that reaches no column has infinite keys.
            estimates[product] = min((KEYS - 1) / total, columns[product])


def fresh_keys(columns: int, seed: int) -> np.ndarray:
    """Random keys of the last columns of a product: float32, ``(columns, KEYS)``."""
    return np.random.default_rng(seed).standard_exponential((columns, KEYS), dtype=np.float32)


def least(pattern: Pattern, keys: np.ndarray) -> np.ndarray:
    """The least keys among the columns of each row: float32, ``(rows, lanes)``; infinite for an empty row."""
    for structure in reversed(_factors(pattern.structure)):
        keys = _least_of(structure, keys)
    return keys


def spread(
    edges: Iterable[tuple[Hashable, Hashable, Pattern]], start: Hashable, keys: np.ndarray
) -> Iterator[tuple[Hashable, np.ndarray]]:
    """Yield each vertex of a graph that `start` reaches, with its keys, which are dropped once they are passed on.

    Parameters
    ----------
    edges : iterable of (vertex, vertex, Pattern)
        Source, target, and the pattern whose columns belong to the source and whose rows to the target. All edges into
        a vertex come before those out of it.
    start : vertex
        The vertex that has the keys.
    keys : ndarray of float32, (elements, lanes)
        The keys of its elements.

    Yields
    ------
    vertex, ndarray
        A vertex and its keys.
    """
    edges = list(edges)
    unused = Counter(source for source, _, _ in edges)
    reached = {start: keys}
    for source, target, pattern in edges:
        if source in reached:
            least_keys = least(pattern, reached[source])
            reached[target] = np.minimum(reached[target], least_keys) if target in reached else least_keys
        unused[source] -= 1
        if not unused[source] and source in reached:
            yield source, reached.pop(source)
    yield from reached.items()


def _factors(structure: Structure) -> tuple[Structure, ...]:
    """Structures with few entries whose product is this one, so that equal rows are computed once."""
    if isinstance(structure, Full):
        structure = Blocks(1, structure.m, structure.n)
    if isinstance(structure, Blocks):
        outer, rows, columns, inner = structure.outer, structure.rows, structure.columns, structure.inner
        return (Blocks(outer, rows, 1, inner), Blocks(outer, 1, columns, inner))
    if isinstance(structure, Convolution) and structure.mask_bits is not None:
        # A few pruned weights leave no row without a path, and leaving them out takes all indices.
        unpruned = replace(structure, mask_bits=None)
        structure = unpruned if structure.nnz >= NEARLY * unpruned.nnz else structure
    if isinstance(structure, Convolution) and structure.mask_bits is None:
        if structure.transposed:
            return tuple(factor.T for factor in reversed(_factors(structure.T)))
        # Each channel of a group leads to each other one, by the same windows.
        windows = Pooling(structure.groups, structure.axes)
        channels = (structure.out_channels // structure.groups, structure.in_channels // structure.groups)
        places = tuple(size // max(1, structure.groups) for size in windows.shape)
        return (
            Blocks(structure.groups, channels[0], 1, places[0]),
            windows,
            Blocks(structure.groups, 1, channels[1], places[1]),
        )
    return (structure,)


def _least_of(structure: Structure, keys: np.ndarray) -> np.ndarray:
    if isinstance(structure, Diagonal):
        return keys
    rows, lanes = structure.shape[0], keys.shape[1]
    if isinstance(structure, Blocks):
        blocks = keys.reshape(structure.outer, structure.columns, structure.inner, lanes)
        shortest = blocks.min(axis=1, keepdims=True, initial=np.inf)
        return np.repeat(shortest, structure.rows, axis=1).reshape(rows, lanes)
    out = np.empty((rows, lanes), dtype=np.float32)
    indptr, indices = structure.csr()
    run_rows(_least, indptr, indptr, indices, np.ascontiguousarray(keys), out, lanes=lanes)
    return out


def counts(keys: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Estimate how many of its `columns` each product's row reaches: float32, ``(rows, products)``."""
    out = np.empty((len(keys), len(columns)), dtype=np.float32)
    run_rows(_counts, np.arange(len(keys) + 1), keys, columns, out, lanes=keys.shape[1])
    return out
