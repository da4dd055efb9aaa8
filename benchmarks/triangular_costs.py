"""The paper's equations for work, time and memory of triangular solvers, beside what the solvers count."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jacsparse.patterns import Diagonal, Pattern

from jacsparse import SparseJacobian, solvers
from jacsparse.figures import BLUE, GREEN, ORANGE, SKY

from ._context import Context
from ._experiment import Comparison, Grid, Group, Row
from ._figures import COLOURS, Line, Panel, Part, Picture, Rule

#: The iterations of Jacobi's method that equations 46 and 47 are compared for: both are proportional to them.
_ITERATIONS = 4
_WHAT = {
    42: "equation 42, work of substitution",
    43: "equation 43, work of one level of reduction",
    44: "equation 44, time of one level of reduction on l workers",
    45: "equation 45, time of full reduction on l workers",
    46: "equation 46, work of Jacobi's iterations",
    47: "equation 47, time of Jacobi's iterations on l workers",
}
_MEMORY = "section 4.1, entries that full reduction stores beside the system's"
_TIME = "time of substitution on one worker / of full reduction on l"
_SHARED = "time of substitution on l workers / of full reduction on l"


@dataclass(frozen=True)
class TriangularCosts(Grid):
    """Multiply-adds and entries of fully connected layers of equal width, counted without numbers."""

    units: tuple[int, ...] = (8, 16, 64)
    depths: tuple[int, ...] = (15, 63)
    samples: tuple[int, ...] = (1, 4, 8, 16, 64, 256)

    name = "triangular_costs"
    title = "Work, time and memory of triangular solvers, by the paper and as counted"
    source = "Naumov, equations 42 to 47 and the memory and criterion of section 4.1"

    def cases(self, context: Context) -> Iterable[tuple[int, int]]:
        return itertools.product(self.depths, self.units)

    def measure(self, case: tuple[int, int], context: Context) -> list[Row]:
        depth, units = case
        context.say(f"{depth} layers of {units} units")
        points = [_points(depth, units, samples) for samples in self.samples]
        return [row for curve in zip(*points, strict=True) for row in _rows(curve, depth, units)]

    def picture(self, rows: Sequence[Row]) -> Picture:
        curves = {(row.data["what"], row.data["l"], row.data["n"]): row.data for row in rows}
        places = sorted({(layers, n) for _, layers, n in curves})
        depth, units = places[min(1, len(places) - 1)]
        lines = (
            ("42, 46, 47: work and time of passes", (_WHAT[42], _WHAT[46], _WHAT[47]), "#888888"),
            ("43: work, one level of reduction", (_WHAT[43],), SKY),
            ("44: time, one level of reduction", (_WHAT[44],), GREEN),
            ("45: time, full reduction", (_WHAT[45],), BLUE),
            ("4.1: memory, full reduction", (_MEMORY,), ORANGE),
        )
        counted = []
        for label, names, colour in lines:
            for curve in (curves[name, depth, units] for name in names):
                ratios = [c / p for c, p in zip(curve["counted"], curve["paper"], strict=True)]
                counted.append(Line(curve["r"], ratios, label, colour, "o-"))
        pays: list[Part] = [Rule(x=1, label="by the paper it pays from here on", colour="red"), Rule(1)]
        for (layers, n), colour in zip(places, itertools.cycle((*COLOURS, "#888888")), strict=False):
            curve = curves[_TIME, layers, n]
            over = [r / n for r in curve["r"]]
            pays.append(Line(over, curve["paper"], "", colour, "--"))
            pays.append(Line(over, curve["counted"], f"l = {layers}, n = {n}", colour, "o-"))
        pays.append(Line((), (), "by equations 42 and 45", style="--"))
        title = f"l = {depth} layers of n = {units} units; 1: as the paper has it"
        other, y = "full reduction on l workers: dashed by the paper, dots counted", "counted / by the paper"
        panels = [
            Panel(counted, title, "samples r of the mini-batch", y, "xy"),
            Panel(pays, other, "samples r / units n", "times as fast as substitution on one worker", "xy"),
        ]
        return Picture(
            "Each sample has reduced blocks of its own: products count r times, where the paper counts one for all.\n"
            "As counted, reduction over substitution is the same for any r: of the paper's criteria, r ≥ n or "
            "l / log2 l ≥ n, the second is left", panels, (11.5, 4.6),
        )  # fmt: skip


@dataclass(frozen=True)
class _Point:
    """One quantity for some number of samples."""

    what: str
    samples: int
    paper: float
    counted: float


def _points(depth: int, units: int, samples: int) -> list[_Point]:
    system = _system(depth, units, samples)
    passes = solvers.Jacobi(limit=_ITERATIONS).solve(system).work
    rows = {each.equation: each for each in solvers.estimates(system, {solvers.Jacobi.name: passes})}
    meta = system.on_meta()
    reduced, direct = (method.solve(meta).work for method in (solvers.CyclicReduction(), solvers.Substitution()))
    full = rows[45]
    return [
        *(_Point(_WHAT[number], samples, row.paper, row.counted) for number, row in sorted(rows.items())),
        _Point(_MEMORY, samples, system.off_diagonal.entries, reduced.entries),
        _Point(_TIME, samples, rows[42].paper / full.paper, rows[42].counted / full.counted),
        _Point(_SHARED, samples, rows[42].paper / full.paper, direct.time(depth) / full.counted),
    ]


def _system(depth: int, units: int, samples: int) -> solvers.BlockBidiagonal:
    """Back-propagation through equal layers, each with a diagonal of its own for each sample."""
    right = [torch.zeros(samples, units)] * depth + [torch.ones(samples, units)]
    diagonal = SparseJacobian(Pattern.of(Diagonal(units)), torch.full((units, samples), 0.5 / units))
    return solvers.BlockBidiagonal(
        [torch.ones(units, units)] * depth, right, inverse_diagonal=[None, *[diagonal] * depth]
    )


def _rows(curve: Sequence[_Point], depth: int, units: int) -> list[Row]:
    """Rows for one sample and for as many as units; each has the whole curve."""
    rows, what = Group(f"l = {depth} layers of n = {units} units"), curve[0].what
    data: dict[str, Any] = {"what": what, "l": depth, "n": units}
    data |= {name: [getattr(point, name) for point in curve] for name in ("paper", "counted")}
    data["r"] = [point.samples for point in curve]
    quantity = "ratio" if what in (_TIME, _SHARED) else "memory" if what == _MEMORY else "multiply-adds"
    for point in curve:
        if point.samples not in (1, units) and (units in data["r"] or point is not curve[-1]):
            continue
        note = f"by the paper {'at most ' if what == _MEMORY else ''}{point.paper:,.0f}"
        if quantity == "ratio":
            does = "does" if point.counted > 1 else "does not"
            note = f"r ≥ n: reduction pays by the paper, and as counted it {does}" if point.samples >= units else ""
        label, unit = f"{what}, r = {point.samples}", "entries" if what == _MEMORY else ""
        compared, more = (Comparison("counted / paper", point.counted / point.paper),), {"samples": point.samples}
        rows.value(label, point.counted, quantity, unit, comparisons=compared, note=note, data={**data, **more})
    return rows.rows()
