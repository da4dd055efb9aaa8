"""A sparse Jacobian for ``scipy.integrate.solve_ivp``, beside SciPy's own finite differences.

``python -m examples.radau`` solves the Brusselator. Without a Jacobian SciPy calls the right-hand side once for each
unknown, and its factors are dense. With ``jac_sparsity`` it calls it once for each group of columns and has sparse
factors, as with a sparse Jacobian, on which nearly all of the time is spent.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.integrate
import scipy.sparse
import torch

import jacsparse
from jacsparse.terminal import console, new_table, short_time

from .equations import brusselator, initial_values


def _right_hand_side(shape: tuple[int, ...]) -> Callable[[float, np.ndarray], np.ndarray]:
    """The Brusselator as SciPy calls it: a time and a flat vector to a flat vector."""
    return lambda t, y: brusselator(torch.from_numpy(y).reshape(shape)).flatten().numpy()


def sparse_jacobian(start: torch.Tensor) -> tuple[Callable[[float, np.ndarray], Any], scipy.sparse.csr_array]:
    """The Brusselator's Jacobian as SciPy calls it, and its sparsity."""
    prepared = jacsparse.prepare_jacobian(brusselator, start)
    return lambda t, y: prepared(torch.from_numpy(y).reshape(start.shape)).to_scipy(), prepared.pattern.to_scipy()


def solve_by_radau(start: torch.Tensor, end: float, *, tolerance: float = 1e-4, **options: Any) -> Any:
    """SciPy's solution of the Brusselator until a time; the options, `jac` or `jac_sparsity`, are SciPy's."""
    f = _right_hand_side(tuple(start.shape))
    errors = {"rtol": tolerance, "atol": tolerance / 100}
    return scipy.integrate.solve_ivp(f, (0.0, end), start.flatten().numpy(), method="Radau", **errors, **options)


def ways(start: torch.Tensor) -> dict[str, dict[str, Any]]:
    """SciPy's options for each way to the Jacobian."""
    jacobian, sparsity = sparse_jacobian(start)
    return {
        "jacsparse": {"jac": jacobian},
        "differences by groups, jac_sparsity": {"jac_sparsity": sparsity},
        "SciPy's default: dense differences": {"jac": None},
    }


def main(n: int = 24, end: float = 1.0) -> None:
    """Print what each way takes."""
    start = initial_values(n)
    table = new_table(f"Radau on the Brusselator of {n} × {n} points until time {end}")
    for column in ("Jacobian", "steps", "f", "Jacobians", "factors", "difference", "time"):
        table.add_column(column, justify="left" if column == "Jacobian" else "right")
    solutions: list[Any] = []
    with console().status("solving") as status:
        for way, options in ways(start).items():
            status.update(way)
            begin = time.perf_counter()
            solutions.append(solution := solve_by_radau(start, end, **options))
            seconds = short_time(time.perf_counter() - begin)
            difference = np.abs(solution.y[:, -1] - solutions[0].y[:, -1]).max()
            counts = (len(solution.t) - 1, solution.nfev, solution.njev, solution.nlu)
            table.add_row(way, *map(str, counts), f"{difference:.0e}", seconds)
    console().print(table)


if __name__ == "__main__":
    main()
