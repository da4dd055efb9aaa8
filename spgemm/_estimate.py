"""How full products of patterns will be, without making them.

Each column gets random keys; a row of a product can reach a column where a path of entries leads to it, and the least
key that it reaches tells how many columns it reaches (Cohen, 1998: *Structure prediction and the order of optimization
for sparse matrix products*). With `r` keys, exponentially distributed, whose least are ``m_1, ..., m_r``, the number
is estimated by ``(r - 1) / Σ m``, with a relative error of about ``1/√(r - 2)`` for one row, and much less for a sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator

import numpy as np

from ..patterns import Blocks, Convolution, Diagonal, Full, Pattern, Pooling, Structure
from ..patterns._runtime import kernel, run_rows

__all__ = ["KEYS", "counts", "fresh_keys", "least", "spread"]

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


@kernel
def _counts(first, last, keys, columns, out):
    for row in range(first, last):
        own, found = keys[row], out[row]
        for product in range(len(columns)):
            total = np.float32(0)
            for key in range(product * KEYS, (product + 1) * KEYS):
                total += own[key]
            # No key at all is infinite.
            found[product] = min((KEYS - 1) / total, columns[product])


def fresh_keys(columns: int, seed: int) -> np.ndarray:
    """Keys of columns that are the ends of products: float32, ``(columns, KEYS)``."""
    return np.random.default_rng(seed).standard_exponential((columns, KEYS), dtype=np.float32)


def least(pattern: Pattern, keys: np.ndarray) -> np.ndarray:
    """For each row of a pattern the least keys among its columns: float32, ``(rows, lanes)``; infinite for none."""
    for structure in reversed(_factors(pattern.structure)):
        keys = _least_of(structure, keys)
    return keys


def spread(
    edges: Iterable[tuple[Hashable, Hashable, Pattern]], start: Hashable, keys: np.ndarray
) -> Iterator[tuple[Hashable, np.ndarray]]:
    """Keys of one vertex of a graph taken along its edges to all that it reaches, and let go once they are passed on.

    Parameters
    ----------
    edges : iterable of (vertex, vertex, Pattern)
        From where, to where, and the pattern whose columns belong to the first and whose rows to the second; all edges
        into a vertex come before those out of it.
    start : vertex
        That has the keys.
    keys : ndarray of float32, (elements, lanes)
        Of its elements.

    Yields
    ------
    vertex, ndarray
        Each vertex that is reached, with its keys.
    """
    edges = list(edges)
    left = Counter(source for source, _, _ in edges)
    held = {start: keys}
    for source, target, pattern in edges:
        if source in held:
            own = least(pattern, held[source])
            held[target] = np.minimum(held[target], own) if target in held else own
        left[source] -= 1
        if not left[source] and source in held:
            yield source, held.pop(source)
    yield from held.items()


def _factors(structure: Structure) -> tuple[Structure, ...]:
    """Structures whose product is this one, each with few entries: rows of which many are alike are made once."""
    if isinstance(structure, Full):
        structure = Blocks(1, structure.m, structure.n)
    if isinstance(structure, Blocks):
        outer, rows, columns, inner = structure.outer, structure.rows, structure.columns, structure.inner
        return (Blocks(outer, rows, 1, inner), Blocks(outer, 1, columns, inner))
    if isinstance(structure, Convolution) and structure.kept is None:
        if structure.transposed:
            return tuple(factor.T for factor in reversed(_factors(structure.T)))
        # From any channel of a group to any other, by the same windows.
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
    """How many columns each row reaches, of as many as `columns` says for each product: ``(rows, products)``."""
    out = np.empty((len(keys), len(columns)), dtype=np.float32)
    run_rows(_counts, np.arange(len(keys) + 1), keys, columns, out, lanes=keys.shape[1])
    return out
