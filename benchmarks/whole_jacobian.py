"""Jacobians of whole networks, against autograd, which computes them row by row."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from jacsparse.models import build
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import jacsparse
from jacsparse.stages import Chain
from jacsparse.stages import chain as chain_of

from ._context import Context
from ._experiment import Grid
from ._rows import Group, Row
from ._workloads import pruned_vgg11, seeded

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


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 32))


def _small_cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 8, 3), nn.ReLU())


#: Seconds from which on autograd is run once where it runs several times otherwise.
_LONG = 5.0
_VGG = "pruned VGG-11 features, 512 × 3072"


@dataclass(frozen=True)
class WholeJacobian(Grid):
    """Calls of `jacobian` and of a prepared one; autograd computes as many rows at once as is fastest."""

    networks: tuple[Network, ...] = (
        Network(_VGG, pruned_vgg11, at_least=25),
        Network(f"{_VGG}, batch 4", pruned_vgg11, batch=4, at_least=25),
        Network(f"{_VGG}, float64", pruned_vgg11, dtype=torch.float64, at_least=25),
        Network(f"{_VGG}, float64, batch 4", pruned_vgg11, batch=4, dtype=torch.float64, at_least=25),
        Network("ResNet-8, 10 × 3072", partial(build, "resnet8")),
        Network("LeNet-5, 10 × 3072", partial(build, "lenet5")),
        Network("perceptron of two layers, 32 × 64", _perceptron, (64,)),
        Network("small CNN, 200 × 144", _small_cnn, (1, 12, 12)),
    )
    #: Numbers of rows that autograd may compute at once; that of the shortest first run is timed.
    chunks: tuple[int, ...] = (16, 64, 256)

    name = "whole_jacobian"
    title = "Jacobians of whole networks"
    source = "thesis, section 3.4; torch.func.jacrev"
    devices = ("cpu", "cuda")

    def cases(self, context: Context) -> Iterable[Network]:
        return self.networks

    def measure(self, case: Network, context: Context) -> list[Row]:
        module = seeded(case.build).to(context.place, case.dtype)
        shape, generator = (case.batch, *case.input_shape), torch.Generator().manual_seed(0)
        x = torch.randn(shape, generator=generator, dtype=case.dtype).to(context.place)
        prepared = jacsparse.prepare_jacobian(module, x)

        def ours() -> torch.Tensor:
            return jacsparse.jacobian(module, x).values

        def autograd(chunk: int) -> Callable[[], torch.Tensor]:
            # Samples do not meet: the rows of all at once.
            rows = torch.func.jacrev(lambda x: module(x).sum(0), chunk_size=chunk)
            return lambda: rows(x).detach()

        seconds = {}
        for chunk in self.chunks:
            context.say(f"{case.label}: {PEER}, chunks of {chunk}")
            begin = time.perf_counter()
            expected = autograd(chunk)().cpu()
            seconds[chunk] = time.perf_counter() - begin
        _check(jacsparse.jacobian(module, x).to("cpu"), expected)
        chunk = min(seconds, key=seconds.__getitem__)
        label = f"{PEER}, chunks of {chunk}"
        rounds = context.rounds if seconds[chunk] < _LONG else 1
        rows, chain = Group(case.label), chain_of(module, case.input_shape)
        accumulation, backward = chain.accumulation, _backward_multiply_adds(chain)
        with FlopCounterMode(display=False) as forward:
            module(x)
        flop = 2 * (accumulation.multiply_adds + backward) + forward.get_total_flops()
        moved, _ = accumulation.work(1, lambda _: False)
        floor = context.limits.floor(4 * moved, flop)
        note = (
            f"order {chain.order}; multiply-adds: {accumulation.multiply_adds:,} in sparse products, some by zero, "
            f"{backward:,} in operators' own backward"
        )
        calls = {_LATER: ours, _PREPARED: lambda: prepared.values(x), label: autograd(chunk)}
        rows.in_turns(replace(context, rounds=rounds), calls, role={label: "peer"})
        rows.add(replace(rows[_LATER], floor=floor, note=note))
        _first_calls(rows, case, x)
        rows.compare(f"{PEER}, the fastest / ours", label, _LATER, at_least=case.at_least)
        rows.compare(f"{_PREPARED} / {_LATER}", _PREPARED, _LATER, at=_PREPARED, at_most=1.0)
        if context.device != "cpu":
            return rows.rows()
        memory = Group(f"{case.label}: memory")
        memory.memory(_LATER, ours, runs=rounds)
        memory.memory(label, autograd(chunk), runs=rounds, role="peer")
        memory.compare(f"{PEER} / ours", label, _LATER, at_least=1.0)
        return [*rows.rows(), *memory.rows()]


def _first_calls(rows: Group, network: Network, x: torch.Tensor) -> None:
    """Add the first two calls for a new module, whose kernels are compiled and products planned."""
    seconds: dict[str, list[float]] = {_FIRST: [], _SECOND: []}
    for _ in range(5):
        fresh = seeded(network.build).to(x)
        for times in seconds.values():
            begin = time.perf_counter()
            # A copy waits for a GPU.
            jacsparse.jacobian(fresh, x).values.cpu()
            times.append(time.perf_counter() - begin)
    for label, times in seconds.items():
        rows.value(label, statistics.median(times), "time", "s")
    rows.compare(f"{_SECOND} / {_FIRST}", _SECOND, _FIRST, at=_SECOND, at_most=1.1)


def _backward_multiply_adds(chain: Chain) -> int:
    """Multiply-adds of the operators' own backward, for all columns that pass through it."""
    passes = chain.accumulation.passes
    return sum(columns * sum(stage.backward_work for stage in chain.stages[span]) for span, columns in passes)


def _check(jacobian: jacsparse.SparseJacobian, expected: torch.Tensor) -> None:
    """Raise ValueError if the two Jacobians differ by more than rounding."""
    rows, columns = jacobian.shape
    samples = expected.reshape(rows, -1, columns).movedim(1, 0)
    difference = max(
        (jacobian.todense(number) - sample).abs().max() / sample.abs().max() for number, sample in enumerate(samples)
    )
    if not difference < 1e-4:
        raise ValueError(f"the Jacobian differs from autograd's by {difference.item():.1e} of its largest entry")
