"""Gradients of products with respect to values, first and second order: finite differences and dense autograd."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jacsparse.patterns import Blocks, Diagonal, Full, Identity, Pattern
from jacsparse.spgemm import METHODS, matvec
from torch.autograd import gradcheck, gradgradcheck

import jacsparse
from tests.helpers import random_pattern

PATTERNS: dict[str, Callable[[int, int], Pattern]] = {
    "csr": lambda m, n: random_pattern(m, n, 0.5, m + n),
    "empty": lambda m, n: random_pattern(m, n, 0.0, 0),
    "full": lambda m, n: Pattern.of(Full(m, n)),
    "diagonal": lambda m, n: Pattern.of(Diagonal(m)),
    "identity": lambda m, n: Pattern.of(Identity(m)),
    "blocks": lambda m, n: Pattern.of(Blocks(m // 2, 2, 2)),
}


def values_of(pattern: Pattern, batch: int) -> torch.Tensor:
    return torch.randn(pattern.nnz, batch, dtype=torch.float64, requires_grad=True)


BATCHES = ((1, 1), (3, 1), (1, 3), (2, 2))


def products() -> Iterator[Any]:
    """Two kinds of factors and their batches; every second one, in which all pairs are, but for `make test-full`."""
    for places in itertools.product(range(len(PATTERNS)), range(len(PATTERNS)), range(len(BATCHES))):
        left, right, batches = places
        marks = pytest.mark.full if sum(places) % 2 else ()
        yield pytest.param([*PATTERNS][left], [*PATTERNS][right], BATCHES[batches], marks=marks)


@pytest.mark.parametrize(("left", "right", "batches"), products())
def test_products(left: str, right: str, batches: tuple[int, int]) -> None:
    a, b = PATTERNS[left](4, 4), PATTERNS[right](4, 4)
    plan = jacsparse.plan_product(a, b)
    operands = (values_of(a, batches[0]), values_of(b, batches[1]))
    assert gradcheck(plan.multiply, operands)
    assert gradgradcheck(plan.multiply, operands)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_methods(method: str) -> None:
    pairs = {
        "scale": (Pattern.of(Diagonal(4)), random_pattern(4, 5, 0.5, 1)),
        "dense": (random_pattern(3, 4, 0.5, 2), Pattern.of(Full(4, 5))),
        "select": (jacsparse.jacobian_pattern(torch.nn.MaxPool2d(2), (1, 4, 4)).T, random_pattern(4, 5, 0.5, 1)),
    }
    a, b = pairs.get(method, (random_pattern(3, 4, 0.5, 3), random_pattern(4, 5, 0.5, 4)))
    try:
        plan = jacsparse.plan_product(a, b, method=method)
    except ValueError as error:
        pytest.skip(f"no pair of factors here: {error}")
    if method == "select":
        with pytest.raises(ValueError, match="select moves values without a graph; plan with another method"):
            plan.multiply(torch.zeros(4, 1, dtype=torch.int32), values_of(b, 1))
        return
    operands = (values_of(a, 2), values_of(b, 2))
    assert gradcheck(plan.multiply, operands) and gradgradcheck(plan.multiply, operands)


@settings(max_examples=60)
@given(
    st.tuples(*[st.integers(1, 9)] * 3), st.floats(0.1, 1), st.sampled_from([1, 2, 17]), st.sampled_from([1, 2, 17]),
    st.integers(0, 999),
)  # fmt: skip
def test_gradients_are_those_of_dense_matrices(
    sizes: tuple[int, int, int], density: float, left: int, right: int, seed: int
) -> None:
    if left > 1 and right > 1:
        right = left
    m, k, n = sizes
    a, b = random_pattern(m, k, density, seed), random_pattern(k, n, density, seed + 1)
    plan = jacsparse.plan_product(a, b)
    operands = (values_of(a, left), values_of(b, right))
    weight = torch.randn(plan.pattern.nnz, max(left, right), dtype=torch.float64)
    results = torch.autograd.grad((plan.multiply(*operands) * weight).sum(), operands)
    c = dense(plan.pattern, weight)
    expected = torch.autograd.grad((dense(a, operands[0]) @ dense(b, operands[1]) * c).sum(), operands)
    for each, other in zip(results, expected, strict=True):
        assert each.shape == other.shape and torch.allclose(each, other, rtol=1e-12, atol=1e-13)


def dense(pattern: Pattern, values: torch.Tensor) -> torch.Tensor:
    """``(batch, rows, columns)``."""
    rows, columns = pattern.shape
    places = np.repeat(np.arange(rows) * columns, np.diff(pattern.indptr)) + pattern.indices
    flat = torch.zeros(values.shape[1], rows * columns, dtype=values.dtype)
    return flat.index_add(1, torch.from_numpy(places), values.T).reshape(-1, rows, columns)


@pytest.mark.parametrize("kind", PATTERNS)
@pytest.mark.parametrize("batches", [(1, 1), (3, 1), (1, 3), (2, 2)])
def test_vectors(kind: str, batches: tuple[int, int]) -> None:
    pattern = PATTERNS[kind](4, 4)
    operands = (values_of(pattern, batches[0]), torch.randn(4, batches[1], dtype=torch.float64, requires_grad=True))
    assert gradcheck(lambda values, x: matvec(pattern, values, x), operands)
    assert gradgradcheck(lambda values, x: matvec(pattern, values, x), operands)


def test_sums() -> None:
    plan = jacsparse.plan_sum([random_pattern(3, 4, 0.4, 1), random_pattern(3, 4, 0.6, 2), Pattern.of(Full(3, 4))])
    operands = tuple(values_of(term, batch) for term, batch in zip(plan.terms, (2, 1, 2), strict=True))
    assert gradcheck(lambda *values: plan.add(values), operands)
    assert gradgradcheck(lambda *values: plan.add(values), operands)
    with torch.no_grad():
        assert torch.allclose(plan.add(operands), plan.add([each.detach() for each in operands]))


@pytest.mark.parametrize("kind", PATTERNS)
@pytest.mark.parametrize("batches", [(0, 0), (0, 1), (1, 0)])
def test_empty_batches(kind: str, batches: tuple[int, int]) -> None:
    pattern = PATTERNS[kind](4, 4)
    product, total = jacsparse.plan_product(pattern, pattern), jacsparse.plan_sum([pattern, Pattern.of(Full(4, 4))])
    for run, other in ((product.multiply, pattern), (lambda *values: total.add(values), total.terms[1])):
        operands = [values_of(each, batch) for each, batch in zip((pattern, other), batches, strict=True)]
        result = run(*operands)
        results = torch.autograd.grad(result.sum(), operands)
        assert result.shape[1] == 0 and [each.shape for each in results] == [each.shape for each in operands]
        assert not any(each.any() for each in results)


def test_products_over_nothing() -> None:
    plan = jacsparse.plan_product(Pattern.of(Full(3, 0)), Pattern.of(Full(0, 2)))
    plan.multiply(*(values_of(each, 2) for each in (plan.a, plan.b))).sum().backward()
    sparse = jacsparse.plan_product(Pattern((3, 0), [0] * 4, []), Pattern.of(Full(0, 2)), method="dense")
    assert not sparse.multiply(np.zeros((0, 1)), np.zeros((0, 1))).any()


def test_one_dimension_and_one_operand() -> None:
    a, b = random_pattern(3, 4, 0.5, 1), random_pattern(4, 5, 0.5, 2)
    plan = jacsparse.plan_product(a, b)
    left, right = torch.randn(a.nnz, requires_grad=True), torch.randn(b.nnz)
    product = plan.multiply(left, right)
    assert product.shape == (plan.pattern.nnz,) and torch.equal(product.detach(), plan.multiply(left.detach(), right))
    product.sum().backward()
    assert left.grad.shape == left.shape and right.grad is None
    with torch.no_grad():
        assert not plan.multiply(left, right).requires_grad


def test_products_of_jacobians_are_part_of_autograd() -> None:
    values = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    matrix = jacsparse.SparseJacobian(Pattern.of(Full(2, 3)), values)
    scale = jacsparse.SparseJacobian(Pattern.of(Diagonal(3)), torch.ones(3, 1, dtype=torch.float64))
    (matrix @ scale).values.sum().backward()
    assert torch.equal(values.grad, torch.ones_like(values))
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(matrix.jvp, (x,)) and gradcheck(matrix.vjp, (torch.randn(2, 2).double().requires_grad_(),))


def test_bad_operands() -> None:
    plan = jacsparse.plan_product(Pattern.of(Full(2, 2)), Pattern.of(Full(2, 2)))
    values = torch.ones(4, 1, requires_grad=True)
    with pytest.raises(ValueError, match="out is given, but an operand requires grad"):
        plan.multiply(values, values, out=torch.empty(4, 1))
    with pytest.raises(TypeError, match="b_values is an ndarray, but another operand requires grad"):
        plan.multiply(values, np.ones((4, 1), dtype=np.float32))
    with pytest.raises(ValueError, match="out requires grad, but it is only written to"):
        plan.multiply(values.detach(), values.detach(), out=torch.empty(4, 1, requires_grad=True))
    with pytest.raises(ValueError, match=r"a_values has shape \(3, 1\)"):
        plan.multiply(torch.ones(3, 1, requires_grad=True), values)
    total = jacsparse.plan_sum([plan.a] * 3)
    with pytest.raises(ValueError, match=r"values\[0\] has shape \(1, 2\); expected \(4, batch\)"):
        total.add([torch.ones(1, 2, requires_grad=True), values, values])
    with pytest.raises(TypeError, match=r"values\[0\] is float32 and values\[1\] is float64"):
        total.add([values, values.double(), values])
    with pytest.raises(ValueError, match=r"values\[1\] has a batch of 3 and values\[2\] one of 2"):
        total.add([values, values.expand(-1, 3), values.expand(-1, 2)])
    with pytest.raises(TypeError, match="a_values is float64 and b_values is float32"):
        plan.multiply(torch.ones(4, 1, dtype=torch.float64, requires_grad=True), values)
