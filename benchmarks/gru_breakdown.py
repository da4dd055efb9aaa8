"""Where the time of training the GRU goes: Figure 5.4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ._context import Context
from ._experiment import Experiment, Row
from ._recurrent import OURS, PEER, RecurrentWorkload, shown

__all__ = ["GruBreakdown"]

#: On CUDA, with set L in batches of 16: as much as the thesis reached, and three times that.
_TARGETS = {"backward": {"auto": (13.45, 3 * 13.45)}, "step": {"auto": (2.11, 3 * 2.11)}}


@dataclass(frozen=True)
class GruBreakdown(Experiment):
    """Forward and backward passes over sequences as long and as wide as the thesis' three sets of features.

    In its words: FP, `torch.nn`'s forward pass; FO, what ours takes beyond that, which in the thesis is to compute
    again the gates that cuDNN does not give; BP, `torch.nn`'s backward pass; BPPSA, ours.

    Attributes
    ----------
    sets : tuple of (str, int, int)
        Name, steps and features of a step.
    batches : tuple of int
        Samples.
    """

    sets: tuple[tuple[str, int, int], ...] = (("S", 259, 38), ("M", 517, 24), ("L", 1034, 12))
    batches: tuple[int, ...] = (16, 32, 64)

    name = "gru_breakdown"
    title = "Training the GRU on instruments: forward and backward passes"
    source = "thesis, Figure 5.4 (published, on GPUs: backward at most 13.45 times as fast, overall 2.11)"
    devices = ("cpu", "cuda")

    def run(self, context: Context) -> list[Row]:
        # The longest first: on CUDA time may run out.
        return [
            row
            for name, time, features in reversed(self.sets)
            for batch in self.batches
            for row in _rows(name, RecurrentWorkload("GRU", time, batch, features), context)
        ]

    def figure(self, rows: Sequence[Row], path: Path) -> None:
        from jacsparse._figures import BLUE, ORANGE, new_figure, save_figure

        found: dict[tuple[str, int, str, str], Row] = {
            (row.data["set"], row.data["batch"], row.data["part"], row.role): row for row in shown(rows)
        }
        names = list(dict.fromkeys(name for name, *_ in found))[::-1]
        figure, panels = new_figure(10.0, 4.2, columns=max(1, len(names)))
        for axes, name in zip(panels if len(names) > 1 else [panels], names, strict=False):
            batches = sorted({batch for other, batch, *_ in found if other == name})
            for role, colour, shift, passes in (
                ("peer", ORANGE, -0.2, ("FP", "BP")),
                ("ours", BLUE, 0.2, ("FP + FO", "BPPSA")),
            ):
                below = [0.0] * len(batches)
                for part, shade, label in zip(("forward", "backward"), (0.45, 1.0), passes, strict=True):
                    rows_of = [found.get((name, batch, part, role)) for batch in batches]
                    heights = [1e3 * ((row and row.median) or 0.0) for row in rows_of]
                    places = [place + shift for place in range(len(batches))]
                    layer = PEER if role == "peer" else OURS
                    axes.bar(places, heights, 0.36, below, color=colour, alpha=shade, label=f"{label}, {layer.name}")
                    below = [one + other for one, other in zip(below, heights, strict=True)]
            axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
            axes.set(title=f"set {name}", xlabel="samples of a batch")
            axes.grid(axis="y", alpha=0.25)
        figure.axes[0].set_ylabel("milliseconds")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, fontsize=8, frameon=False, loc="outside lower center", ncols=len(labels))
        figure.suptitle(self.title, fontsize=10)
        save_figure(figure, path)


def _rows(name: str, workload: RecurrentWorkload, context: Context) -> list[Row]:
    rows: list[Row] = []
    group, targeted = f"set {name}: {workload.name}", (context.device, name, workload.batch) == ("cuda", "L", 16)
    found = workload.times(context, ("forward", "backward", "rest", "step"))
    for part, terms in (("forward", ("FP + FO", "FP")), ("backward", ("BPPSA", "BP")), ("step", ("step", "step"))):
        rows += found.rows(
            part,
            (f"{terms[0]}: {part}", f"{terms[1]}: {part}"),
            context.limits,
            targets=_TARGETS.get(part) if targeted else None,
            group=group,
            data={"set": name, "batch": workload.batch},
        )
        if part == "forward":
            # As the thesis takes it: from steps without their backward pass.
            for mode in found.modes():
                overhead = found.timings[OURS, "rest", mode].less(found.timings[PEER, "rest", mode])
                note = "below zero: there is none, for gates are kept on the way"
                row = found.row("FO: beyond FP, by subtraction", overhead, OURS, mode, group=group)
                rows.append(replace(row, note=note))
    return rows
