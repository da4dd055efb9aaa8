"""Hessians, and gradients of Jacobians' values, against autograd in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import jacsparse
from jacsparse import PreparedHessian, hessian, hessian_pattern, prepare_hessian
from jacsparse.jacobians.colorings import star_coloring
from tests.helpers import BOUND, FLOAT, drawn

from .test_prepared import brusselator


def rosenbrock(x: torch.Tensor) -> torch.Tensor:
    return (100 * (x[..., 1:] - x[..., :-1] ** 2) ** 2 + (1 - x[..., :-1]) ** 2).sum(-1)


def springs(x: torch.Tensor) -> torch.Tensor:
    a, b = torch.tensor([[0, 1, 2, 4, 0], [1, 2, 3, 5, 5]])
    return ((x[..., a] - x[..., b]).cosh() - 1).sum(-1)


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[..., 1:] *= x[..., :-1]
    return y.exp_().sum(-1)


def filtered(x: torch.Tensor) -> torch.Tensor:
    kernel = torch.tensor([[[1.0, -2.0, 0.5]], [[0.3, 0.0, 1.0]]], dtype=x.dtype)
    y = nn.functional.conv1d(x.reshape(-1, 1, 6), kernel, stride=2, padding=1)
    return y.pow(4).sum((1, 2)).reshape(x.shape[:-1])


def upsampled(x: torch.Tensor) -> torch.Tensor:
    kernel = torch.linspace(-1.0, 1.0, 18, dtype=x.dtype).reshape(2, 3, 3)
    y = nn.functional.conv_transpose1d(x.reshape(-1, 2, 3), kernel, stride=2, padding=1, output_padding=1)
    return y.sigmoid().sum((1, 2)).reshape(x.shape[:-1])


def normalised(x: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(0.5, 2.0, 3, dtype=x.dtype)
    y = nn.functional.layer_norm(x.reshape(-1, 2, 3), (3,), weights, weights)
    return y.pow(3).sum((1, 2)).reshape(x.shape[:-1])


def transposed_in_place(x: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(0.5, 2.0, 6, dtype=x.dtype)
    y = (2 * x.reshape(-1, 2, 3)).transpose_(1, 2)
    return (y.flatten(1).pow(3) * weights).sum(1).reshape(x.shape[:-1])


SCALARS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rosenbrock": rosenbrock,
    "springs": springs,
    "filtered": filtered,
    "upsampled": upsampled,
    "normalised": normalised,
    "linear": lambda x: 3 * x.sum(-1),
    "quadratic": lambda x: (x[..., 1:] * x[..., :-1]).sum(-1) + x[..., 0] ** 2,
    "kinks": lambda x: (nn.functional.leaky_relu(x - 1) + nn.functional.hardtanh(x, 0.5, 1.5)).sum(-1),
    "selected": lambda x: x[..., [0, 2]].sum(-1),
    "masked": lambda x: x[..., torch.tensor([True, False, True] * 2)].sum(-1),
    "transposed in place": transposed_in_place,
    "root": lambda x: x[..., :3].norm(dim=-1) * x[..., 5],
    "entropy": lambda x: (x.log_softmax(-1) * x.softmax(-1)).sum(-1),
    "detached": lambda x: (x * x.detach() * x.exp()).sum(-1),
    "branches": lambda x: torch.where(x > 1.0, x**3, x.roll(1, -1).sin() * x).sum(-1),
    "elementwise": lambda x: (x.tanh() / x.sqrt() + nn.functional.gelu(x) * x.log()).sum(-1),
}
#: Entries of those whose patterns are known.
ENTRIES = {
    "rosenbrock": 16,
    "springs": 16,
    "linear": 0,
    "kinks": 0,
    "selected": 0,
    "masked": 0,
    "quadratic": 11,
    "normalised": 18,
}
METHODS = ("hessian", "products", "compressed")


def dense(f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.func.hessian(lambda flat: f(flat.reshape(x.shape)))(x.reshape(-1))


def assert_hessian(actual: jacsparse.SparseJacobian, expected: torch.Tensor) -> None:
    """Each sample's is exactly symmetric, and near the expected one; elements on the way to it are of order one."""
    for sample, matrix in enumerate(expected):
        result = actual.todense(0 if actual.batch == 1 else sample)
        assert torch.equal(result, result.T)
        assert (result - matrix).abs().amax() <= BOUND * max(1.0, matrix.abs().amax())


