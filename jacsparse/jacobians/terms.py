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
from ..runtime import frozen, index_dtype, row_starts, run_rows, unsigned
from ..spgemm import product_pattern
from .kernels import add_terms, find_entries, multiply_terms, order_entries, select_terms

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
    #: Whether each entry is known to have one term.
    single: bool = False

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """What kernels take."""
        return unsigned(self.indptr), unsigned(self.column), self.variable, self.coefficient

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, selected: np.ndarray) -> TermMatrix:
        """The matrix of the terms where a mask is true."""
        count = np.count_nonzero(selected)
        if count == len(self):
            return self
        indptr, terms = np.empty_like(self.indptr), (self.column, self.variable, self.coefficient)
        column, variable, coefficient = results = [np.empty(count, array.dtype) for array in terms]
        select_terms(0, self.shape[0], unsigned(self.indptr), selected, *terms, indptr, *results)
        return TermMatrix(self.shape, indptr, column, variable, coefficient, self.single)

    @functools.cached_property
    def entries(self) -> tuple[np.ndarray, np.ndarray]:
        """Where the entries of each row begin; and where the terms of each entry do, and end."""
        if self.single:
            return self.indptr, np.arange(len(self) + 1)
        indptr, begins = np.empty_like(self.indptr), np.empty(len(self) + 1, np.int64)
        find_entries(0, self.shape[0], unsigned(self.indptr), unsigned(self.column), indptr, begins)
        return indptr, begins[: indptr[-1] + 1]

    @functools.cached_property
    def per_row(self) -> tuple[np.ndarray, int, int]:
        """The number of terms of each row, the least and the most of them."""
        counts = np.diff(self.indptr)
        return counts, int(counts.min(initial=len(self))), int(counts.max(initial=0))

    @functools.cached_property
    def is_diagonal(self) -> bool:
        """Whether each row has one term, on the diagonal."""
        rows, columns = self.shape
        is_square = rows == columns == len(self) and self.per_row[1:] == (1, 1)
        return is_square and bool((self.column == np.arange(rows)).all())

    @property
    def nnz(self) -> int:
        """The number of entries."""
        return len(self) if self.single else len(self.entries[1]) - 1

    @functools.cached_property
    def row_counts(self) -> np.ndarray:
        """The number of entries of each row."""
        return self.per_row[0] if self.single else np.diff(self.entries[0])

    @functools.cached_property
    def column_counts(self) -> np.ndarray:
        """The number of entries of each column."""
        columns = self.column if self.single else self.column[self.entries[1][:-1]]
        return np.bincount(columns, minlength=self.shape[1])

    @functools.cached_property
    def varies(self) -> np.ndarray:
        """Whether each term has a variable."""
        return self.variable != NONE

    @functools.cached_property
    def pattern(self) -> Pattern:
        """The positions of the entries."""
        (rows, columns), (indptr, begins), nnz = self.shape, self.entries, self.nnz
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
    return TermMatrix(pattern.shape, indptr, columns, variables, coefficients, True).at(pattern)


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

    def nnz_of(self, matrix: TermMatrix) -> int:
        """The number of entries of a matrix."""
        return matrix.nnz

    def product_work(self, left: TermMatrix, right: TermMatrix) -> int:
        """The number of pairs of entries that meet in a product."""
        if right.single and right.per_row[1] == right.per_row[2]:
            return left.nnz * right.per_row[2]
        return int(left.column_counts @ right.row_counts)

    def products(self, lefts: Sequence[TermMatrix], rights: Sequence[TermMatrix]) -> list[list[TermMatrix]]:
        """The products of each one of some matrices with each one of others."""

        def uses_of_left(left: TermMatrix) -> np.ndarray:
            return np.sum([right.per_row[0][left.column] for right in rights], 0)

        def uses_of_right(right: TermMatrix) -> np.ndarray:
            columns = np.concatenate([left.column for left in lefts])
            return np.repeat(np.bincount(columns, minlength=right.shape[0]), right.per_row[0])

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
        if terms.nnz == len(terms) or not terms.varies.any():
            return terms
        if not any(other.varies.any() for other in others):
            times, begins = uses(terms), terms.entries[1][:-1]
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
        """The sum of matrices, two by two."""
        parts = [part for part in parts if len(part)] or parts[:1]
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=False)
            parts = [*(self._sum_of_two(*pair) for pair in pairs), *parts[len(parts) // 2 * 2 :]]
        return parts[0]

    def _sum_of_two(self, a: TermMatrix, b: TermMatrix) -> TermMatrix:
        starts, count = a.indptr + b.indptr, len(a) + len(b)
        column, coefficient = np.empty(count, a.column.dtype), np.empty(count)
        variable = np.empty(count, np.promote_types(a.variable.dtype, b.variable.dtype))
        results = column, variable, coefficient
        run_rows(add_terms, starts, *a.arrays, *b.arrays, unsigned(starts), *results)
        return TermMatrix(a.shape, starts, *results)[column >= 0]

    def _product(self, a: TermMatrix, b: TermMatrix, *, of_variables: bool = False) -> tuple[TermMatrix, np.ndarray]:
        """The product of two matrices, one without variables; or all pairs of theirs, and their second factors."""
        counts, least, most = b.per_row
        starts = a.indptr * most if least == most else row_starts(counts[a.column], np.int64)[a.indptr]
        total = int(starts[-1])
        self.terms += total
        if self.terms > self.limit:
            entries = product_pattern(a.pattern, b.pattern).nnz + sum(a.shape) + sum(b.shape) if self.grows else 0
            if self.terms > TERMS_PER_ENTRY * entries:
                raise NotFoldableError("its paths meet in too many terms")
        if a.is_diagonal or b.is_diagonal:
            return self._scaled(a, b, of_variables)
        column, coefficient = np.empty(total, b.column.dtype), np.empty(total)
        variable = np.empty(total, np.promote_types(a.variable.dtype, b.variable.dtype))
        right = np.empty(total, b.variable.dtype) if of_variables else variable
        results = column, variable, right, coefficient
        run_rows(multiply_terms, starts, *a.arrays, *b.arrays, of_variables, unsigned(starts), *results)
        single = b.single and a.per_row[2] <= 1
        product = TermMatrix((a.shape[0], b.shape[1]), starts, column, variable, coefficient, single)
        return product if of_variables else product[column >= 0], right

    def _scaled(self, a: TermMatrix, b: TermMatrix, of_variables: bool) -> tuple[TermMatrix, np.ndarray]:
        """As `_product`, of a matrix and a diagonal one."""
        other, diagonal = (b, a) if a.is_diagonal else (a, b)
        counts, least, most = other.per_row
        rows = np.arange(len(counts)) if least == most == 1 else np.repeat(np.arange(len(counts)), counts)
        which = rows if a.is_diagonal else other.column
        of_diagonal, coefficient = diagonal.variable[which], other.coefficient * diagonal.coefficient[which]
        left, right = (of_diagonal, other.variable) if a.is_diagonal else (other.variable, of_diagonal)
        left = left if of_variables else np.maximum(left, right)
        return TermMatrix(other.shape, other.indptr, other.column, left, coefficient, other.single), right

    def _summed(self, terms: TermMatrix) -> TermMatrix:
        """The same matrix with one variable for each entry that has several."""
        varies = terms.varies
        variables = terms[varies]
        counts = np.diff(variables.entries[1])
        several = np.repeat(counts > 1, counts)
        if not several.any():
            return terms
        return self._sum([terms[~varies], variables[~several], self._step(variables[several], None)])

    def _step(self, terms: TermMatrix, right: np.ndarray | None) -> TermMatrix:
        """Add a step whose variables are the entries of a matrix, and return it with these."""
        (indptr, begins), count, left, coefficient = terms.entries, terms.nnz, terms.variable, terms.coefficient
        columns = terms.column if count == len(terms) else terms.column[begins[:-1]]
        numbers = np.arange(count, dtype=index_dtype(self.variables + count, 0, 0))
        starts = begins.astype(index_dtype(len(terms), 0, 0))
        if terms.row_counts.max(initial=0) > 1:
            second = left[:0] if right is None else right
            ordered = [np.empty_like(each) for each in (left, second, coefficient)]
            factors = unsigned(indptr), unsigned(begins), left, second, coefficient
            order_entries(0, terms.shape[0], *factors, numbers, starts, *ordered)
            left, second, coefficient = ordered
            right = None if right is None else second
        numbers += numbers.dtype.type(self.variables)
        self.steps.append(WeightedSums(self.variables, starts, left, right, coefficient))
        self.variables += count
        return TermMatrix(terms.shape, indptr, columns, numbers, np.ones(count), True)
