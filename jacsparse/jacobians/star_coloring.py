"""Colours of symmetric matrices: of a pair of entries, one is alone in a product with its column's colour as a seed.

A star colouring gives neighbours in the graph of a symmetric matrix different colours, and no path of four vertices
only two (Coleman and Moré, 1984; Gebremedhin, Tarafdar, Manne and Pothen, 2007: *New acyclic and star coloring
algorithms with application to computing Hessians*). It takes fewer colours than one of columns, and the result is
exactly symmetric, as both entries of a pair are taken from one place.
"""

from __future__ import annotations

import functools

import numpy as np

from ..patterns import Pattern
from . import kernels
from .compressed import Coloring, part


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


def star_coloring(pattern: Pattern) -> Coloring:
    """A colouring of columns for a symmetric matrix, whose entries are in the symmetric part of a pattern.

    Examples
    --------
    >>> arrow = Pattern((4, 4), [0, 4, 6, 8, 10], [0, 1, 2, 3, 0, 1, 0, 2, 0, 3])
    >>> star_coloring(arrow).columns
    array([0, 1, 1, 1])
    """
    symmetric, _ = symmetric_part(pattern)
    size = symmetric.shape[0]
    colors = np.full(size, -1, dtype=np.int64)
    # Each vertex waits for those before it: one range, on one thread.
    kernels.star_colors(0, size, symmetric.indptr, symmetric.indices, colors)
    places = colors[symmetric.indices] * np.int64(size) + symmetric.rows
    # Alone in its row among the columns of its colour.
    _, inverse, counts = np.unique(places, return_inverse=True, return_counts=True)
    alone = counts[inverse] == 1
    mirror = symmetric.transposition
    direct = alone & ((symmetric.rows >= symmetric.indices) | ~alone[mirror])
    return Coloring(symmetric, colors, np.full(size, -1), np.where(direct, places, places[mirror]))
