"""The speed of training recurrent layers, by the sequences' length and by the batch: the thesis' Figure 5.2."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from jacsparse.figures import BLUE, GREEN, ORANGE, PURPLE, SKY

from ._context import Context
from ._figures import Drawn, Line, Panel, Picture, Straight
from ._recurrent import OURS, PEER, SCANS, Layer, RecurrentCase, RecurrentGrid, RecurrentWorkload, Timings, shown
from ._rows import Group, Row, values_of, where

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
class RnnSensitivity(RecurrentGrid):
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

    def cases(self, context: Context) -> Iterable[RecurrentCase]:
        """All workloads, first those with schedules, as time may run out; on the CPU these once more on one thread."""
        workloads = [RecurrentWorkload("RNN", time, 16, 1) for time in self.times]
        scheduled, on_cuda = [each for each in workloads if each.time in self.scheduled], context.device == "cuda"
        workloads += [RecurrentWorkload("RNN", self.time, batch, 1) for batch in self.batches]
        workloads += [RecurrentWorkload(kind, time, 16, 12) for kind in ("GRU", "LSTM") for time in self.others]
        scanned = [RecurrentWorkload("RNN", self.time, batch, 1) for batch in self.scanned]
        by_schedules = (
            dict.fromkeys(scheduled, self.schedules) if on_cuda else dict.fromkeys(scheduled + scanned, self.scans)
        )
        for workload in dict.fromkeys([*scheduled, *workloads]):
            yield self._case(workload, by_schedules.get(workload, ()), context)
        if not on_cuda and torch.get_num_threads() > 1:
            yield from (self._case(each, self.scans, context, single_thread=True) for each in scheduled)

    def _case(
        self, workload: RecurrentWorkload, schedules: Sequence[str], context: Context, *, single_thread: bool = False
    ) -> RecurrentCase:
        on_cuda, threads = context.device == "cuda", 1 if single_thread else torch.get_num_threads()
        every = (("backward of all",), (OURS, *map(Layer.by, schedules), PEER))
        # On CUDA the backward pass by subtraction adds nothing.
        turns = [(("backward",), every[1]), (("step",) if on_cuda else ("step", "rest"), (OURS, PEER))]
        if schedules or not (on_cuda or workload.kind == "RNN"):
            turns.append(every)
        has_targets = workload.batch == 16 and not single_thread
        return RecurrentCase(
            workload,
            [every] if single_thread else turns,
            {part: (label, label) for part, label in _LABELS.items()},
            {"kind": workload.kind, "time": workload.time, "batch": workload.batch, "threads": threads},
            workload.name if on_cuda else f"{workload.name}, {threads} thread(s)",
            _TARGETS[context.device].get((workload.kind, workload.time), {}) if has_targets else {},
            single_thread=single_thread,
        )

    def add_differences(self, rows: Group, case: RecurrentCase, timings: Timings) -> None:
        labels = {layer: f"backward pass by subtraction, {layer.name}" for layer in (OURS, PEER)}
        for layer, label in labels.items():
            time = timings["step", "", layer].less(timings["rest", "", layer])
            rows.timed(label, time, role="peer" if layer == PEER else "ours")
        rows.compare("torch.nn / jacsparse", labels[PEER], labels[OURS])

    def picture(self, rows: Sequence[Row]) -> Picture:
        drawn = [row for row in shown(rows) if row.comparisons]
        threads = max((row.data["threads"] for row in drawn), default=1)
        by_steps = where(drawn, batch=16, threads=threads, layer=OURS.name)
        panels = []
        for part, title in _LABELS.items():
            lines = []
            for kind, colour in zip(("RNN", "GRU", "LSTM"), (BLUE, ORANGE, GREEN), strict=True):
                line = where(by_steps, kind=kind, part=part)
                lines += _lines(line, "time", "o-", colour, f"{kind}: {_ran(line)}")
            published = _PUBLISHED.get(title, _PUBLISHED["backward"])
            lines.append(Straight(published, None, f"published on GPUs: {published}", "red", ":"))
            panels.append((title, "steps, batches of 16", lines))
        by_batch = where(drawn, time=self.time, kind="RNN", threads=threads, layer=OURS.name)
        lines = []
        for (part, title), colour in zip(_LABELS.items(), (BLUE, SKY, PURPLE), strict=True):
            lines += _lines(where(by_batch, part=part), "batch", "o-", colour, title)
        panels.append(("RNN", f"samples of a batch, {self.time:,} steps", lines))
        scans = where(drawn, kind="RNN", part="backward of all", batch=16)
        scans = [row for row in scans if row.data["time"] in self.scheduled]
        for count in sorted(values_of(scans, "threads"), reverse=True):
            lines = []
            for number, name in enumerate(values_of(scans, "layer")):
                line, colour = where(scans, layer=name, threads=count), (BLUE, ORANGE, GREEN, SKY, PURPLE)[number % 5]
                style = "osD"[number // 5 % 3] + "-"
                lines += _lines(line, "time", style, colour, name.partition(" ")[2] or _ran(line))
            panels.append((f"RNN, backward, loss on every step,\n{count} thread(s)", "steps, batches of 16", lines))
        speed, peer = f"times as fast as {PEER.name}", Straight(1)
        drawn_panels = [
            Panel([*lines, peer], title, label, speed, "xy", "below", size=8) for title, label, lines in panels
        ]
        return Picture(f"{self.title}; medians, with quartiles", drawn_panels, (8.0, 4.2 * -(-len(panels) // 3)), 3)


def _ran(rows: Sequence[Row]) -> str:
    """The schedules that ran, such as ``sequential``."""
    return " or ".join(dict.fromkeys(row.data["ran"].partition(", ")[2] for row in rows))


def _lines(rows: Sequence[Row], place: str, style: str, colour: str, label: str) -> list[Drawn]:
    """A line of speeds over the length or the batch, or none without rows."""
    points = [(row.data[place], *_ratio(row)) for row in rows]
    return [Line.through(points, label, colour, style)] if points else []


def _ratio(row: Row) -> tuple[float, float, float]:
    """How many times as fast as PyTorch's a row is: by its median, upper and lower quartile."""
    ratio = row.comparisons[0].ratio
    median, lower, upper = (seconds or 1.0 for seconds in (row.median, row.lower, row.upper))
    return ratio, ratio * median / upper, ratio * median / lower
