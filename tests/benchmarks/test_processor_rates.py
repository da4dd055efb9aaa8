"""What a sparse kernel is said to do, beside PyTorch's convolution of ones and the lines that it must touch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from benchmarks import _processor_rates
from benchmarks._processor_rates import LINE, Cache, Work
from jacsparse.nn import SparseConv2d

LANES = 16


def sparse(layer: nn.Conv2d, share: float) -> SparseConv2d:
    return SparseConv2d.from_dense(layer, torch.rand(layer.weight.shape) < share)


def outputs(layer: SparseConv2d, size: tuple[int, int]) -> torch.Tensor:
    return torch.zeros(2, layer.out_channels, *layer.out_size(size), LANES)


@pytest.mark.parametrize("size", [(8, 8), (5, 7), (4, 4), (2, 2), (16, 16)])
@pytest.mark.parametrize("stride", [1, 2])
def test_loads_are_the_multiplications_that_meet_no_border(size: tuple[int, int], stride: int) -> None:
    torch.manual_seed(0)
    layer = sparse(nn.Conv2d(5, 7, 3, stride, padding=1), 0.4)
    work = Work.of(layer._convolution(size, LANES).forward, outputs(layer, size))
    products = nn.functional.conv2d(torch.ones(2, 5, *size), layer.mask.float(), stride=stride, padding=1).sum()
    assert work.loads == int(products)


def test_a_large_cache_lacks_each_line_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, size = sparse(nn.Conv2d(5, 7, 3, padding=1), 1.0), (8, 8)
    correlation, y = layer._convolution(size, LANES).forward, outputs(layer, size)
    small = Work.of(correlation, y)
    monkeypatch.setattr(Cache, "of_level", lambda _: Cache(2**24, 16))
    large = Work.of(correlation, y)
    of_weights = 2 * math.ceil(4 * len(layer.values) / LINE)
    assert large.misses == 2 * (5 * 64 + of_weights) + y.numel() // LANES
    assert large[:2] == small[:2] and large.misses <= small.misses


def test_a_cache_of_one_line_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, size = sparse(nn.Conv2d(2, 3, 1), 1.0), (2, 2)
    monkeypatch.setattr(_processor_rates.Cache, "of_level", lambda _: Cache(LINE, 1))
    work = Work.of(layer._convolution(size, LANES).forward, outputs(layer, size))
    assert work.misses == work.loads + 2 * work.weights + outputs(layer, size).numel() // LANES
