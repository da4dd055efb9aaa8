"""Sums of a sparse convolution and another activation, as of residual blocks, against PyTorch's on tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from jacsparse.sparse import freeze, sparsify
from jacsparse.sparse.convolution import Correlation

from ..helpers import close
from .test_sparsify import pruned

SUMMANDS = ("right", "left", "in place", "both", "itself", "input", "three", "twice", "after ReLU", "scaled", "view")
AFTERWARDS = ("nothing", "relu", "relu in place", "pool", "norm", "relu and pool", "read before")


class Sum(nn.Module):
    """A convolution's output plus something, and what follows."""

    def __init__(self, channels: int, kernel: int, stride: int, summand: str, afterwards: str) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(channels, channels, kernel, stride, padding=kernel // 2, bias=bias) for bias in (True, False)
        )
        self.norm, self.summand, self.afterwards = nn.BatchNorm2d(channels), summand, afterwards

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, other = self.first(x), self.second(x)
        before = y.relu() if self.afterwards == "read before" else None
        if self.summand == "right":
            y = y + other.sigmoid()
        elif self.summand == "left":
            y = other.sigmoid() + y
        elif self.summand == "in place":
            y += other.sigmoid()
        elif self.summand == "both":
            y = y + other
        elif self.summand == "itself":
            y = y + y
        elif self.summand == "input":
            y = y + (x if x.shape == y.shape else other)
        elif self.summand == "three":
            y = torch.tanh(other) + y + other
        elif self.summand == "twice":
            y, other = y + other, y
            y = y + other
        elif self.summand == "after ReLU":
            y = y.relu() + other
        elif self.summand == "scaled":
            y = torch.add(y, other, alpha=2)
        else:
            y = y.flatten(1) + other.flatten(1)
            y = y.view(other.shape)
        return self.after(y) if before is None else self.after(y) + before

    def after(self, y: torch.Tensor) -> torch.Tensor:
        if self.afterwards == "relu in place":
            return functional.relu(y, inplace=True)
        if "pool" in self.afterwards:
            return functional.max_pool2d(y.relu() if "relu" in self.afterwards else y, 2, ceil_mode=True)
        return {"relu": torch.relu, "norm": self.norm}.get(self.afterwards, nn.Identity())(y)


def near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Assert that numbers of size one or more are equal; normalised ones may be rounding alone."""
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * max(1, expected.abs().max())


@settings(max_examples=80)
@given(
    batch=st.sampled_from([1, 2, 8, 15, 16, 17, 33]),
    channels=st.integers(1, 4),
    size=st.tuples(st.integers(1, 9), st.integers(1, 20)),
    window=st.sampled_from([(1, 1), (3, 1), (3, 2), (5, 1), (1, 2)]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    summand=st.sampled_from(SUMMANDS),
    afterwards=st.sampled_from(AFTERWARDS),
    training=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_drawn_sums(batch, channels, size, window, dtype, summand, afterwards, training, seed) -> None:
    torch.manual_seed(seed)
    # A channel of a single number has no statistics; rounding of float32 moves elements across zero.
    training = training and batch > 1
    dtype = torch.float64 if training else dtype
    model = pruned(Sum(channels, *window, summand, afterwards), 0.6).train(training)
    model.norm.running_mean.normal_()
    x = torch.randn(batch, channels, *size, dtype=torch.float64)
    sparse = sparsify(model, x, measure=False).model.to(dtype)
    tolerance = 1e-12 if dtype is torch.float64 else 1e-5
    with torch.no_grad():
        near(sparse(x.to(dtype)).double(), model(x), tolerance)
    if dtype is torch.float64:
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        outputs = [each(given) for each, given in zip((model, sparse), inputs, strict=True)]
        weights = torch.randn(outputs[0].shape, dtype=torch.float64)
        expected, actual = (
            torch.autograd.grad((y * weights).sum(), (given, each.first.bias), allow_unused=True)
            for y, given, each in zip(outputs, inputs, (model, sparse), strict=True)
        )
        for ours, theirs in zip((outputs[1], *actual), (outputs[0], *expected), strict=True):
            near(ours, theirs, 1e-10)


@pytest.mark.parametrize("summand", ["right", "both", "input"])
def test_second_derivatives(summand: str) -> None:
    model = pruned(Sum(2, 3, 1, summand, "relu"), 0.9)
    x = torch.randn(3, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    sparse = sparsify(model, x, measure=False)
    assert torch.autograd.gradgradcheck(lambda x, *parameters: sparse(x), (x, *sparse.model.parameters()))


@pytest.mark.parametrize("batch", [1, 5])
def test_a_sum_and_its_relu_are_part_of_the_kernel(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = pruned(Sum(4, 3, 1, "both", "relu"), 0.5).eval(), torch.randn(batch, 4, 6, 6, dtype=torch.float64)
    sparse, added = sparsify(model, x, measure=False), []
    run = Correlation.__call__
    monkeypatch.setattr(
        Correlation,
        "__call__",
        lambda self, x, values, bias, floor, other: (
            added.append(other is not None and floor == 0) or run(self, x, values, bias, floor, other)
        ),
    )
    with torch.no_grad():
        close(sparse(x), model(x), 1e-12)
    assert added == [False, True]
    frozen, other = freeze(sparse, x), torch.randn(batch, 4, 6, 6, dtype=torch.float64)
    close(frozen(other), model(other).detach(), 1e-12)


def test_numbers_that_are_none_pass() -> None:
    model = pruned(Sum(2, 3, 1, "input", "relu"), 0.9).eval()
    x = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    x[1, 0, 2, 2] = torch.nan
    sparse = sparsify(model, torch.randn_like(x), measure=False)
    with torch.no_grad():
        actual, expected = sparse(x), model(x)
    # A dense layer's pruned weights make more of them.
    assert not (actual.isnan() & ~expected.isnan()).any() and actual[1, 0, 2, 2].isnan()
    assert torch.equal(actual[[0, 2]].isnan(), expected[[0, 2]].isnan())
