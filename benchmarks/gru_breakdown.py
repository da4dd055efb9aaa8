"""Where the time of training the GRU goes: Figure 5.4."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ._context import Context
from ._experiment import Experiment, Row, compare
from ._recurrent import OURS, PEER, RecurrentWorkload, layer_row

__all__ = ["GruBreakdown"]


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

    def run(self, context: Context) -> list[Row]:
        return [
            row
            for name, time, features in self.sets
            for batch in self.batches
            for row in _rows(name, RecurrentWorkload("GRU", time, batch, features), context)
        ]

    def figure(self, rows: Sequence[Row], path: Path) -> None:
        from jacsparse._figures import BLUE, ORANGE, new_figure, save_figure

        found: dict[tuple[str, int, str, str], Row] = {
            (row.data["set"], row.data["batch"], row.data["part"], row.role): row for row in rows if row.data
        }
        names = list(dict.fromkeys(name for name, *_ in found))
        figure, panels = new_figure(10.0, 4.2, columns=len(names))
        for axes, name in zip([panels] if len(names) == 1 else panels, names, strict=True):
            batches = sorted({batch for other, batch, *_ in found if other == name})
            for role, colour, shift, passes in (
                ("peer", ORANGE, -0.2, ("FP", "BP")),
                ("ours", BLUE, 0.2, ("FP + FO", "BPPSA")),
            ):
                below = [0.0] * len(batches)
                for part, shade, label in zip(("forward", "backward"), (0.45, 1.0), passes, strict=True):
                    heights = [1e3 * (found[name, batch, part, role].median or 0.0) for batch in batches]
                    places = [place + shift for place in range(len(batches))]
                    layer = PEER if role == "peer" else OURS
                    axes.bar(places, heights, 0.36, below, color=colour, alpha=shade, label=f"{label}, {layer}")
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
    group = f"set {name}: {workload.name}"
    found = workload.times(context, ("forward", "backward", "rest", "step"))
    for part, terms in (("forward", ("FP + FO", "FP")), ("backward", ("BPPSA", "BP")), ("step", ("step", "step"))):
        data = {"set": name, "batch": workload.batch, "part": part}
        ours, peer = (
            replace(layer_row(workload, f"{term}: {part}, {layer}", found[layer, part], layer), group=group, data=data)
            for term, layer in zip(terms, (OURS, PEER), strict=True)
        )
        comparisons = compare("torch.nn / jacsparse", peer, ours)
        rows += [replace(ours, comparisons=comparisons, floor=workload.floor(part, context.limits)), peer]
        if part == "forward":
            # As the thesis takes it: from steps without their backward pass.
            overhead = found[OURS, "rest"].less(statistics.median(found[PEER, "rest"].seconds))
            note = "below zero: there is none, for gates are kept on the way"
            rows.append(Row.timed("FO: ours beyond FP, by subtraction", overhead, group=group, note=note))
    return rows
