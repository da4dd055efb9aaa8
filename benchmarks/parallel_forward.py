"""Forward passes in parallel over time, alone and in whole training steps, against sequential ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jacsparse.figures import BLUE, GREEN, ORANGE

from ._context import Context
from ._figures import Line, Panel, Picture
from ._recurrent import PEER, Layer, RecurrentCase, RecurrentGrid, RecurrentWorkload, shown
from ._rows import Row, values_of, where

_SEQUENTIAL, _PARALLEL, _RELAXED, _NEWTON = (
    Layer(f"jacsparse {way}", "auto", way) for way in ("sequential", "parallel", "relaxed", "newton")
)
_BOTH_RELAXED = Layer("jacsparse parallel, backward relaxed", "relaxed", "parallel")
#: The target for a training step of the RNN with the parallel forward pass on CUDA: times as fast as torch.nn's.
_TARGETS = {30_000: {"parallel": (10.0,)}}
_LABELS = {"forward": ("forward pass",) * 2, "step": ("training step",) * 2}
_TURNS = (
    (("forward",), (_SEQUENTIAL, _PARALLEL, _RELAXED, _NEWTON, PEER)),
    (("step",), (_SEQUENTIAL, _PARALLEL, _BOTH_RELAXED, PEER)),
)


@dataclass(frozen=True)
class ParallelForward(RecurrentGrid):
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

    def cases(self, context: Context) -> Iterable[RecurrentCase]:
        for (kind, features), time in itertools.product(self.kinds, self.times):
            targets = {"step": _TARGETS.get(time, {})} if (context.device, kind) == ("cuda", "RNN") else {}
            yield RecurrentCase(
                RecurrentWorkload(kind, time, self.batch, features), _TURNS, _LABELS, {"kind": kind, "time": time},
                targets=targets, base=_SEQUENTIAL,
            )  # fmt: skip

    def picture(self, rows: Sequence[Row]) -> Picture:
        lines = (
            (PEER, ORANGE, "o-"),
            (_SEQUENTIAL, BLUE, "s--"),
            (_PARALLEL, BLUE, "o-"),
            (_RELAXED, GREEN, "o-"),
            (_NEWTON, GREEN, "s--"),
        )
        panels = []
        for kind in values_of(rows, "kind"):
            parts = []
            for layer, colour, style in lines:
                of_line = shown(where(rows, kind=kind, layer=layer.name, part="forward"))
                points = [(row.data["time"], 1e3 * (row.median or 0.0)) for row in of_line]
                parts.append(Line.through(points, layer.name, colour, style))
            label = "milliseconds of a forward pass"
            panels.append(Panel(parts, kind, f"steps, batches of {self.batch}", label, "xy"))
        return Picture(self.title, panels)
