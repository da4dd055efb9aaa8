"""The algebra of sparse Jacobians, compared with dense PyTorch in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jacsparse.patterns import Blocks, Diagonal, Full, Identity, Pattern
from jacsparse.spgemm import lu, plan_cache
from torch.autograd import gradcheck, gradgradcheck

from jacsparse import SparseJacobian, plan_product, plan_sum
from tests.helpers import random_pattern

PATTERNS: dict[str, Callable[[int, int], Pattern]] = {
    "csr": lambda m, n: random_pattern(m, n, 0.4, m + 10 * n),
    "empty": lambda m, n: random_pattern(m, n, 0.0, 0),
    "full": lambda m, n: Pattern.of(Full(m, n)),
    "diagonal": lambda m, n: Pattern.of(Diagonal(m)),
    "identity": lambda m, n: Pattern.of(Identity(m)),
    "blocks": lambda m, n: Pattern.of(Blocks(m, 1, 2)),
}
SQUARE = ("csr", "full", "diagonal", "identity", "empty")
SIZES, BATCHES = st.integers(0, 6), st.sampled_from([0, 1, 3])


def jacobian_of(pattern: Pattern, batch: int, dtype: torch.dtype = torch.float64) -> SparseJacobian:
    """Drawn values, but ones where the structure says so."""
    values = torch.rand(pattern.nnz, batch, dtype=dtype) * 2 - 1
    return SparseJacobian(pattern, torch.ones_like(values) if isinstance(pattern.structure, Identity) else values)


def dense(matrix: SparseJacobian) -> torch.Tensor:
    """``(batch, rows, columns)``."""
    rows, columns = matrix.shape
    coo = matrix.pattern.to_scipy().tocoo()
    flat = matrix.values.new_zeros(matrix.batch, rows * columns)
    places = torch.from_numpy(coo.row.astype(np.int64) * columns + coo.col)
    return flat.index_add(1, places, matrix.values.T).reshape(matrix.batch, rows, columns)


def near(actual: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor, roundings: int) -> None:
    """Assert that two sums of products differ by rounding alone, where `magnitude` is the sum of absolute values."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    bound = 2 * roundings * torch.finfo(actual.dtype).eps * magnitude
    assert bool(((actual - expected).abs() <= bound).all())


@settings(max_examples=100)
@given(st.sampled_from(sorted(PATTERNS)), SIZES, SIZES, BATCHES, st.sampled_from([None, (), 0, 1, 3]))
def test_gram_and_outer(kind: str, m: int, n: int, batch: int, weights_batch: Any) -> None:
    J = jacobian_of(PATTERNS[kind](m, n), batch)
    rows = J.shape[0]
    if weights_batch in (0, 3) and batch != 1:
        weights_batch = batch
    shape = (rows,) if weights_batch == () else (rows, weights_batch or 0)
    weights = None if weights_batch is None else torch.randn(shape, dtype=torch.float64)
    d = torch.ones(rows, 1).double() if weights is None else weights if weights.ndim == 2 else weights[:, None]
    d = d.T[:, :, None]
    C, A = J.gram(weights), dense(J)
    near(dense(C), A.mT @ (d * A), A.abs().mT @ (d.abs() * A.abs()), rows + 4)
    assert C.pattern == C.pattern.T and torch.equal(C.values, C.T.values)
    near(J.gram_diagonal(weights), (d * A**2).sum(1).T, (d.abs() * A**2).sum(1).T, rows + 4)
    assert torch.equal(J.T.outer(weights).values, C.values)
    assert torch.equal(J.T.outer_diagonal(weights), J.gram_diagonal(weights))


@settings(max_examples=100)
@given(*[st.sampled_from(SQUARE)] * 2, SIZES, SIZES, *[BATCHES] * 2)
def test_sums_and_multiples(left: str, right: str, m: int, n: int, batch: int, other: int) -> None:
    n = n if {left, right} <= {"csr", "full", "empty"} else m
    other = other if 1 in (batch, other) else batch
    J, K = jacobian_of(PATTERNS[left](m, n), batch), jacobian_of(PATTERNS[right](m, n), other)
    A, B = dense(J), dense(K)
    assert torch.equal(dense(J + K), A + B) and torch.equal(dense(J - K), A - B) and torch.equal(dense(-J), -A)
    numbers = torch.tensor([2.0, -0.5, 3.0], dtype=torch.float64)[: max(1, batch)] if batch else torch.ones(0).double()
    for a in (3, 0.3, np.float32(0.5), torch.tensor(0.7), numbers):
        factor = torch.as_tensor(a, dtype=torch.float64) if not isinstance(a, torch.Tensor) else a
        factor = factor.reshape(-1, 1, 1)
        expected = A * factor
        for scaled in (a * J, J * a):
            near(dense(scaled), expected, expected.abs(), 1)
            assert not isinstance(scaled.pattern.structure, Identity)
        near(dense(J / a), A / factor, (A / factor).abs(), 1)
    size = min(m, n)
    assert J.diagonal().shape == (size, batch) and torch.equal(J.diagonal(), A.diagonal(dim1=1, dim2=2).T)
    assert torch.equal(dense(SparseJacobian.from_diagonal(J.diagonal())), torch.diag_embed(J.diagonal().T))
    vector = torch.randn(size)
    assert torch.equal(dense(SparseJacobian.from_diagonal(vector)), torch.diag(vector)[None])


