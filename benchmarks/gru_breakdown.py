"""The parts of the time to train the GRU: the thesis' Figure 5.4."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ._calls import GRAPH, labelled
from ._context import Context
from ._figures import Bars, Panel, Picture
from ._recurrent import OURS, PEER, SCANS, Layer, RecurrentCase, RecurrentGrid, RecurrentWorkload, Timings, shown
from ._rows import Group, Row
from ._text import amount

#: Targets on CUDA with set L, by samples of a batch: the thesis' speed-ups, and three times these; an exact scan's.
_TARGETS: dict[int, dict[str, dict[str, tuple[float, ...]]]] = {
    16: {"backward": {"auto": (13.45, 3 * 13.45)}, "step": {"auto": (2.11, 3 * 2.11)}},
    64: {labelled("backward", GRAPH): {"chunked": (8.0, 13.45)}},
}
#: Labels of our rows and of PyTorch's.
_LABELS = {
    "forward": ("FP + FO: forward", "FP: forward"),
    "backward": ("backward", "BP: backward"),
    "step": ("step",) * 2,
}


@dataclass(frozen=True)
class GruBreakdown(RecurrentGrid):
    """Forward and backward passes over sequences as long and as wide as the thesis' three sets of features.

    In its words: FP is `torch.nn`'s forward pass; FO is the additional time of ours, which in the thesis computes again
    the gates that cuDNN does not return; BP is `torch.nn`'s backward pass; BPPSA is a scan instead of BP. Our layer is
    timed with the schedule `auto`, and with scans.
    """

    #: Name, steps and features of a step.
    sets: tuple[tuple[str, int, int], ...] = (("S", 259, 38), ("M", 517, 24), ("L", 1034, 12))
    #: Samples per batch.
    batches: tuple[int, ...] = (16, 32, 64)
    #: Schedules of our layer beside `auto`.
    schedules: tuple[str, ...] = SCANS

    name = "gru_breakdown"
    title = "Training the GRU on instruments: forward and backward passes"
    source = "thesis, Figure 5.4 (published, on GPUs: backward at most 13.45 times as fast, overall 2.11)"

    def cases(self, context: Context) -> Iterable[RecurrentCase]:
        # The longest sequences come first, as time may run out on CUDA.
        for (name, time, features), batch in itertools.product(reversed(self.sets), self.batches):
            workload = RecurrentWorkload("GRU", time, batch, features)
            yield RecurrentCase(
                workload,
                [(("forward", "backward", "rest", "step"), (OURS, *map(Layer.by, self.schedules), PEER))],
                _LABELS,
                {"set": name, "batch": batch},
                f"set {name}: {workload.name}",
                _TARGETS.get(batch, {}) if (context.device, name) == ("cuda", "L") else {},
            )

    def add_differences(self, rows: Group, case: RecurrentCase, timings: Timings) -> None:
        label = f"FO: beyond FP, by subtraction, {OURS.name}"
        note = "below zero: there is none, for gates are kept on the way"
        for mode in dict.fromkeys(mode for _, mode, _ in timings):
            overhead = timings["rest", mode, OURS].less(timings["rest", mode, PEER])
            rows.timed(labelled(label, mode), overhead, note=note)

    def picture(self, rows: Sequence[Row]) -> Picture:
        # The seconds of both passes, by set, layer and batch.
        seconds: dict[tuple[str, str, int], dict[str, float]] = {}
        for row in shown(rows):
            if row.data["part"] in ("forward", "backward"):
                key = row.data["set"], row.data["ran"], row.data["batch"]
                seconds.setdefault(key, {})[row.data["part"]] = row.median or 0.0
        layers = sorted({layer: None for _, layer, _ in seconds}, key=lambda layer: layer != PEER.name)
        panels = []
        # Rows begin with the longest sequences.
        for name in reversed({name: None for name, *_ in seconds}):
            batches = sorted({batch for other, _, batch in seconds if other == name})
            total: dict[str, list[float | None]] = {layer: [] for layer in layers}
            forward: dict[str, list[float | None]] = {layer: [] for layer in layers}
            texts = dict[str, list[str]]()
            for layer, batch in itertools.product(layers, batches):
                passes, peer = seconds.get((name, layer, batch)), seconds.get((name, PEER.name, batch))
                unit = sum(peer.values()) if peer else 0.0
                total[layer].append(sum(passes.values()) / unit if passes and unit else None)
                forward[layer].append(passes.get("forward", 0.0) / unit if passes and unit else None)
                texts.setdefault(layer, []).append(amount(sum(passes.values()), "s") if passes else "")
            bars = Bars([str(batch) for batch in batches], total, texts=texts, pale=forward)
            label = "time over torch.nn's forward and backward"
            settings = {"ylim": (0, _HIGHEST)}
            panels.append(Panel([bars], f"set {name}", "samples of a batch", label, grid="y", settings=settings))
        return Picture(f"{self.title}; pale: forward", panels, (12.0, 5.0), legend=5)


#: The height at which bars are cut off, in units of torch.nn's forward and backward passes.
_HIGHEST = 3.0
