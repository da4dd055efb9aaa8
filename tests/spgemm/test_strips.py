"""Products of several sparse matrices with a full one, strip by strip."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from jacsparse.patterns import Full
from jacsparse.spgemm import StripProduct

from jacsparse import Pattern, plan_product
from tests.helpers import random_pattern


def drawn(columns: int, dtype: type) -> tuple[list[Pattern], list[np.ndarray], np.ndarray]:
    """Three factors, the second with empty rows, many zeros among their values, and a full matrix with zero rows."""
    rng = np.random.default_rng(columns)
    shapes = [(30, 40), (53, 30), (21, 53)]
    factors = [random_pattern(*shape, density, rng) for shape, density in zip(shapes, (0.1, 0.02, 0.3), strict=True)]
    values = [rng.standard_normal(factor.nnz).astype(dtype) for factor in factors]
    for each in values:
        each[rng.random(len(each)) < 0.5] = 0
    right = rng.standard_normal((40, columns)).astype(dtype)
    right[::3] = 0
    return factors, values, right


def one_by_one(factors: list[Pattern], values: list[np.ndarray], right: np.ndarray) -> np.ndarray:
    """The product by plans, which store zeros of empty rows too."""
    product = right
    for factor, each in zip(factors, values, strict=True):
        plan = plan_product(factor, Pattern.of(Full(*product.shape)))
        result = np.zeros((factor.shape[0], right.shape[1]), right.dtype)
        result[factor.structure.row_counts() > 0] = plan.multiply(each, product.reshape(-1)).reshape(-1, right.shape[1])
        product = result
    return product


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("columns", [48, 65, 130, 201])
def test_strips_have_the_bits_of_whole_products(columns: int, dtype: type, threads: int) -> None:
    factors, values, right = drawn(columns, dtype)
    expected, before = one_by_one(factors, values, right), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        product = StripProduct(factors, columns)
        out = np.full((21, columns, 2), np.nan, dtype)
        assert product.width(right.itemsize) and product.multiply(
            values, right.reshape(-1), out.reshape(-1)[1:], (2 * columns, 2)
        )
        assert np.array_equal(out[:, :, 1], expected) and np.isnan(out[:, :, 0]).all() and expected.any()
        transposed = np.empty((columns, 21), dtype)
        assert product.multiply(values, right.reshape(-1), transposed.reshape(-1), (1, 21))
        assert np.array_equal(transposed.T, expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", ["right", 0, 1, 2])
def test_numbers_that_are_not_finite_are_told(where: int | str, number: float) -> None:
    factors, values, right = drawn(64, np.float64)
    out = np.empty(21 * 64)
    multiply = functools.partial(StripProduct(factors, 64).multiply, out=out, steps=(64, 1))
    assert multiply(values, right.reshape(-1))
    if where == "right":
        right[0, 63] = number
    else:
        values[where][-1] = number
    assert not multiply(values, right.reshape(-1))
    # A product that overflows, in one strip alone.
    values, right = drawn(64, np.float64)[1:]
    assert multiply(values, right.reshape(-1))
    right[1, 5] = values[0][np.flatnonzero(factors[0].indices == 1)] = 1e200
    assert not multiply(values, right.reshape(-1))


def test_rows_that_no_product_reads_are_left_out_only_where_they_are_finite() -> None:
    factors, values, right = drawn(64, np.float64)
    row = int(factors[1].indices[0])
    # Nothing reads the row, as behind a ReLU's zeros.
    values[1][factors[1].indices == row] = 0
    of_row = slice(*factors[0].indptr[row : row + 2])
    values[0][of_row] = 3
    right[factors[0].indices[of_row]] = 2
    expected, out = one_by_one(factors, values, right), np.empty(21 * 64)
    multiply = functools.partial(StripProduct(factors, 64).multiply, values, out=out, steps=(64, 1))
    assert multiply(right.reshape(-1)) and np.array_equal(out.reshape(21, 64), expected)
    # It overflows, and zero times infinity is not a number.
    values[0][of_row], right[factors[0].indices[of_row], 0] = 1e200, 1e200
    with np.errstate(all="ignore"):
        assert np.isnan(one_by_one(factors, values, right)).any() and not multiply(right.reshape(-1))


def test_few_columns_and_long_lists_are_left_to_whole_products() -> None:
    factors = [random_pattern(20, 20, 0.1, np.random.default_rng(0))] * 2
    assert not StripProduct(factors, 15).width(4) and StripProduct(factors, 16 * torch.get_num_threads()).width(4)
    full = [Pattern.of(Full(40, 40))] * 2
    assert not StripProduct(full, 64).width(4)
