"""The paper's equations for work, time and memory of triangular solvers, beside what the solvers count."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jacsparse.patterns import Diagonal, Pattern

from jacsparse import SparseJacobian, solvers
from jacsparse.figures import BLUE, GREEN, ORANGE, SKY

from ._context import Context
from ._experiment import Grid
from ._figures import COLOURS, Drawn, Line, Panel, Picture, Straight
from ._rows import Group, Row

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
        rows, points = Group(f"l = {depth} layers of n = {units} units"), [_point(*case, each) for each in self.samples]
        for what in points[0]:
            paper, counted = zip(*(point[what] for point in points), strict=True)
            data = {"what": what, "l": depth, "n": units, "paper": paper, "counted": counted, "r": self.samples}
            self._add(rows, what, units, data)
        return rows.rows()

    def _add(self, rows: Group, what: str, units: int, data: dict[str, Any]) -> None:
        """Add a quantity for one sample and for as many as units; each row has the whole curve."""
        quantity = "ratio" if what in (_TIME, _SHARED) else "memory" if what == _MEMORY else "multiply-adds"
        largest = self.samples[-1] if units not in self.samples else units
        for samples, paper, counted in zip(self.samples, data["paper"], data["counted"], strict=True):
            if samples not in (1, largest):
                continue
            note = f"by the paper {'at most ' if what == _MEMORY else ''}{paper:,.0f}"
            if quantity == "ratio":
                does = "does" if counted > 1 else "does not"
                note = f"r ≥ n: reduction pays by the paper, and as counted it {does}" if samples >= units else ""
            label, unit = f"{what}, r = {samples}", "entries" if what == _MEMORY else ""
            rows.value(label, counted, quantity, unit, note=note, data={**data, "samples": samples})
            rows.beside(label, "counted / paper", counted / paper)

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
        pays: list[Drawn] = [
            Straight(x=1, label="by the paper it pays from here on", colour="red"),
            Straight(1),
        ]
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


def _point(depth: int, units: int, samples: int) -> dict[str, tuple[float, float]]:
    """Each quantity by the paper, and as counted, for some number of samples.

    Layers have n units, a batch has r samples, and γ = 1: an activation is the multiplication by f'. The paper counts a
    product of two blocks once for all samples; here each sample has reduced blocks of its own. In equations 42 to 44 a
    product has one worker, and ours share its elements.
    """
    system = _system(depth, units, samples)
    passes, meta = solvers.Jacobi(limit=_ITERATIONS).solve(system).work, system.on_meta()
    once, reduced, direct = (
        method.solve(meta).work
        for method in (solvers.CyclicReduction(depth=1), solvers.CyclicReduction(), solvers.Substitution())
    )
    a_pass, product = float((units**2 + units) * samples), float(units**3 + units**2)
    figures = {
        42: (depth * a_pass, direct.multiply_adds),
        43: ((depth - 1) * (product + a_pass), once.multiply_adds),
        44: (product + (depth - 1) / 2 * a_pass, once.time(depth)),
        45: (units**3 * math.log2(depth) + units**2 * samples, reduced.time(depth)),
        46: (depth * a_pass * passes.steps, passes.multiply_adds),
        47: (a_pass * passes.steps, passes.time(depth)),
    }
    (sequential, substitution), (parallel, full) = figures[42], figures[45]
    return {
        **{_WHAT[number]: each for number, each in figures.items()},
        _MEMORY: (system.off_diagonal.entries, reduced.entries),
        _TIME: (sequential / parallel, substitution / full),
        _SHARED: (sequential / parallel, direct.time(depth) / full),
    }


def _system(depth: int, units: int, samples: int) -> solvers.BlockBidiagonal:
    """Back-propagation through equal layers, each with a diagonal of its own for each sample."""
    right = [torch.zeros(samples, units)] * depth + [torch.ones(samples, units)]
    diagonal = SparseJacobian(Pattern.of(Diagonal(units)), torch.full((units, samples), 0.5 / units))
    return solvers.BlockBidiagonal(
        [torch.ones(units, units)] * depth, right, inverse_diagonal=[None, *[diagonal] * depth]
    )
