"""Colourings of patterns: groups of columns, or of rows, whose products with one vector contain each entry by itself.

Columns that share no row are summed into one seed of forward mode; each of their entries is then alone in its row of
the result. Rows that share no column are summed in the same way for backward mode (Curtis, Powell and Reid, 1974).
Where a few rows, or columns, are much fuller than the others, they are taken the one way and the rest the other way
(Coleman and Verma, 1998: *The efficient computation of sparse Jacobian matrices using automatic differentiation*,
section 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..patterns import Pattern, row_colors
from ..runtime import array_in, frozen
from ..spgemm import PLAN_CACHE
from . import kernels

#: Cost of a backward pass relative to a forward pass.
BACKWARD = 1.5


class _OfPattern:
    """What `PLAN_CACHE` holds of one pattern, with arrays."""

    pattern: Pattern

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        return (self.pattern,)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in vars(self).values() if isinstance(array, np.ndarray))


@dataclass(frozen=True)
class Coloring(_OfPattern):
    """Groups of columns and of rows whose compressed products contain each entry by itself.

    Attributes
    ----------
    pattern : Pattern
        The pattern of the entries.
    columns, rows : ndarray of int
        The colour of each column and of each row; -1 for those that no entry is taken from.
    places : ndarray of int64, (nnz,)
        The place of each entry in the products with all seeds of columns and then of rows, one after the other.
    """

    pattern: Pattern
    columns: np.ndarray
    rows: np.ndarray
    places: np.ndarray

    @property
    def counts(self) -> tuple[int, int]:
        """The number of colours of columns and of rows."""
        return int(self.columns.max(initial=-1)) + 1, int(self.rows.max(initial=-1)) + 1

    def seeds(self) -> list[np.ndarray]:
        """For columns and for rows: a seed for each colour, one where a column or a row has it."""
        pairs = zip((self.columns, self.rows), self.counts, strict=True)
        return [(colors == np.arange(count)[:, None]).astype(np.float64) for colors, count in pairs]

    def describe(self) -> dict[str, np.ndarray]:
        """The arrays by name."""
        return {"columns": self.columns, "rows": self.rows, "places": self.places}

    @classmethod
    def restore(cls, content: Mapping[str, Any], pattern: Pattern) -> Coloring:
        """The colouring of arrays from outside; ValueError where they do not fit the pattern."""
        sizes = {"columns": pattern.shape[1], "rows": pattern.shape[0], "places": pattern.nnz}
        colors = cls(pattern, *(array_in(content, name, size=size) for name, size in sizes.items()))
        array_in(content, "places", stop=int(np.dot(colors.counts, pattern.shape)))
        return colors

    @property
    def cost(self) -> float:
        """The cost of all passes, in forward passes."""
        forward, backward = self.counts
        return forward + BACKWARD * backward


def coloring(pattern: Pattern) -> Coloring:
    """The cheapest colouring among those of columns, of rows, and of both, the fullest ones apart.

    Examples
    --------
    >>> arrow = Pattern((4, 4), [0, 4, 6, 8, 10], [0, 1, 2, 3, 0, 1, 0, 2, 0, 3])
    >>> coloring(arrow).counts
    (2, 1)
    """

    def cheapest() -> Coloring:
        best = _apart(pattern, 0)
        for matrix, of_columns, of_rows in ((pattern, 1.0, BACKWARD), (pattern.T, BACKWARD, 1.0)):
            lengths = np.sort(matrix.structure.row_counts())[::-1]
            for count in _counts(lengths):
                # There are as many colours of columns as the longest of the other rows has entries, or more.
                least = of_columns * lengths[count] + (of_rows if count else 0)
                if (count or matrix is not pattern) and least < best.cost:
                    apart = _apart(matrix, count)
                    candidate = apart if matrix is pattern else _transposed(pattern, apart)
                    best = min(best, candidate, key=lambda coloring: coloring.cost)
        return best

    return PLAN_CACHE.get(("coloring", pattern.digest), cheapest)


def row_coloring(pattern: Pattern) -> Coloring:
    """The colouring of rows alone."""
    return _transposed(pattern, _apart(pattern.T, 0))


def least_cost(pattern: Pattern) -> float:
    """A cost that no colouring is below: a product has an entry of the matrix in each of its elements at the most.

    Of a symmetric matrix, half of the entries will do.
    """
    rows, columns = pattern.shape
    return pattern.nnz / 2 * min(1 / max(1, rows), BACKWARD / max(1, columns))


def _counts(lengths: np.ndarray) -> list[int]:
    """Numbers of fullest rows to take apart: powers of two while they shorten the longest of the other rows.

    `lengths` are the numbers of entries of the rows, the fullest first.
    """
    powers = (2**power for power in range(10))
    return [
        count
        for count in (0, *powers)
        if count < len(lengths) and (not count or lengths[count] + BACKWARD * count < lengths[0])
    ]


def _apart(pattern: Pattern, count: int) -> Coloring:
    """A number of fullest rows coloured as rows; the entries of the other rows by their columns."""
    order = np.argsort(-pattern.structure.row_counts(), kind="stable")
    apart = np.zeros(pattern.shape[0], dtype=np.bool_)
    apart[order[:count]] = True
    forward = ~apart[pattern.rows]
    rows = np.where(apart, row_colors(part(pattern, ~forward)) if count else 0, -1)
    columns = row_colors(part(pattern, forward).T)
    return _colored(pattern, columns if forward.any() else np.full(pattern.shape[1], -1), rows, forward)


def _colored(pattern: Pattern, columns: np.ndarray, rows: np.ndarray, forward: np.ndarray) -> Coloring:
    """The colouring whose entries are taken from the products with their columns' seeds where `forward`."""
    height, width = np.int64(pattern.shape[0]), np.int64(pattern.shape[1])
    of_columns = columns[pattern.indices] * height + pattern.rows
    of_rows = (columns.max(initial=-1) + 1) * height + rows[pattern.rows] * width + pattern.indices
    return Coloring(pattern, columns, rows, np.where(forward, of_columns, of_rows))


