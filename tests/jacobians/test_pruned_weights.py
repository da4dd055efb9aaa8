"""Prepared Jacobians of pruned networks: patterns leave out zeros of weights, which each call looks at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune

from jacsparse import PreparedJacobian, jacobian, prepare_hessian, prepare_jacobian
from jacsparse.jacobians.options import METHODS
from tests.helpers import BOUND, FLOAT, assert_equal, dense, drawn


def network(how: str) -> nn.Sequential:
    """Two layers, three quarters of whose weights are pruned by masks, or zero without one."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    for layer in (layers[0], layers[2]):
        if how == "masks":
            prune.random_unstructured(layer, "weight", 0.75)
        else:
            with torch.no_grad():
                layer.weight.mul_(torch.rand(layer.weight.shape) < 0.25)
    return layers


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 3, 2)).double()
    for layer in (layers[0], layers[3]):
        prune.random_unstructured(layer, "weight", 0.8)
    return layers


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("make", [lambda: network("masks"), lambda: network("zeros"), convolutions])
def test_patterns_leave_out_pruned_weights(make: Callable[[], nn.Sequential], method: str) -> None:
    layers = make()
    shape = (2, 6) if isinstance(layers[0], nn.Linear) else (2, 2, 4, 4)
    prepared, x = prepare_jacobian(layers, drawn(*shape), method=method), drawn(*shape, seed=1) - 1
    assert prepared.pattern == jacobian(layers, x).pattern
    assert_equal(prepared(x), dense(layers, x))
    # Weights that train stay where they are.
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.mul_(-1.5)
    assert_equal(prepared(x), dense(layers, x))
    everything = prepare_jacobian(layers, drawn(*shape), method=method, pruned=False)
    assert everything.pattern.nnz > prepared.pattern.nnz
    assert_equal(everything(x), dense(layers, x))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("how", ["masks", "zeros"])
def test_weights_that_are_filled(how: str, method: str) -> None:
    layers, x = network(how), drawn(2, 6)
    prepared = prepare_jacobian(layers, x, method=method)
    whole = prepare_jacobian(layers, x, method=method, pruned=False)
    place = (layers[2].weight == 0).nonzero()[0].tolist()
    with torch.no_grad():
        # Without a new version of the tensor.
        (layers[2].weight_mask if how == "masks" else layers[2].weight).data[tuple(place)] = 1.0
    name = r"2\.weight_orig and 2\.weight_mask|2\.weight_mask and 2\.weight_orig" if how == "masks" else r"2\.weight"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"^Sequential: ({name}) was zero where .* pass pruned=False"):
            prepared(x)
    assert_equal(whole(x), dense(layers, x))
    assert_equal(jacobian(layers, x), dense(layers, x))
    assert_equal(prepare_jacobian(layers, x, method=method)(x), dense(layers, x))


def test_weights_are_no_constants() -> None:
    """An element that is left is read at each call, also where entries fold into terms."""
    weight = torch.tensor([[2.0, 0.0], [0.0, 3.0]], dtype=FLOAT)
    f = lambda x: (x @ weight).sin()  # noqa: E731
    prepared = prepare_jacobian(f, drawn(2), batched=False, method="products")
    assert prepared.pattern.nnz == 2
    weight.mul_(2)
    assert_equal(prepared(drawn(2)), dense(f, drawn(2), batched=False))
    weight[0, 1] = 1.0
    with pytest.raises(RuntimeError, match=r"a tensor of shape \(2, 2\) was zero"):
        prepared(drawn(2))


def test_arguments_are_not_pruned() -> None:
    """An object may be prepared with zeros in the place of what comes later."""
    f = lambda x, a: (x @ a).sin()  # noqa: E731
    prepared, a = prepare_jacobian(f, drawn(2), torch.zeros(2, 2, dtype=FLOAT), batched=False), drawn(2, 2)
    assert_equal(prepared(drawn(2), a), dense(f, drawn(2), a, batched=False))


def test_selections_by_what_varies_are_not_pruned() -> None:
    threshold = torch.zeros((), dtype=FLOAT)
    places = torch.linspace(-1, 1, 4, dtype=FLOAT)
    f = lambda x: torch.where(places > threshold, x**2, x.flip(0))  # noqa: E731
    prepared = prepare_jacobian(f, drawn(4), batched=False)
    for value in (0.0, 0.5, -2.0):
        threshold.fill_(value)
        assert_equal(prepared(drawn(4)), dense(f, drawn(4), batched=False))


def test_several_weights_and_a_scale() -> None:
    weight, scale = drawn(3, 3).tril().requires_grad_(), drawn(1)
    f = lambda x: functional.linear(x, weight * scale) @ weight.T  # noqa: E731
    prepared = prepare_jacobian(f, drawn(2, 3), batched=True)
    scale.mul_(3)
    assert_equal(prepared(drawn(2, 3)), dense(f, drawn(2, 3)))
    with torch.no_grad():
        weight[0, 2] = 1.0
    with pytest.raises(RuntimeError, match="was zero where"):
        prepared(drawn(2, 3))


@pytest.mark.parametrize("method", ["products", "compressed"])
def test_saved_and_loaded(method: str, tmp_path: Path) -> None:
    layers, x, path = network("zeros"), drawn(2, 6), tmp_path / "network.npz"
    prepare_jacobian(layers, x, method=method).save(path)
    assert_equal(PreparedJacobian.load(path, layers, x)(x), dense(layers, x))
    with torch.no_grad():
        layers[0].weight[(layers[0].weight == 0)] = 0.1
    with pytest.raises(ValueError, match="is not of this function"):
        PreparedJacobian.load(path, layers, x)


@pytest.mark.parametrize("method", METHODS)
def test_hessians(method: str) -> None:
    layers, x = nn.Sequential(*network("masks"), nn.Linear(5, 1, dtype=FLOAT)), drawn(2, 6)
    f = lambda x: layers(x)[..., 0].exp()  # noqa: E731
    prepared = prepare_hessian(f, x, batched=True, method=method)
    expected = torch.stack([torch.func.hessian(lambda t: f(t[None])[0])(sample) for sample in x])
    actual = torch.stack([prepared(x).todense(sample) for sample in range(2)])
    assert (actual - expected).abs().amax() <= BOUND * max(1.0, expected.abs().amax().item())