@pytest.mark.parametrize("kind", PATTERNS)
def test_one_vector(kind: str) -> None:
    J = jacobian_of(PATTERNS[kind](4, 3), 1)
    v, g = (torch.randn(size, dtype=torch.float64) for size in reversed(J.shape))
    assert torch.equal(J.jvp(v), J.jvp(v[None])[0]) and torch.equal(J.vjp(g), J.vjp(g[None])[0])
    assert (J @ v).shape == J.jvp(v).shape == (J.shape[0],)


@pytest.mark.parametrize("kind", PATTERNS)
@pytest.mark.parametrize("batch", [1, 2])
def test_conversions_are_differentiable(kind: str, batch: int) -> None:
    J = jacobian_of(PATTERNS[kind](4, 3), batch)
    values = J.values.detach().requires_grad_()
    for convert in (SparseJacobian.todense, lambda J, sample: J.to_torch(sample).to_dense()):
        for sample in range(batch):
            matrix = convert(SparseJacobian(J.pattern, values), sample)
            assert np.array_equal(matrix.detach().numpy(), J.to_scipy(sample).toarray())
            (gradient,) = torch.autograd.grad(matrix.pow(3).sum(), values)
            assert torch.equal(gradient[:, sample], 3 * values[:, sample] ** 2)


def test_indices_of_a_tensor_are_a_copy() -> None:
    J = SparseJacobian(Pattern((2, 3), [0, 1, 3], [2, 0, 1]), torch.ones(3, 1))
    matrix = J.to_torch()
    for indices in (matrix.crow_indices(), matrix.col_indices()):
        indices.zero_()
    assert (J.pattern.indptr.tolist(), J.pattern.indices.tolist()) == ([0, 1, 3], [2, 0, 1])


def test_from_scipy() -> None:
    rows, columns, values = [2, 0, 2, 1], [1, 0, 1, 3], [1.0, 2.0, 3.0, 0.0]
    for make in (scipy.sparse.coo_array, lambda *args, **shape: scipy.sparse.coo_matrix(*args, **shape).tocsc()):
        matrix = make((values, (rows, columns)), shape=(3, 4))
        J = SparseJacobian.from_scipy(matrix)
        assert J.nnz == 3 and J.dtype == torch.float64 and np.array_equal(J.to_scipy().toarray(), matrix.toarray())


def dominant(kind: str, n: int, batch: int, dtype: torch.dtype) -> SparseJacobian:
    """A square matrix whose diagonal outweighs the rest of its row and of its column."""
    J = jacobian_of(PATTERNS[kind](n, n), batch, dtype)
    return J + (n + 1) * SparseJacobian.identity(n, dtype=dtype)


@settings(max_examples=100)
@given(
    st.sampled_from(SQUARE), st.integers(0, 12), BATCHES, st.sampled_from([None, 0, 1, 5]), st.integers(0, 4),
    st.sampled_from([torch.float32, torch.float64]),
)  # fmt: skip
def test_solutions(kind: str, n: int, batch: int, columns: int | None, samples: int, dtype: torch.dtype) -> None:
    J = dominant(kind, n, batch, dtype)
    samples = samples if batch == 1 else batch
    b = torch.randn((samples, n, 1 if columns is None else columns), dtype=dtype)
    b = b[:, :, 0] if columns is None and (batch > 1 or samples != n) else b
    for matrix in (J, J.T):
        x = matrix.solve(b)
        assert x.shape == b.shape and x.dtype == dtype
        A, X, B = dense(matrix).double(), torch.atleast_3d(x).double(), torch.atleast_3d(b).double()
        # |L| |U| is at most (2n - 1) |A| in norm, and the residual 3n eps times that (Higham, theorems 9.4 and 9.9).
        magnitude = A.abs().sum(2, keepdim=True).amax(1, keepdim=True) * X.abs().amax(1, keepdim=True) if n else B
        assert bool(((A @ X - B).abs() <= 6 * n**2 * torch.finfo(dtype).eps * magnitude).all())
    if samples and columns is None and batch == 1:
        # BLAS adds in another order where it has several columns; SuperLU does not.
        factors = J.factorize("superlu")
        assert torch.equal(factors.solve(b[0]).flatten(), factors.solve(b)[0].flatten())


