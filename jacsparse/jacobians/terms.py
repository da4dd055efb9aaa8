"""Matrices whose entries are sums of terms, and their products and sums.

A term is a coefficient, times at most one variable: a local derivative, or a number, that each call computes. So
products of matrices with constant entries are taken when preparing. Where two variables meet, their product becomes a
variable of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..patterns import Csr, Diagonal, Full, Identity, Pattern
from ..runtime import frozen, index_dtype, row_starts, run_rows, within_rows
from ..spgemm import product_pattern
from .kernels import multiply_terms

#: The variable of a term that has none.
NONE = -1
#: Terms of all products, for each entry of a matrix, beyond which they are too many.
TERMS_PER_ENTRY = 64


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

    @functools.cached_property
    def begins(self) -> np.ndarray:
        """The first term of each entry."""
        differ = np.empty(len(self), np.bool_)
        differ[:1], differ[1:] = True, self.column[1:] != self.column[:-1]
        differ[self.indptr[:-1][np.diff(self.indptr) > 0]] = True
        return np.flatnonzero(differ)

    @functools.cached_property
    def pattern(self) -> Pattern:
        """The positions of the entries."""
        (rows, columns), entries = self.shape, self.begins
        if len(entries) == rows * columns:
            return Pattern.of(Full(rows, columns))
        dtype = index_dtype(len(entries), rows, columns)
        indptr, indices = np.searchsorted(entries, self.indptr), self.column[entries]
        return Pattern.of(Csr(rows, columns, frozen(indptr.astype(dtype)), frozen(indices.astype(dtype))))

    def at(self, pattern: Pattern) -> Terms:
        """The same matrix, whose pattern is known."""
        self.__dict__["pattern"] = pattern
        return self


def terms_at(pattern: Pattern, *, variable: int | np.ndarray = NONE, coefficient: float | np.ndarray = 1.0) -> Terms:
    """A matrix of one term for each entry."""
    arrays = ((pattern.indices, np.int64), (variable, np.int64), (coefficient, np.float64))
    columns = [np.full(pattern.nnz, each, dtype) for each, dtype in arrays]
    return Terms(pattern.shape, pattern.indptr.astype(np.int64), *columns).at(pattern)


@dataclass(frozen=True)
class WeightedSums:
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
    """Products have more terms than it pays to plan."""


@dataclass
class Algebra:
    """Products and sums of matrices of terms, with the variables and the steps that they need."""

    #: The number of variables.
    variables: int = 0
    #: The most terms of all products together, and whether a product with many entries may go beyond.
    limit: int = 0
    grows: bool = False
    steps: list[WeightedSums] = field(default_factory=list)
    terms: int = 0

    def pattern_of(self, matrix: Terms) -> Pattern:
        """The pattern of a matrix."""
        return matrix.pattern

    def multiply(self, a: Terms, b: Terms) -> Terms:
        """The product of two matrices."""
        for factor, other in ((a, b), (b, a)):
            if isinstance(factor.pattern.structure, Identity):
                return other
            if isinstance(factor.pattern.structure, Diagonal):
                return self._multiplied(a, b).at(other.pattern.scaled())
        return self._multiplied(a, b)

    def _multiplied(self, a: Terms, b: Terms) -> Terms:
        varies, others_vary = a.variable != NONE, b.variable != NONE
        if not varies.any():
            b = self._summed_if_used(b, lambda: np.bincount(a.column, minlength=b.shape[0])[b.row])
            return self._product(a, b)[0]
        if not others_vary.any():
            return self._product(self._summed_if_used(a, lambda: np.diff(b.indptr)[a.column]), b)[0]
        products, right = self._product(self._summed(a[varies]), self._summed(b[others_vary]), of_variables=True)
        pairs = ((a[~varies], b), (a[varies], b[~others_vary]))
        parts = [self._product(*pair)[0] for pair in pairs if len(pair[0]) and len(pair[1])]
        return self._sum([*parts, self._step(products, right)])

    def add(self, terms: Sequence[Terms]) -> Terms:
        """The sum of matrices of one shape."""
        total, pattern = self._sum(terms), terms[0].pattern
        return total.at(pattern.scaled()) if all(pattern == each.pattern for each in terms) else total

    def _sum(self, parts: Sequence[Terms]) -> Terms:
        if len(parts) == 1:
            return parts[0]
        # The product of [I I ...] and the matrices, one below the other.
        (rows, columns), count = parts[0].shape, len(parts)
        arrays = zip(*((t.column, t.variable, t.coefficient) for t in parts), strict=True)
        indptr = row_starts(np.concatenate([np.diff(part.indptr) for part in parts]), np.int64)
        stacked = Terms((rows * count, columns), indptr, *(np.concatenate(each) for each in arrays))
        picks = np.arange(rows * count).reshape(count, rows).T.ravel()
        starts, none = np.arange(0, rows * count + 1, count), np.full(rows * count, NONE)
        before = self.terms
        total = self._product(Terms((rows, rows * count), starts, picks, none, np.ones(rows * count)), stacked)[0]
        self.terms = before
        return total

    def _product(self, a: Terms, b: Terms, *, of_variables: bool = False) -> tuple[Terms, np.ndarray]:
        """The product of two matrices, one without variables; or all pairs of theirs, and their second factors."""
        starts = row_starts(np.diff(b.indptr)[a.column], np.int64)[a.indptr]
        total = int(starts[-1])
        self.terms += total
        if self.terms > self.limit:
            entries = product_pattern(a.pattern, b.pattern).nnz + sum(a.shape) + sum(b.shape) if self.grows else 0
            if self.terms > TERMS_PER_ENTRY * entries:
                raise TooManyTermsError
        column, variable = np.empty((2, total), np.int64)
        right, coefficient = np.empty(total if of_variables else 0, np.int64), np.empty(total)
        factors = [each for t in (a, b) for each in (t.indptr, t.column, t.variable, t.coefficient)]
        counts, variables = np.empty(a.shape[0], np.int64), 0 if of_variables else self.variables + 1
        run_rows(multiply_terms, starts, *factors, variables, starts, column, variable, right, coefficient, counts)
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
        return self._sum([terms[~varies], variables[~several], self._step(variables[several], None)])

    def _summed_if_used(self, terms: Terms, uses: Callable[[], np.ndarray]) -> Terms:
        """The same, where a product that uses each term so many times has fewer terms for it than it takes to sum."""
        if len(terms.begins) == len(terms):
            return terms
        times = uses()
        return self._summed(terms) if times.sum() > len(terms) + times[terms.begins].sum() else terms

    def _step(self, terms: Terms, right: np.ndarray | None) -> Terms:
        """Add a step whose variables are the entries of a matrix, and return it with these."""
        begins = terms.begins
        indptr, counts = np.searchsorted(begins, terms.indptr), np.diff(begins, append=len(terms))
        # The first entries of all rows come first, then the second ones: on a grid, neighbours have the same terms.
        place_in_row = within_rows(np.diff(indptr))
        # NumPy sorts small types in linear time.
        small = np.min_scalar_type(place_in_row.max(initial=0))
        sequence = np.argsort(place_in_row.astype(small), kind="stable")
        variables = np.empty(len(begins), np.int64)
        variables[sequence] = np.arange(self.variables, self.variables + len(begins))
        starts = row_starts(counts[sequence], np.int64)
        order = np.arange(len(terms)) + np.repeat(begins[sequence] - starts[:-1], counts[sequence])
        factors = terms.variable[order], None if right is None else right[order]
        self.steps.append(WeightedSums(self.variables, starts, *factors, terms.coefficient[order]))
        self.variables += len(begins)
        return Terms(terms.shape, indptr, terms.column[begins], variables, np.ones(len(begins)))
