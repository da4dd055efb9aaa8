"""How the speed of a recurrent layer's training depends on the sequences' length and on the batch: Figure 5.2."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ._context import Context, Timing
from ._experiment import Experiment, Row, compare
from ._recurrent import OURS, PEER, RecurrentWorkload, layer_row

__all__ = ["RnnSensitivity"]

#: At these settings a backward pass, and a whole step, should be so much faster than torch.nn's.
_TARGETS = {("RNN", 1000): (8, 5), ("RNN", 10_000): (8, 5), ("GRU", 1000): (10, 7), ("GRU", 10_000): (10, 7)}


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
    """

    times: tuple[int, ...] = (10, 30, 100, 300, 1000, 3000, 10_000, 30_000)
    batches: tuple[int, ...] = (2, 4, 8, 16, 32, 64, 128, 256)
    time: int = 1000
    others: tuple[int, ...] = (1000, 10_000)

    name = "rnn_sensitivity"
    title = "Training recurrent layers: speed against torch.nn's, by length and batch"
    source = "thesis, Figure 5.2 (published, on GPUs: backward at most 8.8 times as fast, overall 2.75)"

    def run(self, context: Context) -> list[Row]:
        workloads = {RecurrentWorkload("RNN", time, 16, 1): None for time in self.times}
        workloads |= {RecurrentWorkload("RNN", self.time, batch, 1): None for batch in self.batches}
        workloads |= {RecurrentWorkload(kind, time, 16, 12): None for kind in ("GRU", "LSTM") for time in self.others}
        return [row for workload in workloads for row in _rows(workload, context)]

    def figure(self, rows: Sequence[Row], path: Path) -> None:
        from jacsparse._figures import BLUE, GREEN, ORANGE, new_figure, save_figure

        figure, panels = new_figure(10.0, 4.2, columns=2)
        labels = ("steps, batches of 16", f"samples of a batch, {self.time:,} steps")
        for axes, place, label in zip(panels, ("time", "batch"), labels, strict=True):
            for kind, colour in (("RNN", BLUE), ("GRU", ORANGE), ("LSTM", GREEN)):
                for part, style, shown in (("backward", "o-", "backward"), ("step", "s--", "whole step")):
                    found = [row for row in rows if row.data.get("kind") == kind and row.data["part"] == part]
                    points = sorted(_point(row, place) for row in found if _belongs(row, place, self.time))
                    if points:
                        axes.plot(
                            *zip(*points, strict=True), style, color=colour, markersize=4, label=f"{kind}, {shown}"
                        )
            axes.axhline(1, color="black", linewidth=1, label="torch.nn")
            axes.set(xscale="log", yscale="log", xlabel=label)
            axes.grid(alpha=0.25, which="both")
        panels[0].set_ylabel("times as fast as torch.nn")
        panels[0].legend(fontsize=8, frameon=False)
        figure.suptitle(self.title, fontsize=10)
        save_figure(figure, path)


def _belongs(row: Row, place: str, time: int) -> bool:
    """Whether a row is one of the panel over lengths, or over batches."""
    return row.data["batch"] == 16 if place == "time" else row.data["time"] == time and row.data["kind"] == "RNN"


def _point(row: Row, place: str) -> tuple[int, float]:
    return row.data[place], row.comparisons[0].ratio


def _rows(workload: RecurrentWorkload, context: Context) -> list[Row]:
    found = workload.times(context, ("backward", "step", "rest"))
    targets = _TARGETS.get((workload.kind, workload.time), (None, None)) if workload.batch == 16 else (None, None)
    rows: list[Row] = []
    for part, label, target in zip(("backward", "step"), ("backward pass", "training step"), targets, strict=True):
        ours, peer = (layer_row(workload, f"{label}, {layer}", found[layer, part], layer) for layer in (OURS, PEER))
        wanted = {} if target is None else {"at_least": target}
        comparisons = compare("torch.nn / jacsparse", peer, ours, **wanted)
        data = {"kind": workload.kind, "time": workload.time, "batch": workload.batch, "part": part}
        rows += [replace(ours, comparisons=comparisons, floor=workload.floor(part, context.limits), data=data), peer]
    ours, peer = (_difference(workload, found[layer, "step"], found[layer, "rest"], layer) for layer in (OURS, PEER))
    return [*rows, replace(ours, comparisons=compare("torch.nn / jacsparse", peer, ours)), peer]


def _difference(workload: RecurrentWorkload, step: Timing, rest: Timing, layer: str) -> Row:
    """The backward pass as the thesis takes it: a step's time, less the median of one without it."""
    without = statistics.median(rest.seconds)
    return layer_row(workload, f"backward pass by subtraction, {layer}", step.less(without), layer)
