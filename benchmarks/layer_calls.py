"""Recurrent layers called as everybody calls them, one by one and as CUDA graphs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jacsparse.figures import BLUE, GREEN, ORANGE

from ._calls import GRAPH, MODES, labelled
from ._context import Context
from ._environment import environment, hardware
from ._figures import Line, Panel, Picture, Straight
from ._recurrent import OURS, PEER, RecurrentCase, RecurrentGrid, RecurrentWorkload
from ._results import read
from ._rows import Group, Row, values_of, where

#: How many times as fast as torch.nn's a pass should be, called one by one, by steps; and a training step as a graph.
_PASSES = {100: 1.0, 300: 1.5, 1000: 3.0, 30_000: 20.0}
_GRAPHS = {10_000: 30.0, 30_000: 60.0}
_LABELS = {
    "forward": ("forward pass",) * 2,
    "backward": ("backward pass, loss on the last state",) * 2,
    "step": ("training step",) * 2,
}
#: Experiments whose stored results have the same workloads, and the names of our layer as users get it.
_EXPERIMENTS, _NAMES = ("layer_calls", "rnn_sensitivity", "parallel_forward"), (OURS.name, "jacsparse sequential")
_RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class LayerCalls(RecurrentGrid):
    """The RNN and the GRU as users get them, beside torch.nn's and stored results.

    Called one by one, even a Function that computes nothing takes a time, which no layer can go below: targets allow it
    beside a share of torch.nn's time.
    """

    #: Lengths of the sequences, the most telling ones first, as time may run out.
    times: tuple[int, ...] = (100, 1000, 30_000, 300, 10_000)
    #: Layers, and elements of a step's input.
    kinds: tuple[tuple[str, int], ...] = (("RNN", 1), ("GRU", 12))
    batch: int = 16

    name = "layer_calls"
    title = "Recurrent layers on a GPU, called one by one and as graphs"
    source = "no paper: the thesis times calls as everybody makes them"
    devices = ("cuda",)

    def cases(self, context: Context) -> Iterable[RecurrentCase]:
        for mode, time, (kind, features) in itertools.product(MODES[context.device], self.times, self.kinds):
            workload = RecurrentWorkload(kind, time, self.batch, features)
            targets = {labelled("step", GRAPH): {"auto": (_GRAPHS[time],)}} if time in _GRAPHS else {}
            data = {"kind": kind, "time": time}
            turns = [(tuple(_LABELS), (OURS, PEER))]
            yield RecurrentCase(workload, turns, _LABELS, data, targets=targets, modes=(mode,))

    def measure(self, case: RecurrentCase, context: Context) -> list[Row]:
        rows = Group(case.workload.name)
        for row in super().measure(case, context):
            rows.add(row)
        (mode,) = case.modes
        if mode != GRAPH:
            add_nothing(rows, case.workload, mode, context)
            for part in ("forward", "backward"):
                _compare_with_nothing(rows, case, part, mode)
        stored = _stored(hardware(context.device, environment()))
        for part in _LABELS:
            label = case.label(part, mode, OURS)
            if (found := stored.get((rows.name, part, mode))) is not None and (median := rows[label].median):
                name, row = found
                rows.beside(label, f"{name} / jacsparse", (row.median or 0.0) / median)
        return rows.rows()

    def picture(self, rows: Sequence[Row]) -> Picture:
        panels = []
        for kind in values_of(rows, "kind"):
            of_kind = [row for row in where(rows, kind=kind, layer=OURS.name) if row.comparisons]
            modes = zip(values_of(of_kind, "mode"), ("o-", "s--"), strict=False)
            parts = (("forward", GREEN), ("backward", BLUE), ("step", ORANGE))
            lines = []
            for (part, colour), (mode, style) in itertools.product(parts, modes):
                drawn = where(of_kind, part=part, mode=mode)
                points = [(row.data["time"], row.comparisons[0].ratio) for row in drawn]
                lines.append(Line.through(points, labelled(_LABELS[part][0], mode), colour, style))
            label = f"steps, batches of {self.batch}"
            panels.append(Panel([*lines, Straight(1, label=PEER.name)], kind, label, "times as fast as torch.nn", "xy"))
        return Picture(self.title, panels, (10.0, 5.4), legend=3)


def add_nothing(rows: Group, workload: RecurrentWorkload, mode: str, context: Context) -> None:
    """Rows of both passes of a Function that computes nothing."""
    passes = workload.nothing(context.place)
    calls = {_nothing(part, mode): call for part, call in zip(("forward", "backward"), passes, strict=True)}
    rows.in_turns(context, calls, role="reference")


def _nothing(part: str, mode: str) -> str:
    return labelled(f"{_LABELS[part][0]}, a Function that computes nothing", mode)


def _compare_with_nothing(rows: Group, case: RecurrentCase, part: str, mode: str) -> None:
    """Compare times to which that of a Function that computes nothing is added; that has the target."""
    label = case.label(part, mode, OURS)
    ours, peer, nothing = (rows[each].median for each in (label, case.label(part, mode, PEER), _nothing(part, mode)))
    if not ours or peer is None or nothing is None:
        return
    rows.beside(label, "(torch.nn + nothing) / (jacsparse + nothing)", (peer + nothing) / (ours + nothing))
    if (bar := _PASSES.get(case.workload.time)) is not None:
        text = f"(torch.nn / {bar:g} + nothing) / jacsparse"
        rows.beside(label, text, (peer / bar + nothing) / ours, at_least=1.0)


@functools.cache
def _stored(here: str) -> dict[tuple[str, str, str], tuple[str, Row]]:
    """Stored rows of our layer on a GPU, with their hardware and date, by group, part and mode.

    Where there are some of `here`'s hardware, these are taken.
    """
    paths = [
        (path.parent.name != here, number, path)
        for number, experiment in enumerate(_EXPERIMENTS)
        for path in _RESULTS.glob(f"*/{experiment}.*.json")
        if not path.name.endswith(".cpu.json")
    ]
    stored: dict[tuple[str, str, str], tuple[str, Row]] = {}
    for *_, path in sorted(paths):
        result = read(path)
        for row in itertools.chain(*(where(result.rows, layer=name) for name in _NAMES)):
            if row.median is not None and {"part", "mode"} <= row.data.keys():
                key = row.group, row.data["part"], row.data["mode"]
                stored.setdefault(key, (f"{result.hardware}, {result.date[:10]}", row))
    return stored
