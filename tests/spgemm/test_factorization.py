"""Factorisations by each method, compared with dense PyTorch in float64."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jacsparse.patterns import Full, Pattern
from jacsparse.spgemm import FACTORIZATIONS
from jacsparse.spgemm.lu import Ordering
from torch.autograd import gradcheck, gradgradcheck

from jacsparse import SparseJacobian
from tests.helpers import random_pattern


def band(n: int, lower: int, upper: int) -> Pattern:
    """A full band."""
    i, j = np.indices((n, n))
    return Pattern.from_scipy(scipy.sparse.csr_array(((i - j <= lower) & (j - i <= upper)).astype(float)))


def groups(n: int) -> Pattern:
    """Groups of one to three rows that do not meet, far from each other."""
    group = np.random.default_rng(n).permutation(np.repeat(np.arange(n), np.resize([3, 1, 2], n))[:n])
    return Pattern.from_scipy(scipy.sparse.csr_array((group[:, None] == group).astype(float)))


PATTERNS: dict[str, Callable[[int], Pattern]] = {
    "random": lambda n: random_pattern(n, n, 0.4, n),
    "sparse": lambda n: random_pattern(n, n, 0.1, n),
    "full": lambda n: Pattern.of(Full(n, n)),
    "tridiagonal": lambda n: band(n, 1, 1),
    "lower": lambda n: band(n, 2, 0),
    "upper": lambda n: band(n, 0, 3),
    "wide": lambda n: band(n, 4, 2),
    "groups": groups,
    "blocks": lambda n: Pattern.from_scipy(
        scipy.sparse.csr_array(np.equal.outer(np.arange(n) // 32, np.arange(n) // 32) * 1.0)
    ),
    "periodic": lambda n: Pattern.from_scipy(scipy.sparse.csr_array(np.eye(n) + np.roll(np.eye(n), 1, axis=0))),
}
#: In float64; Cholesky's takes symmetric ones alone.
EPS = torch.finfo(torch.float64).eps


def regular(kind: str, n: int, batch: int, dtype: torch.dtype, method: str, seed: int = 0) -> SparseJacobian:
    """A matrix of drawn values whose singular values are at least 1, and whose pivots lie off the diagonal."""
    pattern, generator = PATTERNS[kind](n), torch.Generator().manual_seed(seed)
    J = SparseJacobian(pattern, torch.rand(pattern.nnz, batch, dtype=dtype, generator=generator) * 2 - 1)
    if method == "cholesky":
        return J.gram() + SparseJacobian.identity(n, dtype=dtype)
    # Where a row's greatest element is in its neighbour's place, rows are exchanged; all stay in the pattern.
    if kind in ("full", "tridiagonal", "wide"):
        places = (pattern.rows ^ 1) == pattern.indices
        places |= (pattern.rows == n - 1) & (pattern.indices == n - 1) & (n % 2 == 1)
        return J + SparseJacobian(pattern, torch.from_numpy(places * (n + 1.0))[:, None].to(dtype))
    return J + (n + 1) * SparseJacobian.identity(n, dtype=dtype)


def dense(J: SparseJacobian) -> torch.Tensor:
    """``(batch, n, n)`` in float64, part of autograd."""
    if not J.batch:
        return torch.zeros(0, *J.shape, dtype=torch.float64)
    return torch.stack([J.todense(sample) for sample in range(J.batch)]).double()


@settings(max_examples=80)
@given(
    st.sampled_from(sorted(FACTORIZATIONS)), st.sampled_from(sorted(PATTERNS)), st.integers(0, 13),
    st.sampled_from([0, 1, 2, 16, 17, 40]), st.sampled_from([0, 1, 3]), st.sampled_from([torch.float32, torch.float64]),
    st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_every_method_solves(
    method: str, kind: str, n: int, batch: int, columns: int, dtype: torch.dtype, transpose: bool, seed: int
) -> None:
    J = regular(kind, n, batch, dtype, method, seed)
    b = torch.randn((batch, n, columns), dtype=dtype)
    factors = J.factorize(method)
    assert factors.method == method and method in repr(factors) and factors.pattern is J.pattern
    x, A = factors.solve(b, transpose=transpose), dense(J)
    assert x.shape == b.shape and x.dtype == dtype
    A = A.mT if transpose else A
    # |L| |U| is at most 2^(n - 1) |A| for partial pivoting, and the growth of these is below n (Higham, theorem 9.4).
    magnitude = A.abs().sum((1, 2), keepdim=True) * x.double().abs().sum(1, keepdim=True)
    assert bool(((A @ x.double() - b.double()).abs() <= 6 * max(n, 1) ** 2 * torch.finfo(dtype).eps * magnitude).all())
    expected = torch.linalg.slogdet(A)[1]
    assert factors.logdet().dtype == dtype and factors.logdet().shape == (batch,)
    # The relative error of a determinant is n times the condition number's; the condition is below 2 n².
    assert torch.allclose(
        factors.logdet().double(), expected, rtol=0, atol=40 * max(n, 1) ** 4 * torch.finfo(dtype).eps
    )


SHAPES = st.sampled_from(["(n,)", "(n, k)", "(batch, n)", "(batch, n, k)", "(batch, *shape)", "shape"])


@settings(max_examples=100)
@given(SHAPES, st.sampled_from([1, 3]), st.sampled_from([1, 4, 6]), st.sampled_from([1, 2, 5]), st.sampled_from([1, 3]))
def test_shapes_are_those_of_the_table(shape: str, batch: int, n: int, k: int, samples: int) -> None:
    """The table in the docstring of `solve`: what each shape means, or that it is refused."""
    J = regular("random", n, batch, torch.float64, "auto")
    samples = samples if batch == 1 else batch
    grid = (n // 2, 2) if n % 2 == 0 else (n, 1)
    size = {
        "(n,)": (n,), "(n, k)": (n, k), "(batch, n)": (samples, n), "(batch, n, k)": (samples, n, k),
        "(batch, *shape)": (samples, *grid), "shape": grid,
    }[shape]  # fmt: skip
    b = torch.randn(size, dtype=torch.float64)
    if shape in ("(n,)", "(n, k)", "shape") and batch > 1 and not (shape == "(n, k)" and n == batch and k == n):
        if size in ((batch, n), (batch, n, 1)) or (shape == "shape" and n == 1):
            return
        with pytest.raises(ValueError, match="b has"):
            J.solve(b)
        return
    single = {"(n,)": (1, n, 1), "shape": (1, n, 1), "(n, k)": (1, n, k)}
    by_columns = single.get(shape, (samples, n, k if shape == "(batch, n, k)" else 1))
    expected = torch.linalg.solve(dense(J), b.reshape(by_columns)).reshape(size)
    for x in (J.solve(b), J.factorize().solve(b)):
        assert x.shape == b.shape and torch.allclose(x, expected, rtol=1e-12, atol=1e-12)
    assert torch.allclose(J.factorize().solve(b, transpose=True), J.T.solve(b), rtol=1e-12, atol=1e-12)


def test_ambiguous_shapes_are_refused_and_their_remedies_taken() -> None:
    J = regular("random", 4, 1, torch.float64, "auto")
    eye = torch.eye(4, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"b has shape \(4, 4\).*4 columns or 4 samples; pass b\[None\]"):
        J.solve(eye)
    inverse = torch.linalg.inv(J.todense())
    assert torch.allclose(J.solve(eye[None])[0], inverse) and torch.allclose(
        J.solve(eye[:, :, None])[:, :, 0], inverse.T
    )


@pytest.mark.parametrize("method", FACTORIZATIONS)
@pytest.mark.parametrize("batch", [1, 2, 17])
def test_solutions_and_determinants_are_differentiable(method: str, batch: int) -> None:
    J = regular("tridiagonal", 4, batch, torch.float64, method)
    values, b = J.values.clone().requires_grad_(), torch.randn(batch, 4, 2, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(batch, 4, 2, dtype=torch.float64)

    def ours(values: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if method == "cholesky":
            # Differences of single values would not be symmetric.
            values = (values + SparseJacobian(J.pattern, values).T.values) / 2
        factors = SparseJacobian(J.pattern, values).factorize(method)
        x = factors.solve(b) + factors.solve(b.sin(), transpose=True)
        return (weights * x).sum() + (factors.logdet() ** 2).sum()

    def by_autograd(values: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        A = dense(SparseJacobian(J.pattern, values))
        A = (A + A.mT) / 2 if method == "cholesky" else A
        x = torch.linalg.solve(A, b) + torch.linalg.solve(A.mT, b.sin())
        return (weights * x).sum() + (torch.linalg.slogdet(A)[1] ** 2).sum()

    firsts = [torch.autograd.grad(f(values, b), (values, b), create_graph=True) for f in (ours, by_autograd)]
    seconds = [torch.autograd.grad(sum((each**2).sum() for each in first), (values, b)) for first in firsts]
    for actual, expected in (*zip(*firsts, strict=True), *zip(*seconds, strict=True)):
        assert torch.allclose(actual, expected, rtol=1e-10, atol=1e-12)
    if batch == 1:
        assert gradcheck(ours, (values, b)) and gradgradcheck(ours, (values, b))


def test_determinants_of_more_columns_than_are_taken_together_have_gradients() -> None:
    J = regular("groups", 150, 2, torch.float64, "auto")
    values = J.values.clone().requires_grad_()
    J = SparseJacobian(J.pattern, values)
    actual, expected = (
        torch.autograd.grad((log * torch.tensor([1.0, -2.0])).sum(), values)[0]
        for log in (J.factorize().logdet(), torch.linalg.slogdet(dense(J))[1])
    )
    assert torch.allclose(actual, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("method", FACTORIZATIONS)
def test_other_values_are_factored_by_the_same_method_and_order(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    J, other = (regular("tridiagonal", 9, batch, torch.float64, method, seed=batch) for batch in (1, 20))
    factors = J.factorize(method)
    plan = type(factors._plan)
    monkeypatch.setattr(plan, "__init__", lambda self, pattern: pytest.fail("a pattern was planned again"))
    again, b = factors.refactorize(other.values), torch.randn(20, 9, dtype=torch.float64)
    assert again.method == method and again.values is other.values
    assert torch.equal(again.solve(b), other.factorize(method).solve(b))
    assert torch.equal(factors.solve(b[0]), J.factorize(method).solve(b[0]))


@pytest.mark.parametrize(
    ("kind", "n", "batch", "method"),
    [
        ("tridiagonal", 1000, 1, "banded"), ("tridiagonal", 100, 64, "banded"), ("wide", 300, 1, "banded"),
        ("periodic", 500, 1, "banded"), ("full", 40, 1, "dense"), ("full", 40, 100, "dense"),
        ("sparse", 60, 1, "dense"), ("blocks", 960, 1, "block_diagonal"),
    ],
)  # fmt: skip
def test_auto_chooses_by_pattern_and_size(kind: str, n: int, batch: int, method: str) -> None:
    J = regular(kind, n, batch, torch.float64, "auto")
    assert J.factorize().method == method


def test_auto_chooses_sparse_factors_of_large_grids() -> None:
    line = scipy.sparse.diags_array(np.ones((3, 90)), offsets=(-1, 0, 1), shape=(90, 90))
    pattern = Pattern.from_scipy(scipy.sparse.kronsum(line, line))
    values = torch.where(torch.from_numpy(pattern.rows == pattern.indices), 9.0, -1.0)[:, None]
    factors = SparseJacobian(pattern, values).factorize()
    assert repr(factors) == "<Factorization 8100 × 8100, superlu, batch 1, torch.float32>"


def test_sparse_factors_of_symmetric_patterns_fill_in_as_eliminated_without_pivots() -> None:
    """A network with two unknowns at each node, whose diagonal is large."""
    rng, nodes = np.random.default_rng(0), 300
    ends = [(i, j) for i in range(1, nodes) for j in {int(rng.integers(max(0, i - 17), i)), int(rng.integers(0, i))}]
    one, other = np.array(ends).T
    lines = scipy.sparse.coo_array((np.ones(len(one)), (one, other)), (nodes, nodes))
    pattern = Pattern.from_scipy(scipy.sparse.kron(np.ones((2, 2)), lines + lines.T + scipy.sparse.eye_array(nodes)))
    values = rng.uniform(-1, 1, pattern.nnz)
    values[pattern.rows == pattern.indices] = 40
    ordering = Ordering(pattern, True)
    left = pattern.to_scipy(np.ones(pattern.nnz)).todense()[np.ix_(ordering.rows, ordering.rows)] != 0
    for k in range(len(left)):
        left[k + 1 :, k + 1 :] |= np.outer(left[k + 1 :, k], left[k, k + 1 :])
    # SuperLU's supernodes have some zeros.
    assert left.sum() <= ordering.factors(values).nnz + len(left) <= 1.1 * left.sum() + len(left)


def test_large_blocks_are_factored_by_several_threads() -> None:
    """PyTorch's own batched factorisation hangs there: another process, which can be ended."""
    code = """
import torch
from jacsparse import Pattern, SparseJacobian
from jacsparse.patterns import Full
torch.set_num_threads(2)
values = torch.rand(200**2, 3, dtype=torch.float64)
values[::201] += 100
J, b = SparseJacobian(Pattern.of(Full(200, 200)), values), torch.ones(3, 200, dtype=torch.float64)
assert torch.allclose(J.jvp(J.factorize("dense").solve(b)), b)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def zero_row(kind: str, method: str, batch: int) -> SparseJacobian:
    """Whose last sample is singular."""
    J = regular(kind, 5, batch, torch.float64, method)
    values = J.values.clone()
    values[torch.from_numpy((J.pattern.rows == 2) | (J.pattern.indices == 2)), -1] = 0
    return SparseJacobian(J.pattern, values)


@pytest.mark.parametrize("method", [method for method in FACTORIZATIONS if method != "cholesky"])
@pytest.mark.parametrize("batch", [1, 18])
def test_singular_and_infinite_samples_are_named(method: str, batch: int) -> None:
    J = zero_row("tridiagonal", method, batch)
    with pytest.raises(ValueError, match=f"sample {batch - 1} of the Jacobian is singular"):
        J.factorize(method)
    values = regular("tridiagonal", 5, batch, torch.float64, method).values.clone()
    values[3, -1] = torch.inf
    with pytest.raises(ValueError, match=f"sample {batch - 1} of the Jacobian is not finite"):
        SparseJacobian(J.pattern, values).factorize(method)


def test_a_sum_that_overflows_is_no_infinite_value() -> None:
    J = SparseJacobian.from_diagonal(torch.full((4,), 2.0**127))
    assert J.solve(torch.full((4,), 2.0**126)).tolist() == [0.5] * 4


J = regular("random", 4, 1, torch.float64, "auto")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: J.factorize("lu"), ValueError, "method is 'lu'; expected one of auto, banded"),
        (lambda: J.factorize("cholesky"), ValueError, "the Jacobian is not symmetric"),
        (lambda: (-J.gram()).factorize("cholesky"), ValueError, "sample 0 of the Jacobian is not positive definite"),
        (lambda: J.factorize().refactorize(J.values[:, 0]), ValueError, r"values has shape \(\d+,\); expected \("),
        (lambda: J.factorize().refactorize(J.values[1:]), ValueError, r"values has shape \(\d+, 1\); expected"),
        (lambda: J.factorize().refactorize([1.0]), TypeError, "values is a list"),
        (lambda: J.factorize().solve(torch.ones(4)), TypeError, "b is torch.float32 and the Jacobian is torch.float64"),
        (lambda: J.factorize().solve(torch.ones(3).double()), ValueError, r"b has shape \(3,\).*\(4, columns\)"),
    ],
)  # fmt: skip
def test_bad_arguments(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def poisson(n: int, dtype: torch.dtype = torch.float64) -> SparseJacobian:
    """A grid of n × n points, with a wind."""
    line = scipy.sparse.diags_array([-1.2, 2.1, -0.8], offsets=(-1, 0, 1), shape=(n, n))
    return SparseJacobian.from_scipy(scipy.sparse.kronsum(line, line)).to(dtype)


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "jacobi"},
        {"kind": "block_jacobi", "block_size": 12},
        {"kind": "ilu"},
        {"kind": "ilu", "permc_spec": "COLAMD"},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_preconditioners(options: dict[str, Any], dtype: torch.dtype) -> None:
    J = poisson(10, dtype)
    A, M = J.to_scipy().toarray(), J.preconditioner(**options)
    size = {"jacobi": 1, "block_jacobi": 12}.get(options["kind"])
    if size is not None:
        inverse = np.linalg.inv(np.where(np.equal.outer(np.arange(100) // size, np.arange(100) // size), A, 0.0))
    v, scale = np.random.default_rng(0).standard_normal((100, 3)).astype(A.dtype), 100 * np.finfo(A.dtype).eps
    assert M.shape == J.shape and M.dtype == A.dtype
    for actual, matrix in ((M @ v, A), (M.T @ v, A.T), (np.stack([M @ each for each in v.T], 1), A)):
        if size is not None:
            assert np.allclose(actual, (inverse if matrix is A else inverse.T) @ v, rtol=0, atol=scale)
        else:
            # Incomplete factors leave a part of the residual.
            assert np.linalg.norm(matrix @ actual - v) < 0.1 * np.linalg.norm(v)
    x, failed = scipy.sparse.linalg.gmres(J.to_scipy(), v[:, 0], M=M, rtol=1e-4)
    assert not failed and np.linalg.norm(A @ x - v[:, 0]) < 2e-4 * np.linalg.norm(v[:, 0])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kind": "lu"}, ValueError, "kind is 'lu'; expected one of jacobi, block_jacobi, ilu"),
        ({"kind": "block_jacobi"}, ValueError, "block_size is None; block_jacobi needs"),
        ({"kind": "jacobi", "block_size": 2}, ValueError, "block_size is 2; block_jacobi needs"),
        ({"kind": "block_jacobi", "block_size": 0}, ValueError, "block_size is 0"),
        ({"kind": "jacobi", "drop_tol": 0.1}, TypeError, "jacobi takes no drop_tol"),
        ({"kind": "jacobi", "sample": 3}, IndexError, "sample is 3"),
        ({"kind": "jacobi", "sample": 1}, ValueError, "element 2 of the Jacobian's diagonal is zero"),
        ({"kind": "block_jacobi", "block_size": 2, "sample": 1}, ValueError, "blocks of 2 rows .* singular"),
    ],
)
def test_bad_preconditioners(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        zero_row("tridiagonal", "auto", 2).preconditioner(**{"sample": 0, **options})


def test_more_refused_preconditioners() -> None:
    rectangle = SparseJacobian(Pattern.of(Full(2, 3)), torch.ones(6, 1))
    with pytest.raises(ValueError, match="2 × 3; only a square one"):
        rectangle.preconditioner("ilu")
    with pytest.raises(ValueError, match="no incomplete factors"):
        zero_row("tridiagonal", "auto", 1).preconditioner("ilu")
