"""What a sparse kernel is said to do, beside PyTorch's convolution of ones and the lines that it must touch."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import _processor_rates, sparse_kernels
from benchmarks._context import Context
from benchmarks._processor_rates import Cache, KernelWork, Rates, moved
from jacsparse.nn import SparseConv2d

LANES, LINE = 16, 64


def sparse(layer: nn.Conv2d, share: float) -> SparseConv2d:
    return SparseConv2d.from_dense(layer, torch.rand(layer.weight.shape) < share)


def outputs(layer: SparseConv2d, size: tuple[int, int]) -> torch.Tensor:
    return torch.zeros(2, layer.out_channels, *layer.out_size(size), LANES)


@pytest.mark.parametrize("size", [(8, 8), (5, 7), (4, 4), (2, 2), (16, 16)])
@pytest.mark.parametrize("stride", [1, 2])
def test_loads_are_the_multiplications_that_meet_no_border(size: tuple[int, int], stride: int) -> None:
    torch.manual_seed(0)
    layer = sparse(nn.Conv2d(5, 7, 3, stride, padding=1), 0.4)
    work = KernelWork.of(layer._convolution(size, LANES).forward, outputs(layer, size))
    products = nn.functional.conv2d(torch.ones(2, 5, *size), layer.mask.float(), stride=stride, padding=1).sum()
    assert work.loads == int(products)


def test_a_large_cache_lacks_each_line_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, size = sparse(nn.Conv2d(5, 7, 3, padding=1), 1.0), (8, 8)
    correlation, y = layer._convolution(size, LANES).forward, outputs(layer, size)
    small = KernelWork.of(correlation, y)
    monkeypatch.setattr(Cache, "of_level", lambda _: Cache(2**24, 16))
    large, places = KernelWork.of(correlation, y), torch.randperm(len(layer.values))
    both = KernelWork.of(correlation, y, order=places)
    of_weights = 2 * math.ceil(4 * len(layer.values) / LINE)
    of_y = y.numel() // LANES
    assert large.missed == LINE * (2 * (5 * 64 + of_weights) + of_y)
    assert both.missed == LINE * (2 * (5 * 64 + 2 * of_weights) + 2 * of_y)
    assert large[:2] == small[:2] == both[:2] and large.missed <= small.missed


def test_a_cache_of_one_line_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, size = sparse(nn.Conv2d(2, 3, 1), 1.0), (2, 2)
    monkeypatch.setattr(_processor_rates.Cache, "of_level", lambda _: Cache(LINE, 1))
    work = KernelWork.of(layer._convolution(size, LANES).forward, outputs(layer, size))
    assert work.missed == LINE * (work.loads + 2 * work.weights + outputs(layer, size).numel() // LANES)


@pytest.mark.parametrize("missing", ["", "ways_of_associativity"])
def test_caches_as_linux_tells_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    told = {"level": "1", "type": "Data", "size": "48K", "ways_of_associativity": "12", "coherency_line_size": "128"}
    (tmp_path / "index0").mkdir()
    for name, text in told.items():
        if name != missing:
            (tmp_path / "index0" / name).write_text(text + "\n", encoding="utf-8")
    monkeypatch.setattr(_processor_rates, "Path", lambda _: tmp_path)
    assert Cache.of_level(1) == (Cache(2**15, 8) if missing else Cache(48 * 1024, 12, 128))


@pytest.mark.parametrize("elements", [0, 3, 255, 256, 5000])
def test_tensors_of_any_size_are_read_and_filled(elements: int) -> None:
    written = torch.ones(elements)
    moved((torch.ones(elements),), (written,), Rates(1.0, 1.0, 1.0, 1.0, width=64, threads=64))()
    assert not written.any()


@pytest.mark.parametrize(("weights", "seconds"), [(1, 8.0), (6, 12.0)])
def test_lanes_are_added_up_beside_multiplications(weights: int, seconds: float) -> None:
    kernel = sparse_kernels._Kernel(lambda: None, (), (), KernelWork(4, weights, 0), factors=2, adds_lanes=True)
    limits = kernel.limits(Rates(multiply_adds=1.0, lane_sums=0.5, first=1.0, second=1.0, width=64, threads=1))
    assert limits[sparse_kernels.ARITHMETIC] == seconds


def test_without_limits_there_are_no_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory() -> None:
        raise MemoryError("too little")

    monkeypatch.setattr(sparse_kernels, "moved", lambda *_: no_memory)
    network = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU())
    experiment = sparse_kernels.SparseKernels(build=lambda: network, input_shape=(2, 4, 4), batches=(3,))
    rows = experiment.run(Context(seconds=0.01, rounds=1))
    assert all(row.median and row.floor is None for row in rows)
