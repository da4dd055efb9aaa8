"""What is returned beside a Jacobian or Hessian, patterns of one's own, and gradients of prepared values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from torch import nn
from torch.nn.utils import prune

import jacsparse
from jacsparse import (
    Pattern,
    PreparedHessian,
    PreparedJacobian,
    UnsupportedOperatorError,
    VerificationError,
    hessian,
    jacobian,
    prepare_hessian,
    prepare_jacobian,
)
from tests.helpers import FLOAT, assert_equal, dense, drawn

Tree = dict[str, Any]


def of_states(x: torch.Tensor, k: Any = 1.5) -> tuple[Tree, Tree]:
    """Results of two dtypes; beside them what is written to later, an index, a number and what no operator made."""
    y = x.sin() * k
    z = y.clone()
    beside = {"written": z, "largest": x.argmax(), "number": 3, "argument": x}
    z[1:].mul_(2.0)
    return {"double": y * x, "single": x[..., :2].float()}, beside


def assert_of_states(x: torch.Tensor, y: Tree, beside: Tree) -> None:
    expected, expected_beside = of_states(x)
    assert y.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(y[name], tensor, rtol=1e-14)
        assert y[name].dtype == tensor.dtype
        assert y[name].shape == tensor.shape
    assert torch.allclose(beside["written"], expected_beside["written"], rtol=1e-14)
    assert torch.equal(beside["largest"], expected_beside["largest"])
    assert beside["number"] == 3
    assert torch.equal(beside["argument"], x)
    assert not any(tensor.requires_grad for tensor in (*y.values(), beside["written"]))


@pytest.mark.parametrize("batched", [False, True])
def test_of_one_run(batched: bool) -> None:
    called = []

    def counted(x: torch.Tensor) -> tuple[Tree, Tree]:
        called.append(x)
        return of_states(x)

    for seed in range(4):
        x = drawn(3, 4, seed=seed)
        J, y, beside = jacobian(counted, x, batched=batched, value=True, has_aux=True)
        assert_of_states(x, y, beside)
        assert_equal(J, dense(lambda x: tuple(of_states(x)[0].values()), x, batched=batched))
        # Memory of its own.
        beside["argument"].zero_()
        assert x.any()
    assert len(called) <= 6
    J, beside = jacobian(of_states, x, batched=batched, has_aux=True)
    assert beside["number"] == 3
    _, y = jacobian(nn.Tanh(), x, batched=batched, value=True)
    assert torch.equal(y, x.tanh())


def test_buffers_that_a_module_returns() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(3, dtype=FLOAT))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.mean.mul_(0.5).add_(x.detach().mean(0))
            return x * self.mean, self.mean

    module, x = Mean(), drawn(2, 3)
    _, y, mean = jacobian(module, x, batched=True, value=True, has_aux=True)
    assert torch.allclose(mean, x.mean(0))
    assert torch.allclose(y, x * x.mean(0))
    assert not module.mean.any()


def test_an_empty_batch() -> None:
    x = drawn(0, 4)
    J, y, beside = jacobian(of_states_of_samples, x, batched=True, value=True, has_aux=True)
    assert (J.batch, y.shape, beside.shape) == (0, (0, 4), (0, 4))


def of_states_of_samples(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.sin() * x, x.cos()


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("method", ["products", "compressed"])
def test_of_prepared_jacobians(method: str, compile: bool, tmp_path: Path) -> None:
    options = {"batched": False, "value": True, "has_aux": True, "method": method, "compile": compile}
    prepared = prepare_jacobian(of_states, drawn(3, 4), **options)
    prepared.save(tmp_path / "prepared.npz")
    loaded = PreparedJacobian.load(tmp_path / "prepared.npz", of_states, drawn(3, 4), compile=compile)
    for seed, each in enumerate((prepared, prepared, loaded)):
        x = drawn(3, 4, seed=seed)
        J, y, beside = each(x)
        assert_of_states(x, y, beside)
        assert_equal(J, dense(lambda x: tuple(of_states(x)[0].values()), x, batched=False))
        assert torch.equal(each.values(x), J.values)
    # A part of the result is float32.
    assert prepared.check(drawn(3, 4)) < 1e-6


@pytest.mark.parametrize("compile", [False, True])
def test_numbers_that_change(compile: bool) -> None:
    def f(x: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        squares = factor * x[1:] ** 2
        return squares - x[:-1], squares.cumsum(0)

    x = drawn(5)
    prepared = prepare_jacobian(f, x, 2.0, value=True, has_aux=True, compile=compile)
    for factor in (3.0, -0.5):
        J, y, beside = prepared(x, factor)
        assert torch.equal(y, f(x, factor)[0]) and torch.equal(beside, f(x, factor)[1])
        assert_equal(J, dense(lambda x, factor=factor: f(x, factor)[0], x, batched=False))


def test_of_prepared_products_of_matrices() -> None:
    model = nn.Sequential(nn.Linear(4, 60), nn.Tanh(), nn.Linear(60, 50)).to(FLOAT)
    x = drawn(3, 4)
    J, y = prepare_jacobian(model, drawn(3, 4, seed=1), batched=True, value=True, method="products")(x)
    assert torch.allclose(y, model(x), rtol=1e-13)
    assert_equal(J, dense(model, x))


def test_where_no_entry_depends_on_a_tensor() -> None:
    J, y = prepare_jacobian(lambda x: x.flip(0) * 2, drawn(3), batched=False, value=True)(drawn(3, seed=1))
    assert torch.equal(y, drawn(3, seed=1).flip(0) * 2)
    assert J.values.tolist() == [[2.0]] * 3


def energy(x: torch.Tensor, k: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    return (x[1:] * x[:-1] ** 2).sum() * k + x.sin().sum(), x.argmax()


@pytest.mark.parametrize("way", ["hessian", "products", "compressed"])
def test_of_hessians(way: str) -> None:
    x = drawn(6)
    options = {"gradient": True, "value": True, "has_aux": True}
    if way == "hessian":
        H, g, y, largest = hessian(energy, x, 2.0, **options)
    else:
        H, g, y, largest = prepare_hessian(energy, drawn(6, seed=1), 1.0, method=way, **options)(x, 2.0)
    leaf = x.clone().requires_grad_()
    expected, place = energy(leaf, 2.0)
    assert torch.allclose(y, expected.detach(), rtol=1e-14)
    assert torch.equal(largest, place)
    assert torch.allclose(g, torch.autograd.grad(expected, leaf)[0], rtol=1e-13)
    reference = torch.autograd.functional.hessian(lambda x: energy(x, 2.0)[0], x)
    assert torch.allclose(H.todense(), reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("prepared", [False, True])
def test_each_part_alone(prepared: bool) -> None:
    x, f = drawn(4), lambda x: energy(x)[0]
    of = (lambda **asked: prepare_hessian(f, x, **asked)(x)) if prepared else functools.partial(hessian, f, x)
    assert of(gradient=True)[1].shape == (4,)
    assert of(value=True)[1].shape == ()
    assert of(gradient=True, value=True)[1].shape == (4,)


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (lambda x: x.sin(), r"returns a Tensor; with has_aux=True expected a pair"),
        (lambda x: (x, x, x), "returns a tuple of 3; with has_aux=True"),
    ],
)
@pytest.mark.parametrize("way", [jacobian, prepare_jacobian])
def test_no_pair(f: Any, message: str, way: Callable[..., Any]) -> None:
    with pytest.raises(UnsupportedOperatorError, match=message):
        way(f, drawn(3), batched=False, has_aux=True)


def test_the_remedy_for_results_without_derivatives() -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"torch.int64, .*has_aux=True \(result, aux\)"):
        jacobian(lambda x: (x.sin(), x.argmax()), drawn(3), batched=False)


# Gradients of prepared values.


def weighted(J: jacsparse.SparseJacobian, y: torch.Tensor) -> torch.Tensor:
    """A sum of all that a call returns, with weights that the place of an entry decides."""
    rows, columns = (torch.tensor(array.tolist(), dtype=FLOAT) for array in (J.pattern.rows, J.pattern.indices))
    return (J.values * (rows + 1.7 * columns).sin()[:, None]).sum() + y.pow(2).sum()


def assert_gradients(f: Callable[..., Any], *args: Any, batched: bool = False, **options: Any) -> PreparedJacobian[Any]:
    """Gradients of a prepared Jacobian's values, and of the value beside them, against those of `jacobian`."""
    prepared = prepare_jacobian(f, *args, batched=batched, create_graph=True, value=True, **options)
    given = [arg.detach().clone().requires_grad_() if isinstance(arg, torch.Tensor) else arg for arg in args]
    parameters = list(f.parameters()) if isinstance(f, nn.Module) else []
    wanted = [tensor for tensor in (*given, *parameters) if isinstance(tensor, torch.Tensor)]
    expected = weighted(*jacobian(f, *given, batched=batched, create_graph=True, value=True))
    actual = weighted(*prepared(*given))
    assert torch.allclose(actual, expected, rtol=1e-12)
    both = [torch.autograd.grad(total, wanted, materialize_grads=True) for total in (actual, expected)]
    for one, other in zip(*both, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-11 * (1 + float(other.abs().max())))
    with torch.no_grad():
        assert not prepared(*given)[0].values.requires_grad
    return prepared


