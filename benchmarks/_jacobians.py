"""Jacobians of problems in turns: prepared ones, their peers, and asdex in a process of its own."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import scipy.sparse

import jacsparse

from ._calls import Call, in_mode
from ._context import Context, Timing
from ._equations import EQUATIONS
from ._experiment import Grid
from ._problems import PROBLEMS, SparseFunction
from ._programs import JsonProgram
from ._rows import Group, Row, reason

PREPARED, COMPILED = "prepared", "prepared, compiled"
#: The variable that names a Python with asdex.
ASDEX = "JACSPARSE_ASDEX_PYTHON"
_PROGRAM = str(Path(__file__).with_name("_asdex.py"))
#: The largest difference of values, as a share of the largest.
_DIFFERENCE = 1e-9


@dataclass(frozen=True)
class Case:
    """A problem of a size, and what its later calls should reach."""

    problem: str
    size: int
    batch: int = 1
    #: The least ratio of asdex's time to that of a prepared Jacobian, or the most of its inverse.
    asdex: float | None = None
    at_most: float | None = None
    #: The most seconds of a prepared Jacobian.
    seconds: float | None = None
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.problem}, {self.size}" + (f", batch {self.batch}" if self.batch > 1 else "")


class _Asdex:
    """A Jacobian of asdex's in one mode; the first call starts its process, and later ones are timed in turns.

    The values of the first call, which the process writes into a file, are compared with those expected, if any.
    """

    def __init__(self, case: Case, mode: str, path: Path, expected: scipy.sparse.csr_array | None) -> None:
        self._arguments, self._expected = (case.problem, case.size, case.batch, mode, path), expected
        self._program: JsonProgram | None = None
        #: Seconds of the first call.
        self.first: float | None = None
        self.note = ""

    def __call__(self) -> None:
        python = os.environ.get(ASDEX)
        if python is None:
            raise ImportError(f"set {ASDEX} to a Python that has asdex")
        program = self._program = JsonProgram([python, _PROGRAM], *self._arguments)
        answer = program.answer()
        if self._expected is not None:
            with np.load(self._arguments[-1]) as content:
                entries = content["values"], (content["rows"], content["columns"])
                check_values(scipy.sparse.csr_array(entries, self._expected.shape), self._expected)
        self.first, self.note = answer["first"], f"{answer['colors']} colours, {answer['versions']}"

    def turn(self, seconds: float) -> Timing:
        """The timing of runs for some seconds."""
        assert self._program is not None
        answer = self._program.answer(seconds)
        return Timing(answer["times"], answer["runs"])

    def close(self) -> None:
        """End the process."""
        if self._program is not None:
            self._program.close()


def matrix_of(jacobian: jacsparse.SparseJacobian) -> scipy.sparse.csr_array:
    """The Jacobian of one sample, wherever it lies."""
    return jacobian.to("cpu").to_scipy()


def check_values(actual: scipy.sparse.csr_array, expected: scipy.sparse.csr_array) -> None:
    """Raise ValueError where values differ from those of the prepared Jacobian."""
    scale = abs(expected).max()
    difference = abs(actual - expected).max()
    if not difference <= _DIFFERENCE * scale:
        raise ValueError(
            f"its values differ from those of a prepared Jacobian by {difference / scale:.1e} of the largest"
        )


def _compiled(problem: SparseFunction, expected: scipy.sparse.csr_array | None) -> Call:
    """Calls of a compiled program, checked as asdex's; ValueError where it cannot be compiled."""
    prepared = jacsparse.prepare_jacobian(problem.f, *problem.args, **problem.options, compile=True)
    if expected is not None:
        check_values(matrix_of(prepared(*problem.args)), expected)
    return functools.partial(prepared.values, *problem.args)


