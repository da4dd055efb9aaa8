"""Matrices whose entries are sums of terms, and their products and sums.

A term is a coefficient, times at most one variable: a local derivative, or a number, that each call computes. So
products of matrices with constant entries are taken when preparing. Where two variables meet, their product becomes a
variable of its own; so does a sum that several products use, which they would repeat: a step of a loop over time would
sum the terms of all steps before it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..patterns import Csr, Diagonal, Full, Identity, Pattern
from ..runtime import frozen, index_dtype, row_starts, run_rows
from ..spgemm import product_pattern
from .kernels import add_terms, multiply_terms

#: The variable of a term that has none.
NONE = -1
#: Terms of all products, for each entry of a matrix, beyond which they are too many; the same where elements of factors
#: are among them, and how many are few in any case: half a second to prepare.
TERMS_PER_ENTRY = 64
TERMS_OF_FACTORS, FEW_TERMS = 8, 2**20


@dataclass(frozen=True)
class TermMatrix:
    """A matrix as terms, in the order of their rows, columns and variables; an entry has each variable at most once."""

    shape: tuple[int, int]
    #: Where the terms of each row begin; for each term its column, variable or `NONE`, and coefficient.
    indptr: np.ndarray
    column: np.ndarray
    variable: np.ndarray
    coefficient: np.ndarray

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, selected: np.ndarray) -> TermMatrix:
        """The matrix of the terms where a mask is true."""
        if selected.all():
            return self
        arrays = (array[selected] for array in (self.column, self.variable, self.coefficient))
        return TermMatrix(self.shape, row_starts(selected, np.int64)[self.indptr], *arrays)

    def entries(self) -> tuple[np.ndarray, np.ndarray]:
        """Where the entries of each row begin; and where the terms of each entry do, and end."""
        first = np.ones(len(self) + 1, np.bool_)
        np.not_equal(self.column[1:], self.column[:-1], out=first[1:-1])
        first[self.indptr] = True
        return row_starts(first[:-1], np.int64)[self.indptr], np.flatnonzero(first)

    @functools.cached_property
    def varies(self) -> np.ndarray:
        """Whether each term has a variable."""
        return self.variable != NONE

    @functools.cached_property
    def pattern(self) -> Pattern:
        """The positions of the entries."""
        (rows, columns), (indptr, begins) = self.shape, self.entries()
        nnz = len(begins) - 1
        if nnz == rows * columns:
            return Pattern.of(Full(rows, columns))
        dtype = index_dtype(nnz, rows, columns)
        indices = self.column[begins[:-1]] if nnz < len(self) else self.column
        return Pattern.of(Csr(rows, columns, frozen(indptr.astype(dtype)), frozen(indices.astype(dtype))))

    def at(self, pattern: Pattern) -> TermMatrix:
        """The same matrix, whose pattern is known."""
        self.__dict__["pattern"] = pattern
        return self


def terms_at(
    pattern: Pattern, *, variable: int | np.ndarray = NONE, coefficient: float | np.ndarray = 1.0
) -> TermMatrix:
    """A matrix of one term for each entry."""
    nnz, most = pattern.nnz, int(np.max(variable, initial=0))
    columns = np.full(nnz, pattern.indices, index_dtype(0, 0, pattern.shape[1]))
    variables = np.full(nnz, variable, index_dtype(most, 0, 0))
    coefficients = np.full(nnz, coefficient, np.float64)
    indptr = pattern.indptr.astype(np.int64)
    return TermMatrix(pattern.shape, indptr, columns, variables, coefficients).at(pattern)


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


class NotFoldableError(Exception):
    """A local Jacobian is neither constant nor elementwise, or paths meet in more terms than it pays to plan."""


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

    def pattern_of(self, matrix: TermMatrix) -> Pattern:
        """The pattern of a matrix."""
        return matrix.pattern

    def products(self, lefts: Sequence[TermMatrix], rights: Sequence[TermMatrix]) -> list[list[TermMatrix]]:
        """The products of each one of some matrices with each one of others."""

        def uses_of_left(left: TermMatrix) -> np.ndarray:
            return np.sum([np.diff(right.indptr)[left.column] for right in rights], 0)

        def uses_of_right(right: TermMatrix) -> np.ndarray:
            columns = np.concatenate([left.column for left in lefts])
            return np.repeat(np.bincount(columns, minlength=right.shape[0]), np.diff(right.indptr))

        if not rights:
            return [[] for _ in lefts]
        lefts = [self._as_used(left, rights, uses_of_left) for left in lefts]
        rights = [self._as_used(right, lefts, uses_of_right) for right in rights]
        return [[self._multiplied(left, right) for right in rights] for left in lefts]

    def _as_used(
        self, terms: TermMatrix, others: Sequence[TermMatrix], uses: Callable[[TermMatrix], np.ndarray]
    ) -> TermMatrix:
        """The same matrix as its products with others use it, each term so many times.

        Its variables are summed where a product with other variables needs their sums, or where products have fewer
        terms then than it takes to sum.
        """
        if terms.pattern.nnz == len(terms) or not terms.varies.any():
            return terms
        if not any(other.varies.any() for other in others):
            times, begins = uses(terms), terms.entries()[1][:-1]
            if times.sum() <= len(terms) + times[begins].sum():
                return terms
        return self._summed(terms)

    def _multiplied(self, a: TermMatrix, b: TermMatrix) -> TermMatrix:
        for factor, other in ((a, b), (b, a)):
            if isinstance(factor.pattern.structure, Identity):
                return other
            if isinstance(factor.pattern.structure, Diagonal):
                return self._product_of(a, b).at(other.pattern.scaled())
        return self._product_of(a, b)

    def _product_of(self, a: TermMatrix, b: TermMatrix) -> TermMatrix:
        varies, others_vary = a.varies, b.varies
        if not varies.any() or not others_vary.any():
            return self._product(a, b)[0]
        products, right = self._product(a[varies], b[others_vary], of_variables=True)
        pairs = ((a[~varies], b), (a[varies], b[~others_vary]))
        parts = [self._product(*pair)[0] for pair in pairs if len(pair[0]) and len(pair[1])]
        return self._sum([*parts, self._step(products, right)])

    def add(self, terms: Sequence[TermMatrix]) -> TermMatrix:
        """The sum of matrices of one shape."""
        total, pattern = self._sum(terms), terms[0].pattern
        return total.at(pattern.scaled()) if all(pattern == each.pattern for each in terms) else total

    def _sum(self, parts: Sequence[TermMatrix]) -> TermMatrix:
        if len(parts) == 1:
            return parts[0]
        offsets = row_starts(np.array([len(part) for part in parts]), np.int64)[:-1, None]
        indptr = np.stack([part.indptr for part in parts]) + offsets
        columns, variables, coefficients = (
            np.concatenate(each) for each in zip(*((t.column, t.variable, t.coefficient) for t in parts), strict=True)
        )
        starts = np.sum([part.indptr for part in parts], 0)
        results = [np.empty_like(each) for each in (columns, variables, coefficients)]
        run_rows(add_terms, starts, indptr, columns, variables, coefficients, starts, *results)
        return TermMatrix(parts[0].shape, starts, *results)[results[0] >= 0]

    def _product(self, a: TermMatrix, b: TermMatrix, *, of_variables: bool = False) -> tuple[TermMatrix, np.ndarray]:
        """The product of two matrices, one without variables; or all pairs of theirs, and their second factors."""
        starts = row_starts(np.diff(b.indptr)[a.column], np.int64)[a.indptr]
        total = int(starts[-1])
        self.terms += total
        if self.terms > self.limit:
            entries = product_pattern(a.pattern, b.pattern).nnz + sum(a.shape) + sum(b.shape) if self.grows else 0
            if self.terms > TERMS_PER_ENTRY * entries:
                raise NotFoldableError("its paths meet in too many terms")
        column, coefficient = np.empty(total, b.column.dtype), np.empty(total)
        variable = np.empty(total, np.promote_types(a.variable.dtype, b.variable.dtype))
        right = np.empty(total, b.variable.dtype) if of_variables else variable
        factors = [each for t in (a, b) for each in (t.indptr, t.column, t.variable, t.coefficient)]
        run_rows(multiply_terms, starts, *factors, of_variables, starts, column, variable, right, coefficient)
        return TermMatrix((a.shape[0], b.shape[1]), starts, column, variable, coefficient)[column >= 0], right

    def _summed(self, terms: TermMatrix) -> TermMatrix:
        """The same matrix with one variable for each entry that has several."""
        varies = terms.varies
        variables = terms[varies]
        counts = np.diff(variables.entries()[1])
        several = np.repeat(counts > 1, counts)
        if not several.any():
            return terms
        return self._sum([terms[~varies], variables[~several], self._step(variables[several], None)])

    def _step(self, terms: TermMatrix, right: np.ndarray | None) -> TermMatrix:
        """Add a step whose variables are the entries of a matrix, and return it with these."""
        indptr, begins = terms.entries()
        count = len(begins) - 1
        # The first entries of all rows come first, then the second ones: on a grid, neighbours have the same terms.
        place = np.arange(count) - np.repeat(indptr[:-1], np.diff(indptr))
        order = np.argsort(place.astype(np.min_scalar_type(place.max(initial=0))), kind="stable")
        counts = np.diff(begins)[order]
        starts = row_starts(counts, index_dtype(len(terms), 0, 0))
        of_entries = np.repeat(begins[order] - starts[:-1], counts) + np.arange(len(terms))
        left, coefficient = terms.variable[of_entries], terms.coefficient[of_entries]
        right = None if right is None else right[of_entries]
        self.steps.append(WeightedSums(self.variables, starts, left, right, coefficient))
        numbers = np.empty(count, index_dtype(self.variables + count, 0, 0))
        numbers[order] = np.arange(self.variables, self.variables + count)
        self.variables += count
        return TermMatrix(terms.shape, indptr, terms.column[begins[:-1]], numbers, np.ones(count))
