"""Patterns of functions that discretised equations are written with: as sharp as they can be, and never too sharp."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

import jacsparse
from tests.helpers import FLOAT, assert_equal, dense
from tests.patterns.operators import Apply

Function = Callable[[torch.Tensor], torch.Tensor]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


def check(f: Function, x: torch.Tensor, batched: bool, exact: torch.Tensor) -> None:
    """Twice, since a later call may run a program: the pattern has the exact positions, and the values are right."""
    for _ in range(2):
        jacobian = jacsparse.jacobian(f, x, batched=batched)
        assert_equal(jacobian, dense(f, x, batched=batched))
        assert torch.equal(torch.from_numpy(jacobian.pattern.to_scipy().toarray()) != 0, exact)


def check_prepared(f: Function, x: torch.Tensor, batched: bool, exact: torch.Tensor | None = None) -> None:
    """A prepared Jacobian is right at another input, and its pattern has the exact positions where they are told."""
    prepared = jacsparse.prepare_jacobian(f, x, batched=batched)
    other = normal(*x.shape, seed=9)
    assert_equal(prepared(other), dense(f, other, batched=batched))
    if exact is not None:
        assert torch.equal(torch.from_numpy(prepared.pattern.to_scipy().toarray()) != 0, exact)


def tridiagonal(n: int) -> torch.Tensor:
    return sum(torch.diag(normal(n - abs(k), seed=k + 1), k) for k in (-1, 0, 1))  # type: ignore[return-value]


SAMPLES, N, M = 3, 5, 2
A = tridiagonal(N)
#: A stack of matrices, with other zeros each.
STACK = torch.stack([A, A.tril(), A.roll(1, 0)])

PRODUCTS: dict[str, tuple[Function, tuple[int, ...], bool]] = {
    "A @ x": (lambda x: A @ x, (N,), False),
    "x @ A": (lambda x: x @ A, (N,), False),
    "A @ X": (lambda x: A @ x, (N, M), False),
    "A @ X, batched": (lambda x: A @ x, (SAMPLES, N, M), True),
    "X @ A, batched": (lambda x: x @ A, (SAMPLES, M, N), True),
    "X.T @ A, batched": (lambda x: x.mT @ A, (SAMPLES, N, M), True),
    "mv": (lambda x: torch.mv(A, x), (N,), False),
    "addmv": (lambda x: torch.addmv(x, A, x, alpha=0.5), (N,), False),
    "bmm": (lambda x: torch.bmm(STACK, x.expand(3, N, M)), (N, M), False),
    "bmm, batched": (lambda x: torch.bmm(A.expand(len(x), N, N), x), (SAMPLES, N, M), True),
    "baddbmm": (lambda x: torch.baddbmm(x, A.expand(len(x), N, N), x), (SAMPLES, N, M), True),
    "linear": (lambda x: functional.linear(x, A, A[0]), (SAMPLES, N), True),
    "linear of a transpose": (lambda x: functional.linear(x.mT, A), (SAMPLES, N, M), True),
    "einsum": (lambda x: torch.einsum("ij,bjc->bic", A, x), (SAMPLES, N, M), True),
    "einsum of a stack": (lambda x: torch.einsum("kij,bj->bki", STACK, x), (SAMPLES, N), True),
    "einsum of three": (lambda x: torch.einsum("ij,jk,kc->ic", A, A, x), (N, M), False),
    "tensordot": (lambda x: torch.tensordot(A, x, 1), (N, M), False),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_constant_factor_keeps_its_zeros(name: str) -> None:
    f, shape, batched = PRODUCTS[name]
    x = normal(*shape)
    # The function is linear: its Jacobian's non-zeros are the pattern.
    check(f, x, batched, (dense(f, x, batched=batched) != 0).any(0))
    check_prepared(f, x, batched)


@pytest.mark.parametrize("batched", [False, True])
def test_zeros_that_are_filled_are_seen(batched: bool) -> None:
    matrix = A.clone()

    def f(x: torch.Tensor) -> torch.Tensor:
        return matrix @ x

    x = normal(*((SAMPLES, N, M) if batched else (N, M)))
    check(f, x, batched, (dense(f, x, batched=batched) != 0).any(0))
    matrix[0, N - 1] = 2.0
    check(f, x, batched, (dense(f, x, batched=batched) != 0).any(0))


LAYOUTS = {"coo": torch.sparse_coo, "csr": torch.sparse_csr, "csc": torch.sparse_csc}
#: Functions of a matrix and of the input.
SPARSE_PRODUCTS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], tuple[int, ...], bool]] = {
    "sparse.mm": (lambda s, x: torch.sparse.mm(s, x), (N, M), False),
    "S @ X": (lambda s, x: s @ x.sin(), (N, M), False),
    "S @ x": (lambda s, x: s @ x, (N,), False),
    "x @ S": (lambda s, x: x @ s, (N,), False),
    "X @ S, batched": (lambda s, x: x**2 @ s, (SAMPLES, N), True),
    "(S @ X.T).T, batched": (lambda s, x: (s @ x.T).T, (SAMPLES, N), True),
    "sparse.addmm": (lambda s, x: torch.sparse.addmm(x, s, x, beta=0.5, alpha=3.0), (N, M), False),
    "linear": (lambda s, x: functional.linear(x, s), (SAMPLES, N), True),
    "of a transpose": (lambda s, x: torch.mv(s.t(), x), (N,), False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SPARSE_PRODUCTS)
def test_a_sparse_matrix_gives_its_elements_alone(name: str, layout: str) -> None:
    f, shape, batched = SPARSE_PRODUCTS[name]
    x = normal(*shape)
    exact = (dense(lambda x: f(A, x), x, batched=batched) != 0).any(0)
    matrix = A.to_sparse(layout=LAYOUTS[layout])
    check(lambda x: f(matrix, x), x, batched, exact)
    check_prepared(lambda x: f(matrix, x), x, batched, exact)


@pytest.mark.parametrize("method", ["products", "compressed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_sparse_matrix(layout: str, method: str) -> None:
    def f(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return s @ x**2

    x, matrix = normal(N), A.to_sparse(layout=LAYOUTS[layout])
    prepared = jacsparse.prepare_jacobian(f, x, matrix, batched=False, method=method)
    for factor in (1.0, 2.0, 3.0):
        scaled = matrix * factor
        for jacobian in (jacsparse.jacobian(f, x, scaled, batched=False), prepared(x, scaled)):
            assert_equal(jacobian, 2 * factor * (A * x)[None])
    other = STACK[2].to_sparse(layout=LAYOUTS[layout])
    assert_equal(jacsparse.jacobian(f, x, other, batched=False), 2 * (STACK[2] * x)[None])
    with pytest.raises(ValueError, match="holds other elements"):
        prepared(x, other)


def test_an_operator_that_takes_no_sparse_tensor() -> None:
    matrix = A.to_sparse()
    with pytest.raises(jacsparse.UnsupportedOperatorError, match=r"mul.Tensor makes a sparse tensor .* multiply by it"):
        jacsparse.jacobian(lambda x: (matrix * x).to_dense(), normal(N, N), batched=False)


#: Functions of which one line of three samples is a block, by the numbers of outputs and of inputs in it.
SELECTIONS: dict[str, Function] = {
    "gather, argsort": lambda x: (x**2).gather(1, x.argsort(1)),
    "gather, topk": lambda x: x.sin().gather(1, x.topk(2, 1)[1]),
    "gather, argmax": lambda x: x.gather(1, x.argmax(1, keepdim=True)),
    "take_along_dim": lambda x: torch.take_along_dim(x, x.argsort(1, descending=True), 1),
    "quantile": lambda x: x.quantile(0.3, 1, keepdim=True),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_computed_indices_select_from_a_line(name: str) -> None:
    f, x = SELECTIONS[name], normal(SAMPLES, 4, 2)
    outputs = f(x)[0].numel()
    exact = torch.eye(2, dtype=torch.bool).repeat(outputs // 2, 4)
    check(f, x, True, exact)
    check_prepared(f, x, True, exact)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x[x.argsort()],
        lambda x: (x**2)[x.sin().argsort()[:3] - len(x)],
        lambda x: x.index_select(0, torch.searchsorted(x.detach(), x).clamp(max=len(x) - 1)),
        lambda x: x.reshape(3, 2)[x[:3].argsort(), :].sin(),
        lambda x: x.reshape(2, 3)[:, x[:4].argsort().reshape(2, 2) % 3],
    ],
)
def test_computed_indices_of_a_tensor(f: Function) -> None:
    x = normal(6)
    assert_equal(jacsparse.jacobian(f, x, batched=False), dense(f, x, batched=False))
    check_prepared(f, x, False)


def test_indices_computed_from_an_external_are_refused() -> None:
    order = normal(6)
    with pytest.raises(jacsparse.UnsupportedOperatorError, match="indices are computed from what a tensor holds"):
        jacsparse.prepare_jacobian(lambda x: x[order.argsort()], normal(6), batched=False)


#: Systems of a matrix and of the input, and the exact positions for the tridiagonal matrix.
SYSTEMS: dict[str, tuple[Function, tuple[int, ...], bool]] = {
    "vector": (lambda x: torch.linalg.solve(DOMINANT, x), (N,), False),
    "matrix": (lambda x: torch.linalg.solve(DOMINANT, x.sin()), (SAMPLES, N, M), True),
    "from the right": (lambda x: torch.linalg.solve(DOMINANT, x, left=False), (M, N), False),
    "matrix of the input": (lambda x: torch.linalg.solve(DOMINANT + torch.diag_embed(x), x), (SAMPLES, N), True),
    "triangular": (lambda x: torch.linalg.solve_triangular(DOMINANT, x**2, upper=True), (N, M), False),
    "inverse": (lambda x: torch.linalg.inv(DOMINANT + torch.diag(x)), (N,), False),
    "inverse times": (lambda x: torch.linalg.inv(DOMINANT) @ x, (N, M), False),
    "blocks": (lambda x: torch.linalg.solve(torch.block_diag(DOMINANT[:2, :2], DOMINANT[2:, 2:]), x), (N,), False),
}
DOMINANT = A + 8 * torch.eye(N, dtype=FLOAT)


@pytest.mark.parametrize("name", SYSTEMS)
def test_solutions_of_linear_systems(name: str) -> None:
    f, shape, batched = SYSTEMS[name]
    x = normal(*shape)
    check(f, x, batched, (dense(f, x, batched=batched) != 0).any(0))
    check_prepared(f, x, batched)


def upwind(u: torch.Tensor) -> torch.Tensor:
    return u * torch.where(u > 0, u - u.roll(1, -1), u.roll(-1, -1) - u)


def one_sided(u: torch.Tensor) -> torch.Tensor:
    return torch.minimum(u - u.roll(1, -1), u.roll(-1, -1) - u)


def far_condition(u: torch.Tensor) -> torch.Tensor:
    return torch.where(u.roll(2, -1).sum(-1, keepdim=True) > 0, u.sin(), 2 * u)


@pytest.mark.parametrize(("f", "offsets"), [(upwind, (-1, 0, 1)), (one_sided, (-1, 0, 1)), (far_condition, (0,))])
def test_branches_by_where_are_a_union(f: Function, offsets: tuple[int, ...]) -> None:
    exact = sum(torch.eye(6).roll(offset, 1) for offset in offsets) != 0
    for x, batched in ((normal(SAMPLES, 6), True), (normal(6), False)):
        check(f, x, batched, exact)
        check_prepared(f, x, batched, exact)


MASK = torch.tensor([True, False, False, True, True, False])
#: Functions with a constant condition: a mask, and one that is computed from numbers.
CONSTANT_CONDITIONS: dict[str, Function] = {
    "mask": lambda u: u * torch.where(MASK, u - u.roll(1, -1), u.roll(-1, -1) - u),
    "mask of the function": lambda u: torch.where(torch.arange(6) < 2, u.roll(1, -1).sin(), 2 * u),
    "one branch": lambda u: torch.where(MASK, u.roll(1, -1), 3.0),
    "broadcast": lambda u: torch.where(MASK[:, None], u[..., None, :] * u[..., None, :], 0.0).sum(-2),
    "all": lambda u: torch.where(MASK | True, u.roll(1, -1), u**2),
}


@pytest.mark.parametrize("name", CONSTANT_CONDITIONS)
def test_a_constant_condition_selects_branches(name: str) -> None:
    f = CONSTANT_CONDITIONS[name]
    for x, batched in ((normal(SAMPLES, 6), True), (normal(6), False)):
        exact = (dense(f, x, batched=batched) != 0).any(0)
        check(f, x, batched, exact)
        check_prepared(f, x, batched, exact)
        union = jacsparse.jacobian(f, x, batched=batched, pruned=False)
        assert_equal(union, dense(f, x, batched=batched))
        assert union.pattern.nnz >= exact.sum()


def test_a_condition_of_numbers_that_change() -> None:
    speed, mask, x = normal(6), MASK.clone(), normal(SAMPLES, 6)

    def by_speed(u: torch.Tensor) -> torch.Tensor:
        return speed * torch.where(speed > 0, u - u.roll(1, -1), u.roll(-1, -1) - u)

    def by_mask(u: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, u - u.roll(1, -1), u.roll(-1, -1) - u)

    prepared = (
        jacsparse.prepare_jacobian(by_speed, x, batched=True),
        jacsparse.prepare_jacobian(by_mask, x, batched=True),
    )
    for _ in range(2):
        for f in (by_speed, by_mask):
            check(f, x, True, (dense(f, x) != 0).any(0))
        assert_equal(prepared[0](x), dense(by_speed, x))
        speed.neg_()
        mask.logical_not_()
    mask.logical_not_()
    with pytest.raises(ValueError, match=r"mask or other tensor of .* holds other elements"):
        prepared[1](x)


def test_a_constant_of_the_function_is_pruned_in_programs() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x**2 @ torch.diag(torch.ones(3, dtype=FLOAT), 1)

    x = normal(SAMPLES, 4)
    check(f, x, True, (dense(f, x) != 0).any(0))
    check_prepared(f, x, True, (dense(f, x) != 0).any(0))


def test_a_mask_that_is_overwritten_after_its_use() -> None:
    overwrites, x = [False], normal(SAMPLES, 6)

    def f(u: torch.Tensor) -> torch.Tensor:
        mask = MASK ^ overwrites[0]
        y = torch.where(mask, u.roll(1, -1), 2 * u)
        if overwrites[0]:
            # It looks as in the first call again.
            mask.logical_not_()
        return y

    # Chains are found again for a module.
    module = Apply(f)
    assert_equal(jacsparse.jacobian(module, x), dense(f, x))
    overwrites[0] = True
    assert_equal(jacsparse.jacobian(module, x), dense(lambda u: torch.where(~MASK, u.roll(1, -1), 2 * u), x))
