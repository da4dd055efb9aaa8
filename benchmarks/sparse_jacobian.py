"""Jacobians of discretised equations: prepared ones, against asdex, autograd's, and finite differences by groups."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.optimize._numdiff
import torch

import jacsparse
from examples import brusselator

from ._context import Context, Timing, one_thread, reason
from ._experiment import Experiment, Row, compare
from ._figures import bars

__all__ = ["SparseJacobian"]

#: The variable that names a Python with asdex, and the program that times it.
ASDEX, _PROGRAM = "JACSPARSE_ASDEX_PYTHON", Path(__file__).with_name("_asdex.py")


@dataclass(frozen=True)
class SparseJacobian(Experiment):
    """The Jacobian of the 2-D Brusselator in float64 on one thread, later calls."""

    #: Grids, and the number of samples.
    cases: tuple[tuple[int, int], ...] = ((16, 1), (32, 1), (64, 1), (256, 1), (512, 1), (16, 16), (32, 16), (64, 16))
    #: The largest grid that peers with a cost for each row take.
    most: int = 32

    name = "sparse_jacobian"
    title = "Jacobians of the 2-D Brusselator"
    source = "asdex (adrhill/asdex); torch.func.jacrev; SciPy's finite differences by groups of columns"

    def run(self, context: Context) -> list[Row]:
        with one_thread():
            return [row for n, batch in self.cases for row in self._case(n, batch, context)]

    def _case(self, n: int, batch: int, context: Context) -> list[Row]:
        group = f"N = {n}, batch {batch}"
        values = [[(7 * i + 3 * sample) % 11 / 11 for i in range(2 * n * n)] for sample in range(batch)]
        x = torch.tensor(values, dtype=torch.float64).reshape(batch, 2, n, n)
        prepared = {
            method: jacsparse.prepare_jacobian(brusselator, x, method=method) for method in ("products", "compressed")
        }
        functions: dict[str, Callable[[], object]] = {
            f"prepared, {method}": functools.partial(jacobian.values, x) for method, jacobian in prepared.items()
        }
        functions["jacobian"] = lambda: jacsparse.jacobian(brusselator, x)
        functions["f alone"] = lambda: brusselator(x)
        if n <= self.most and batch == 1:
            functions["torch.func.jacrev"] = lambda: torch.func.jacrev(brusselator)(x)
            functions["SciPy, differences by groups"] = _differences(prepared["products"].pattern, x)
        timings = context.under(group).times(functions)
        timings["asdex"] = _asdex(n, batch, context.seconds)
        rows = {label: Row.timed(label, timing, group=group, role=_role(label)) for label, timing in timings.items()}
        if timings["asdex"].seconds:
            ours = rows["prepared, products"]
            ratio = compare("asdex / prepared", rows["asdex"], ours)
            rows["prepared, products"] = Row(**{**vars(ours), "comparisons": ratio})
        return list(rows.values())

    def figure(self, rows: Sequence[Row], path: Path) -> None:
        bars(rows, path, self.title)


def _role(label: str) -> str:
    if label == "f alone":
        return "reference"
    return "ours" if label.startswith(("prepared", "jacobian")) else "peer"


def _differences(pattern: jacsparse.Pattern, x: torch.Tensor) -> Callable[[], object]:
    """SciPy's finite differences with columns in groups."""
    groups = scipy.optimize._numdiff.group_columns(pattern.to_scipy())

    def f(flat: np.ndarray) -> np.ndarray:
        return brusselator(torch.from_numpy(flat).reshape(x.shape)).flatten().numpy()

    sparsity = (pattern.to_scipy(), groups)
    start = x.flatten().numpy()
    return lambda: scipy.optimize._numdiff.approx_derivative(f, start, method="2-point", sparsity=sparsity)


def _asdex(n: int, batch: int, seconds: float) -> Timing:
    """The timing of asdex, which another Python runs."""
    python = os.environ.get(ASDEX)
    if python is None:
        return Timing([], 0, f"set {ASDEX} to a Python that has asdex")
    command = [python, str(_PROGRAM), str(n), str(batch), str(seconds)]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    except (OSError, subprocess.SubprocessError) as error:
        return Timing([], 0, reason(error))
    times = json.loads(run.stdout.splitlines()[-1])["times"]
    return Timing(times, len(times))