def with_unseen_writes(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    factor = k * 1
    with torch.no_grad():
        factor.mul_(2)
    factor[1:].mul_(x[1:])
    return x**2 * factor * k.detach() + k.sin().detach() * x


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "a number": (lambda x, k: k * x.sin() * x[:1] ** 2, (drawn(5), torch.tensor(2.0, dtype=FLOAT))),
    "a float": (lambda x, k: k * x.sin() * x[:1] ** 2, (drawn(5), 2.0)),
    "another argument": (lambda x, k: (k * x.sin())[1:] + x[:-1] * k[1:] ** 2, (drawn(5), drawn(5, seed=1))),
    "unseen writes": (with_unseen_writes, (drawn(5), drawn(5, seed=1))),
    "branches": (lambda x, k: torch.where(x > 0, k * x**2, x.exp()), (drawn(5), drawn(5, seed=1))),
    "not contiguous": (lambda x, k: x**2 * k, (drawn(4, 3).T, drawn(4, 3).T)),
}


@pytest.mark.parametrize("method", ["products", "compressed"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_prepared_values(name: str, method: str) -> None:
    f, args = FUNCTIONS[name]
    assert_gradients(f, *args, method=method)


@pytest.mark.parametrize(
    "layers",
    [
        (nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)),
        (nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 3, 3, padding=1), nn.Softplus(), nn.Conv1d(3, 2, 3)),
    ],
)
def test_gradients_of_prepared_networks(layers: tuple[nn.Module, ...]) -> None:
    assert_gradients(nn.Sequential(*layers).to(FLOAT), drawn(3, 6), batched=True)


