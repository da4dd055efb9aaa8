"""Whole Jacobians: every order of products, full and sparse, and what a SparseJacobian can do."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jacsparse.models import build, prune_weights
from jacsparse.patterns import Blocks, Convolution, Csr, Diagonal, Full, Pattern, Pooling, Sliding
from jacsparse.spgemm import product_pattern
from jacsparse.spgemm._estimate import KEYS, counts, fresh_keys, least
from torch import nn

import jacsparse
from jacsparse import _accumulation, _order
from jacsparse._chain import Chains
from tests.helpers import autograd_jacobian, random_pattern


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
def test_every_order_is_right(
    monkeypatch: pytest.MonkeyPatch, dense: float, full: float, wide_end: bool, batch: int
) -> None:
    monkeypatch.setattr(_order, "DENSE", dense)
    monkeypatch.setattr(_accumulation, "FULL", full)
    module, x = network(wide_end), torch.randn(batch, 2, 4, 4, dtype=torch.float64)
    found = jacsparse.jacobian(module, x)
    assert found.batch == batch and found.pattern == jacsparse.jacobian_pattern(module, (2, 4, 4))
    for number, sample in enumerate(x):
        expected = autograd_jacobian(module, sample)
        assert torch.allclose(found.todense(number), expected, rtol=1e-10, atol=1e-13)
        inside = torch.from_numpy(found.pattern.to_scipy().toarray())
        assert not expected[~inside].any()


@pytest.mark.parametrize("seed", range(6))
def test_every_way_through_a_chain_is_right(seed: int) -> None:
    """Orders that no cost would choose: each way to take each interval, drawn."""
    module, x = network(seed % 2 == 0), torch.randn(2, 2, 4, 4, dtype=torch.float64)
    chain, (_, records) = Chains(module).of(x)
    draw = np.random.default_rng(seed)

    def order(first: int, last: int) -> _order.Order:
        if first == last:
            return _order.Order("stage", first)
        how = draw.choice(["product", "through", "from", "backward"])
        if how == "product":
            middle = int(draw.integers(first, last))
            return _order.Order("product", left=order(first, middle), right=order(middle + 1, last))
        if how == "from":
            return _order.Order("from", last, left=order(first, last - 1))
        return _order.Order(how, first, right=order(first + 1, last))

    chosen = order(0, len(chain) - 1)
    assert str(chosen).count("J") == len(chain)
    chain.__dict__["order"] = chosen
    found = chain.jacobian(records, x)
    assert found.pattern == jacsparse.jacobian_pattern(module, (2, 4, 4))
    for number, sample in enumerate(x):
        assert torch.allclose(found.todense(number), autograd_jacobian(module, sample), rtol=1e-10, atol=1e-13)


def test_the_order_fits_the_shape() -> None:
    torch.manual_seed(0)
    narrowing = nn.Sequential(*(nn.Linear(2 ** (9 - k), 2 ** (8 - k)) for k in range(5)))
    widening = nn.Sequential(*(nn.Linear(2 ** (4 + k), 2 ** (5 + k)) for k in range(5)))
    order = _order.best_order(jacsparse.chain(narrowing, (512,)).stages)
    assert order.stage == 0 or (order.left is not None and order.left.stage == 0)
    order = _order.best_order(jacsparse.chain(widening, (16,)).stages)
    assert order.how == "product" and order.right is not None and order.right.stage == 4


def test_one_backward_pass_takes_all_that_it_can() -> None:
    # Ending the pass early costs less for the last stages alone, more for all.
    order = _order.best_order(jacsparse.chain(build("resnet8").eval(), (3, 32, 32)).stages)
    assert str(order) == "·".join([*(f"J{number}*" for number in range(1, 11)), "J11"])


def test_an_order_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JACSPARSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("JACSPARSE_CACHE_MIB", "1")
    monkeypatch.setattr("jacsparse.patterns._store.SLOW", 0.0)
    monkeypatch.setattr("jacsparse.patterns._store.READ", 1e12)
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), Unit(3, moves=False), nn.Conv2d(3, 2, 3, padding=1))

    def stages(module: nn.Module = module, size: int = 6) -> tuple[jacsparse.Stage, ...]:
        return jacsparse.chain(module, (2, size, size)).stages

    first = _order.best_order(stages())
    with monkeypatch.context() as patched:
        patched.setattr(_order, "_cheapest", lambda _: pytest.fail("worked out again"))
        assert _order.best_order(stages()) == first
        for other in (stages(size=7), stages(nn.Sequential(*module, nn.ReLU()))):
            with pytest.raises(pytest.fail.Exception):
                _order.best_order(other)


def test_pruned_vgg_11_equals_autograd() -> None:
    model = build("vgg11").eval()
    prune_weights(model, 0.97)
    x = torch.randn(1, 3, 32, 32)
    found = jacsparse.jacobian(model.features, x)
    assert found.shape == (512, 3072)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        gradient = torch.randn(1, 512, generator=generator)
        given = x.clone().requires_grad_()
        (expected,) = torch.autograd.grad(model.features(given), given, gradient.reshape(1, 512, 1, 1))
        assert (found.vjp(gradient) - expected.flatten(1)).abs().max() < 1e-5 * expected.abs().max()


# The estimates.


@given(st.lists(st.tuples(st.integers(5, 60), st.floats(0.02, 0.5)), min_size=2, max_size=4), st.integers(0, 2**31))
@settings(max_examples=40)
def test_estimated_counts_are_near_the_true_ones(sizes: list[tuple[int, float]], seed: int) -> None:
    torch.manual_seed(seed)
    patterns = [random_pattern(a, b, density, seed + a) for (a, density), (b, _) in pairwise(sizes)]
    product = patterns[0]
    for pattern in patterns[1:]:
        product = product_pattern(product, pattern)
    estimates = []
    for draw in range(24):
        keys = fresh_keys(product.shape[1], draw)
        for pattern in reversed(patterns):
            keys = least(pattern, keys)
        estimates.append(counts(keys, np.array([product.shape[1]]))[:, 0])
    found, true = np.mean(estimates, axis=0), product.structure.row_counts()
    assert ((found == 0) == (true == 0)).all()
    # The share of a row's error that is left after as many draws, five times over.
    assert (np.abs(found - true) <= 1 + 5 * true / math.sqrt(24 * (KEYS - 2))).all()


STRUCTURES = {
    "full": Full(5, 7),
    "blocks": Blocks(3, 4, 2, 5),
    "empty": Blocks(2, 3, 0, 4),
    "diagonal": Diagonal(6),
    "linear": Convolution(6, 4, 1, ()),
    "convolution": Convolution(6, 4, 1, (Sliding(7, 3, stride=2, before=1, after=1), Sliding(5, 2, dilation=2))),
    "grouped": Convolution(6, 4, 2, (Sliding(7, 3, before=4, after=0),)),
    "pruned": Convolution(2, 2, 1, (Sliding(5, 3),), np.packbits([1, 0, 0] * 4).tobytes()),
    "pooling": Pooling(3, (Sliding(6, 2, stride=2), Sliding(5, 3)), selects=True),
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", STRUCTURES)
def test_least_keys_of_a_structure_are_those_of_its_entries(name: str, transposed: bool) -> None:
    pattern = Pattern.of(STRUCTURES[name].T if transposed else STRUCTURES[name])
    keys = fresh_keys(pattern.shape[1], 3)
    expected = np.full((pattern.shape[0], KEYS), np.inf, dtype=np.float32)
    np.minimum.at(expected, pattern.rows, keys[pattern.indices])
    assert np.array_equal(least(pattern, keys), expected)


def test_packed_rows_give_the_same_pattern() -> None:
    rng = np.random.default_rng(0)
    for rows, inner, columns, density in ((7, 9, 64, 0.5), (5, 3, 130, 0.9), (40, 30, 70, 0.2), (3, 4, 1, 1.0)):
        left, right = (
            random_pattern(rows, inner, 0.4, 1),
            random_pattern(inner, columns, density, rng),
        )
        expected = Pattern.from_scipy(left.to_scipy().astype(int) @ right.to_scipy().astype(int))
        assert product_pattern(left, right) == expected


# Full results, and zeros of a factor that need not be looked at.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_left_out_zeros_change_no_bit(dtype: torch.dtype) -> None:
    left = random_pattern(30, 40, 0.3, 1)
    full = Pattern.of(Full(40, 50))
    plan = jacsparse.plan_product(left, full, method="dense")
    a, b = torch.randn(left.nnz, dtype=dtype), torch.randn(40 * 50, dtype=dtype)
    a[::3], b.view(40, 50)[::2] = 0, 0
    sums = torch.zeros(30, 50, dtype=dtype)
    for row in range(30):
        for entry in range(left.indptr[row], left.indptr[row + 1]):
            sums[row] += a[entry] * b.view(40, 50)[left.indices[entry]]
    assert torch.equal(plan.multiply(a, b), sums[left.structure.row_counts() > 0].flatten())
    b[0] = math.inf
    found, lanes = plan.multiply(a, b), plan.multiply(a[:, None].expand(-1, 4), b[:, None].expand(-1, 4))
    assert torch.equal(found.isnan(), lanes[:, 0].isnan()) and bool(found.isnan().any())


def test_sums_of_patterns() -> None:
    matrices = [random_pattern(6, 7, density, seed) for seed, density in enumerate((0.2, 0.4, 0.0))]
    plan = jacsparse.plan_sum(matrices)
    values = [torch.randn(matrix.nnz, 3, dtype=torch.float64) for matrix in matrices]
    expected = sum(
        torch.from_numpy(matrix.to_scipy(own[:, 1].numpy()).toarray())
        for matrix, own in zip(matrices, values, strict=True)
    )
    found = torch.from_numpy(plan.pattern.to_scipy(plan.add(values)[:, 1].numpy()).toarray())
    assert torch.equal(found, expected) and "3 terms" in repr(plan)
    shared = plan.add([values[0], values[1][:, :1].contiguous(), values[2]])
    assert shared.shape == (plan.pattern.nnz, 3)
    assert isinstance(jacsparse.plan_sum([matrices[0], Pattern.of(Full(6, 7))]).pattern.structure, Full)
    assert isinstance(plan.pattern.structure, Csr)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda plan: jacsparse.plan_sum([]), ValueError, "terms is empty"),
        (lambda plan: jacsparse.plan_sum([3]), TypeError, r"terms\[0\] is a int"),
        (
            lambda plan: jacsparse.plan_sum([Pattern.of(Full(1, 2)), Pattern.of(Full(2, 1))]),
            ValueError,
            "they must agree",
        ),
        (lambda plan: plan.add([np.ones(2)]), ValueError, "values holds 1 arrays for 2 terms"),
        (lambda plan: plan.add([np.ones(2), np.ones(3)]), ValueError, r"values\[1\] has shape \(3,\)"),
        (lambda plan: plan.add([np.ones(2), np.ones(2, dtype=np.float32)]), TypeError, r"values\[1\] is float32"),
        (lambda plan: plan.add([np.ones((2, 2)), np.ones((2, 3))]), ValueError, "a batch of 2"),
    ],
)
def test_bad_sums(call: Callable[[object], object], error: type[Exception], message: str) -> None:
    plan = jacsparse.plan_sum([Pattern.of(Full(1, 2)), Pattern.of(Full(1, 2))])
    with pytest.raises(error, match=message):
        call(plan)


def test_a_hook_on_the_input_is_not_the_models() -> None:
    module = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 2)
    )
    x = torch.randn(1, 1, 6, 6, requires_grad=True)
    expected = jacsparse.jacobian(module, x).todense(0)
    x.register_hook(lambda gradient: 2 * gradient)
    assert torch.equal(jacsparse.jacobian(module, x).todense(0), expected)
