"""The parts of the time to train the GRU: the thesis' Figure 5.4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ._context import Context
from ._experiment import Experiment, Row
from ._recurrent import OURS, PEER, SCANS, Layer, RecurrentWorkload, shown
from ._text import amount

__all__ = ["GruBreakdown"]

#: Targets on CUDA, with set L in batches of 16: the thesis' speed-ups, and three times these.
_TARGETS = {"backward": {"auto": (13.45, 3 * 13.45)}, "step": {"auto": (2.11, 3 * 2.11)}}


@dataclass(frozen=True)
class GruBreakdown(Experiment):
    """Forward and backward passes over sequences as long and as wide as the thesis' three sets of features.

    In its words: FP is `torch.nn`'s forward pass; FO is the additional time of ours, which in the thesis computes again
    the gates that cuDNN does not return; BP is `torch.nn`'s backward pass; BPPSA is a scan instead of BP. Our layer is
    timed with the schedule `auto`, and with scans.
    """

    #: Name, steps and features of a step.
    sets: tuple[tuple[str, int, int], ...] = (("S", 259, 38), ("M", 517, 24), ("L", 1034, 12))
    #: Samples per batch.
    batches: tuple[int, ...] = (16, 32, 64)

    name = "gru_breakdown"
    title = "Training the GRU on instruments: forward and backward passes"
    source = "thesis, Figure 5.4 (published, on GPUs: backward at most 13.45 times as fast, overall 2.11)"
    devices = ("cpu", "cuda")

    def run(self, context: Context) -> list[Row]:
        # The longest sequences come first, as time may run out on CUDA.
        return [
            row
            for name, time, features in reversed(self.sets)
            for batch in self.batches
            for row in _rows(name, RecurrentWorkload("GRU", time, batch, features), context)
        ]

    def figure(self, rows: Sequence[Row], path: Path) -> None:
        from jacsparse.figures import BLUE, GREEN, ORANGE, PURPLE, SKY, new_figure, save_figure

        colours = (ORANGE, BLUE, GREEN, SKY, PURPLE)
        # The seconds of both passes, by set, batch and layer.
        seconds: dict[tuple[str, int, str], dict[str, float]] = {}
        for row in shown(rows):
            if row.data["part"] in ("forward", "backward"):
                key = row.data["set"], row.data["batch"], row.data["ran"]
                seconds.setdefault(key, {})[row.data["part"]] = row.median or 0.0
        sets = list(dict.fromkeys(name for name, *_ in seconds))
        layers = sorted(dict.fromkeys(layer for *_, layer in seconds), key=lambda layer: layer != PEER.name)
        figure, panels = new_figure(12.0, 5.0, columns=max(1, len(sets)))
        for axes, name in zip(panels if len(sets) > 1 else [panels], sets[::-1], strict=False):
            batches = sorted({batch for other, batch, _ in seconds if other == name})
            width = 0.8 / len(layers)
            for number, (layer, colour) in enumerate(zip(layers, colours, strict=False)):
                for place, batch in enumerate(batches):
                    passes, unit = seconds.get((name, batch, layer)), seconds.get((name, batch, PEER.name))
                    if passes and unit:
                        at = place + (number - (len(layers) - 1) / 2) * width
                        _bar(axes, at, width, passes, sum(unit.values()), colour)
            axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
            axes.set(title=f"set {name}", xlabel="samples of a batch", ylim=(0, _HIGHEST))
            axes.minorticks_on()
            axes.tick_params(axis="x", which="minor", bottom=False)
            axes.grid(axis="y", alpha=0.25)
        figure.axes[0].set_ylabel("time over torch.nn's forward and backward")
        _legend(figure, layers, colours)
        figure.suptitle(self.title, fontsize=10)
        save_figure(figure, path)


#: The height at which bars are cut off, in units of torch.nn's forward and backward passes.
_HIGHEST = 3.0


def _bar(axes: Any, place: float, width: float, seconds: dict[str, float], unit: float, colour: str) -> None:
    """Draw a forward pass and the backward pass above it, relative to `unit`, and print their time."""
    forward, backward = (seconds.get(part, 0.0) / unit for part in ("forward", "backward"))
    axes.bar(place, forward, 0.9 * width, color=colour, alpha=0.45)
    axes.bar(place, backward, 0.9 * width, forward, color=colour)
    axes.annotate(
        amount(sum(seconds.values()), "s"),
        (place, min(forward + backward, 0.86 * _HIGHEST)),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        va="bottom",
        rotation=90,
        fontsize=7,
    )


def _legend(figure: Any, layers: Sequence[str], colours: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=layer) for layer, colour in zip(layers, colours, strict=False)]
    handles += [Patch(color="grey", alpha=0.45, label="forward"), Patch(color="grey", label="backward")]
    figure.legend(handles=handles, fontsize=8, frameon=False, loc="outside lower center", ncols=len(handles))


def _rows(name: str, workload: RecurrentWorkload, context: Context) -> list[Row]:
    rows: list[Row] = []
    group, targeted = f"set {name}: {workload.name}", (context.device, name, workload.batch) == ("cuda", "L", 16)
    measured = workload.times(context, ("forward", "backward", "rest", "step"), (OURS, *map(Layer.by, SCANS), PEER))
    for part, terms in (("forward", ("FP + FO: ", "FP: ")), ("backward", ("", "BP: ")), ("step", ("", ""))):
        rows += measured.rows(
            part,
            (f"{terms[0]}{part}", f"{terms[1]}{part}"),
            context.limits,
            targets=_TARGETS.get(part) if targeted else None,
            group=group,
            data={"set": name, "batch": workload.batch},
        )
        if part == "forward":
            # The thesis subtracts the times of steps without their backward pass.
            for mode in measured.modes():
                overhead = measured.timings[OURS, "rest", mode].less(measured.timings[PEER, "rest", mode])
                note = "below zero: there is none, for gates are kept on the way"
                row = measured.row("FO: beyond FP, by subtraction", overhead, OURS, mode, group=group)
                rows.append(replace(row, note=note))
    return rows