def add_first_call(
    rows: Group, label: str, case: Case, way: str, asdex: float | None, *, processes: int = 1
) -> float | None:
    """Add the first call in a new process by one of the ways of `_first_call`, beside asdex's; its seconds, if any.

    The last of several processes counts: an earlier one compiles kernels.
    """
    for _ in range(processes):
        seconds, problem = first_call(case, way)
    if seconds is None:
        rows.missing(label, problem)
        return None
    rows.value(label, seconds, "time", "s")
    if asdex is not None:
        rows.beside(label, "asdex / ours", asdex / seconds, at_least=1.0)
        rows.value("asdex, first call", asdex, "time", "s", role="peer")
    return seconds


def first_call(case: Case, way: str) -> tuple[float | None, str]:
    """Seconds of the first call in a new process, or None and why."""
    command = [sys.executable, "-m", f"{__package__}._first_call"]
    with contextlib.closing(JsonProgram(command, case.problem, case.size, case.batch, way)) as program:
        try:
            return program.answer()["first"], ""
        except (OSError, RuntimeError) as error:
            return None, reason(error)


@dataclass(frozen=True)
class JacobianGrid(Grid):
    """Jacobians on one thread: later calls in turns, asdex's among them, and first calls in new processes."""

    problems: tuple[Case, ...] = ()
    #: Whether compiled Jacobians are timed, which take a compiler, and seconds for each.
    compiled: bool = True

    single_thread = True
    #: The modes of asdex by their rows' labels.
    modes: ClassVar[Mapping[str, str]]
    #: The labels of our rows, of those with a floor, and of nobody's; all others are peers'.
    ours: ClassVar[tuple[str, ...]]
    floors: ClassVar[tuple[str, ...]] = ()
    references: ClassVar[tuple[str, ...]]

    @abstractmethod
    def calls(
        self,
        case: Case,
        problem: SparseFunction,
        prepared: jacsparse.PreparedJacobian,
        expected: scipy.sparse.csr_array | None,
    ) -> Mapping[str, Call]:
        """The calls that are timed beside those of a prepared Jacobian, by label; without a batch, its values."""

    @abstractmethod
    def compared(self, case: Case, rows: Group, values: Call, first: Mapping[str, float | None]) -> Iterable[Row]:
        """The rows with ratios and first calls; `first` has the seconds of asdex's by mode's label."""

    def cases(self, context: Context) -> Iterable[Case]:
        return [replace(case, device=context.place) for case in self.problems]

    def measure(self, case: Case, context: Context) -> Iterable[Row]:
        problem = PROBLEMS[case.problem](case.size, case.batch).to(case.device)
        prepared = jacsparse.prepare_jacobian(problem.f, *problem.args, **problem.options)
        values, x = functools.partial(prepared.values, *problem.args), problem.args[0]
        rows = Group(str(case), data={"equation": case.problem, "unknowns": x.numel()})
        expected = None if problem.batched else matrix_of(prepared(*problem.args))
        calls: dict[str, Call] = {PREPARED: values, **self.calls(case, problem, prepared, expected)}
        if self.compiled:
            calls[COMPILED] = in_mode(functools.partial(_compiled, problem, expected), "")
        floor = context.limits.floor(x.nbytes + x.element_size() * prepared.pattern.nnz)
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            peers: dict[str, _Asdex] = {}
            for label, mode in self.modes.items() if case.problem in EQUATIONS else ():
                peers[label] = _Asdex(case, mode, Path(folder, f"{mode}.npz"), expected)
                stack.callback(peers[label].close)
            calls |= peers
            roles = {label: "ours" if label in self.ours else "peer" for label in calls}
            roles |= dict.fromkeys(self.references, "reference")
            rows.in_turns(context, calls, role=roles, floor=dict.fromkeys(self.floors, floor))
        notes = {PREPARED: f"{prepared.method}, nnz {prepared.pattern.nnz:,}"}
        for label, note in (notes | {label: peer.note for label, peer in peers.items()}).items():
            rows.add(replace(rows[label], note=note))
        return self.compared(case, rows, values, {label: peer.first for label, peer in peers.items()})
