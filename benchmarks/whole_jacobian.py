"""Jacobians of whole networks, against autograd, which computes them row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
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
from ._figures import bars
from ._memory import peak_memory
from ._workloads import pruned_vgg11

__all__ = ["Network", "WholeJacobian"]

PEER = "torch.func.jacrev"


@dataclass(frozen=True)
class Network:
    """A network whose Jacobian is computed."""

    #: The network's name with the Jacobian's shape.
    label: str
    build: Callable[[], nn.Module]
    #: Shape of one sample.
    input_shape: tuple[int, ...] = (3, 32, 32)
    #: How many times as fast as autograd jacsparse should be.
    at_least: float | None = None


def _resnet8() -> nn.Module:
    torch.manual_seed(0)
    return build("resnet8").eval()


@dataclass(frozen=True)
class WholeJacobian(Experiment):
    """Jacobians of one sample, with plans made beforehand; autograd computes as many rows at once as is fastest."""

    networks: tuple[Network, ...] = (
        Network("pruned VGG-11 features, 512 × 3072", pruned_vgg11, at_least=12),
        Network("ResNet-8, 10 × 3072", _resnet8),
    )
    #: Numbers of rows that autograd may compute at once.
    chunks: tuple[int, ...] = (16, 64, 256)

    name = "whole_jacobian"
    title = "Jacobians of whole networks, one sample"
    source = "thesis, section 3.4; torch.func.jacrev"

    def run(self, context: Context) -> list[Row]:
        return [row for network in self.networks for row in self._network(network, context)]

    def _network(self, network: Network, context: Context) -> list[Row]:
        module = network.build()
        x = torch.randn(1, *network.input_shape, generator=torch.Generator().manual_seed(0))

        def ours() -> torch.Tensor:
            return jacsparse.jacobian(module, x).values

        def autograd(chunk: int) -> Callable[[], torch.Tensor]:
            return lambda: torch.func.jacrev(module, chunk_size=chunk)(x).detach()

        functions = {"ours": ours, **{f"chunks of {chunk}": autograd(chunk) for chunk in self.chunks}}
        _check(jacsparse.jacobian(module, x), functions[f"chunks of {self.chunks[0]}"]())
        timings = context.under(network.label).times(functions)
        peers = [
            Row.timed(f"{PEER}, {label}", timing, group=network.label, role="peer")
            for label, timing in timings.items()
            if label != "ours"
        ]
        timed = [row for row in peers if row.median is not None]
        best = min(timed, key=lambda row: row.median or 0.0) if timed else peers[0]
        chain = chain_of(module, network.input_shape)
        accumulation = chain.accumulation
        backward = _backward_multiply_adds(chain)
        with FlopCounterMode(display=False) as forward:
            module(x)
        flop = 2 * (accumulation.multiply_adds + backward) + forward.get_total_flops()
        targets = {} if network.at_least is None else {"at_least": network.at_least}
        row = Row.timed(
            "jacsparse.jacobian",
            timings["ours"],
            group=network.label,
            floor=context.limits.floor(4 * accumulation.moved, flop),
            note=f"order {chain.order}; multiply-adds: {accumulation.multiply_adds:,} in sparse products, some by "
            f"zero, {backward:,} in operators' own backward",
        )
        ratio = compare(f"{PEER}, the fastest / ours", best, row, **targets)
        chunk = int(best.label.rpartition(" ")[2])
        return [
            Row(**{**vars(row), "comparisons": ratio}),
            *peers,
            *_memory(network, ours, autograd(chunk), best.label),
        ]

    def figure(self, rows: Sequence[Row], path: Path) -> None:
        bars(rows, path, self.title)


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
    difference = (jacobian.todense(0) - expected.reshape(jacobian.shape)).abs().max() / expected.abs().max()
    if not difference < 1e-4:
        raise ValueError(f"the Jacobian differs from autograd's by {difference.item():.1e} of its largest entry")


def _memory(
    network: Network, ours: Callable[[], object], autograd: Callable[[], object], label: str
) -> tuple[Row, ...]:
    """Rows of the memory that each function needs at its peak, including its result."""
    group, rows = f"{network.label}: memory", []
    for name, function, role in (("jacsparse.jacobian", ours, "ours"), (label, autograd, "peer")):
        try:
            nbytes = min(peak_memory(function) for _ in range(3))
        except (OSError, AttributeError) as error:
            rows.append(Row.missing(name, reason(error), group=group, role=role))
        else:
            rows.append(Row.of_value(name, nbytes / 2**20, "memory", "MiB", group=group, role=role))
    row, peer = rows
    targets = {} if network.at_least is None else {"at_least": 1.0}
    return Row(**{**vars(row), "comparisons": compare(f"{PEER} / ours", peer, row, **targets)}), peer
