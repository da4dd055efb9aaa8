"""Jacobians of whole networks, against autograd, which computes them row by row."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jacsparse.models import build
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import jacsparse
from jacsparse.stages import Chain, Pulled
from jacsparse.stages import chain as chain_of

from ._context import Context, reason
from ._experiment import Experiment, Row, compare
from ._memory import peak_memory
from ._workloads import pruned_vgg11

__all__ = ["Network", "WholeJacobian"]

PEER = "torch.func.jacrev"
_LATER, _PREPARED = "jacobian, later calls", "prepared"
_FIRST, _SECOND = "first call for a module", "second call"


@dataclass(frozen=True)
class Network:
    """A network whose Jacobian is computed."""

    #: The network's name with the Jacobian's shape.
    label: str
    build: Callable[[], nn.Module]
    #: Shape of one sample.
    input_shape: tuple[int, ...] = (3, 32, 32)
    batch: int = 1
    dtype: torch.dtype = torch.float32
    #: How many times as fast as autograd a later call should be.
    at_least: float = 1.0


def _built(name: str) -> Callable[[], nn.Module]:
    def build_seeded() -> nn.Module:
        torch.manual_seed(0)
        return build(name).eval()

    return build_seeded


def _perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 32))


def _small_cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 8, 3), nn.ReLU())


#: Seconds from which on autograd is run once where it runs several times otherwise.
_LONG = 5.0
_VGG = "pruned VGG-11 features, 512 × 3072"


@dataclass(frozen=True)
class WholeJacobian(Experiment):
    """Calls of `jacobian` and of a prepared one; autograd computes as many rows at once as is fastest."""

    networks: tuple[Network, ...] = (
        Network(_VGG, pruned_vgg11, at_least=25),
        Network(f"{_VGG}, batch 4", pruned_vgg11, batch=4, at_least=25),
        Network(f"{_VGG}, float64", pruned_vgg11, dtype=torch.float64, at_least=25),
        Network(f"{_VGG}, float64, batch 4", pruned_vgg11, batch=4, dtype=torch.float64, at_least=25),
        Network("ResNet-8, 10 × 3072", _built("resnet8")),
        Network("LeNet-5, 10 × 3072", _built("lenet5")),
        Network("perceptron of two layers, 32 × 64", _perceptron, (64,)),
        Network("small CNN, 200 × 144", _small_cnn, (1, 12, 12)),
    )
    #: Numbers of rows that autograd may compute at once; that of the shortest first run is timed.
    chunks: tuple[int, ...] = (16, 64, 256)

    name = "whole_jacobian"
    title = "Jacobians of whole networks"
    source = "thesis, section 3.4; torch.func.jacrev"

    def run(self, context: Context) -> list[Row]:
        return [row for network in self.networks for row in self._network(network, context)]

    def _network(self, network: Network, context: Context) -> list[Row]:
        module = network.build().to(network.dtype)
        shape, generator = (network.batch, *network.input_shape), torch.Generator().manual_seed(0)
        x = torch.randn(shape, generator=generator, dtype=network.dtype)
        prepared = jacsparse.prepare_jacobian(module, x)

        def ours() -> torch.Tensor:
            return jacsparse.jacobian(module, x).values

        def autograd(chunk: int) -> Callable[[], torch.Tensor]:
            # Samples do not meet: the rows of all at once.
            rows = torch.func.jacrev(lambda x: module(x).sum(0), chunk_size=chunk)
            return lambda: rows(x).detach()

        seconds = {}
        for chunk in self.chunks:
            context.say(f"{network.label}: {PEER}, chunks of {chunk}")
            begin = time.perf_counter()
            expected = autograd(chunk)()
            seconds[chunk] = time.perf_counter() - begin
        _check(jacsparse.jacobian(module, x), expected)
        chunk = min(seconds, key=seconds.__getitem__)
        label = f"{PEER}, chunks of {chunk}"
        functions = {"ours": ours, _PREPARED: lambda: prepared.values(x), label: autograd(chunk)}
        rounds = context.rounds if seconds[chunk] < _LONG else 1
        timings = replace(context.under(network.label), rounds=rounds).times(functions)
        best = Row.timed(label, timings[label], group=network.label, role="peer")
        chain = chain_of(module, network.input_shape)
        accumulation = chain.accumulation
        backward = _backward_multiply_adds(chain)
        with FlopCounterMode(display=False) as forward:
            module(x)
        flop = 2 * (accumulation.multiply_adds + backward) + forward.get_total_flops()
        row = Row.timed(
            _LATER,
            timings["ours"],
            group=network.label,
            floor=context.limits.floor(4 * accumulation.moved, flop),
            note=f"order {chain.order}; multiply-adds: {accumulation.multiply_adds:,} in sparse products, some by "
            f"zero, {backward:,} in operators' own backward",
        )
        faster = compare(f"{PEER}, the fastest / ours", best, row, at_least=network.at_least)
        of_prepared = Row.timed(_PREPARED, timings[_PREPARED], group=network.label)
        return [
            replace(row, comparisons=faster),
            replace(of_prepared, comparisons=compare(f"{_PREPARED} / {_LATER}", of_prepared, row, at_most=1.0)),
            *_first_calls(network, x),
            best,
            *_memory(network, ours, autograd(chunk), label, rounds),
        ]


def _first_calls(network: Network, x: torch.Tensor) -> tuple[Row, Row]:
    """Rows of the first two calls for a new module, whose kernels are compiled and products planned."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(5):
        fresh = network.build().to(network.dtype)
        for times in seconds:
            begin = time.perf_counter()
            jacsparse.jacobian(fresh, x)
            times.append(time.perf_counter() - begin)
    first, second = (
        Row.of_value(label, statistics.median(times), "time", "s", group=network.label)
        for label, times in zip((_FIRST, _SECOND), seconds, strict=True)
    )
    return first, replace(second, comparisons=compare(f"{_SECOND} / {_FIRST}", second, first, at_most=1.1))


