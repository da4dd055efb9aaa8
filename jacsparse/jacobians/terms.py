"""Matrices whose entries are sums of terms, and their products and sums.

A term is a coefficient, times at most one variable: a local derivative, or a number, that each call computes. So
products of matrices with constant entries are taken when preparing. Where two variables meet, their product becomes a
variable of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..runtime import row_starts, within_rows

#: The variable of a term that has none.
NONE = -1


@dataclass(frozen=True)
class Terms:
    """A matrix as terms: for each its row, column, variable or `NONE`, and coefficient."""

    shape: tuple[int, int]
    row: np.ndarray
    column: np.ndarray
    variable: np.ndarray
    coefficient: np.ndarray

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, places: np.ndarray) -> Terms:
        if places.dtype == np.bool_:
            if places.all():
                return self
            places = np.flatnonzero(places)
        arrays = (self.row, self.column, self.variable, self.coefficient)
        return Terms(self.shape, *(array[places] for array in arrays))

    @property
    def T(self) -> Terms:
        """The transposed matrix."""
        return replace(self, shape=self.shape[::-1], row=self.column, column=self.row)

    @property
    def place(self) -> np.ndarray:
        """The place of each term's entry among all the matrix' elements in C order."""
        return self.row * np.int64(self.shape[1]) + self.column


def terms_at(
    shape: tuple[int, int],
    row: np.ndarray,
    column: np.ndarray,
    *,
    variable: int | np.ndarray = NONE,
    coefficient: float | np.ndarray = 1.0,
) -> Terms:
    """A matrix of one term for each entry."""
    variables = np.broadcast_to(np.asarray(variable, dtype=np.int64), (len(row),))
    coefficients = np.broadcast_to(np.asarray(coefficient, dtype=np.float64), (len(row),))
    return Terms(shape, row.astype(np.int64), column.astype(np.int64), variables, coefficients)


def joined(parts: Sequence[Terms]) -> Terms:
    """The sum of matrices."""
    columns = zip(*((t.row, t.column, t.variable, t.coefficient) for t in parts), strict=True)
    return Terms(parts[0].shape, *(np.concatenate(arrays) for arrays in columns))


@dataclass(frozen=True)
class Step:
    """Variables that each call computes from others: sums of weighted variables, or of weighted products of two."""

    #: The first of the consecutive variables.
    first: int
    #: The terms of each variable, as in CSR; their factors, of which `right` is None where there is one.
    indptr: np.ndarray
    left: np.ndarray
    right: np.ndarray | None
    coefficient: np.ndarray

    @property
    def factors(self) -> list[np.ndarray]:
        """The factors of all terms: one array, or two."""
        return [self.left] if self.right is None else [self.left, self.right]


class TooManyTermsError(Exception):
    """A product has more terms than it pays to plan."""


@dataclass
class Algebra:
    """Products of matrices of terms, with the variables and the steps that they need."""

    #: The number of variables.
    variables: int = 0
    #: The most terms of all products together.
    limit: int = 0
    steps: list[Step] = field(default_factory=list)
    terms: int = 0

    def multiply(self, a: Terms, b: Terms) -> Terms:
        """The product of two matrices."""
        shape = (a.shape[0], b.shape[1])
        a_constant, b_constant = a.variable == NONE, b.variable == NONE
        parts = []
        for left, right in ((a[a_constant], b), (a[~a_constant], b[b_constant])):
            i, j = self._pairs(left, right)
            parts.append(
                Terms(
                    shape,
                    left.row[i],
                    right.column[j],
                    np.maximum(left.variable[i], right.variable[j]),
                    left.coefficient[i] * right.coefficient[j],
                )
            )
        if not a_constant.all() and not b_constant.all():
            parts.append(self._of_variables(shape, self._summed(a[~a_constant]), self._summed(b[~b_constant])))
        product = joined(parts)
        return merged(product) if len(product) > max(len(a), len(b)) else product

    def _pairs(self, a: Terms, b: Terms) -> tuple[np.ndarray, np.ndarray]:
        """The terms of two matrices that meet, pair by pair."""
        order = sorted_order(b.row)
        counts = np.bincount(b.row, minlength=b.shape[0])
        starts, repeats = np.cumsum(counts) - counts, counts[a.column]
        self.terms += int(repeats.sum())
        if self.terms > self.limit:
            raise TooManyTermsError
        i = np.repeat(np.arange(len(a)), repeats)
        return i, order[starts[a.column[i]] + within_rows(repeats)]

    def _of_variables(self, shape: tuple[int, int], a: Terms, b: Terms) -> Terms:
        """The product of two matrices whose terms all have variables: each of its entries is a new variable."""
        i, j = self._pairs(a, b)
        place = a.row[i] * np.int64(shape[1]) + b.column[j]
        return self._step(shape, place, a.variable[i], b.variable[j], a.coefficient[i] * b.coefficient[j])

    def _summed(self, terms: Terms) -> Terms:
        """The same matrix with at most one term for each entry."""
        terms = merged(terms)
        _, entry, counts = distinct(terms.place)
        several = counts[entry] > 1
        if not several.any():
            return terms
        t = terms[several]
        return joined([terms[~several], self._step(t.shape, t.place, t.variable, None, t.coefficient)])

    def _step(
        self,
        shape: tuple[int, int],
        place: np.ndarray,
        left: np.ndarray,
        right: np.ndarray | None,
        coefficient: np.ndarray,
    ) -> Terms:
        """Add a step whose variables are the entries at distinct places, and return their matrix."""
        places, entry, counts = distinct(place)
        row, column = divmod(places, np.int64(max(1, shape[1])))
        # The first entries of all rows come first, then the second ones: on a grid, neighbours have the same terms.
        place_in_row = np.arange(len(row)) - np.searchsorted(row, row)
        sequence = np.argsort(place_in_row, kind="stable")
        variable = np.empty(len(row), dtype=np.int64)
        variable[sequence] = np.arange(len(row))
        order = np.argsort(variable[entry], kind="stable")
        factors = (left[order], None if right is None else right[order])
        indptr = row_starts(counts[sequence], np.int64)
        self.steps.append(Step(self.variables, indptr, *factors, coefficient[order]))
        variables = np.arange(self.variables, self.variables + len(places))
        self.variables += len(places)
        return terms_at(shape, row[sequence], column[sequence], variable=variables)


def distinct(array: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The distinct elements in order, the place among these of each element, and how often each occurs."""
    order = sorted_order(array)
    ordered = array[order]
    begins = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))[: len(array)]
    counts = np.diff(np.append(begins, len(array)))
    places = np.empty(len(array), dtype=np.int64)
    places[order] = np.repeat(np.arange(len(begins)), counts)
    return ordered[begins], places, counts


def sorted_order(array: np.ndarray) -> np.ndarray:
    """The order that sorts an array, of equal elements as they come; it may be sorted already."""
    return np.arange(len(array)) if (array[1:] >= array[:-1]).all() else np.argsort(array, kind="stable")


def merged(terms: Terms) -> Terms:
    """The same matrix with at most one term for each entry and variable."""
    variables = int(terms.variable.max(initial=0)) + 2
    if terms.shape[0] * terms.shape[1] * variables < 2**63:
        keys = (terms.place * variables + terms.variable + 1)[None]
        order = sorted_order(keys[0])
    else:
        keys = np.stack((terms.place, terms.variable))
        order = np.lexsort(keys[::-1])
    terms, keys = terms[order], keys[:, order]
    begins = np.flatnonzero(np.append(True, (keys[:, 1:] != keys[:, :-1]).any(0)))[: len(terms)]
    sums = np.add.reduceat(terms.coefficient, begins) if len(terms) else terms.coefficient
    return replace(terms[begins], coefficient=sums)
