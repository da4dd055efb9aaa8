"""Colours of symmetric matrices: of a pair of entries, one is alone in a product with its column's colour as a seed.

A star colouring gives neighbours in the graph of a symmetric matrix different colours, and no path of four vertices
only two (Coleman and Moré, 1984; Gebremedhin, Tarafdar, Manne and Pothen, 2007: *New acyclic and star coloring
algorithms with application to computing Hessians*). It takes fewer colours than one of columns, and the result is
exactly symmetric, as both entries of a pair are taken from one place.
"""

from __future__ import annotations

import numpy as np

from ..patterns import Pattern
from . import kernels
from .compressed import Coloring
from .symmetry import symmetric_part


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
