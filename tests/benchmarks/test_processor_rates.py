"""What a sparse kernel is said to do, beside a count position by position."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from benchmarks import sparse_kernels
from benchmarks._context import Context
from benchmarks._processor_rates import Rates, moved


@pytest.mark.parametrize("size", [(8, 8), (5, 7), (4, 4), (2, 2), (16, 16)])
@pytest.mark.parametrize("stride", [1, 2])
def test_loads_are_the_multiplications_that_meet_no_border(size: tuple[int, int], stride: int) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(5, 7, 3, stride, padding=1)
    prune.random_unstructured(layer, "weight", 0.6)
    (of_layer,) = sparse_kernels._layers(nn.Sequential(layer, nn.ReLU()), torch.randn(1, 5, *size), 3)
    positions = itertools.product(*(range(0, end, stride) for end in size))
    places = [(row + dy - 1, column + dx - 1, dy, dx)
              for row, column in positions for dy in range(3) for dx in range(3)]  # fmt: skip
    inside = [(dy, dx) for row, column, dy, dx in places if 0 <= row < size[0] and 0 <= column < size[1]]
    met = sum(int(layer.weight_mask[:, :, dy, dx].sum()) for dy, dx in inside)
    assert of_layer.products == len(of_layer.x) * met and met > 0


@pytest.mark.parametrize("elements", [0, 3, 255, 256, 5000])
def test_tensors_of_any_size_are_read_and_filled(elements: int) -> None:
    written = torch.ones(elements)
    moved((torch.ones(elements),), (written,), Rates(1.0, 1.0, width=64, threads=64))()
    assert not written.any()


def test_without_limits_there_are_no_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory() -> None:
        raise MemoryError("too little")

    monkeypatch.setattr(sparse_kernels, "moved", lambda *_: no_memory)
    network = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU())
    experiment = sparse_kernels.SparseKernels(build=lambda: network, input_shape=(2, 4, 4), batches=(3,))
    rows = experiment.run(Context(seconds=0.01, rounds=1))
    assert all(row.median and row.floor is None for row in rows)
