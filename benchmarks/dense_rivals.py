"""Pruned networks beside what serves dense ones fast: half precision, and ONNX Runtime and OpenVINO, also in int8."""

from __future__ import annotations

import functools
import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import jacsparse

from ._calls import Call, in_mode
from ._context import Context, Timing
from ._experiment import Grid
from ._figures import COLOURS, Bars, Panel, Picture, Straight
from ._programs import package
from ._rows import Group, Row
from ._workloads import pruned_resnet18, whole_pruned_vgg11
from .sparse_networks import ONNX_RUNTIME, PrunedNetwork, exported, forward_call, onnx_runtime_call, step_call, unmasked

_OURS, _FLOAT32, _BFLOAT16 = "jacsparse", "PyTorch, float32", "PyTorch, bfloat16 autocast"
_OPENVINO = "OpenVINO"
_BATCHES = (1, 16, 64)


@dataclass(frozen=True)
class _TimedByProcessor:
    """A call whose runs are timed by what they take of the processor, on any thread."""

    call: Call

    def __call__(self) -> object:
        return self.call()

    def turn(self, seconds: float) -> Timing:
        """The timing of runs that take that long together."""
        times: list[float] = []
        while sum(times) < seconds:
            begin = time.process_time()
            self.call()
            times.append(time.process_time() - begin)
        return Timing(times, len(times))


@dataclass(frozen=True)
class DenseRivals(Grid):
    """Steps and forward passes of pruned networks on one thread, beside the same networks by what computes densely.

    Times are the processor's, which others on the machine hardly change; where it is idle they are the clock's.
    """

    networks: tuple[PrunedNetwork, ...] = (
        PrunedNetwork("VGG-11, 97 % of each convolution pruned", whole_pruned_vgg11, _BATCHES),
        PrunedNetwork("ResNet-18, 95 % pruned", pruned_resnet18, _BATCHES),
    )

    name = "dense_rivals"
    title = "Pruned networks beside dense inference and training in lower precision"
    source = "PyTorch's autocast, ONNX Runtime and OpenVINO on CPUs"
    single_thread = True

    def cases(self, context: Context) -> Iterable[tuple[str, PrunedNetwork, int]]:
        for what, network in itertools.product(("inference", "training step"), self.networks):
            yield from ((what, network, batch) for batch in network.batches)

    def measure(self, case: tuple[str, PrunedNetwork, int], context: Context) -> list[Row]:
        """A row for each function; those of others are compared with ours, which is sparse wherever it is pruned."""
        what, network, batch = case
        torch.manual_seed(0)
        x, rows = torch.randn(batch, *network.input_shape), Group(f"{what}, {network.name}, batch {batch}")
        call = forward_call if what == "inference" else step_call

        def build() -> nn.Module:
            return network.build().train(what != "inference")

        def dense() -> nn.Module:
            return unmasked(build()) if what == "inference" else build()

        with tempfile.TemporaryDirectory() as folder:
            int8 = functools.cache(lambda: _in_int8(build(), x, folder))
            prepare: dict[str, Callable[[], Call]] = {
                _OURS: lambda: _ours(build(), x),
                _FLOAT32: lambda: call(dense(), x),
                _BFLOAT16: lambda: _in_bfloat16(call(dense(), x)),
            }
            if what == "inference":
                prepare |= {
                    f"{ONNX_RUNTIME}, float32": lambda: onnx_runtime_call(exported(build(), x, folder), x),
                    f"{ONNX_RUNTIME}, int8": lambda: onnx_runtime_call(int8(), x),
                    f"{_OPENVINO}, float32": lambda: _openvino_call(exported(build(), x, folder), x),
                    f"{_OPENVINO}, int8": lambda: _openvino_call(int8(), x),
                }
            calls = {label: _TimedByProcessor(in_mode(prepared, "")) for label, prepared in prepare.items()}
            peers = [*calls][1:]
            rows.in_turns(context, calls, role=dict.fromkeys(peers, "peer"), quantity="processor time")
        for label in peers:
            rows.compare(f"{label} / {_OURS}", label, _OURS)
        return rows.rows()

    def picture(self, rows: Sequence[Row]) -> Picture:
        times: dict[str, dict[str, dict[str, float]]] = {}
        for row in rows:
            panel, _, batch = row.group.rpartition(", ")
            if row.fastest:
                times.setdefault(panel, {}).setdefault(row.label, {})[batch] = row.fastest
        panels = []
        for panel, by_label in times.items():
            batches = [*by_label[_FLOAT32]]
            speeds: dict[str, list[float | None]] = {
                label: [by_label[_FLOAT32][batch] / of_label[batch] for batch in batches]
                for label, of_label in by_label.items()
            }
            bars = Bars(batches, speeds, (*COLOURS, "0.45", "0.75"), "%.1f")
            y = "times as fast as PyTorch, float32"
            panels.append(Panel([bars, Straight(1.0)], panel, "", y, "y", grid="y"))
        return Picture(f"{self.title}, by the fastest runs", panels, (12.0, 7.6), columns=2, legend=4)


def _ours(model: nn.Module, x: torch.Tensor) -> Call:
    """A step, or a forward pass of the frozen model, with sparse layers wherever weights are pruned."""
    sparse = jacsparse.sparsify(model, x, measure=False)
    return step_call(sparse, x) if model.training else forward_call(jacsparse.freeze(sparse, x), x)


def _in_bfloat16(call: Call) -> Call:
    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            call()

    return run


def _in_int8(model: nn.Module, x: torch.Tensor, folder: str) -> str:
    """The path of the exported model in int8, calibrated on 32 samples; both runtimes take its pairs of operators."""
    package("onnx", "onnx", "pip install 'jacsparse[rivals]'")
    quantization: Any = package("onnxruntime.quantization", ONNX_RUNTIME, "pip install 'jacsparse[rivals]'")
    samples = torch.randn(max(1, 32 // len(x)), *x.shape).numpy()
    path, quantized = exported(model, x, folder), f"{folder}/int8.onnx"
    feeds = iter([{"x": batch} for batch in samples])

    class Samples(quantization.CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(feeds, None)

    quantization.shape_inference.quant_pre_process(path, quantized)
    quantization.quantize_static(quantized, quantized, Samples(), per_channel=True)
    return quantized


def _openvino_call(path: str, x: torch.Tensor) -> Call:
    """A run by OpenVINO on as many threads as PyTorch uses; what is float32 is computed so, and not in bfloat16."""
    openvino = package("openvino", _OPENVINO, "pip install 'jacsparse[rivals]'")
    options = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
    }
    request = (
        openvino.Core().compile_model(path, "CPU", {"PERFORMANCE_HINT": "LATENCY", **options}).create_infer_request()
    )
    return lambda: request.infer([x.numpy()])