def _backward_multiply_adds(chain: Chain) -> int:
    """Multiply-adds of the operators' own backward, for all columns that pass through it."""
    total = 0
    for matrix in chain.accumulation.matrices:
        if isinstance(matrix, Pulled):
            span: Any = matrix.key
            first, last = span
            total += matrix.pattern.shape[1] * sum(stage.backward_work for stage in chain.stages[first : last + 1])
    return total


def _check(jacobian: jacsparse.SparseJacobian, expected: torch.Tensor) -> None:
    """Raise ValueError if the two Jacobians differ by more than rounding."""
    rows, columns = jacobian.shape
    samples = expected.reshape(rows, -1, columns).movedim(1, 0)
    difference = max(
        (jacobian.todense(number) - sample).abs().max() / sample.abs().max() for number, sample in enumerate(samples)
    )
    if not difference < 1e-4:
        raise ValueError(f"the Jacobian differs from autograd's by {difference.item():.1e} of its largest entry")


def _memory(
    network: Network, ours: Callable[[], object], autograd: Callable[[], object], label: str, rounds: int
) -> tuple[Row, ...]:
    """Rows of the memory that each function needs at its peak, including its result."""
    group, rows = f"{network.label}: memory", []
    for name, function, role in ((_LATER, ours, "ours"), (label, autograd, "peer")):
        try:
            nbytes = min(peak_memory(function) for _ in range(rounds))
        except (OSError, AttributeError) as error:
            rows.append(Row.missing(name, reason(error), group=group, role=role))
        else:
            rows.append(Row.of_value(name, nbytes / 2**20, "memory", "MiB", group=group, role=role))
    row, peer = rows
    return replace(row, comparisons=compare(f"{PEER} / ours", peer, row, at_least=1.0)), peer
