"""Pruned networks at the cost of the weights that are left: training steps and inference, beside dense PyTorch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import jacsparse

from ._context import Context, Timing
from ._experiment import Experiment, Group, Row, reason
from ._figures import COLOURS, Line, Panel, Part, Picture, Rule
from ._sparse_peers import (
    DEEPSPARSE,
    ONNX_RUNTIME,
    SPARSEPROP,
    deepsparse_call,
    onnx_runtime_call,
    sparseprop_model,
)
from ._workloads import pruned_resnet18, whole_pruned_vgg11

__all__ = ["PrunedNetwork", "SparseCrossover", "SparseInference", "SparseTraining"]

_DENSE, _COMPILED = "PyTorch, dense with masks", "PyTorch, dense, torch.compile"
_OURS, _FROZEN = "jacsparse.sparsify", "jacsparse.freeze"


@dataclass(frozen=True)
class PrunedNetwork:
    """A pruned network, and the batches that it is measured at."""

    name: str
    build: Callable[[], nn.Module]
    batches: tuple[int, ...]
    input_shape: tuple[int, ...] = (3, 32, 32)
    #: How many times as fast as dense PyTorch, and as SparseProp or DeepSparse, jacsparse should be.
    dense: float = 1.0
    peer: float = 1.0


@dataclass(frozen=True)
class _Comparison(Experiment):
    """Functions of one network and batch that take turns."""

    #: Whether torch.compile is a peer, which takes a minute to compile each network.
    compiled: bool = True
    #: The rows of ours, the last of which has targets, and the peer for which there is one.
    ours: tuple[str, ...] = (_OURS,)
    peer: str = SPARSEPROP

    def _timed(
        self, network: PrunedNetwork, batch: int, prepare: dict[str, Callable[[], Callable[[], Any]]], context: Context
    ) -> list[Row]:
        """A row for each function; those of our own model are compared with the others."""
        group = f"{network.name}, batch {batch}"
        calls, missing = {}, []
        for label, prepared in prepare.items():
            try:
                calls[label] = prepared()
            except Exception as error:
                missing.append(Row.missing(label, reason(error), group=group, role="peer"))
        rows = Group(group)
        for label, timing in context.under(group).times(calls).items():
            rows.timed(label, timing, role="ours" if label in self.ours else "peer", data=_tail(timing))
        best = rows.fastest((_DENSE, _COMPILED))
        for ours in self.ours:
            name, has_targets = ours if len(self.ours) > 1 else "jacsparse", ours == self.ours[-1]
            if best is not None:
                target = network.dense if has_targets else None
                rows.compare(f"the better dense PyTorch / {name}", best.label, ours, at_least=target)
            for label in (SPARSEPROP, ONNX_RUNTIME, DEEPSPARSE):
                target = network.peer if has_targets and label == self.peer else None
                rows.compare(f"{label} / {name}", label, ours, at_least=target)
        return [*rows.rows(), *missing]


def _tail(timing: Timing) -> dict[str, Any]:
    """High percentiles of the runs' seconds."""
    if timing.problem:
        return {}
    return {f"{share} %": float(np.quantile(timing.seconds, share / 100)) for share in (90, 99)}


@dataclass(frozen=True)
class SparseTraining(_Comparison):
    """A whole step: forward pass, loss, backward pass, and SGD with momentum."""

    networks: tuple[PrunedNetwork, ...] = (
        PrunedNetwork("VGG-11, 97 % of each convolution pruned", whole_pruned_vgg11, (16, 64), dense=7.0, peer=2.6),
        PrunedNetwork("ResNet-18, 95 % pruned", pruned_resnet18, (64,), dense=3.0, peer=1.5),
    )

    name = "sparse_training"
    title = "A training step of a pruned network"
    source = "Nikdan et al., SparseProp (2023): training at the cost of the weights that are left"

    def run(self, context: Context) -> list[Row]:
        return [
            row for network in self.networks for batch in network.batches for row in self._rows(network, batch, context)
        ]

    def _rows(self, network: PrunedNetwork, batch: int, context: Context) -> list[Row]:
        torch.manual_seed(0)
        model = network.build().train()
        x = torch.randn(batch, *network.input_shape)
        targets = torch.randint(0, 2, (batch,))

        def step(trained: nn.Module) -> Callable[[], Any]:
            return _step(trained, x, targets)

        prepare = {
            _DENSE: lambda: step(network.build().train()),
            _OURS: lambda: step(jacsparse.sparsify(model, x)),
            SPARSEPROP: lambda: step(sparseprop_model(model, tuple(x.shape))),
        }
        if self.compiled:
            prepare[_COMPILED] = lambda: step(torch.compile(network.build().train()))  # type: ignore[arg-type]
        rows = self._timed(network, batch, prepare, context)
        peaks, quantity = Group(rows[0].group), "peak memory of a step"
        for label, role in ((_DENSE, "peer"), (_OURS, "ours")):
            call = prepare[label]()
            call()
            peaks.memory(f"{label}: memory", call, runs=1, quantity=quantity, unit="B", role=role)
        peaks.compare("dense / jacsparse, memory", f"{_DENSE}: memory", f"{_OURS}: memory", at_least=1.0)
        return [*rows, *peaks.rows()]