def test_vectors_in_the_shape_of_a_sample() -> None:
    one, several, shared = (dominant("csr", 4, batch, torch.float64) for batch in (1, 3, 1))
    v = torch.randn(3, 2, 2, dtype=torch.float64)
    for product in (SparseJacobian.jvp, SparseJacobian.vjp, SparseJacobian.solve):
        assert torch.equal(product(one, v[0]).flatten(), product(one, v[0].flatten()))
        for J in (several, shared):
            assert torch.equal(product(J, v).flatten(), product(J, v.flatten(1)).flatten())
    assert torch.equal(several.gram(v[0]).values, several.gram(v[0].flatten()).values)
    numbers = jacobian_of(PATTERNS["csr"](1, 4), 3)
    assert torch.equal(numbers.vjp(v[:, 0, 0]), numbers.vjp(v[:, :1, 0]))
    assert one.vjp(v[0]).shape == (4,) and one.solve(v[0]).shape == (2, 2) and numbers.vjp(v[:, 0, 0]).shape == (3, 4)


def test_rows_are_exchanged_where_the_diagonal_is_empty() -> None:
    J = SparseJacobian(Pattern((3, 3), [0, 1, 2, 3], [2, 0, 1]), torch.tensor([[2.0], [4.0], [8.0]]))
    assert J.solve(torch.tensor([2.0, 4.0, 16.0])).tolist() == [1.0, 2.0, 1.0]
    assert J.T.solve(torch.tensor([2.0, 4.0, 16.0])).tolist() == [8.0, 0.5, 0.5]


def values_of(J: SparseJacobian) -> torch.Tensor:
    return J.values.detach().clone().requires_grad_()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("batch", "shape"), [(1, (4,)), (1, (3, 4)), (2, (2, 4)), (2, (2, 4, 3)), (1, (2, 4, 2))])
