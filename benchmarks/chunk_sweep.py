"""How the steps of a chunk change the time of recurrences on a GPU, from which `auto`'s prices are fitted."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ._calls import GRAPH, MODES
from ._context import Context
from ._figures import COLOURS, Line, Panel, Picture
from ._recurrent import OURS, PEER, Layer, RecurrentCase, RecurrentGrid, RecurrentWorkload, shown
from ._rows import Row, values_of, where

_LABELS = {"forward": ("forward pass",) * 2, "backward of all": ("backward pass, loss on every step",) * 2}


@dataclass(frozen=True)
class ChunkSweep(RecurrentGrid):
    """Both passes by guesses in chunks of several lengths, step after step, and as `auto` chooses."""

    times: tuple[int, ...] = (1000, 10_000, 300, 3000, 30_000)
    chunks: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024)
    #: Layers, and elements of a step's input.
    kinds: tuple[tuple[str, int], ...] = (("RNN", 1), ("GRU", 12))
    batch: int = 16

    name = "chunk_sweep"
    title = "Recurrences on a GPU by guesses, by the steps of a chunk"
    source = "no paper: the prices of `auto`"
    devices = ("cuda",)

    def cases(self, context: Context) -> Iterable[RecurrentCase]:
        # Graphs come first: their times are the kernels'.
        modes = sorted(MODES[context.device], key=lambda mode: mode != GRAPH)
        for mode, time, (kind, features) in itertools.product(modes, self.times, self.kinds):
            chunks = [chunk for chunk in self.chunks if chunk < time]
            layers = [Layer(f"jacsparse relaxed:{chunk}", f"relaxed:{chunk}", f"relaxed:{chunk}") for chunk in chunks]
            layers = [OURS, Layer("jacsparse sequential", "sequential", "sequential"), *layers, PEER]
            workload = RecurrentWorkload(kind, time, self.batch, features)
            data = {"kind": kind, "time": time}
            yield RecurrentCase(workload, [(tuple(_LABELS), layers)], _LABELS, data, modes=(mode,))

    def picture(self, rows: Sequence[Row]) -> Picture:
        drawn, panels = shown(rows), []
        for kind, part in itertools.product(values_of(drawn, "kind"), _LABELS):
            lines = []
            for time, colour in zip(sorted(values_of(drawn, "time")), itertools.cycle(COLOURS), strict=False):
                of_line = where(drawn, kind=kind, part=part, time=time)
                points = [
                    (int(number), 1e6 * (row.median or 0.0))
                    for row in of_line
                    if (number := row.data["layer"].partition("relaxed:")[2])
                ]
                lines.append(Line.through(points, f"{time:,} steps", colour, "o-"))
            panels.append(Panel(lines, f"{kind}, {_LABELS[part][0]}", "steps of a chunk", "microseconds", "2y"))
        return Picture(self.title, panels, (9.0, 7.0), 2, legend=5)
