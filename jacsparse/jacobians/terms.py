"""Matrices whose entries are sums of terms, and their products and sums.

A term is a coefficient, times at most one variable: a local derivative, or a number, that each call computes. So
products of matrices with constant entries are taken when preparing. Where two variables meet, their product becomes a
variable of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..runtime import kernel, row_starts, run_rows, within_rows

#: The variable of a term that has none.
NONE = -1
#: Terms of a row up to which each is put in its place as it comes.
SHORT = 64


@dataclass(frozen=True)
class Terms:
    """A matrix as terms, in the order of their rows, columns and variables; an entry has each variable at most once."""

    shape: tuple[int, int]
    #: Where the terms of each row begin; for each term its column, variable or `NONE`, and coefficient.
    indptr: np.ndarray
    column: np.ndarray
    variable: np.ndarray
    coefficient: np.ndarray

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, selected: np.ndarray) -> Terms:
        """The matrix of the terms where a mask is true."""
        if selected.all():
            return self
        places = np.flatnonzero(selected)
        arrays = (self.column, self.variable, self.coefficient)
        return Terms(self.shape, np.searchsorted(places, self.indptr), *(array[places] for array in arrays))

    @property
    def row(self) -> np.ndarray:
        """The row of each term."""
        return np.repeat(np.arange(self.shape[0]), np.diff(self.indptr))

    @property
    def begins(self) -> np.ndarray:
        """The first term of each entry."""
        differ = np.empty(len(self), np.bool_)
        differ[:1], differ[1:] = True, self.column[1:] != self.column[:-1]
        differ[self.indptr[:-1][np.diff(self.indptr) > 0]] = True
        return np.flatnonzero(differ)


def terms_at(
    shape: tuple[int, int],
    row: np.ndarray,
    column: np.ndarray,
    *,
    variable: int | np.ndarray = NONE,
    coefficient: float | np.ndarray = 1.0,
) -> Terms:
    """A matrix of one term for each entry, whose columns come in order within each row."""
    arrays = [column.astype(np.int64)]
    for each, dtype in ((variable, np.int64), (coefficient, np.float64)):
        arrays.append(np.ascontiguousarray(np.broadcast_to(np.asarray(each, dtype=dtype), (len(row),))))
    if (row[1:] < row[:-1]).any():
        order = np.argsort(row, kind="stable")
        arrays = [array[order] for array in arrays]
    return Terms(shape, row_starts(np.bincount(row, minlength=shape[0]), np.int64), *arrays)


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
    """Products and sums of matrices of terms, with the variables and the steps that they need."""

    #: The number of variables.
    variables: int = 0
    #: The most terms of all products together.
    limit: int = 0
    steps: list[Step] = field(default_factory=list)
    terms: int = 0

    def multiply(self, a: Terms, b: Terms) -> Terms:
        """The product of two matrices."""
        varies, others_vary = a.variable != NONE, b.variable != NONE
        if not varies.any():
            return self._product(a, self._summed_if_used(b, np.bincount(a.column, minlength=b.shape[0])[b.row]))[0]
        if not others_vary.any():
            return self._product(self._summed_if_used(a, np.diff(b.indptr)[a.column]), b)[0]
        products, right = self._product(self._summed(a[varies]), self._summed(b[others_vary]), of_variables=True)
        parts = [self._product(a, b)[0], self._step(products, right)]
        return self.sum([part for part in parts if len(part)] or parts[:1])

    def sum(self, parts: Sequence[Terms]) -> Terms:
        """The sum of matrices of one shape."""
        if len(parts) == 1:
            return parts[0]
        # The product of [I I ...] and the matrices, one below the other.
        rows, columns = parts[0].shape
        arrays = zip(*((t.column, t.variable, t.coefficient) for t in parts), strict=True)
        counts = np.concatenate([np.diff(part.indptr) for part in parts])
        stacked = Terms((len(counts), columns), row_starts(counts, np.int64), *(np.concatenate(each) for each in arrays))
        picks = np.arange(len(counts)).reshape(len(parts), rows).T.reshape(-1)
        before = self.terms
        total = self._product(terms_at((rows, len(counts)), np.repeat(np.arange(rows), len(parts)), picks), stacked)[0]
        self.terms = before
        return total

    def _product(self, a: Terms, b: Terms, *, of_variables: bool = False) -> tuple[Terms, np.ndarray]:
        """The product of two matrices but for pairs of variables; or of these all pairs, and their second factors."""
        counts = np.diff(b.indptr)[a.column]
        if not of_variables:
            constants = np.diff(row_starts(b.variable == NONE, np.int64)[b.indptr])
            counts = np.where(a.variable == NONE, counts, constants[a.column])
        starts = row_starts(counts, np.int64)[a.indptr]
        total = int(starts[-1])
        self.terms += total
        if self.terms > self.limit:
            raise TooManyTermsError
        column, variable = np.empty((2, total), np.int64)
        right, coefficient = np.empty(total if of_variables else 0, np.int64), np.empty(total)
        factors = [each for t in (a, b) for each in (t.indptr, t.column, t.variable, t.coefficient)]
        counts, variables = np.empty(a.shape[0], np.int64), 0 if of_variables else self.variables + 1
        run_rows(_multiply, starts, *factors, variables, starts, column, variable, right, coefficient, counts)
        indptr, arrays = row_starts(counts, np.int64), [column, variable, coefficient]
        if indptr[-1] < total:
            places = np.arange(indptr[-1]) + np.repeat(starts[:-1] - indptr[:-1], counts)
            arrays = [array[places] for array in arrays]
        return Terms((a.shape[0], b.shape[1]), indptr, *arrays), right

    def _summed(self, terms: Terms) -> Terms:
        """The same matrix with one variable for each entry that has several."""
        varies = terms.variable != NONE
        variables = terms[varies]
        counts = np.diff(variables.begins, append=len(variables))
        several = np.repeat(counts > 1, counts)
        if not several.any():
            return terms
        return self.sum([terms[~varies], variables[~several], self._step(variables[several], None)])

    def _summed_if_used(self, terms: Terms, uses: np.ndarray) -> Terms:
        """The same, where a product that uses each term so many times has fewer terms for it than it takes to sum."""
        return self._summed(terms) if uses.sum() > len(terms) + uses[terms.begins].sum() else terms

    def _step(self, terms: Terms, right: np.ndarray | None) -> Terms:
        """Add a step whose variables are the entries of a matrix, and return it with these."""
        begins, row = terms.begins, terms.row
        counts, row = np.diff(begins, append=len(terms)), row[begins]
        # The first entries of all rows come first, then the second ones: on a grid, neighbours have the same terms.
        place_in_row = np.arange(len(row)) - np.searchsorted(row, row)
        sequence = np.argsort(place_in_row, kind="stable")
        variables = np.empty(len(row), np.int64)
        variables[sequence] = self.variables + np.arange(len(row))
        counts = counts[sequence]
        order = np.repeat(begins[sequence], counts) + within_rows(counts)
        factors = terms.variable[order], None if right is None else right[order]
        self.steps.append(Step(self.variables, row_starts(counts, np.int64), *factors, terms.coefficient[order]))
        self.variables += len(row)
        indptr = np.searchsorted(begins, terms.indptr)
        return Terms(terms.shape, indptr, terms.column[begins], variables, np.ones(len(row)))


@kernel
def _multiply(
    first, last,
    a_indptr, a_column, a_variable, a_coefficient,
    b_indptr, b_column, b_variable, b_coefficient,
    variables, starts, column, left, right, coefficient, counts,
):  # fmt: skip
    """The terms of rows of a product; where `variables` is 0, all pairs in the order of their columns."""
    for row in range(first, last):
        begin = end = starts[row]
        is_short, in_order = starts[row + 1] - begin <= SHORT, True
        for p in range(a_indptr[row], a_indptr[row + 1]):
            k, x = a_column[p], a_variable[p]
            for q in range(b_indptr[k], b_indptr[k + 1]):
                y, key = b_variable[q], b_column[q]
                if variables:
                    if x >= 0 and y >= 0:
                        continue
                    key = key * variables + max(x, y) + 1
                at = end
                if is_short:
                    while at > begin and column[at - 1] > key:
                        at -= 1
                        column[at + 1], coefficient[at + 1] = column[at], coefficient[at]
                        if not variables:
                            left[at + 1], right[at + 1] = left[at], right[at]
                elif end > begin:
                    in_order &= column[end - 1] <= key
                column[at], coefficient[at] = key, a_coefficient[p] * b_coefficient[q]
                if not variables:
                    left[at], right[at] = x, y
                end += 1
        if not in_order:
            order = np.argsort(column[begin:end], kind="mergesort")
            column[begin:end], coefficient[begin:end] = column[begin:end][order], coefficient[begin:end][order]
            if not variables:
                left[begin:end], right[begin:end] = left[begin:end][order], right[begin:end][order]
        if variables:
            # Equal terms are added where they come next to each other.
            total, before = begin, np.int64(-1)
            for p in range(begin, end):
                key = column[p]
                if key == before:
                    coefficient[total - 1] += coefficient[p]
                    continue
                before = key
                column[total], coefficient[total] = key // variables, coefficient[p]
                left[total] = key - column[total] * variables - 1
                total += 1
            end = total
        counts[row] = end - begin
