"""Jacobians of equations, least squares and networks: prepared ones, against asdex, autograd's, and differences."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.optimize._numdiff
import torch

import jacsparse

from ._asdex_peer import Asdex
from ._calls import in_mode, one_thread
from ._context import Context
from ._equations import EQUATIONS
from ._experiment import Comparison, Experiment, Group, Row
from ._figures import Picture, times_picture
from ._problems import PROBLEMS, Problem, elements
from ._programs import first_call

__all__ = ["Case", "SparseJacobian"]

_CHANGED = "prepared, another number at each call"
#: Those whose Jacobians SciPy estimates by differences of groups of columns.
_EQUATIONS = ("brusselator", "burgers", "heat")
#: Bytes of values from which the memory of a call has a target.
_FEW = 2**20


@dataclass(frozen=True)
class Case:
    """A problem of a size, and what its later calls should reach."""

    problem: str
    size: int
    batch: int = 1
    #: The least ratio of asdex's time to that of a prepared Jacobian.
    asdex: float | None = None
    #: The most seconds of a prepared Jacobian.
    seconds: float | None = None

    def __str__(self) -> str:
        return f"{self.problem}, {self.size}" + (f", batch {self.batch}" if self.batch > 1 else "")


@dataclass(frozen=True)
class SparseJacobian(Experiment):
    """Jacobians in float64 (ResNet-8 in float32) on one thread: later calls, first calls and memory."""

    cases: tuple[Case, ...] = (
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
    #: Whether compiled Jacobians are timed, which take a compiler, and seconds for each.
    compiled: bool = True
    #: Processes whose first call is timed, of which the last counts: an earlier one compiles kernels.
    processes: int = 2

    name = "sparse_jacobian"
    title = "Sparse Jacobians"
    source = "asdex (adrhill/asdex); torch.func.jacrev; SciPy's finite differences by groups of columns"

    def run(self, context: Context) -> list[Row]:
        with one_thread():
            return [row for case in self.cases for row in self._case(case, context)]

    def _case(self, case: Case, context: Context) -> list[Row]:
        rows, problem = Group(str(case)), PROBLEMS[case.problem](case.size, case.batch)
        options: dict[str, Any] = {"argnums": problem.argnums, "batched": problem.batched}
        prepared = jacsparse.prepare_jacobian(problem.f, *problem.args, **options)
        values = functools.partial(prepared.values, *problem.args)
        functions: dict[str, Callable[[], object]] = {
            "prepared": values,
            "jacobian": lambda: jacsparse.jacobian(problem.f, *problem.args, **options),
            "f alone": lambda: problem.f(*problem.args),
        }
        if self.compiled:
            functions["prepared, compiled"] = in_mode(lambda: _compiled(problem, options), "")
        if any(type(argument) is float for argument in problem.args):
            functions[_CHANGED] = _other_numbers(prepared, problem)
        if case.batch == 1 and elements(problem) <= self.most:
            functions["torch.func.jacrev"] = lambda: torch.func.jacrev(problem.f, problem.argnums)(*problem.args)
            if case.problem in _EQUATIONS:
                functions["SciPy, differences by groups"] = _differences(prepared.pattern, problem)
        with tempfile.TemporaryDirectory() as folder:
            asdex = Asdex(case.problem, case.size, case.batch, "auto", Path(folder) / "values.npz")
            if case.problem in EQUATIONS:
                functions["asdex"] = asdex
            try:
                timings = context.under(rows.name).times(functions)
            finally:
                asdex.close()
        for label, timing in timings.items():
            note = f"{prepared.method}, nnz {prepared.pattern.nnz:,}" if label == "prepared" else ""
            rows.timed(label, timing, role=_role(label), note=note)
        for label, least in (("prepared", case.asdex), ("prepared, compiled", 1 / 1.25)):
            rows.compare("asdex / ours", "asdex", label, at_least=least)
        ours = rows["prepared"]
        if case.seconds is not None and ours.median is not None:
            text = f"time / {1e3 * case.seconds} ms"
            rows.add(ours.beside(Comparison(text, ours.median / case.seconds, at_most=1.0)))
        for label in ("prepared", "jacobian"):
            rows.compare("jacrev / ours", "torch.func.jacrev", label, at_least=0.95)
        rows.compare("changed / prepared", _CHANGED, "prepared", at=_CHANGED)
        self._first_calls(rows, case, asdex.first)
        needed = rows.memory("prepared: memory of a call", values)
        if needed.median is not None:
            nbytes = values().nbytes
            # Less cannot be told from what else the process does.
            at_most = 3.0 if nbytes > _FEW else None
            rows.add(needed.beside(Comparison("memory / values", needed.median * 2**20 / nbytes, at_most=at_most)))
        return rows.rows()

    def _first_calls(self, rows: Group, case: Case, asdex: float | None) -> None:
        """Add the first call in a new process, which has imported all, with kernels compiled before."""
        for _ in range(self.processes):
            seconds, problem = first_call(case.problem, case.size, case.batch, "jacobian")
        if seconds is None:
            rows.missing("first call", problem)
            return
        compared = () if asdex is None else (Comparison("asdex / ours", asdex / seconds, at_least=1.0),)
        rows.value("first call", seconds, "time", "s", comparisons=compared)
        if asdex is not None:
            rows.value("asdex, first call", asdex, "time", "s", role="peer")

    def picture(self, rows: Sequence[Row]) -> Picture:
        return times_picture([row for row in rows if "first call" not in row.label], self.title)


def _compiled(problem: Problem, options: dict[str, Any]) -> Callable[[], object]:
    """Calls of a compiled program; ValueError where it cannot be compiled."""
    prepared = jacsparse.prepare_jacobian(problem.f, *problem.args, **options, compile=True)
    return functools.partial(prepared.values, *problem.args)


def _role(label: str) -> Any:
    if label == "f alone":
        return "reference"
    return "ours" if label.startswith(("prepared", "jacobian")) else "peer"


def _other_numbers(prepared: jacsparse.PreparedJacobian, problem: Problem) -> Callable[[], object]:
    """Calls whose numbers are others than at the call before."""
    state = [0]

    def call() -> torch.Tensor:
        state[0] += 1
        args = [argument * (1 + state[0] % 2) if type(argument) is float else argument for argument in problem.args]
        return prepared.values(*args)

    return call


def _differences(pattern: jacsparse.Pattern, problem: Problem) -> Callable[[], object]:
    """SciPy's finite differences with columns in groups."""
    x, *others = problem.args
    groups = scipy.optimize._numdiff.group_columns(pattern.to_scipy())

    def f(flat: np.ndarray) -> np.ndarray:
        y: np.ndarray = problem.f(torch.from_numpy(flat).reshape(x.shape), *others).flatten().numpy()
        return y

    sparsity, start = (pattern.to_scipy(), groups), x.flatten().numpy()
    return lambda: scipy.optimize._numdiff.approx_derivative(f, start, method="2-point", sparsity=sparsity)