def test_solutions_are_differentiable(batch: int, shape: tuple[int, ...], transposed: bool) -> None:
    J = dominant("csr", 4, batch, torch.float64)

    def solved(values: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        matrix = SparseJacobian(J.pattern, values)
        return (matrix.T if transposed else matrix).solve(b)

    operands = (values_of(J), torch.randn(shape, dtype=torch.float64, requires_grad=True))
    assert gradcheck(solved, operands) and gradgradcheck(solved, operands)
    assert gradcheck(lambda b: solved(J.values, b), operands[1:])


@pytest.mark.parametrize("kind", PATTERNS)
@pytest.mark.parametrize("batches", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_algebra_is_differentiable(kind: str, batches: tuple[int, int]) -> None:
    J = jacobian_of(PATTERNS[kind](4, 3), batches[0])
    weights = torch.randn(J.shape[0], batches[1], dtype=torch.float64, requires_grad=True)
    pattern = J.pattern.scaled()
    for product in (
        lambda matrix, d: matrix.gram(d).values,
        lambda matrix, d: matrix.T.outer_diagonal(d),
        lambda matrix, d: (matrix - matrix.gram(d)).values if J.shape[0] == J.shape[1] else matrix.values,
        lambda matrix, d: (d[0] * matrix / d[1]).diagonal(),
    ):

        def of_values(values: torch.Tensor, d: torch.Tensor, product: Callable[..., Any] = product) -> torch.Tensor:
            return product(SparseJacobian(pattern, values), d)  # type: ignore[no-any-return]

        assert gradcheck(of_values, (values_of(J), weights)) and gradgradcheck(of_values, (values_of(J), weights))


def test_plans_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    shifted = dominant("csr", 12, 3, torch.float64)
    arrays = shifted.pattern.indptr, shifted.pattern.indices
    first, second = (SparseJacobian(Pattern((12, 12), *arrays), shifted.values) for _ in range(2))
    eye = SparseJacobian.identity(12, dtype=torch.float64).T
    assert (first - eye).pattern == (second - eye).pattern
    assert plan_sum([first.pattern, eye.pattern]) is plan_sum([second.pattern, eye.pattern])
    assert first.gram().pattern is second.gram(torch.ones(12).double()).pattern
    factorisations = watched_factorisations(monkeypatch)
    b = torch.randn(3, 12, dtype=torch.float64)
    first, second = (matrix.factorize("superlu") for matrix in (first, second))
    assert torch.equal(first.solve(b), second.solve(b))
    assert [order for order, _ in factorisations] == ["COLAMD", *["NATURAL"] * 6]


def watched_factorisations(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The order and the number of entries of each factorisation from now on; no order is known yet.

    An incomplete one tells the order.
    """
    factorisations = list[tuple[str, int]]()

    def watched(factor: Callable[..., Any]) -> Callable[..., Any]:
        def call(matrix: Any, **options: Any) -> Any:
            factors = factor(matrix, **options)
            factorisations.append((options["permc_spec"], factors.nnz))
            return factors

        return call

    monkeypatch.setattr(lu, "PLAN_CACHE", plan_cache.PlanCache(2**20))
    for name in ("splu", "spilu"):
        monkeypatch.setattr(lu, name, watched(getattr(lu, name)))
    return factorisations


def test_pivots_stay_on_a_diagonal_that_is_not_small(monkeypatch: pytest.MonkeyPatch) -> None:
    line = scipy.sparse.diags_array(np.ones((3, 48)), offsets=(-1, 0, 1), shape=(48, 48))
    pattern, rng = Pattern.from_scipy(scipy.sparse.kronsum(line, line)), np.random.default_rng(0)
    values = np.where(pattern.rows == pattern.indices, 9.0, rng.uniform(-1, 1, pattern.nnz))
    scales, b = 2.0 ** rng.integers(-40, 40, 48**2), rng.standard_normal(48**2)

    def solved(values: np.ndarray, b: np.ndarray) -> np.ndarray:
        matrix = SparseJacobian(pattern, torch.from_numpy(values)[:, None])
        return matrix.factorize("superlu").solve(torch.from_numpy(b)).numpy()

    factorisations = watched_factorisations(monkeypatch)
    x, matrix = solved(values, b), pattern.to_scipy(values)
    # As in test_solutions; a row has at most 13 in sum of magnitudes.
    assert np.abs(matrix @ x - b).max() <= 6 * 48**4 * np.finfo(float).eps * 13 * np.abs(x).max()
    (order, _), (again, entries) = factorisations
    assert order == "MMD_AT_PLUS_A" and again == "NATURAL"
    assert entries < scipy.sparse.linalg.splu(matrix.tocsc()).nnz
    # Scales of rows and columns by powers of 2 change no bit.
    scaled = solved(values * scales[pattern.rows] * scales[pattern.indices], scales * b)
    assert np.array_equal(scales * scaled, x)
    # Where an element of the diagonal is small, rows are exchanged.
    values[0] = 1e-9
    x, matrix = solved(values, b), pattern.to_scipy(values)
    assert factorisations[-2][0] == "COLAMD" and np.allclose(matrix @ x, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", [*PATTERNS, "zero"])
def test_everything_prints(kind: str) -> None:
    pattern = PATTERNS[kind](6, 5) if kind in PATTERNS else Pattern((0, 3), [0], [])
    J = jacobian_of(pattern, 2)
    for thing in (J, pattern, plan_sum([pattern, pattern]), plan_product(pattern, pattern.T)):
        headline = str(thing).splitlines()[0]
        assert " × ".join(map(str, J.shape)) in headline and len(headline) < 120


def products(values: torch.Tensor) -> dict[str, Callable[[], object]]:
    """What kernels compute of the values of a triangular matrix."""
    J = SparseJacobian(Pattern((2, 2), [0, 1, 3], [0, 0, 1]), values)
    return {
        "J @ K": lambda: (J @ J).values.sum(),
        "J @ v": lambda: (J @ torch.ones(2, dtype=values.dtype)).sum(),
        "J + K": lambda: (J + J.T).values.sum(),
        "gram": lambda: J.gram().values.sum(),
        "vjp": lambda: J.vjp(torch.ones(1, 2, dtype=values.dtype)).sum(),
        "solve": lambda: J.solve(torch.ones(1, 2, dtype=values.dtype)).sum(),
        "to_torch": lambda: J.to_torch(0).to_dense().sum(),
        "to_scipy": lambda: torch.tensor(J.to_scipy(0).sum()),
    }


@pytest.mark.parametrize("name", products(torch.ones(3, 1)))
@pytest.mark.parametrize("transform", [torch.func.grad, torch.vmap])
def test_products_within_transforms_say_what_to_do(name: str, transform: Callable[..., Callable[..., object]]) -> None:
    values = torch.ones((3, 1) if transform is torch.func.grad else (4, 3, 1))
    with pytest.raises(TypeError, match=r"within a transform of torch.func.*take gradients by torch.autograd"):
        transform(lambda values: products(values)[name]())(values)


J = SparseJacobian(Pattern.of(Full(2, 3)), torch.ones(6, 2))
S = SparseJacobian(Pattern.of(Full(2, 2)), torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.0, 1.0], [1.0, 1.0]]))
SHARED = SparseJacobian.identity(2)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: J.gram(3), TypeError, "weights is an int; expected a torch.Tensor"),
        (lambda: J.gram(torch.ones(3)), ValueError, r"weights has shape \(3,\); expected \(2,\) or \(2, batch\)"),
        (lambda: J.outer(torch.ones(2)), ValueError, r"weights has shape \(2,\); expected \(3,\) or \(3, batch\)"),
        (lambda: J.gram_diagonal(torch.ones(2, 3)), ValueError, "weights has a batch of 3 and the Jacobian one of 2"),
        (lambda: J.gram(torch.ones(2).double()), TypeError, "weights is torch.float64 and the Jacobian is"),
        (lambda: J + 1, TypeError, "unsupported operand"),
        (lambda: J * J, TypeError, "unsupported operand"),
        (lambda: J / "x", TypeError, "unsupported operand"),
        (lambda: J + S, ValueError, "must agree"),
        (lambda: J.to(torch.float64) + J, TypeError, "the left term is torch.float64 and the right term is"),
        (lambda: torch.vmap(SHARED.jvp)(torch.ones(3, 2)), TypeError, "v is within a transform of torch.func"),
        (lambda: torch.ones(2, 3) * J, ValueError, r"the factor has shape \(2, 3\).*Products of matrices are J @ K"),
        (lambda: torch.ones(3) * J, ValueError, "the factor has a batch of 3 and the Jacobian one of 2"),
        (lambda: torch.ones(2).double() * J, TypeError, "the factor is torch.float64 and the Jacobian is"),
        (lambda: SparseJacobian.identity(-1), ValueError, "n is -1"),
        (lambda: J.jvp(torch.ones(3)), ValueError, "v has a batch of 1, the Jacobian one of 2"),
        (lambda: SHARED.vjp(torch.ones(3)), ValueError, r"g has shape \(3,\); expected 2 elements, or \(batch"),
        (lambda: SHARED.jvp(torch.tensor(1.0)), ValueError, r"v has shape \(\)"),
        (lambda: SparseJacobian(scipy.sparse.eye_array(2), torch.ones(2, 1)), TypeError, "pattern is a .*from_scipy"),
        (lambda: SparseJacobian(S.pattern, torch.ones(4)), ValueError, r"expected \(4, batch\): values\[:, None\]"),
        (lambda: SparseJacobian.from_scipy(np.eye(2)), TypeError, "matrix is an ndarray"),
        (lambda: SparseJacobian.from_scipy(scipy.sparse.eye_array(2, dtype=int)), TypeError, "dtype torch.int64"),
        (lambda: SparseJacobian.from_diagonal([1.0]), TypeError, "diagonal is a list"),
        (lambda: SparseJacobian.from_diagonal(torch.ones(1, 2, 3)), ValueError, r"diagonal has shape \(1, 2, 3\)"),
        (lambda: J.solve(torch.ones(2, 2)), ValueError, "the Jacobian is 2 × 3; only a square one"),
        (lambda: S.solve([1.0, 2.0]), TypeError, "b is a list"),
        (lambda: S.solve(torch.ones(2, 2).double()), TypeError, "b is torch.float64 and the Jacobian is torch.float32"),
        (lambda: S.solve(torch.ones(2)), ValueError, "b has a batch of 1, the Jacobian one of 2"),
        (lambda: S.solve(torch.ones(2, 3)), ValueError, r"b has shape \(2, 3\).*\(batch, 2, columns\)"),
        (lambda: S.solve(torch.tensor(1.0)), ValueError, r"b has shape \(\)"),
        (lambda: S.solve(torch.ones(2, 2)), ValueError, "sample 1 of the Jacobian is singular"),
        (lambda: (SHARED * torch.nan).solve(torch.ones(2)), ValueError, "sample 0 of the Jacobian is not finite"),
        (lambda: S.solve(torch.ones(2, 2, device="meta")), ValueError, "the Jacobian is on cpu and b on meta"),
    ],
)  # fmt: skip
def test_bad_operands(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
