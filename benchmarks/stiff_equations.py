"""A stiff equation solved by SciPy's Radau: with a sparse Jacobian of ours, and by SciPy's own finite differences."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.integrate
import torch

import jacsparse
from examples import brusselator, initial_values

from ._context import Context
from ._experiment import Grid
from ._rows import Group, Row

_OURS, _GROUPS = "jac: prepared Jacobian", "jac_sparsity: SciPy's differences by groups"
_DENSE = "SciPy's default: differences column by column"
#: How much slower SciPy's default is, on grids of at least so many points a side: the smallest ones hardly differ.
_SLOWER, _FROM = 5.0, 32


@dataclass(frozen=True)
class StiffEquations(Grid):
    """The 2-D Brusselator by ``solve_ivp(method="Radau")`` in float64, on one thread of PyTorch's."""

    #: Grids.
    sizes: tuple[int, ...] = (16, 32, 64)
    #: The largest grid that SciPy's default takes.
    most: int = 32
    #: The time until which each is solved.
    end: float = 1.0

    name = "stiff_equations"
    title = "Radau on the 2-D Brusselator"
    source = "SciPy's solve_ivp, with jac, with jac_sparsity, and with neither"
    single_thread = True

    def cases(self, context: Context) -> Iterable[int]:
        return self.sizes

    def measure(self, case: int, context: Context) -> list[Row]:
        rows, start = Group(f"N = {case}"), initial_values(case)
        prepared = jacsparse.prepare_jacobian(brusselator, start)

        def f(t: float, y: np.ndarray) -> np.ndarray:
            return brusselator(torch.from_numpy(y).reshape(start.shape)).flatten().numpy()

        def jacobian(t: float, y: np.ndarray) -> Any:
            return prepared(torch.from_numpy(y).reshape(start.shape)).to_scipy()

        options = {_OURS: {"jac": jacobian}, _GROUPS: {"jac_sparsity": prepared.pattern.to_scipy()}}
        if case <= self.most:
            options[_DENSE] = {"jac": None}
        notes: dict[str, str] = {}

        def solve(label: str) -> None:
            """Solve it, and note what that took, for the reader who asks whether steps are the same."""
            solution = scipy.integrate.solve_ivp(
                f, (0.0, self.end), start.flatten().numpy(), method="Radau", rtol=1e-4, atol=1e-6, **options[label]
            )
            counts = f"{len(solution.t) - 1} steps, {solution.nfev} calls of f"
            notes[label] = f"{counts}, {solution.njev} Jacobians, {solution.nlu} factorisations"

        ways = {label: functools.partial(solve, label) for label in options}
        rows.in_turns(context, ways, role={_GROUPS: "peer", _DENSE: "peer"}, note=notes)
        for label in (_GROUPS, _DENSE):
            at_least = _SLOWER if label == _DENSE and case >= _FROM else None
            rows.compare(f"{label.partition(':')[0]} / ours", label, _OURS, at_least=at_least)
        if case > self.most:
            rows.missing(_DENSE, "dense factors take more than half an hour", role="peer")
        return rows.rows()
