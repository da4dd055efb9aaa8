"""The order in which the matrices of a chain are multiplied."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from jacsparse.models import build, prune_weights
from jacsparse.spgemm import StripProduct
from torch import nn
from torch.nn.utils import prune

import jacsparse
from jacsparse.stages import COSTS, forward_pass, matrices
from jacsparse.stages.order import Order, best_order
from tests.helpers import autograd_jacobian, by_products


class Unit(nn.Module):
    """A residual unit, and one whose shortcut only moves data."""

    def __init__(self, channels: int, moves: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.Conv2d(channels, channels, 1)
        )
        self.moves = moves

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + (x.flip(1) if self.moves else x)


def network(wide_end: bool) -> nn.Module:
    """Few outputs, or more of them than inputs."""
    torch.manual_seed(3)
    parts = [nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), Unit(3, False), nn.MaxPool2d(2), Unit(3, True), nn.Tanh()]
    end = [nn.Upsample(scale_factor=4), nn.Conv2d(3, 2, 3)] if wide_end else [nn.Flatten(), nn.Linear(12, 2)]
    model = nn.Sequential(*parts, *end).double()
    prune_weights(model, 0.5)
    return model


#: The price of a dense backward that makes it free, fair or out of the question; and how full a full matrix is.
@pytest.mark.parametrize("dense", [0.0, 1 / 8, 1e9])
@pytest.mark.parametrize("full", [0.0, 0.3, 2.0])
@pytest.mark.parametrize("wide_end", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("most_stages", [0, 200])
def test_every_order_is_right(
    monkeypatch: pytest.MonkeyPatch, dense: float, full: float, wide_end: bool, batch: int, most_stages: int
) -> None:
    monkeypatch.setattr("jacsparse.stages.order.MOST_STAGES", most_stages)
    monkeypatch.setitem(COSTS, "cpu", replace(COSTS["cpu"], dense=dense))
    monkeypatch.setattr("jacsparse.stages.accumulation.FULL", full)
    monkeypatch.setattr("jacsparse.stages.matrices.LARGE_PRODUCT", 0)
    module, x = network(wide_end), torch.randn(batch, 2, 4, 4, dtype=torch.float64)
    actual = by_products(module, x)
    assert actual.batch == batch and actual.pattern == jacsparse.jacobian_pattern(module, (2, 4, 4))
    for number, sample in enumerate(x):
        expected = autograd_jacobian(module, sample)
        assert torch.allclose(actual.todense(number), expected, rtol=1e-10, atol=1e-13)
        inside = torch.from_numpy(actual.pattern.to_scipy().toarray())
        assert not expected[~inside].any()


def test_a_result_is_made_full_for_no_product() -> None:
    module = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)).double()
    prune_weights(module, 0.8)
    chain = jacsparse.chain(module, (4, 4, 4))
    pattern, last = chain.transposed_pattern, chain.accumulation.matrices[-1]
    assert math.prod(pattern.shape) > pattern.nnz > 0.3 * math.prod(pattern.shape)
    assert last.stored == pattern and chain.accumulation.result == len(chain.accumulation.matrices) - 1


@pytest.mark.parametrize("seed", range(6))
def test_every_way_through_a_chain_is_right(seed: int) -> None:
    """Orders that no cost would choose: each way to take each interval, drawn."""
    module, x = network(seed % 2 == 0), torch.randn(2, 2, 4, 4, dtype=torch.float64)
    chain, (_, records) = forward_pass(module, x)
    draw = np.random.default_rng(seed)

    def order(first: int, last: int) -> Order:
        if first == last:
            return Order("stage", first)
        how = draw.choice(["product", "through", "from", "backward"])
        if how == "product":
            middle = int(draw.integers(first, last))
            return Order("product", left=order(first, middle), right=order(middle + 1, last))
        if how == "from":
            return Order("from", last, left=order(first, last - 1))
        return Order(how, first, right=order(first + 1, last))

    chosen = order(0, len(chain) - 1)
    assert str(chosen).count("J") == len(chain)
    chain.__dict__["order"] = chosen
    actual = chain.products(records, x)
    assert actual.pattern == jacsparse.jacobian_pattern(module, (2, 4, 4))
    for number, sample in enumerate(x):
        assert torch.allclose(actual.todense(number), autograd_jacobian(module, sample), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_samples_one_by_one_have_the_bits_of_a_batch(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setitem(COSTS, "cpu", replace(COSTS["cpu"], dense=1e9))
    module, x = network(False).to(dtype), torch.randn(3, 2, 4, 4, dtype=dtype)
    at_once = by_products(module, x).values
    monkeypatch.setattr("jacsparse.stages.matrices.LARGE_PRODUCT", 0)
    assert torch.equal(by_products(module, x).values, at_once) and at_once.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [1, 3])
def test_last_products_by_strips_have_the_bits_of_whole_ones(
    monkeypatch: pytest.MonkeyPatch, batch: int, dtype: torch.dtype
) -> None:
    monkeypatch.setitem(COSTS, "cpu", replace(COSTS["cpu"], dense=1e9))
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 7, 3, padding=1), nn.ReLU(),
        nn.Conv2d(7, 8, 2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 67),
    ).to(dtype)  # fmt: skip
    for layer in (module[0], module[3], module[5]):
        prune.random_unstructured(layer, "weight", 0.8)
    x, multiplied, of_strips = torch.randn(batch, 2, 8, 8, dtype=dtype), list[bool](), StripProduct.multiply

    def multiply(product: StripProduct, *args: Any) -> bool:
        multiplied.append(of_strips(product, *args))
        return multiplied[-1]

    monkeypatch.setattr(StripProduct, "multiply", multiply)
    large = matrices.LARGE_PRODUCT
    for number in (1.0, math.inf):
        with torch.no_grad():
            layer = module[3]
            layer.weight_orig[tuple(layer.weight_mask.nonzero()[0])] = number
        results = []
        for least in (large, 0):
            monkeypatch.setattr(matrices, "LARGE_PRODUCT", least)
            results.append(by_products(module, x).values.nan_to_num(7.0))
        assert torch.equal(*results) and results[0].any()
    assert multiplied == [True] * batch + [False]


@pytest.mark.parametrize("most_stages", [0, 200])
def test_the_order_fits_the_shape(monkeypatch: pytest.MonkeyPatch, most_stages: int) -> None:
    monkeypatch.setattr("jacsparse.stages.order.MOST_STAGES", most_stages)
    torch.manual_seed(0)
    narrowing = nn.Sequential(*(nn.Linear(2 ** (9 - k), 2 ** (8 - k)) for k in range(5)))
    widening = nn.Sequential(*(nn.Linear(2 ** (4 + k), 2 ** (5 + k)) for k in range(5)))
    order = best_order(jacsparse.chain(narrowing, (512,)).stages, COSTS["cpu"])
    assert order.stage == 0 or (order.left is not None and order.left.stage == 0)
    order = best_order(jacsparse.chain(widening, (16,)).stages, COSTS["cpu"])
    assert order.how == "product" and order.right is not None and order.right.stage == 4


@pytest.mark.parametrize("most_stages", [0, 200])
def test_one_backward_pass_takes_all_that_it_can(monkeypatch: pytest.MonkeyPatch, most_stages: int) -> None:
    monkeypatch.setattr("jacsparse.stages.order.MOST_STAGES", most_stages)
    # Ending the pass early costs less for the last stages alone, more for all.
    order = best_order(jacsparse.chain(build("resnet8").eval(), (3, 32, 32)).stages, COSTS["cpu"])
    assert str(order) == "·".join([*(f"J{number}*" for number in range(1, 11)), "J11"])


def test_a_loop_of_many_steps() -> None:
    """An order is as deep as the chain is long: deeper than Python's calls may be."""
    matrices = [0.5 * torch.randn(3, 3, dtype=torch.float64) for _ in range(600)]

    def f(x: torch.Tensor) -> torch.Tensor:
        for matrix in matrices:
            x = (x @ matrix).sin()
        return x

    x = torch.randn(2, 3, dtype=torch.float64)
    jacobian = jacsparse.jacobian(f, x, batched=True)
    expected = torch.autograd.functional.jacobian(lambda x: f(x).sum(0), x).movedim(1, 0)
    for number, sample in enumerate(expected):
        assert torch.allclose(jacobian.todense(number), sample, rtol=1e-10, atol=0)
    chain = jacsparse.chain(nn.Sequential(*[nn.Tanh()] * 1200), (2,))
    assert str(chain.order).count("J") == len(chain) == 1200
    assert best_order(chain.stages, COSTS["cpu"]).cost == chain.order.cost
