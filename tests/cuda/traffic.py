"""What the threads of kernels ask memory for, in bytes: a build whose loads and stores call a counter.

``python -m tests.cuda.traffic`` prints it for methods of products, beside the least that there is to read and write.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jacsparse.patterns import Pattern
from jacsparse.spgemm import ProductPlan, plan_product
from torch import nn

import jacsparse
from jacsparse.runtime import Launch, backend
from tests.cuda import fibers
from tests.cuda.harness import Fibers
from tests.helpers import random_pattern


class Traffic(NamedTuple):
    """Of one launch: threads, and bytes read and written of the memory behind each pointer, by its name."""

    instance: str
    threads: int
    read: dict[str, int]
    written: dict[str, int]

    @property
    def nbytes(self) -> int:
        """All bytes asked for."""
        return sum(self.read.values()) + sum(self.written.values())


class Counting(Fibers):
    """The backend that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Traffic] = []

    def launch(self, launch: Launch) -> None:
        file, instance, grid, block, arguments, shared, _ = launch
        library = _library(file.source, instance)
        library.traffic_begin()
        parameters = zip(file.parameters[instance], arguments, strict=True)
        tensors = {parameter.name: argument for parameter, argument in parameters if parameter.pointer}
        for tensor in tensors.values():
            begin = ctypes.c_uint64(tensor.data_ptr())
            library.traffic_range(begin, ctypes.c_uint64(begin.value + tensor.nbytes))
        function = library.launch_0
        fibers.call(function, grid, block, arguments, shared)
        read, written = (
            {name: library.traffic_of(number, stored) for number, name in enumerate(tensors)} for stored in (0, 1)
        )
        self.launches.append(Traffic(instance, math.prod(grid) * math.prod(block), read, written))


@functools.cache
def _library(source: str, instance: str) -> Any:
    code = fibers.generated(source, (instance,))
    library = ctypes.CDLL(str(fibers.library("traffic", code, "traffic")))
    fibers.declare(library.launch_0)
    library.traffic_of.restype = ctypes.c_uint64
    return library


@contextlib.contextmanager
def counted() -> Iterator[list[Traffic]]:
    """A context in which kernels run on the CPU's tensors, and the list of what each launch asked for."""
    counting = Counting()
    with backend(counting):
        yield counting.launches


def pruned_convolutions(channels: int = 32, size: int = 8, kept: float = 0.08) -> tuple[Pattern, Pattern]:
    """Transposed Jacobians of two convolutions one after the other, with few weights left."""
    layers = [nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    for layer in layers:
        layer.weight.data *= torch.rand(layer.weight.shape, generator=generator) < kept
    stages = jacsparse.chain(nn.Sequential(*layers), (channels, size, size)).stages
    return stages[0].transposed_pattern, stages[1].transposed_pattern


def pooling(left: bool) -> tuple[Pattern, Pattern]:
    """Max-pooling's transposed Jacobian, and a factor of it."""
    selecting = jacsparse.chain(nn.MaxPool2d(2), (8, 16, 16)).stages[0].transposed_pattern
    rows, windows = selecting.shape
    return (
        (selecting, random_pattern(windows, 300, 0.1, 1)) if left else (random_pattern(200, rows, 0.05, 1), selecting)
    )


def traffic_of(plan: ProductPlan, batch: int = 1, *, shared: bool = False) -> Traffic:
    """That of one product of `batch` samples; where `shared`, they share A's values."""
    values = [torch.randn(plan.a.nnz, 1 if shared else batch), torch.randn(plan.b.nnz, batch)]
    for number, selects in enumerate((plan.selects_left, plan.selects_right)):
        if selects:
            windows = (plan.a, plan.b)[number].T
            first = torch.from_numpy(windows.indices[windows.indptr[:-1]]).int()
            values[number] = first[:, None].repeat(1, batch)
    with counted() as launches:
        plan.multiply(*values)
    (launch,) = launches
    return launch


if __name__ == "__main__":
    cases = {
        "merge": pruned_convolutions(),
        "rowwise": pruned_convolutions(),
        "select, left": pooling(True),
        "select, right": pooling(False),
    }
    print("float32; bytes for each entry and sample of the product, and the least: factors read, the product written")
    for name, factors in cases.items():
        plan = plan_product(*factors, method=name.partition(",")[0])
        for batch in (1, 16, 64):
            traffic, outputs = traffic_of(plan, batch), plan.pattern.nnz * batch
            least = 4 * (sum(pattern.nnz for pattern in plan.patterns)) * batch / outputs
            parts = ", ".join(f"{key} {value / outputs:.2f}" for key, value in traffic.read.items() if value)
            print(
                f"{name}, batch {batch}: {traffic.nbytes / outputs:.1f} bytes (at least {least:.1f}), "
                f"{traffic.threads / outputs:.2f} threads, {plan.flop / 2 / plan.pattern.nnz:.2f} pairs: {parts}"
            )