def part(pattern: Pattern, entries: np.ndarray) -> Pattern:
    """The pattern of some of the entries."""
    if entries.all():
        return pattern
    indptr = np.append(0, np.cumsum(entries))[pattern.indptr]
    return Pattern(pattern.shape, indptr, pattern.indices[entries])


def _transposed(pattern: Pattern, of_transpose: Coloring) -> Coloring:
    """The colouring of a pattern from one of its transpose."""
    forward = np.empty(pattern.nnz, dtype=np.bool_)
    forward[pattern.transposition] = of_transpose.places >= of_transpose.counts[0] * np.int64(pattern.shape[1])
    return _colored(pattern, of_transpose.rows, of_transpose.columns, forward)


@dataclass(frozen=True)
class SymmetricPart(_OfPattern):
    """The entries of a pattern whose mirror images are entries too; see `symmetric_part`."""

    pattern: Pattern
    #: The place of the lower entry of each pair among those of the whole pattern; and the same memory as a tensor.
    places: np.ndarray
    index: torch.Tensor


def symmetric_part(pattern: Pattern) -> SymmetricPart:
    """The part of a pattern that is symmetric.

    Examples
    --------
    >>> lower = symmetric_part(Pattern((2, 2), [0, 1, 3], [0, 0, 1]))
    >>> lower.pattern.indices.tolist(), lower.places.tolist()
    ([0, 1], [0, 2])
    """

    def symmetric() -> SymmetricPart:
        rows, columns = pattern.rows.astype(np.int64), pattern.indices.astype(np.int64)
        symmetric_pattern = part(
            pattern, np.isin(columns * pattern.shape[1] + rows, pattern.places, assume_unique=True)
        )
        rows, columns = (each.astype(np.int64) for each in (symmetric_pattern.rows, symmetric_pattern.indices))
        lower = np.maximum(rows, columns) * pattern.shape[1] + np.minimum(rows, columns)
        places = np.searchsorted(pattern.places, lower)
        index = torch.from_numpy(places)
        return SymmetricPart(symmetric_pattern, frozen(places), index)

    return PLAN_CACHE.get(("symmetric part", pattern.digest), symmetric)


def star_coloring(pattern: Pattern) -> Coloring:
    """A star colouring of columns for a symmetric matrix, whose entries are in the symmetric part of a pattern.

    Neighbours in the graph of the matrix have different colours, and no path of four vertices only two (Coleman and
    Moré, 1984; Gebremedhin, Tarafdar, Manne and Pothen, 2007: *New acyclic and star coloring algorithms with
    application to computing Hessians*). These are fewer colours than those of `coloring`: of a pair of entries, one is
    alone in a product with its column's colour. The result is exactly symmetric, as both are taken from one place.

    Examples
    --------
    >>> arrow = Pattern((4, 4), [0, 4, 6, 8, 10], [0, 1, 2, 3, 0, 1, 0, 2, 0, 3])
    >>> star_coloring(arrow).columns
    array([0, 1, 1, 1])
    """
    symmetric = symmetric_part(pattern).pattern
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
