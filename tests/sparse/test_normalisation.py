"""Batch normalisation by a batch's own statistics, between sparse layers, against PyTorch's on tensors."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from jacsparse.sparse import freeze, sparsify
from jacsparse.sparse.layouts import enter, leave
from jacsparse.sparse.processor import lanes_for

from ..helpers import close
from .test_sparsify import pruned


class Normalising(nn.Module):
    """A sparse convolution, batch normalisation, and what may follow it."""

    def __init__(self, channels: int, norm: nn.Module, summand: str, relu: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.summand, self.relu = nn.Conv2d(3, channels, 1), norm, summand, relu
        self.other, self.other_norm = nn.Conv2d(3, channels, 1), copy.deepcopy(norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x))
        if self.summand == "left":
            y = self.other(x) + y
        elif self.summand == "in place":
            y += self.other(x)
        elif self.summand == "both":
            y = y + self.other_norm(self.other(x))
        elif self.summand == "itself":
            y = y + y
        return torch.relu(y) if self.relu else y


def results(model: nn.Module, x: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    """The output, the gradient of the input and those of the normalisation's parameters, and its statistics."""
    x = x.clone().requires_grad_()
    y = model(x)
    (y * weights).sum().backward()
    norm = model.norm
    return [y.detach(), x.grad, *[each.grad for each in norm.parameters()], *norm.buffers()]


@settings(max_examples=60)
@given(
    batch=st.integers(1, 40),
    channels=st.integers(1, 5),
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    options=st.fixed_dictionaries(
        {
            "affine": st.booleans(),
            "track_running_stats": st.booleans(),
            "momentum": st.sampled_from([0.1, 1.0, None]),
            "eps": st.sampled_from([1e-5, 1e-2]),
        }
    ),
    summand=st.sampled_from(["none", "left", "in place", "both", "itself"]),
    relu=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_drawn_normalisations(batch, channels, size, dtype, options, summand, relu, seed) -> None:
    torch.manual_seed(seed)
    # Of few elements, some are alike by chance, and their gradients are rounding alone.
    batch += 3 if size[0] * size[1] < 4 else 0
    # Rounding of float32 moves elements across zero.
    relu = relu and dtype is torch.float64
    norm = nn.BatchNorm2d(channels, **options)
    if options["affine"]:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    model = pruned(Normalising(channels, norm, summand, relu), 0.8).train()
    x, weights = torch.randn(batch, 3, *size).double() + 4, torch.randn(batch, channels, *size).double()
    sparse = sparsify(model, x, measure=False).model.to(dtype)
    expected, (y, of_x, *others) = results(model, x, weights), results(sparse, x.to(dtype), weights.to(dtype))
    tolerance = 1e-10 if dtype is torch.float64 else 1e-3
    assert y.dtype is of_x.dtype is dtype
    for actual, right in zip((y, of_x, *others), expected, strict=True):
        assert actual.shape == right.shape
        assert (actual - right).abs().max() <= tolerance * max(1, right.abs().max())


@pytest.mark.parametrize("batch", [16, 19])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_float32_is_as_exact_as_pytorch(batch: int, offset: float) -> None:
    x, weights = torch.randn(batch, 3, 40, 40) + offset, torch.randn(batch, 3, 40, 40)
    lanes = lanes_for(batch, 4)

    def computed(in_blocks: bool, dtype: torch.dtype) -> list[torch.Tensor]:
        leaf = x.to(dtype).requires_grad_()
        mean, variance, scale, shift = (torch.full((3,), each, dtype=dtype) for each in (0.0, 1.0, 1.5, 0.5))
        parameters = [scale.requires_grad_(), shift.requires_grad_()]
        inputs = enter(leaf, lanes) if in_blocks else leaf
        y = functional.batch_norm(inputs, mean, variance, *parameters, training=True)
        y = leave(y) if in_blocks else y
        (y * weights.to(dtype)).sum().backward()
        tensors = [y.detach(), leaf.grad, *[each.grad for each in parameters], mean, variance]
        return [each.double() for each in tensors]

    expected = computed(False, torch.float64)
    for ours, right, theirs in zip(
        computed(True, torch.float32), expected, computed(False, torch.float32), strict=True
    ):
        ours, theirs = ((each - right).abs().max() for each in (ours, theirs))
        # Elements deviate from their mean by about 1.
        assert ours <= 2 * theirs + 1e-6 * max(1, right.abs().max())


@pytest.mark.parametrize("summand", ["none", "left"])
def test_second_derivatives(summand: str) -> None:
    model = pruned(Normalising(2, nn.BatchNorm2d(2, track_running_stats=False), summand, True), 0.9)
    x = torch.randn(3, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    sparse = sparsify(model, x, measure=False)
    assert torch.autograd.gradgradcheck(lambda x, *parameters: sparse(x), (x, *sparse.parameters()))


def test_bits_of_any_number_of_threads() -> None:
    model = pruned(Normalising(24, nn.BatchNorm2d(24), "left", True), 0.5)
    x, weights = torch.randn(21, 3, 30, 31).double(), torch.randn(21, 24, 30, 31).double()
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 8):
            torch.set_num_threads(threads)
            sparse = sparsify(model, x, measure=False).model
            found.append(results(sparse, x, weights))
    finally:
        torch.set_num_threads(before)
    for each in found[1:]:
        assert all(map(torch.equal, each, found[0]))


def test_one_value_of_a_channel_is_refused_as_by_pytorch() -> None:
    model = pruned(Normalising(2, nn.BatchNorm2d(2), "none", True))
    x = torch.randn(1, 3, 1, 1, dtype=torch.float64)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        sparsify(model, torch.cat([x, x]), measure=False)(x)


def test_numbers_that_are_none_stay_in_their_channel() -> None:
    model = pruned(Normalising(2, nn.BatchNorm2d(2), "none", True), 0.7)
    sparse = sparsify(model, torch.zeros(2, 3, 2, 2).double(), measure=False)
    with torch.no_grad():
        sparse.model.conv.bias[0] = torch.nan
    y = sparse(torch.randn(2, 3, 2, 2).double())
    assert y[:, 0].isnan().all() and not y[:, 1].isnan().any()


def test_frozen_by_its_own_statistics() -> None:
    model = pruned(Normalising(4, nn.BatchNorm2d(4, track_running_stats=False), "left", True)).eval()
    x = torch.randn(5, 3, 4, 4).double()
    sparse = sparsify(model, x, measure=False)
    frozen, other = freeze(sparse, x), torch.randn(5, 3, 4, 4).double()
    close(frozen(other), model(other).detach(), 1e-12)
