"""Recurrent layers of every width, length and batch against torch.nn's: nowhere slower."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from jacsparse import nn as scanned

from ._calls import Call
from ._context import Context, Timing
from ._experiment import Comparison, Experiment, Row

__all__ = ["RecurrentShapes"]

#: How many times as fast as torch.nn's each layer should at least be: equal, but for five per cent.
_TARGET = 0.95
#: Multiply-adds of a shape's steps beyond which a call takes a second.
_MOST_PRODUCTS = 2e9
#: In how many turns: a ratio of five per cent is less than what a shared machine's speed changes by in a second.
_ROUNDS = 12
_PARTS = ("inference", "training")


@dataclass(frozen=True)
class _Cell:
    """One shape: seconds of ours and of PyTorch's layer by the medians, their ratio, and that of the fastest runs."""

    time: int
    batch: int
    ours: float
    theirs: float
    ratio: float
    fastest: float
    ran: str


@dataclass(frozen=True)
class RecurrentShapes(Experiment):
    """Layers alone, in float32: a forward pass without gradients, and one with those of the weights by all outputs.

    Attributes
    ----------
    kinds : tuple of str
        The layers.
    sizes, times, batches : tuple of int
        Elements of a state, steps, and samples. Inputs have as many elements as a state, at most 32.
    """

    kinds: tuple[str, ...] = ("RNN", "GRU", "LSTM")
    sizes: tuple[int, ...] = (8, 20, 64, 128, 256, 512, 1024)
    times: tuple[int, ...] = (1, 4, 16, 64, 512)
    batches: tuple[int, ...] = (1, 16, 256)

    name = "recurrent_shapes"
    title = "Recurrent layers of any shape: speed against torch.nn's"
    source = "no paper: what a layer is measured by that takes torch.nn's place"

    def run(self, context: Context) -> list[Row]:
        shapes = itertools.product(self.kinds, self.sizes, _PARTS)
        return [self._row(kind, size, part, context) for kind, size, part in shapes]

    def _row(self, kind: str, size: int, part: str, context: Context) -> Row:
        """The shape in which ours is slowest, beside PyTorch's; the others are in its data."""
        cells = list(self._cells(kind, size, part, context))
        slowest = min(cells, key=lambda cell: cell.ratio)
        return Row.of_value(
            f"{kind}, H = {size}, {part}",
            slowest.ratio,
            "least of torch.nn / jacsparse",
            group=f"{context.threads} thread(s)",
            comparisons=(Comparison("torch.nn / jacsparse", slowest.ratio, slowest.fastest, at_least=_TARGET),),
            note=f"least of {len(cells)} shapes: T = {slowest.time}, B = {slowest.batch}, by {slowest.ran}",
            data={
                "kind": kind,
                "size": size,
                "part": part,
                "threads": context.threads,
                "cells": list(map(asdict, cells)),
            },
        )

    def _cells(self, kind: str, size: int, part: str, context: Context) -> Iterator[_Cell]:
        gates, features = {"RNN": 1, "GRU": 3, "LSTM": 4}[kind], min(size, 32)
        for time, batch in itertools.product(self.times, self.batches):
            if gates * size * (size + features) * time * batch > _MOST_PRODUCTS:
                continue
            torch.manual_seed(0)
            theirs: Any = getattr(nn, kind)(features, size)
            ours: Any = getattr(scanned, kind).of(theirs)
            x = torch.randn(time, batch, features)
            functions = {"jacsparse": _function(ours, x, part), "torch.nn": _function(theirs, x, part)}
            for found, expected in zip(*(function() for function in functions.values()), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())
            own = replace(context.under(f"{kind}, H = {size}, T = {time}, B = {batch}, {part}"), rounds=_ROUNDS)
            timings = own.times(functions, seconds=0.2 * context.seconds)
            for _ in range(3):
                # A shape that both solve alike is below by chance, too: longer runs, with the earlier ones, tell.
                if _ratio(timings) < _TARGET:
                    again = own.times(functions, seconds=0.5 * context.seconds)
                    timings = {name: timing.plus(again[name]) for name, timing in timings.items()}
            seconds = {name: _median(timing) for name, timing in timings.items()}
            fastest = min(timings["torch.nn"].seconds) / min(timings["jacsparse"].seconds)
            ran = ours.reports[-1].methods[0]
            yield _Cell(time, batch, seconds["jacsparse"], seconds["torch.nn"], _ratio(timings), fastest, ran)

    def figure(self, rows: Sequence[Row], path: Path) -> None:
        from matplotlib.colors import TwoSlopeNorm

        from jacsparse._figures import new_figure, save_figure

        figure, axes = new_figure(12.0, 1.6 + 0.13 * len(rows), columns=len(_PARTS))
        for panel, part in zip(axes, _PARTS, strict=True):
            own = [row for row in rows if row.data["part"] == part]
            shapes = sorted({(cell["time"], cell["batch"]) for row in own for cell in row.data["cells"]})
            image = np.full((len(own), len(shapes)), np.nan)
            for line, row in enumerate(own):
                for cell in row.data["cells"]:
                    place = shapes.index((cell["time"], cell["batch"]))
                    image[line, place] = math.log2(cell["ratio"])
                    look = "normal" if cell["ran"] == "torch.nn" else "bold"
                    text = f"{cell['ratio']:.2f}" if cell["ratio"] < 9.95 else f"{cell['ratio']:.0f}"
                    colour = "white" if cell["ratio"] > 5 else "black"
                    panel.text(place, line, text, ha="center", va="center", fontsize=5.5, fontweight=look, color=colour)
            panel.imshow(image, cmap="PuOr", norm=TwoSlopeNorm(0.0, -1.0, 5.0), aspect="auto")
            names = [f"{row.data['kind']}, H = {row.data['size']}" for row in own]
            panel.set_yticks(range(len(own)), names, fontsize=7)
            labels = [f"{time}, {batch}" for time, batch in shapes]
            panel.set_xticks(range(len(shapes)), labels, fontsize=7, rotation=90)
            panel.set(title=f"{part}, {own[0].group}", xlabel="steps, samples of a batch")
        text = "times as fast as torch.nn; bold: by kernels of jacsparse, the others by PyTorch's"
        figure.suptitle(f"{self.title}; {text}", fontsize=10)
        save_figure(figure, path)


def _function(layer: Any, x: torch.Tensor, part: str) -> Call:
    weights = list(layer.parameters())

    def inference() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return (layer(x)[0],)

    def training() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(layer(x)[0].sum(), weights)

    return inference if part == "inference" else training


def _ratio(timings: Mapping[str, Timing]) -> float:
    """How many times as fast as PyTorch's ours is, by the medians."""
    return _median(timings["torch.nn"]) / _median(timings["jacsparse"])


def _median(timing: Timing) -> float:
    if timing.problem:
        raise RuntimeError(timing.problem)
    return statistics.median(timing.seconds)
