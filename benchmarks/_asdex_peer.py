"""asdex's Jacobian as a peer: a program of its own that times itself, and whose first values are checked."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import scipy.sparse

from ._context import Timing
from ._programs import JsonProgram

__all__ = ["ASDEX", "Asdex", "check_values"]

#: The variable that names a Python with asdex.
ASDEX = "JACSPARSE_ASDEX_PYTHON"
_PROGRAM = str(Path(__file__).with_name("_asdex.py"))
#: The largest difference of values, as a share of the largest.
_DIFFERENCE = 1e-9


class Asdex:
    """A Jacobian of asdex's in one mode; the first call starts its process, and later ones are timed in turns.

    Parameters
    ----------
    problem, size, batch, mode
        As ``_asdex.py`` takes them.
    path : Path
        A file for the values of the first call.
    expected : csr_array or None
        What these are compared with.
    """

    def __init__(
        self, problem: str, size: int, batch: int, mode: str, path: Path, expected: scipy.sparse.csr_array | None = None
    ) -> None:
        self._arguments, self._path, self._expected = (problem, size, batch, mode, path), path, expected
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
            with np.load(self._path) as content:
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


def check_values(actual: scipy.sparse.csr_array, expected: scipy.sparse.csr_array) -> None:
    """Raise ValueError where values differ from those of the prepared Jacobian."""
    scale = abs(expected).max()
    difference = abs(actual - expected).max()
    if not difference <= _DIFFERENCE * scale:
        raise ValueError(
            f"its values differ from those of a prepared Jacobian by {difference / scale:.1e} of the largest"
        )
