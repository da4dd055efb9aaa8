"""The speed of training recurrent layers, by the sequences' length and by the batch: the thesis' Figure 5.2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from jacsparse.figures import BLUE, GREEN, ORANGE, PURPLE, SKY

from ._context import Context
from ._experiment import Experiment, Row, compare
from ._figures import Line, Panel, Part, Picture, Rule
from ._recurrent import OURS, PEER, SCANS, Layer, Measurements, RecurrentWorkload, shown

__all__ = ["RnnSensitivity"]

#: Targets in batches of 16, by device, layer and length: how many times as fast as torch.nn's a backward pass and a
#: whole step should be, by schedule.
_TARGETS: dict[str, dict[tuple[str, int], dict[str, dict[str, tuple[float, ...]]]]] = {
    "cpu": {
        (kind, time): {"backward of all": {"auto": (backward,)}, "step": {"auto": (step,)}}
        for kind, backward, step in (("RNN", 8, 5), ("GRU", 10, 7))
        for time in (1000, 10_000)
    },
    "cuda": {
        ("RNN", 1000): {"backward": {"chunked": (20,)}},
        ("RNN", 10_000): {"backward": {"chunked": (50,)}},
        ("RNN", 30_000): {"backward": {"chunked": (60,), "relaxed": (200,)}},
    },
}
_LABELS = {
    "backward": "backward pass, loss on the last state",
    "backward of all": "backward pass, loss on every step",
    "step": "training step",
}
#: The largest published speed-ups of the RNN, by scan on an RTX 2080 Ti.
_PUBLISHED = {"backward": 8.8, "training step": 2.75}
#: The schedules that are timed on CUDA.
_SCHEDULES = (
    "sequential",
    "chunked",
    "chunked:16",
    "chunked:64",
    "chunked:320",
    "relaxed",
    "relaxed:32",
    "relaxed:320",
)


@dataclass(frozen=True)
class RnnSensitivity(Experiment):
    """Backward passes and whole training steps against `torch.nn`'s, on random sequences.

    A loss on the last state has gradients that vanish after some hundred steps: our layers spend no time on the steps
    before these. So longer sequences are timed with a loss on every step, too.
    """

    #: Lengths of the RNN's sequences in batches of 16.
    times: tuple[int, ...] = (10, 30, 100, 300, 1000, 3000, 10_000, 30_000)
    #: Samples per batch of the RNN's sequences of `time` steps.
    batches: tuple[int, ...] = (2, 4, 8, 16, 32, 64, 128, 256)
    time: int = 1000
    #: Lengths for the GRU and the LSTM, with as many inputs a step as the thesis' longest instruments (set L).
    others: tuple[int, ...] = (1000, 10_000)
    #: Lengths, in batches of 16, at which the RNN's backward pass is also timed by each of `schedules` on CUDA, and by
    #: each of `scans` on the CPU, where it also runs on one thread; and batches of `time` steps, by each of `scans`.
    scheduled: tuple[int, ...] = (1000, 10_000, 30_000)
    scanned: tuple[int, ...] = (2, 256)
    schedules: tuple[str, ...] = _SCHEDULES
    scans: tuple[str, ...] = SCANS

    name = "rnn_sensitivity"
    title = "Training recurrent layers: speed against torch.nn's, by length and batch"
    source = "thesis, Figure 5.2 (published, on GPUs: backward at most 8.8 times as fast, overall 2.75)"
    devices = ("cpu", "cuda")

    def run(self, context: Context) -> list[Row]:
        rows = [row for workload in self._workloads(context.device) for row in self._rows(workload, context)]
        workers = torch.get_num_threads()
        if context.device == "cuda" or workers == 1:
            return rows
        torch.set_num_threads(1)
        try:
            single = [RecurrentWorkload("RNN", time, 16, 1) for time in self.times if time in self.scheduled]
            return rows + [row for workload in single for row in self._rows(workload, context, alone=True)]
        finally:
            torch.set_num_threads(workers)

    def _workloads(self, device: str) -> list[RecurrentWorkload]:
        """All workloads; on CUDA, those with targets come first, as time may run out."""
        workloads = {RecurrentWorkload("RNN", time, 16, 1): None for time in self.times}
        workloads |= {RecurrentWorkload("RNN", self.time, batch, 1): None for batch in self.batches}
        workloads |= {RecurrentWorkload(kind, time, 16, 12): None for kind in ("GRU", "LSTM") for time in self.others}
        return sorted(workloads, key=lambda workload: not (device == "cuda" and self._is_scheduled(workload)))

    def _is_scheduled(self, workload: RecurrentWorkload) -> bool:
        return workload.kind == "RNN" and workload.batch == 16 and workload.time in self.scheduled

    def _schedules(self, workload: RecurrentWorkload, device: str) -> tuple[str, ...]:
        """The schedules by which a workload's backward pass is timed beside the usual one."""
        if device == "cuda":
            return self.schedules if self._is_scheduled(workload) else ()
        is_scanned = workload.kind == "RNN" and (workload.time, workload.batch) in product((self.time,), self.scanned)
        return self.scans if is_scanned or self._is_scheduled(workload) else ()

    def _rows(self, workload: RecurrentWorkload, context: Context, *, alone: bool = False) -> list[Row]:
        targets = {}
        if workload.batch == 16 and not alone:
            targets = _TARGETS[context.device].get((workload.kind, workload.time), {})
        threads = torch.get_num_threads()
        data = {"kind": workload.kind, "time": workload.time, "batch": workload.batch, "threads": threads}
        group = workload.name if context.device == "cuda" else f"{workload.name}, {threads} thread(s)"
        layers, parts = [OURS, PEER], ["step", "rest"]
        schedules = self._schedules(workload, context.device)
        layers[1:1] = map(Layer.by, schedules)
        if context.device == "cuda":
            # The backward pass by subtraction adds nothing here.
            parts.remove("rest")
        if alone:
            every = workload.times(context, ["backward of all"], layers)
            # The limits, and so the floor, are those of all threads.
            return [replace(row, floor=None) for row in _named(every, "backward of all", context, group, data)]
        backward, step = workload.times(context, ["backward"], layers), workload.times(context, parts)
        measured = [(backward, "backward"), (step, "step")]
        if schedules or (context.device == "cpu" and workload.kind != "RNN"):
            measured.append((workload.times(context, ["backward of all"], layers), "backward of all"))
        rows = [
            row
            for times, part in measured
            for row in _named(times, part, context, group, data, targets=targets.get(part))
        ]
        return rows + (_by_subtraction(step, group) if "rest" in parts else [])

    def picture(self, rows: Sequence[Row]) -> Picture:
        drawn = [row for row in shown(rows) if row.comparisons]
        threads = max((row.data["threads"] for row in drawn), default=1)
        labels = ("steps, batches of 16", f"samples of a batch, {self.time:,} steps", "steps, batches of 16")
        lines: list[list[Part]] = [[], [], []]
        for number, place in enumerate(("time", "batch")):
            of_panel = [row for row in drawn if row.data["threads"] == threads and _is_of_panel(row, place, self.time)]
            for kind, colour in zip(("RNN", "GRU", "LSTM"), (BLUE, ORANGE, GREEN), strict=True):
                for part, style in (("backward", "o:"), ("backward of all", "D-"), ("step", "s--")):
                    fields = {"kind": kind, "part": part, "layer": OURS.name}
                    line = [row for row in of_panel if fields.items() <= row.data.items()]
                    lines[number] += _lines(line, place, style, colour, f"{kind}, {_LABELS[part]}: {_ran(line)}")
        scans = [row for row in drawn if (row.data["kind"], row.data["part"]) == ("RNN", "backward of all")]
        scans = [row for row in scans if row.data["batch"] == 16 and row.data["time"] in self.scheduled]
        counts = list(dict.fromkeys(row.data["threads"] for row in scans))
        for number, name in enumerate(dict.fromkeys(row.data["layer"] for row in scans)):
            for count in counts:
                line = [row for row in scans if (row.data["layer"], row.data["threads"]) == (name, count)]
                style = "osD"[number // 5 % 3] + ("-" if count == threads else ":")
                label = f"RNN, {_LABELS['backward of all']}: {name.partition(' ')[2] or _ran(line)}, {count} thread(s)"
                lines[2] += _lines(line, "time", style, (BLUE, ORANGE, GREEN, SKY, PURPLE)[number % 5], label)
        rules = [
            Rule(speed, None, f"published on GPUs, {part}: at most {speed}", "red", ":" if part == "backward" else "--")
            for part, speed in _PUBLISHED.items()
        ]
        rules.append(Rule(1, label=PEER.name))
        panels = [
            Panel([*parts, *rules], "", label, f"times as fast as {PEER.name}", "xy", "below")
            for parts, label in zip(lines, labels, strict=True)
        ]
        return Picture(f"{self.title}; medians, with quartiles", panels, (13.0, 5.6))


def _named(
    measurements: Measurements, part: str, context: Context, group: str, data: dict[str, Any], **options: Any
) -> list[Row]:
    """Rows of a part with its label in this experiment."""
    return measurements.rows(part, (_LABELS[part],) * 2, context.limits, group=group, data=data, **options)


def _is_of_panel(row: Row, place: str, time: int) -> bool:
    """Whether a row is in the panel over `place`, which is the length or the batch."""
    return bool(row.data["batch"] == 16 if place == "time" else row.data["time"] == time and row.data["kind"] == "RNN")


def _ran(rows: Sequence[Row]) -> str:
    """The schedules that ran, such as ``sequential``."""
    return " or ".join(dict.fromkeys(row.data["ran"].partition(", ")[2] for row in rows))


def _lines(rows: Sequence[Row], place: str, style: str, colour: str, label: str) -> list[Part]:
    """A line of speeds over the length or the batch, or none without rows."""
    points = [(row.data[place], *_ratio(row)) for row in rows]
    return [Line.through(points, label, colour, style)] if points else []


def _ratio(row: Row) -> tuple[float, float, float]:
    """How many times as fast as PyTorch's a row is: by its median, upper and lower quartile."""
    ratio = row.comparisons[0].ratio
    median, lower, upper = (seconds or 1.0 for seconds in (row.median, row.lower, row.upper))
    return ratio, ratio * median / upper, ratio * median / lower


def _by_subtraction(measurements: Measurements, group: str) -> list[Row]:
    """The backward pass as the thesis takes it: a step's time, less the median of a step without backward pass."""
    timings = measurements.timings
    times = {layer: timings[layer, "step", ""].less(timings[layer, "rest", ""]) for layer in (OURS, PEER)}
    ours, peer = (
        measurements.row("backward pass by subtraction", time, layer, "", group=group) for layer, time in times.items()
    )
    return [replace(ours, comparisons=compare("torch.nn / jacsparse", peer, ours)), peer]
