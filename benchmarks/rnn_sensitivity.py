"""How the speed of a recurrent layer's training depends on the sequences' length and on the batch: Figure 5.2."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ._context import Context
from ._experiment import Experiment, Row, compare
from ._recurrent import OURS, PEER, Layer, Measured, RecurrentWorkload, shown

__all__ = ["RnnSensitivity"]

#: In batches of 16, by device, layer and length: how many times as fast as torch.nn's a backward pass and a whole step
#: should be, by schedule.
_TARGETS: dict[str, dict[tuple[str, int], dict[str, dict[str, tuple[float, ...]]]]] = {
    "cpu": {
        (kind, time): {"backward": {"auto": (backward,)}, "step": {"auto": (step,)}}
        for kind, backward, step in (("RNN", 8, 5), ("GRU", 10, 7))
        for time in (1000, 10_000)
    },
    "cuda": {
        ("RNN", 1000): {"backward": {"chunked": (20,)}},
        ("RNN", 10_000): {"backward": {"chunked": (50,)}},
        ("RNN", 30_000): {"backward": {"chunked": (60,), "relaxed": (200,)}},
    },
}
_SCHEDULES = ("linear", "chunked", "chunked:16", "chunked:64", "chunked:320", "relaxed", "relaxed:32", "relaxed:320")


@dataclass(frozen=True)
class RnnSensitivity(Experiment):
    """Backward passes and whole training steps against `torch.nn`'s, on random sequences.

    Attributes
    ----------
    times : tuple of int
        Lengths of the RNN's sequences, in batches of 16.
    batches : tuple of int
        Batches of sequences of `time` steps.
    time : int
        Their length.
    others : tuple of int
        Lengths for the GRU and the LSTM, with as many inputs a step as the thesis' longest instruments (set L).
    scheduled : tuple of int
        Lengths at which, on CUDA, the RNN's backward pass is also timed by each of `schedules`.
    schedules : tuple of str
        As ``jacsparse.nn.RNN`` takes them.
    """

    times: tuple[int, ...] = (10, 30, 100, 300, 1000, 3000, 10_000, 30_000)
    batches: tuple[int, ...] = (2, 4, 8, 16, 32, 64, 128, 256)
    time: int = 1000
    others: tuple[int, ...] = (1000, 10_000)
    scheduled: tuple[int, ...] = (1000, 10_000, 30_000)
    schedules: tuple[str, ...] = _SCHEDULES

    name = "rnn_sensitivity"
    title = "Training recurrent layers: speed against torch.nn's, by length and batch"
    source = "thesis, Figure 5.2 (published, on GPUs: backward at most 8.8 times as fast, overall 2.75)"
    devices = ("cpu", "cuda")

    def run(self, context: Context) -> list[Row]:
        return [row for workload in self._workloads(context.device) for row in self._rows(workload, context)]

    def _workloads(self, device: str) -> list[RecurrentWorkload]:
        """Those with targets first: on CUDA time may run out."""
        found = {RecurrentWorkload("RNN", time, 16, 1): None for time in self.times}
        found |= {RecurrentWorkload("RNN", self.time, batch, 1): None for batch in self.batches}
        found |= {RecurrentWorkload(kind, time, 16, 12): None for kind in ("GRU", "LSTM") for time in self.others}
        return sorted(found, key=lambda workload: not (device == "cuda" and self._is_scheduled(workload)))

    def _is_scheduled(self, workload: RecurrentWorkload) -> bool:
        return workload.kind == "RNN" and workload.batch == 16 and workload.time in self.scheduled

    def _rows(self, workload: RecurrentWorkload, context: Context) -> list[Row]:
        targets = _TARGETS[context.device].get((workload.kind, workload.time), {}) if workload.batch == 16 else {}
        data = {"kind": workload.kind, "time": workload.time, "batch": workload.batch}
        layers, parts = [OURS, PEER], ["step", "rest"]
        if context.device == "cuda":
            # There a backward pass is timed as it is, and one by subtraction tells nothing more.
            parts.remove("rest")
            if self._is_scheduled(workload):
                layers[1:1] = [Layer(f"jacsparse {schedule}", schedule) for schedule in self.schedules]
        backward, step = workload.times(context, ["backward"], layers), workload.times(context, parts)
        rows: list[Row] = []
        for found, part, label in ((backward, "backward", "backward pass"), (step, "step", "training step")):
            rows += found.rows(part, (label, label), context.limits, targets=targets.get(part), data=data)
        if context.device == "cuda" and self._is_scheduled(workload):
            # Gradients of the last state alone vanish after some hundred steps, and guesses of zero are then right.
            label = "backward pass, loss on every step"
            every = workload.times(context, ["backward of all"], layers)
            rows += every.rows("backward of all", (label, label), context.limits, data=data)
        return rows + (_by_subtraction(step) if "rest" in parts else [])

    def figure(self, rows: Sequence[Row], path: Path) -> None:
        from jacsparse._figures import BLUE, GREEN, ORANGE, new_figure, save_figure

        figure, panels = new_figure(10.0, 4.2, columns=2)
        labels = ("steps, batches of 16", f"samples of a batch, {self.time:,} steps")
        for axes, place, label in zip(panels, ("time", "batch"), labels, strict=True):
            for kind, colour in (("RNN", BLUE), ("GRU", ORANGE), ("LSTM", GREEN)):
                for part, style, name in (("backward", "o-", "backward"), ("step", "s--", "whole step")):
                    points = sorted(_points(rows, kind, part, place, self.time))
                    if points:
                        axes.plot(
                            *zip(*points, strict=True), style, color=colour, markersize=4, label=f"{kind}, {name}"
                        )
            axes.axhline(1, color="black", linewidth=1, label="torch.nn")
            axes.set(xscale="log", yscale="log", xlabel=label)
            axes.grid(alpha=0.25, which="both")
        panels[0].set_ylabel("times as fast as torch.nn")
        panels[0].legend(fontsize=8, frameon=False)
        figure.suptitle(self.title, fontsize=10)
        save_figure(figure, path)


def _points(rows: Sequence[Row], kind: str, part: str, place: str, time: int) -> Iterator[tuple[int, float]]:
    """Places and ratios of a line, in the panel over lengths, or over batches."""
    line = [row for row in rows if (row.data.get("kind"), row.data.get("part")) == (kind, part)]
    for row in shown([row for row in line if row.data.get("layer", OURS.name) == OURS.name]):
        belongs = row.data["batch"] == 16 if place == "time" else row.data["time"] == time and kind == "RNN"
        if belongs and row.comparisons:
            yield row.data[place], row.comparisons[0].ratio


def _by_subtraction(found: Measured) -> list[Row]:
    """The backward pass as the thesis takes it: a step's time, less the median of one without it."""
    times = {layer: found.timings[layer, "step", ""].less(found.timings[layer, "rest", ""]) for layer in (OURS, PEER)}
    ours, peer = (found.row("backward pass by subtraction", time, layer, "") for layer, time in times.items())
    return [replace(ours, comparisons=compare("torch.nn / jacsparse", peer, ours)), peer]