def test_zeros_that_training_may_fill_are_not_pruned() -> None:
    layer = nn.Linear(3, 3).to(FLOAT)
    with torch.no_grad():
        layer.weight[0] = 0
    prepared = prepare_jacobian(nn.Sequential(layer, nn.Tanh()), drawn(2, 3), batched=True, create_graph=True)
    assert prepared.pattern.nnz == 9
    prune.l1_unstructured(layer, "weight", 5)
    pruned = assert_gradients(nn.Sequential(layer, nn.Tanh()), drawn(2, 3), batched=True)
    assert pruned.pattern.nnz == 4


def test_gradients_of_a_prepared_hessian() -> None:
    k = torch.tensor(1.3, dtype=FLOAT, requires_grad=True)
    prepared = prepare_hessian(lambda x, k: energy(x, k)[0] * k, drawn(5), k, create_graph=True, gradient=True)
    x = drawn(5, seed=1).requires_grad_()
    H, g = prepared(x, k)
    (H.values.pow(2).sum() + g.sum()).backward()
    expected = torch.zeros((), dtype=FLOAT)
    y = energy(x, k)[0] * k
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    for row in range(5):
        expected = expected + torch.autograd.grad(first[row], x, create_graph=True)[0].pow(2).sum()
    for actual, other in zip((x.grad, k.grad), torch.autograd.grad(expected + first.sum(), (x, k)), strict=True):
        assert torch.allclose(actual, other, rtol=1e-11)