def computed(f: Callable[..., Any], method: str, prepared_for: torch.Tensor, x: torch.Tensor, **options: Any) -> Any:
    if method == "hessian":
        # The second call follows the program of the first one.
        hessian(f, prepared_for, **options)
        return hessian(f, x, **options)
    return prepare_hessian(f, prepared_for, method=method, **options)(x)


@pytest.mark.parametrize("batch", [None, 1, 3])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SCALARS)
def test_hessian_equals_autograd(name: str, method: str, batch: int | None) -> None:
    f, shape = SCALARS[name], (6,) if batch is None else (batch, 6)
    x = drawn(*shape, seed=1)
    actual = computed(f, method, drawn(*shape), x, batched=batch is not None)
    assert_hessian(actual, torch.stack([dense(f, sample) for sample in x.reshape(-1, 6)]))
    if batch is None:
        pattern = hessian_pattern(f, (6,))
        assert actual.pattern == pattern
        assert name not in ENTRIES or pattern.nnz == ENTRIES[name]


@settings(max_examples=25)
@given(
    choices=st.lists(st.integers(0, 5), min_size=1, max_size=5), size=st.integers(1, 7), method=st.sampled_from(METHODS)
)
def test_drawn_functions(choices: list[int], size: int, method: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x
        for step, choice in enumerate(choices):
            other = y.roll(step + 1)
            y = (
                (y * other).sin(),
                (y + other**2) / 4,
                y / (1 + other**2),
                (y.flip(0) + x) / 2,
                (y[:1] * y).tanh(),
                torch.cat([y[1:].cos(), y[:1]]),
            )[choice]
        return y.sum()

    x = drawn(size, seed=1)
    expected = dense(f, x)
    assert_hessian(computed(f, method, drawn(size), x), expected[None])
    outside = hessian_pattern(f, (size,)).to_scipy().toarray() == 0
    assert not expected[torch.from_numpy(outside)].any()


def test_writes_to_views() -> None:
    x = drawn(6)
    assert_hessian(hessian(in_place, x), dense(in_place, x)[None])
    y = drawn(6, seed=1)
    assert_hessian(prepare_hessian(in_place, x)(y), dense(in_place, y)[None])


def test_compression_needs_forward_mode() -> None:
    f = lambda x: nn.functional.huber_loss(x[1:], x[:-1], reduction="sum")  # noqa: E731
    assert_hessian(
        computed(f, "products", drawn(5), drawn(5, seed=1)),
        torch.autograd.functional.hessian(f, drawn(5, seed=1))[None],
    )
    with pytest.raises(NotImplementedError, match=r"forward AD with huber_loss_backward .*; pass method='products'"):
        prepare_hessian(f, drawn(5), method="compressed")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("argnums", [0, 2, (0, 2), (2, 0)])
def test_hessian_by_several_arguments(argnums: int | tuple[int, ...], method: str) -> None:
    def energy(x: dict[str, torch.Tensor], k: float, p: torch.Tensor) -> torch.Tensor:
        return k * (x["u"][1:] * x["v"] * p).sin().sum() + (x["u"] ** 3).sum()

    names, sizes = {0: ("u", "v"), 2: ("p",)}, {"u": 4, "v": 3, "p": 3}
    order = [name for n in ((argnums,) if isinstance(argnums, int) else argnums) for name in names[n]]

    def args(k: float, seed: int) -> tuple[Any, ...]:
        u, v, p = (drawn(sizes[name], seed=seed + place) for place, name in enumerate(sizes))
        return {"u": u, "v": v}, k, p

    def flat(parts: torch.Tensor, x: Any, k: float, p: torch.Tensor) -> torch.Tensor:
        tensors = {**x, "p": p, **dict(zip(order, parts.split([sizes[name] for name in order]), strict=True))}
        return energy(tensors, k, tensors["p"])

    for k, seed in ((2.0, 3), (0.5, 7)):
        x, _, p = args(k, seed)
        tensors = {**x, "p": p}
        expected = torch.func.hessian(flat)(torch.cat([tensors[name] for name in order]), x, k, p)
        if method == "hessian":
            actual = hessian(energy, *args(k, seed), argnums=argnums)
        else:
            actual = prepare_hessian(energy, *args(1.0, 0), argnums=argnums, method=method)(*args(k, seed))
        assert_hessian(actual, expected[None])


def test_parameters_are_inputs_of_prepared_hessians() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    prepared, x = prepare_hessian(network, drawn(2, 4), batched=True), drawn(2, 4, seed=1)
    for _ in range(2):
        expected = torch.stack([dense(lambda sample: network(sample)[0], sample) for sample in x])
        assert_hessian(prepared(x), expected)
        assert_hessian(hessian(network, x, batched=True), expected)
        with torch.no_grad():
            network[0].weight.mul_(-1.5)


@pytest.mark.parametrize("method", ["products", "compressed"])
def test_hessians_saved_and_loaded(method: str, tmp_path: Path) -> None:
    path, x = tmp_path / "hessian.npz", drawn(6, seed=1)
    prepared = prepare_hessian(springs, drawn(6), method=method)
    prepared.save(path)
    loaded = PreparedHessian.load(path, springs, drawn(6))
    assert loaded.pattern == prepared.pattern and torch.equal(loaded.values(x), prepared.values(x))
    assert "PreparedHessian of the gradient of springs" in repr(loaded)
    with pytest.raises(ValueError, match="is not of this function"):
        jacsparse.PreparedJacobian.load(path, springs, drawn(6))


@pytest.mark.parametrize(
    ("f", "batched", "message"),
    [
        (lambda x: x**2, False, r"returns a tensor of shape \(3, 2\); a Hessian is of a function that returns one"),
        (lambda x: (x**2).sum(), True, r"returns a tensor of shape \(\); .* one for each of 3 samples"),
        (lambda x: x.argmax(), False, "returns torch.int64"),
        (lambda x: 3.0, False, "returns a float"),
        (lambda x: torch.linalg.householder_product(x, x[0]).sum(), False, "householder_product has no rule; register"),
    ],
)
def test_what_has_no_hessian(f: Any, batched: bool, message: str) -> None:
    for call in (hessian, prepare_hessian):
        with pytest.raises(NotImplementedError, match=message):
            call(f, drawn(3, 2), batched=batched)
    with pytest.raises(TypeError, match="f is an int; expected a function"):
        hessian(3, drawn(3))


@given(size=st.integers(1, 12), share=st.floats(0, 1), seed=st.integers(0, 2**31))
def test_star_colourings_separate_all_entries(size: int, share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrix = np.where(rng.random((size, size)) < share, rng.integers(1, 1000, (size, size)), 0)
    matrix = np.triu(matrix) + np.triu(matrix, 1).T
    places = np.argwhere(matrix)
    indptr = np.searchsorted(places[:, 0], np.arange(size + 1))
    colors = star_coloring(jacsparse.Pattern((size, size), indptr, places[:, 1]))
    seeds = colors.columns == np.arange(colors.counts[0])[:, None]
    products = (matrix @ seeds.T).T.reshape(-1)
    assert np.array_equal(products[colors.places], matrix[tuple(places.T)])


@pytest.mark.parametrize("size", [4, 40])
def test_star_colourings_take_few_colours(size: int) -> None:
    row, column = np.indices((size, size))
    arrow = (row == column) | (row == 0) | (column == 0)
    for matrix, expected in ((arrow, 2), (abs(row - column) <= 1, 3), (row == column, 1)):
        pattern = jacsparse.Pattern.from_scipy(scipy.sparse.csr_array(matrix.astype(np.float64)))
        assert star_coloring(pattern).counts == (expected, 0)


class Diffusion(nn.Module):
    """A conductivity for each place, and a rate."""

    def __init__(self) -> None:
        super().__init__()
        self.conductivity, self.rate = nn.Parameter(drawn(4)), nn.Parameter(drawn(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.conductivity * (x * x).diff(dim=1)).diff(dim=1) + self.rate * x[:, 1:-1].sin()


FUNCTIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]] = {
    "brusselator": (brusselator, (2, 2, 3)),
    "diffusion": (Diffusion(), (5,)),
    "arrow": (lambda x: torch.cat([(x**3).sum(1, keepdim=True), x[:, 1:] * x[:, :1].sin()], 1), (4,)),
    "in_place": (lambda x: x.clone().mul_(x).cumsum(1).exp_(), (3,)),
    "linear": (lambda x: x.flip(1) * 2.0, (3,)),
    "pooled": (lambda x: nn.functional.max_pool1d(x.sin()[:, None], 2), (4,)),
    "logarithms": (lambda x: x.logcumsumexp(1), (3,)),
    "constant": (lambda x: x.angle(), (3,)),
}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_with_gradients(name: str, batch: int) -> None:
    f, shape = FUNCTIONS[name]
    x = drawn(batch, *shape).requires_grad_()
    parameters = list(f.parameters()) if isinstance(f, nn.Module) else []
    plain, actual = jacsparse.jacobian(f, x, batched=True), jacsparse.jacobian(f, x, create_graph=True, batched=True)
    assert actual.pattern == plain.pattern and not plain.values.requires_grad
    assert (actual.values - plain.values).abs().amax() <= BOUND * plain.values.abs().amax()

    def values(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return jacsparse.jacobian(f, x, create_graph=True, batched=True).values

    # The second derivative of logcumsumexp's backward is NaN in PyTorch.
    if actual.values.requires_grad and name not in ("linear", "logarithms"):
        assert torch.autograd.gradcheck(values, (x, *parameters))


def test_gradients_of_arguments_without_samples() -> None:
    u, k = drawn(4).requires_grad_(), drawn(3, seed=1).requires_grad_()

    def values(u: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        f = lambda x: (k * (x["u"][1:] ** 2 * x["u"][:-1])).diff()  # noqa: E731
        return jacsparse.jacobian(f, {"u": u}, batched=False, create_graph=True).values

    assert torch.autograd.gradcheck(values, (u, k)) and torch.autograd.gradgradcheck(values, (u, k))
    weight = drawn(4).requires_grad_()
    (gradient,) = torch.autograd.grad(
        jacsparse.jacobian(lambda x: weight * x, drawn(3, 4), create_graph=True, batched=True).values.sum(), weight
    )
    assert torch.equal(gradient, torch.ones(4, dtype=FLOAT))


@pytest.mark.parametrize("pruned", [False, True])
def test_gradients_of_weights_that_are_zero(pruned: bool) -> None:
    weight, x = torch.diag(drawn(3)).requires_grad_(), drawn(2, 3)
    jacobian = jacsparse.jacobian(lambda x: x.sin() @ weight, x, pruned=pruned, create_graph=True, batched=True)
    (gradient,) = torch.autograd.grad(jacobian.values.sum(), weight)
    # An entry of the Jacobian is a weight times a cosine.
    assert (gradient - x.cos().sum(0)[:, None]).abs().amax() <= BOUND


def test_gradients_of_hessians() -> None:
    scale = drawn(5).requires_grad_()
    values = lambda x, s: hessian(lambda x: (s * (x[1:] * x[:-1]).exp()).sum(), x, create_graph=True).values  # noqa: E731
    assert torch.autograd.gradcheck(values, (drawn(6).requires_grad_(), scale))


def test_gradients_that_pytorch_lacks() -> None:
    f = lambda x: nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])  # noqa: E731
    with pytest.raises(RuntimeError, match=r"derivative for aten::.* is not implemented"):
        jacsparse.jacobian(f, drawn(1, 3, 2), create_graph=True, batched=True).values.sum().backward()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["rosenbrock", "linear", "springs"])
def test_without_gradients_enabled(name: str, method: str) -> None:
    f, x = SCALARS[name], drawn(2, 6, seed=1)
    with torch.no_grad():
        for _ in range(3):
            actual = computed(f, method, drawn(2, 6), x, batched=True)
            assert_hessian(actual, torch.stack([dense(f, sample) for sample in x]))
        hessian(nn.Linear(6, 1).double(), x, batched=True)
        hessian(lambda x: x.sort(1)[0][:, 0], x, batched=True)
