"""Jacobians of discretised equations beside asdex's, at sizes from where calls cost most to where memory does."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import scipy.sparse
import torch

import jacsparse
from jacsparse.figures import BLUE, GREEN, ORANGE, PURPLE, SKY

from ._asdex_peer import Asdex, check_values
from ._calls import in_mode, one_thread
from ._context import Context
from ._experiment import Comparison, Experiment, Group, Row, compare
from ._figures import Line, Panel, Picture
from ._problems import PROBLEMS
from ._programs import first_call

__all__ = ["DiscretisedEquations", "SizedEquation"]

_FASTER, _COMPILED, _EAGER = "prepared, the faster of both", "prepared, compiled", "prepared"
_LATER, _GRADIENT = "jacobian, later calls", "f with a gradient"
_MODES = {"fwd": "asdex, forward mode", "rev": "asdex, reverse mode"}
_FIRST, _FIRST_ASDEX = "first compiled call", "asdex, first call"
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
class SizedEquation:
    """An equation of a size."""

    equation: str
    size: int
    #: The most time of a prepared Jacobian relative to asdex.
    at_most: float

    def __str__(self) -> str:
        return f"{self.equation}, {self.size}"


def _cases() -> tuple[SizedEquation, ...]:
    return tuple(
        SizedEquation(equation, size, _SMALLEST_RATIO if size == min(sizes) else _RATIO)
        for equation, sizes in _SIZES.items()
        for size in sizes
    )


@dataclass(frozen=True)
class DiscretisedEquations(Experiment):
    """Jacobians in float64 on one thread, without a batch."""

    cases: tuple[SizedEquation, ...] = _cases()
    #: Whether compiled Jacobians are timed.
    compiled: bool = True

    name = "discretised_equations"
    title = "Jacobians of discretised equations"
    source = "asdex (adrhill/asdex), its colouring precomputed, compiled by XLA, the faster of its modes"

    def run(self, context: Context) -> list[Row]:
        # A context without limits yet: they are to be those of one thread.
        context = replace(context)
        with one_thread(), tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if self.compiled:
                # The first process compiles the kernels that prepare.
                first_call("kuramoto_sivashinsky", 7, 1, "compiled")
            return [row for case in self.cases for row in self._case(case, folder, context)]

    def _case(self, case: SizedEquation, folder: Path, context: Context) -> list[Row]:
        problem = PROBLEMS[case.equation](case.size, 1)
        f, (x,) = problem.f, problem.args
        prepared = jacsparse.prepare_jacobian(f, x)
        expected = prepared(x).to_scipy()
        functions: dict[str, Callable[[], object]] = {
            _COMPILED: in_mode(functools.partial(_compiled, f, x, expected), ""),
            _EAGER: functools.partial(prepared.values, x),
            _LATER: in_mode(functools.partial(_later, f, x, expected), ""),
            _GRADIENT: in_mode(functools.partial(_with_gradient, f, x), ""),
        }
        if not self.compiled:
            del functions[_COMPILED]
        peers = {
            label: Asdex(case.equation, case.size, 1, mode, folder / f"{mode}.npz", expected)
            for mode, label in _MODES.items()
        }
        try:
            timings = context.under(str(case)).times({**functions, **peers})
        finally:
            for peer in peers.values():
                peer.close()
        rows = Group(str(case), data={"equation": case.equation, "unknowns": x.numel()})
        notes = {label: peer.note for label, peer in peers.items()}
        notes[_EAGER] = f"{prepared.method}, nnz {prepared.pattern.nnz:,}"
        floor = context.limits.floor(x.nbytes + x.element_size() * prepared.pattern.nnz)
        for label, timing in timings.items():
            least = floor if label in (_COMPILED, _EAGER) else None
            rows.timed(label, timing, role=_role(label), note=notes.get(label, ""), floor=least)
        asdex = rows.fastest(peers)
        together = _compared(case, rows, asdex)
        if self.compiled:
            _first_calls(rows, case, None if asdex is None else peers[asdex.label].first)
        return [together, *rows.rows()]

    def picture(self, rows: Sequence[Row]) -> Picture:
        lines = {
            _COMPILED: (BLUE, "o-"),
            _EAGER: (SKY, "o-"),
            _LATER: (PURPLE, "o-"),
            _GRADIENT: (GREEN, "s--"),
            _MODES["fwd"]: (ORANGE, "^-"),
            _MODES["rev"]: (ORANGE, "v:"),
        }
        drawn = [row for row in rows if row.label in lines and row.median is not None]
        panels = []
        for equation in dict.fromkeys(row.data["equation"] for row in drawn):
            of_equation = [row for row in drawn if row.data["equation"] == equation]
            parts = []
            for label, look in lines.items():
                line = [row for row in of_equation if row.label == label]
                points = [(row.data["unknowns"], row.median, row.lower, row.upper) for row in line]
                parts.append(Line.through(points, label, *look))
            floors = [(row.data["unknowns"], row.floor) for row in of_equation if row.floor]
            parts.append(Line.through(floors, "floor: bytes over bandwidth"))
            panels.append(Panel(parts, equation, "unknowns", "seconds", "xy"))
        return Picture(f"{self.title}; medians, with quartiles", panels, (13.0, 6.4), columns=4, legend=7)


def _compiled(f: Callable[..., Any], x: torch.Tensor, expected: scipy.sparse.csr_array) -> Callable[[], object]:
    prepared = jacsparse.prepare_jacobian(f, x, compile=True)
    check_values(prepared(x).to_scipy(), expected)
    return functools.partial(prepared.values, x)


def _later(f: Callable[..., Any], x: torch.Tensor, expected: scipy.sparse.csr_array) -> Callable[[], object]:
    # The second call makes a program, and later ones follow it.
    for _ in range(3):
        check_values(jacsparse.jacobian(f, x).to_scipy(), expected)
    return lambda: jacsparse.jacobian(f, x)


def _with_gradient(f: Callable[..., Any], x: torch.Tensor) -> Callable[[], object]:
    """A run of the function that autograd records, and one backward pass."""
    leaf = x.clone().requires_grad_()
    g = torch.ones_like(f(x))
    return lambda: torch.autograd.grad(f(leaf), leaf, g)


def _role(label: str) -> Any:
    if label == _GRADIENT:
        return "reference"
    return "peer" if label in _MODES.values() else "ours"


def _compared(case: SizedEquation, rows: Group, asdex: Row | None) -> Row:
    """Add ratios to the faster of asdex's modes; the row of the faster of both prepared Jacobians."""
    faster = rows.fastest((_COMPILED, _EAGER))
    assert faster is not None
    together = replace(faster, label=_FASTER, note=f"it is {faster.label}")
    if asdex is not None:
        together = together.beside(*compare("ours / asdex", together, asdex, at_most=case.at_most))
        text, limit = f"prepared / ({_EAGER_RATIO:g} asdex + {1e3 * _CALL:g} ms)", _more(asdex, _EAGER_RATIO)
        rows.add(rows[_EAGER].beside(*compare(text, rows[_EAGER], limit, at_most=1.0)))
        for label in (_EAGER, _COMPILED):
            rows.compare(f"{label} / asdex", label, asdex.label, at=label)
    text = f"jacobian / ({_LATER_RATIO:g} {_GRADIENT} + {1e3 * _CALL:g} ms)"
    rows.add(rows[_LATER].beside(*compare(text, rows[_LATER], _more(rows[_GRADIENT], _LATER_RATIO), at_most=1.0)))
    return together


def _more(row: Row, ratio: float) -> Row:
    """A row of so many times the time, and of the seconds that any call takes."""
    median, fastest = (None if time is None else ratio * time + _CALL for time in (row.median, row.fastest))
    return replace(row, median=median, fastest=fastest)


def _first_calls(rows: Group, case: SizedEquation, asdex: float | None) -> None:
    """Add first calls in new processes, with kernels compiled before."""
    seconds, problem = first_call(case.equation, case.size, 1, "compiled")
    if seconds is None:
        rows.missing(_FIRST, problem, data={})
        return
    row = rows.value(_FIRST, seconds, "time", "s", data={})
    limit = Comparison(f"time / {_MOST_SECONDS:g} s", seconds / _MOST_SECONDS, at_most=1.0)
    rows.add(row.beside(*(() if asdex is None else (Comparison("ours / asdex", seconds / asdex, at_most=1.0),)), limit))
    if asdex is not None:
        rows.value(_FIRST_ASDEX, asdex, "time", "s", role="peer", data={})
