"""Products and sums of matrices of terms, against those of the matrices that these stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from jacsparse.patterns import Identity, Pattern

from jacsparse.jacobians import terms
from jacsparse.jacobians.terms import NONE, Algebra, NotFoldableError, TermMatrix, terms_at
from jacsparse.runtime import row_starts

#: Variables of the matrices that are drawn.
VARIABLES = 5


def drawn(rng: np.random.Generator, rows: int, columns: int, share: float, dtype: Any = np.int32) -> TermMatrix:
    """A matrix that has so many of all possible terms."""
    present = rng.random((rows, columns, 1 + VARIABLES)) < share
    row, column, variable = np.nonzero(present)
    indptr = row_starts(np.bincount(row, minlength=rows), np.int64)
    coefficient = rng.integers(-3, 4, len(row)).astype(float)
    return TermMatrix((rows, columns), indptr, column.astype(dtype), (variable + NONE).astype(dtype), coefficient)


def matrix(algebra: Algebra, of: TermMatrix) -> np.ndarray:
    """What a matrix stands for at some values of the variables, small integers: all sums are exact."""
    values = np.zeros(algebra.variables + 1)
    values[:VARIABLES] = [2.0, -1.0, 3.0, 1.0, -2.0]
    # The variable of a term that has none is the last one.
    values[NONE] = 1.0
    for step in algebra.steps:
        right = 1.0 if step.right is None else values[step.right]
        products = np.append(step.coefficient * values[step.left] * right, 0.0)
        count = len(step.indptr) - 1
        sums = np.add.reduceat(products, step.indptr[:-1]) if count else []
        values[step.first : step.first + count] = np.where(np.diff(step.indptr) > 0, sums, 0.0)
    dense = np.zeros(of.shape)
    rows = np.repeat(np.arange(of.shape[0]), np.diff(of.indptr))
    np.add.at(dense, (rows, of.column), of.coefficient * values[of.variable])
    return dense


def check(algebra: Algebra, result: TermMatrix, expected: np.ndarray) -> None:
    """The result stands for what is expected, and its terms are in order, each once."""
    assert np.array_equal(matrix(algebra, result), expected)
    rows = np.repeat(np.arange(result.shape[0]), np.diff(result.indptr))
    keys = [*zip(rows.tolist(), result.column.tolist(), result.variable.tolist(), strict=True)]
    assert keys == sorted(set(keys))
    assert result.pattern.nnz == len({key[:2] for key in keys})


SHAPES = [(3, 4, 5), (1, 40, 60), (60, 1, 3), (4, 5, 0), (0, 3, 2)]


@pytest.mark.parametrize("wide", [False, True], ids=["int32", "int64"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_and_sums(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], share: float, wide: bool
) -> None:
    if wide:
        monkeypatch.setattr(terms, "index_dtype", lambda *_: np.int64)
    rng, (m, k, n) = np.random.default_rng(0), shape
    # One factor of the other dtype: it was made before variables became many.
    a, b, c, d = drawn(rng, m, k, share), drawn(rng, k, n, 0.5), drawn(rng, m, n, share), drawn(rng, m, n, 0.3)
    algebra = Algebra(VARIABLES, limit=10**9)
    ((product,),) = algebra.products([a], [b])
    check(algebra, product, matrix(algebra, a) @ matrix(algebra, b))
    check(algebra, algebra.add([product, c, d]), sum(matrix(algebra, each) for each in (product, c, d)))
    check(algebra, algebra.add([product, product]), 2 * matrix(algebra, product))


@pytest.mark.parametrize("constant", [0, 1])
def test_products_with_constants(constant: int) -> None:
    rng = np.random.default_rng(1)
    factors = [drawn(rng, 6, 7, 0.6), drawn(rng, 7, 8, 0.6)]
    factors[constant] = factors[constant][factors[constant].variable == NONE]
    algebra = Algebra(VARIABLES, limit=10**9)
    ((product,),) = algebra.products([factors[0]], [factors[1]])
    check(algebra, product, matrix(algebra, factors[0]) @ matrix(algebra, factors[1]))


def test_all_products_of_some_matrices_with_others() -> None:
    rng = np.random.default_rng(4)
    lefts, rights = ([drawn(rng, 6, 6, share) for share in (0.1, 0.6, 0.6)] for _ in range(2))
    lefts[1], rights[0] = (each[~each.varies] for each in (lefts[1], rights[0]))
    lefts.append(terms_at(Pattern.of(Identity(6))))
    algebra = Algebra(VARIABLES, limit=10**9)
    for left, row in zip(lefts, algebra.products(lefts, rights), strict=True):
        for right, product in zip(rights, row, strict=True):
            check(algebra, product, matrix(algebra, left) @ matrix(algebra, right))
    # The sums of two lefts with several terms and of two rights, and a step for each pair of those that vary.
    assert len(algebra.steps) <= 4 + 4
    assert algebra.products(lefts[:1], []) == [[]]


def test_terms_where_a_mask_is_true() -> None:
    of, algebra = drawn(np.random.default_rng(2), 5, 6, 0.5), Algebra(VARIABLES)
    varies = of.variable != NONE
    assert of[np.ones(len(of), np.bool_)] is of
    check(algebra, of[~varies], matrix(algebra, of) - matrix(algebra, of[varies]))


def test_too_many_terms() -> None:
    rng = np.random.default_rng(3)
    with pytest.raises(NotFoldableError, match="too many terms"):
        Algebra(VARIABLES, limit=10).products([drawn(rng, 6, 7, 0.6)], [drawn(rng, 7, 8, 0.6)])
