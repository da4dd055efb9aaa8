"""Forward passes in parallel over time, alone and in whole training steps, against sequential ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jacsparse.figures import BLUE, GREEN, ORANGE

from ._context import Context
from ._experiment import Experiment, Row
from ._figures import Line, Panel, Picture
from ._recurrent import PEER, Layer, RecurrentWorkload, shown

__all__ = ["ParallelForward"]

_SEQUENTIAL, _PARALLEL, _RELAXED, _NEWTON = (
    Layer(f"jacsparse {way}", "auto", way) for way in ("sequential", "parallel", "relaxed", "newton")
)
_BOTH_RELAXED = Layer("jacsparse parallel, backward relaxed", "relaxed", "parallel")
#: The target for a training step of the RNN with the parallel forward pass on CUDA: times as fast as torch.nn's.
_TARGETS = {30_000: {"parallel": (10.0,)}}


@dataclass(frozen=True)
class ParallelForward(Experiment):
    """All ways to compute the hidden states; each returns those of `torch.nn` within rounding."""

    #: Lengths of the sequences.
    times: tuple[int, ...] = (1000, 10_000, 30_000)
    #: Layers, and elements of a step's input.
    kinds: tuple[tuple[str, int], ...] = (("RNN", 1), ("GRU", 12))
    #: Samples per batch.
    batch: int = 16

    name = "parallel_forward"
    title = "Forward passes of recurrent layers in parallel over time"
    source = "Naumov, section 3.4, and multiple shooting; the thesis computes forward passes step by step"
    devices = ("cpu", "cuda")

    def run(self, context: Context) -> list[Row]:
        workloads = [
            RecurrentWorkload(kind, time, self.batch, features) for kind, features in self.kinds for time in self.times
        ]
        return [row for workload in workloads for row in _rows(workload, context)]

    def picture(self, rows: Sequence[Row]) -> Picture:
        lines = (
            (PEER, ORANGE, "o-"),
            (_SEQUENTIAL, BLUE, "s--"),
            (_PARALLEL, BLUE, "o-"),
            (_RELAXED, GREEN, "o-"),
            (_NEWTON, GREEN, "s--"),
        )
        panels = []
        for kind in dict.fromkeys(row.data["kind"] for row in rows if row.data):
            parts = []
            for layer, colour, style in lines:
                line = {"kind": kind, "layer": layer.name, "part": "forward"}
                line_rows = shown([row for row in rows if line.items() <= row.data.items()])
                points = [(row.data["time"], 1e3 * (row.median or 0.0)) for row in line_rows]
                parts.append(Line.through(points, layer.name, colour, style))
            label = "milliseconds of a forward pass"
            panels.append(Panel(parts, kind, f"steps, batches of {self.batch}", label, "xy"))
        return Picture(self.title, panels)


def _rows(workload: RecurrentWorkload, context: Context) -> list[Row]:
    data = {"kind": workload.kind, "time": workload.time}
    targets = _TARGETS.get(workload.time) if (context.device, workload.kind) == ("cuda", "RNN") else None
    rows: list[Row] = []
    for part, label, ours in (
        ("forward", "forward pass", (_SEQUENTIAL, _PARALLEL, _RELAXED, _NEWTON)),
        ("step", "training step", (_SEQUENTIAL, _PARALLEL, _BOTH_RELAXED)),
    ):
        measurements = workload.times(context, [part], [*ours, PEER])
        rows += measurements.rows(
            part,
            (label, label),
            context.limits,
            targets=targets if part == "step" else None,
            base=_SEQUENTIAL,
            data=data,
        )
    return rows