def _step(model: nn.Module, x: torch.Tensor, targets: torch.Tensor) -> Callable[[], Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), targets).backward()
        optimizer.step()

    return step


@dataclass(frozen=True)
class SparseCrossover(Experiment):
    """From which share of pruned weights on a step of sparse layers is faster, for small and large batches."""

    shares: tuple[float, ...] = (0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.99)
    batches: tuple[int, ...] = (1, 4, 16, 64, 128)
    build: Callable[[float], nn.Module] = whole_pruned_vgg11
    input_shape: tuple[int, ...] = (3, 32, 32)
    #: Of each function's runs.
    seconds: float = 1.0

    name = "sparse_crossover"
    title = "Training steps of VGG-11 by the share of pruned weights and by batch"
    source = "Nikdan et al., SparseProp (2023): from which sparsity on it is faster"

    def run(self, context: Context) -> list[Row]:
        return [row for batch in self.batches for share in self.shares for row in self._rows(share, batch, context)]

    def _rows(self, share: float, batch: int, context: Context) -> list[Row]:
        group = f"batch {batch}, {100 * share:g} % pruned"
        model, x = self.build(share).train(), torch.randn(batch, *self.input_shape)
        targets = torch.randint(0, 2, (batch,))
        calls = {
            _DENSE: _step(self.build(share).train(), x, targets),
            _OURS: _step(jacsparse.sparsify(model, x), x, targets),
        }
        rows, timings = Group(group), context.under(group).times(calls, seconds=self.seconds)
        rows.timed(_OURS, timings[_OURS], data={"share": share, "batch": batch})
        rows.timed(_DENSE, timings[_DENSE], role="peer")
        rows.compare("dense / jacsparse", _DENSE, _OURS, at_least=0.95)
        return rows.rows()

    def picture(self, rows: Sequence[Row]) -> Picture:
        lines: list[Part] = [Rule(1.0)]
        for batch, colour in zip(self.batches, COLOURS, strict=False):
            of_batch = [row for row in rows if row.data.get("batch") == batch and row.comparisons]
            points = [(100 * (1 - row.data["share"]), row.comparisons[0].ratio) for row in of_batch]
            lines.append(Line.through(points, f"batch {batch}", colour, "o-"))
        # From all weights on the left to few on the right.
        left = [100 * (1 - share) for share in self.shares]
        ticks = {"xlim": (1.15 * max(left), 0.87 * min(left)), "yticks": (1, 2, 5, 10, 20)}
        names = {
            "xticks": left,
            "xticklabels": [f"{each:g}" for each in left],
            "yticklabels": ("1", "2", "5", "10", "20"),
        }
        x, y = "weights of the convolutions that are left, %", "times as fast as dense PyTorch with masks"
        return Picture(self.title, [Panel(lines, "", x, y, "xy", settings={**ticks, **names})], (7.0, 4.4))


@dataclass(frozen=True)
class SparseInference(_Comparison):
    """A forward pass in evaluation mode."""

    networks: tuple[PrunedNetwork, ...] = (
        PrunedNetwork("VGG-11, 97 % of each convolution pruned", whole_pruned_vgg11, (1,), dense=3.0, peer=0.5),
        PrunedNetwork("VGG-11, 97 % of each convolution pruned", whole_pruned_vgg11, (16, 64), dense=10.0),
    )
    ours: tuple[str, ...] = (_OURS, _FROZEN)
    peer: str = DEEPSPARSE

    name = "sparse_inference"
    title = "Inference with a pruned network"
    source = "Kurtz et al. (2020), and DeepSparse: inference at the cost of the weights that are left"

    def run(self, context: Context) -> list[Row]:
        return [
            row for network in self.networks for batch in network.batches for row in self._rows(network, batch, context)
        ]

    def _rows(self, network: PrunedNetwork, batch: int, context: Context) -> list[Row]:
        torch.manual_seed(0)
        model = network.build().eval()
        x = torch.randn(batch, *network.input_shape)

        def inferred(module: Any) -> Callable[[], Any]:
            def call() -> Any:
                with torch.inference_mode():
                    return module(x)

            return call

        with tempfile.TemporaryDirectory() as folder:
            prepare: dict[str, Callable[[], Callable[[], Any]]] = {
                _DENSE: lambda: inferred(model),
                _OURS: lambda: inferred(jacsparse.sparsify(model, x)),
                _FROZEN: lambda: inferred(jacsparse.freeze(jacsparse.sparsify(model, x), x)),
                ONNX_RUNTIME: lambda: onnx_runtime_call(model, x, folder),
                DEEPSPARSE: lambda: deepsparse_call(model, x, folder),
            }
            if self.compiled:
                prepare[_COMPILED] = lambda: inferred(torch.compile(network.build().eval()))
            return self._timed(network, batch, prepare, context)