def test_an_implicit_step_is_differentiated() -> None:
    """The gradient of a Newton step by a parameter, against differences."""
    prepared = prepare_jacobian(
        lambda u, k: u - k * (u.roll(1) - 2 * u + u.roll(-1)) * u,
        drawn(6),
        torch.tensor(0.1, dtype=FLOAT),
        batched=False,
        create_graph=True,
        value=True,
    )

    def step(k: torch.Tensor) -> torch.Tensor:
        J, residual = prepared(drawn(6), k)
        return torch.linalg.solve(J.to_torch().to_dense(), residual).pow(2).sum()

    k = torch.tensor(0.1, dtype=FLOAT, requires_grad=True)
    assert torch.autograd.gradcheck(step, (k,))


def test_tensors_that_had_no_gradient_when_it_was_prepared() -> None:
    layer = nn.Linear(3, 2).to(FLOAT).requires_grad_(False)
    prepared = prepare_jacobian(nn.Sequential(layer, nn.Tanh()), drawn(2, 3), batched=True, create_graph=True)
    assert not prepared(drawn(2, 3)).values.requires_grad
    layer.requires_grad_()
    with pytest.raises(ValueError, match=r"requires a gradient, and did not when .*: prepare it again"):
        prepared(drawn(2, 3))
    with torch.no_grad():
        prepared(drawn(2, 3))


# Patterns of one's own.


def band(rows: int, *offsets: int) -> Pattern:
    entries = [[column for o in offsets if 0 <= (column := row + o) < rows] for row in range(rows)]
    indptr = [0, *torch.tensor([len(row) for row in entries]).cumsum(0).tolist()]
    return Pattern((rows, rows), indptr, [column for row in entries for column in row])


def test_a_wider_pattern() -> None:
    prepared = prepare_jacobian(
        lambda x: x.diff(append=x[:1] * 0) * x, drawn(6), batched=False, pattern=band(6, -1, 0, 1)
    )
    assert prepared.pattern == band(6, -1, 0, 1)
    assert "3 colours of columns and 0 of rows, in place of 6 products" in repr(prepared)
    assert_equal(prepared(drawn(6)), dense(lambda x: x.diff(append=x[:1] * 0) * x, drawn(6), batched=False))


