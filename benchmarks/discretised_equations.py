"""Jacobians of discretised equations beside asdex's, at sizes from where calls cost most to where memory does."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import scipy.sparse
import torch

import jacsparse
from jacsparse.figures import BLUE, GREEN, ORANGE, PURPLE, SKY

from ._calls import Call, in_mode
from ._context import Context
from ._figures import Line, Panel, Picture
from ._jacobians import (
    COMPILED,
    PREPARED,
    Case,
    JacobianGrid,
    add_first_call,
    check_values,
    first_call,
    matrix_of,
)
from ._problems import SparseFunction
from ._rows import Group, Row, compare, values_of, where

_FASTER, _LATER, _GRADIENT = "prepared, the faster of both", "jacobian, later calls", "f with a gradient"
_FORWARD, _REVERSE = "asdex, forward mode", "asdex, reverse mode"
_FIRST = "first compiled call"
#: Seconds of a call that no function comes below; the most time relative to asdex, and to a function with a gradient.
_CALL, _EAGER_RATIO, _LATER_RATIO = 0.15e-3, 1.2, 3.0
#: The most seconds of a first compiled call.
_MOST_SECONDS = 3.0
#: The most time of a prepared Jacobian relative to asdex, at the smallest size and at others.
_SMALLEST_RATIO, _RATIO = 1.5, 0.9

_SIZES = {
    "gray_scott": (8, 64, 256),
    "cahn_hilliard": (8, 64, 256),
    "kuramoto_sivashinsky": (64, 4096, 65536),
    "upwind_advection": (5, 16, 48),
    "shallow_water": (64, 4096, 65536),
    "power_flow": (50, 1000, 20_000),
    "oregonator": (64, 4096, 65536),
}


@dataclass(frozen=True)
class DiscretisedEquations(JacobianGrid):
    """Jacobians in float64 on one thread, without a batch."""

    problems: tuple[Case, ...] = tuple(
        Case(equation, size, at_most=_SMALLEST_RATIO if size == min(sizes) else _RATIO)
        for equation, sizes in _SIZES.items()
        for size in sizes
    )

    name = "discretised_equations"
    title = "Jacobians of discretised equations"
    source = "asdex (adrhill/asdex), its colouring precomputed, compiled by XLA, the faster of its modes"
    devices = ("cpu", "cuda")

    modes: ClassVar[Mapping[str, str]] = {_FORWARD: "fwd", _REVERSE: "rev"}
    ours = (COMPILED, PREPARED, _LATER)
    floors = (COMPILED, PREPARED)
    references = (_GRADIENT,)

    def cases(self, context: Context) -> Iterable[Case]:
        if self.compiled and context.device == "cpu":
            # The first process compiles the kernels that prepare.
            first_call(Case("kuramoto_sivashinsky", 7), "compiled")
        return super().cases(context)

    def calls(
        self, case: Case, problem: SparseFunction, prepared: jacsparse.PreparedJacobian, expected: Any
    ) -> dict[str, Call]:
        return {
            _LATER: in_mode(functools.partial(_later, problem, expected), ""),
            _GRADIENT: in_mode(functools.partial(_with_gradient, problem), ""),
        }

    def compared(self, case: Case, rows: Group, values: Call, first: Mapping[str, float | None]) -> list[Row]:
        faster, asdex = rows.fastest((COMPILED, PREPARED)), rows.fastest(self.modes)
        assert faster is not None
        together = replace(faster, label=_FASTER, note=f"it is {faster.label}")
        if asdex is not None:
            together = together.beside(*compare("ours / asdex", together, asdex, at_most=case.at_most))
            _add_limit(rows, PREPARED, "prepared", _EAGER_RATIO, "asdex", asdex)
            for label in (PREPARED, COMPILED):
                rows.compare(f"{label} / asdex", label, asdex.label, at=label)
        _add_limit(rows, _LATER, "jacobian", _LATER_RATIO, _GRADIENT, rows[_GRADIENT])
        if self.compiled and case.device == "cpu":
            seconds = add_first_call(rows, _FIRST, case, "compiled", None if asdex is None else first[asdex.label])
            if seconds is not None:
                rows.beside(_FIRST, f"time / {_MOST_SECONDS:g} s", seconds / _MOST_SECONDS, at_most=1.0)
        return [together, *rows.rows()]

    def picture(self, rows: Sequence[Row]) -> Picture:
        lines = {
            COMPILED: (BLUE, "o-"),
            PREPARED: (SKY, "o-"),
            _LATER: (PURPLE, "o-"),
            _GRADIENT: (GREEN, "s--"),
            _FORWARD: (ORANGE, "^-"),
            _REVERSE: (ORANGE, "v:"),
        }
        drawn = [row for row in rows if row.label in lines and row.median is not None]
        panels = []
        for equation in values_of(drawn, "equation"):
            of_equation = where(drawn, equation=equation)
            parts = []
            for label, look in lines.items():
                line = [row for row in of_equation if row.label == label]
                points = [(row.data["unknowns"], row.median, row.lower, row.upper) for row in line]
                parts.append(Line.through(points, label, *look))
            floors = [(row.data["unknowns"], row.floor) for row in of_equation if row.floor]
            parts.append(Line.through(floors, "floor: bytes over bandwidth"))
            panels.append(Panel(parts, equation, "unknowns", "seconds", "xy"))
        return Picture(f"{self.title}; medians, with quartiles", panels, (13.0, 6.4), columns=4, legend=7)


def _later(problem: SparseFunction, expected: scipy.sparse.csr_array) -> Call:
    # The second call makes a program, and later ones follow it.
    for _ in range(3):
        check_values(matrix_of(jacsparse.jacobian(problem.f, *problem.args)), expected)
    return lambda: jacsparse.jacobian(problem.f, *problem.args)


def _with_gradient(problem: SparseFunction) -> Call:
    """A run of the function that autograd records, and one backward pass."""
    (x,) = problem.args
    leaf, g = x.clone().requires_grad_(), torch.ones_like(problem.f(x))
    return lambda: torch.autograd.grad(problem.f(leaf), leaf, g)


def _add_limit(rows: Group, label: str, name: str, ratio: float, other_name: str, other: Row) -> None:
    """Add the ratio to so many times the time of another row, and the seconds that any call takes."""
    median, fastest = (None if time is None else ratio * time + _CALL for time in (other.median, other.fastest))
    limit, text = replace(other, median=median, fastest=fastest), f"({ratio:g} {other_name} + {1e3 * _CALL:g} ms)"
    rows.add(rows[label].beside(*compare(f"{name} / {text}", rows[label], limit, at_most=1.0)))
