"""Jacobians of equations, least squares and networks: prepared ones, against asdex, autograd's, and differences."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import jacsparse
from jacsparse.figures import BLUE, GREEN, ORANGE, PURPLE, SKY

from ._calls import Call
from ._figures import Line, Panel, Picture
from ._jacobians import COMPILED, PREPARED, Case, JacobianGrid, add_first_call
from ._problems import SparseFunction, differences, elements
from ._rows import Group, Row

_JACOBIAN, _ASDEX, _JACREV = "jacobian", "asdex", "torch.func.jacrev"
#: Those whose Jacobians SciPy estimates by differences of groups of columns.
_EQUATIONS = ("brusselator", "burgers", "heat")
#: Colours of markers, by the role of a row.
_COLOURS = {"ours": (BLUE, SKY), "peer": (ORANGE, PURPLE), "reference": (GREEN,)}
#: Bytes of values from which the memory of a call has a target.
_FEW = 2**20


@dataclass(frozen=True)
class SparseJacobians(JacobianGrid):
    """Jacobians in float64 (ResNet-8 in float32) on one thread: later calls, first calls and memory."""

    problems: tuple[Case, ...] = (
        Case("brusselator", 16, seconds=0.8e-3),
        Case("brusselator", 32, seconds=0.8e-3),
        Case("brusselator", 64, asdex=1 / 3),
        Case("brusselator", 256, asdex=1 / 1.5),
        Case("brusselator", 512, asdex=1 / 1.5),
        Case("brusselator", 16, 16),
        Case("brusselator", 32, 16),
        Case("brusselator", 64, 16, asdex=1.0),
        Case("burgers", 10_000),
        Case("heat", 100),
        Case("graph_network", 500),
        Case("bundle", 500),
        Case("autoencoder", 32),
        Case("resnet8", 32),
    )
    #: The most elements of a dense Jacobian that peers with a cost for each row take.
    most: int = 2**22
    #: Processes whose first call is timed.
    processes: int = 2

    name = "sparse_jacobian"
    title = "Sparse Jacobians"
    source = "asdex (adrhill/asdex); torch.func.jacrev; SciPy's finite differences by groups of columns"

    modes: ClassVar[Mapping[str, str]] = {_ASDEX: "auto"}
    ours = (PREPARED, COMPILED, _JACOBIAN)
    references = ("f alone",)

    def calls(
        self, case: Case, problem: SparseFunction, prepared: jacsparse.PreparedJacobian, expected: Any
    ) -> dict[str, Call]:
        calls: dict[str, Call] = {
            _JACOBIAN: lambda: jacsparse.jacobian(problem.f, *problem.args, **problem.options),
            "f alone": lambda: problem.f(*problem.args),
        }
        if case.batch == 1 and elements(problem) <= self.most:
            calls[_JACREV] = lambda: torch.func.jacrev(problem.f, problem.argnums)(*problem.args)
            if case.problem in _EQUATIONS:
                x = problem.args[0].flatten().numpy()
                by_groups = differences(problem.f, *problem.args)
                calls["SciPy, differences by groups"] = lambda: by_groups(x, *problem.args[1:])
        return calls

    def compared(self, case: Case, rows: Group, values: Call, first: Mapping[str, float | None]) -> list[Row]:
        for label, least in ((PREPARED, case.asdex), (COMPILED, 1 / 1.25)):
            rows.compare("asdex / ours", _ASDEX, label, at_least=least)
        ours = rows[PREPARED]
        if case.seconds is not None and ours.median is not None:
            rows.beside(PREPARED, f"time / {1e3 * case.seconds} ms", ours.median / case.seconds, at_most=1.0)
        for label in (PREPARED, _JACOBIAN):
            rows.compare("jacrev / ours", _JACREV, label, at_least=0.95)
        add_first_call(rows, "first call", case, "jacobian", first.get(_ASDEX), processes=self.processes)
        needed = rows.memory("prepared: memory of a call", values)
        if needed.median is not None:
            nbytes = values().nbytes  # type: ignore[attr-defined]
            # Less cannot be told from what else the process does.
            at_most = 3.0 if nbytes > _FEW else None
            rows.beside(needed.label, "memory / values", needed.median * 2**20 / nbytes, at_most=at_most)
        return rows.rows()

    def picture(self, rows: Sequence[Row]) -> Picture:
        drawn = [row for row in rows if row.unit == "s" and row.median is not None and "first call" not in row.label]
        groups, lines = list(dict.fromkeys(row.group for row in drawn)), []
        for role, colours in _COLOURS.items():
            labels = dict.fromkeys(row.label for row in drawn if row.role == role)
            for label, (colour, marker) in zip(labels, itertools.product(colours, "oD"), strict=False):
                times = [(row.median or 0.0, groups.index(row.group)) for row in drawn if row.label == label]
                lines.append(Line.through(times, label, colour, marker))
        settings = {"yticks": range(len(groups)), "yticklabels": groups, "ylim": (len(groups) - 0.4, -0.6)}
        panel = Panel(lines, x="seconds of a call, on one thread: medians", log="x", settings=settings)
        return Picture(self.title, [panel], (8.0, 1.6 + 0.27 * len(groups)), legend=3)
