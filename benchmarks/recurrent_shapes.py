"""Recurrent layers of many widths, lengths and batches, which should nowhere be slower than torch.nn's."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from jacsparse import nn as scanned

from ._calls import Call
from ._context import Context
from ._experiment import Grid
from ._figures import Cells, Panel, Picture
from ._recurrent import GATES, OURS, PEER
from ._rows import Comparison, Group, Row, reason, where

#: The least speed of each layer relative to torch.nn's: equal within five per cent.
_TARGET = 0.95
#: The most multiply-adds of a shape's steps; a call with more takes over a second.
_MOST_PRODUCTS = 2e9
#: The number of turns: within a second, the speed of a shared machine changes by more than five per cent.
_ROUNDS = 12
#: Seconds of the first run for each layer, and of another run, which alone decides for a shape that seemed slower: in a
#: short run, equal layers miss the target by chance.
_SHORT, _LONG = 0.2, 4.0
_PARTS = ("inference", "training")
_RATIO = f"{PEER.name} / {OURS.name}"


@dataclass(frozen=True)
class RecurrentShapes(Grid):
    """Layers alone, in float32: a forward pass without gradients, and one with those of the weights by all outputs."""

    kinds: tuple[str, ...] = ("RNN", "GRU", "LSTM")
    #: Elements of a state; inputs have as many, but at most 32.
    sizes: tuple[int, ...] = (8, 20, 64, 128, 256, 512, 1024)
    #: Numbers of steps.
    times: tuple[int, ...] = (1, 4, 16, 64, 512)
    #: Samples per batch.
    batches: tuple[int, ...] = (1, 16, 256)

    name = "recurrent_shapes"
    title = "Recurrent layers of any shape: speed against torch.nn's"
    source = "no paper: what a layer is measured by that takes torch.nn's place"

    def cases(self, context: Context) -> Iterable[tuple[str, int, str]]:
        return itertools.product(self.kinds, self.sizes, _PARTS)

    def measure(self, case: tuple[str, int, str], context: Context) -> list[Row]:
        """A row of the shape in which ours is slowest, relative to PyTorch's; its data has all shapes."""
        kind, size, part = case
        rows, label = Group(f"{context.threads} thread(s)"), f"{kind}, H = {size}, {part}"
        cells, problems = list[dict[str, Any]](), list[str]()
        for time, batch in itertools.product(self.times, self.batches):
            if GATES[kind] * size * (size + _features(size)) * time * batch > _MOST_PRODUCTS:
                continue
            try:
                cells.append(_measured(kind, size, time, batch, part, context))
            except Exception as error:
                problems.append(reason(error))
        if not cells:
            return [rows.missing(label, problems[0])]
        slowest = min(cells, key=operator.itemgetter("ratio"))
        note = f"least of {len(cells)} shapes: T = {slowest['time']}, B = {slowest['batch']}, by {slowest['ran']}"
        if repeated := sum(cell["again"] for cell in cells):
            note += f"; {repeated} measured again, for they seemed slower"
        note = "; ".join([note, *(f"{len(problems)} not measured: {text}" for text in problems[:1])])
        data = {"kind": kind, "size": size, "part": part, "cells": cells}
        compared = (Comparison(_RATIO, slowest["ratio"], slowest["fastest"], at_least=_TARGET),)
        return [rows.value(label, slowest["ratio"], f"least of {_RATIO}", comparisons=compared, note=note, data=data)]

    def picture(self, rows: Sequence[Row]) -> Picture:
        from matplotlib import colormaps
        from matplotlib.colors import TwoSlopeNorm

        colour, norm, panels = colormaps["PuOr"], TwoSlopeNorm(0.0, -1.0, 5.0), []
        for part in _PARTS:
            lines = where(rows, part=part)
            shapes = sorted({(cell["time"], cell["batch"]) for row in lines for cell in row.data["cells"]})
            cells = {}
            for line, row in enumerate(lines):
                for cell in row.data["cells"]:
                    ratio, place = cell["ratio"], shapes.index((cell["time"], cell["batch"]))
                    text = f"{ratio:.2f}" if ratio < 9.95 else f"{ratio:.0f}"
                    cells[line, place] = text, colour(norm(math.log2(ratio)))[:3], cell["ran"] != PEER.name
            names = [f"{row.data['kind']}, H = {row.data['size']}" for row in lines]
            parts = [Cells(names, [f"{time},\n{batch}" for time, batch in shapes], cells)]
            panels.append(Panel(parts, f"{part}, {lines[0].group}", "steps, samples of a batch", grid=""))
        text = "times as fast as torch.nn; bold: by kernels of jacsparse, the others by PyTorch's"
        return Picture(f"{self.title}; {text}", panels, (12.0, 1.6 + 0.13 * len(rows)))


def _function(layer: Any, x: torch.Tensor, part: str) -> Call:
    weights = list(layer.parameters())

    def inference() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return (layer(x)[0],)

    def training() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(layer(x)[0].sum(), weights)

    return inference if part == "inference" else training


def _features(size: int) -> int:
    """The number of elements of a step's input."""
    return min(size, 32)


def _measured(kind: str, size: int, time: int, batch: int, part: str, context: Context) -> dict[str, Any]:
    """The measurement of one shape, after a check of the outputs or gradients; RuntimeError if a layer was not timed.

    It has the steps, the samples per batch, how many times as fast as PyTorch's ours is by medians and by fastest runs,
    our median, whether that is of the longer run, and what our layer ran, ``torch.nn`` if that were PyTorch's kernels.
    """
    torch.manual_seed(0)
    theirs: Any = getattr(nn, kind)(_features(size), size)
    ours: Any = getattr(scanned, kind).of(theirs)
    x = torch.randn(time, batch, _features(size))
    functions = {OURS.name: _function(ours, x, part), PEER.name: _function(theirs, x, part)}
    for result, expected in zip(*(function() for function in functions.values()), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())
    for seconds in (_SHORT, _LONG):
        rows = Group(f"{kind}, H = {size}, T = {time}, B = {batch}, {part}")
        rows.in_turns(replace(context, rounds=_ROUNDS), functions, seconds=seconds * context.seconds)
        rows.compare(_RATIO, PEER.name, OURS.name)
        if not rows[OURS.name].comparisons:
            raise RuntimeError(rows[OURS.name].not_measured or rows[PEER.name].not_measured)
        (speed,) = rows[OURS.name].comparisons
        if speed.ratio >= _TARGET:
            break
    ran = ours.reports[-1].methods[0]
    return {
        **{"time": time, "batch": batch, "ratio": speed.ratio, "fastest": speed.fastest},
        **{"seconds": rows[OURS.name].median, "again": seconds == _LONG, "ran": ran},
    }