def test_a_narrower_pattern() -> None:
    """Entries that cancel, which no rule can know."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x**2 + (x.roll(1) - x.roll(1))

    assert prepare_jacobian(f, drawn(6), batched=False).pattern.nnz == 12
    prepared = prepare_jacobian(f, drawn(6), batched=False, pattern=band(6, 0))
    assert_equal(prepared(drawn(6)), dense(f, drawn(6), batched=False))
    with pytest.raises(VerificationError, match="with a pattern that has all entries, or without one"):
        prepare_jacobian(f, drawn(6), batched=False, pattern=band(6, 1))


def test_packed_sequences() -> None:
    layer = nn.LSTM(3, 4, dtype=FLOAT)

    def f(x: torch.Tensor) -> torch.Tensor:
        return layer(nn.utils.rnn.pack_padded_sequence(x, [5, 3]))[0].data

    with pytest.raises(UnsupportedOperatorError, match=r"_pack_padded_sequence has no rule; give .* padded sequences"):
        jacobian(f, drawn(5, 2, 3))


def test_operators_without_a_rule() -> None:
    """PyTorch has no forward mode of this one either."""

    def f(x: torch.Tensor) -> torch.Tensor:
        where = torch.full((2, 1, 2), 0.5, dtype=FLOAT)
        return nn.functional.fractional_max_pool2d(x.reshape(2, 1, 3, 3), 2, output_size=(2, 2), _random_samples=where)

    with pytest.raises(UnsupportedOperatorError, match=r"aten\.fractional_max_pool2d has no rule"):
        jacobian(f, drawn(18), batched=False)
    blocks = Pattern.from_scipy(scipy.sparse.block_diag([np.ones((4, 9))] * 2, format="csr"))
    prepared = prepare_jacobian(f, drawn(18), batched=False, pattern=blocks)
    x = drawn(18, seed=1)
    assert_equal(prepared(x), dense(f, x, batched=False))


def test_a_pattern_is_saved(tmp_path: Path) -> None:
    prepared = prepare_jacobian(torch.exp, drawn(4), batched=False, pattern=band(4, 0, 1))
    prepared.save(tmp_path / "prepared.npz")
    loaded = PreparedJacobian.load(tmp_path / "prepared.npz", torch.exp, drawn(4))
    assert loaded.pattern == band(4, 0, 1)
    assert torch.equal(loaded(drawn(4)).values, prepared(drawn(4)).values)


def test_a_symmetric_pattern_of_a_hessian() -> None:
    prepared = prepare_hessian(lambda x: energy(x)[0], drawn(5), pattern=band(5, -2, -1, 0, 1, 2))
    expected = torch.autograd.functional.hessian(lambda x: energy(x)[0], drawn(5))
    assert isinstance(prepared, PreparedHessian)
    assert torch.allclose(prepared(drawn(5)).todense(), expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="pattern is not symmetric"):
        prepare_hessian(lambda x: energy(x)[0], drawn(5), pattern=band(5, 0, 1))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"pattern": band(3, 0)}, ValueError, r"pattern has shape \(3, 3\); expected \(4, 4\)"),
        ({"pattern": 3}, TypeError, r"pattern is .*int; expected a Pattern: Pattern.from_scipy\(matrix\)"),
        ({"pattern": band(4, 0), "method": "products"}, ValueError, "a pattern is given; leave one out"),
    ],
)
def test_patterns_that_cannot_be_taken(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        prepare_jacobian(torch.exp, drawn(4), batched=False, **options)


@pytest.mark.parametrize("first", [4.0, 0.0], ids=["finite", "infinite"])
@pytest.mark.parametrize("method", ["products", "compressed"])
def test_gradients_of_aux(method: str, first: float) -> None:
    f, at = lambda x: (x.sqrt() * x.roll(1), x.sqrt() * 3), torch.ones(3, dtype=FLOAT)
    prepared = prepare_jacobian(f, at, method=method, has_aux=True, create_graph=True)
    x = torch.tensor([first, 1.0, 2.0], dtype=FLOAT, requires_grad=True)
    _, aux = prepared(x)
    assert torch.equal(*(torch.autograd.grad(each[1:].sum(), x)[0][1:] for each in (aux, f(x)[1])))


@pytest.mark.parametrize("has_aux", [False, True])
def test_what_is_returned_beside_an_empty_batch_has_gradients(has_aux: bool) -> None:
    x = torch.zeros((0, 3), dtype=FLOAT, requires_grad=True)
    f = lambda x: (x.sin(), x.cos()) if has_aux else x.sin()  # noqa: E731
    _, *returned = jacobian(f, x, batched=True, create_graph=True, value=True, has_aux=has_aux)
    for each in returned:
        assert each.shape == x.shape
        assert torch.autograd.grad(each.sum(), x, retain_graph=True)[0].shape == x.shape
