"""Implicit Euler steps of a stiff system, solved by Newton's method with a prepared Jacobian and sparse LU factors.

``python -m examples.implicit_euler`` compares the Brusselator with a solution of SciPy's Radau to ten digits.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

import jacsparse
from jacsparse.terminal import console, new_table, short_time

from .equations import brusselator, initial_values
from .radau import solve_by_radau, sparse_jacobian


def implicit_euler(
    f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, step: float, steps: int, tolerance: float = 1e-10
) -> tuple[torch.Tensor, int]:
    """``x`` after steps of ``x' = f(x)``, and the number of Newton iterations: ``x_new = x + step f(x_new)``.

    A Newton correction below `tolerance` of the largest element ends a step.
    """
    jacobian = jacsparse.prepare_jacobian(f, x)
    identity = jacsparse.SparseJacobian.identity(x.numel(), dtype=x.dtype)
    iterations = 0
    for _ in range(steps):
        before = x
        for _ in range(20):
            residual = x - step * f(x) - before
            correction = (identity - step * jacobian(x)).solve(residual.flatten()).reshape(x.shape)
            x, iterations = x - correction, iterations + 1
            if correction.abs().max() <= tolerance * x.abs().max():
                break
        else:
            raise ArithmeticError(f"Newton's method does not settle with step={step}; take a smaller one")
    return x, iterations


def main(n: int = 32, end: float = 0.5) -> None:
    """Print the error of the solution for smaller and smaller steps."""
    start = initial_values(n)
    fine = solve_by_radau(start, end, tolerance=1e-10, jac=sparse_jacobian(start)[0])
    expected = torch.from_numpy(fine.y[:, -1]).reshape(start.shape)
    table = new_table(f"Brusselator on {n} × {n} points until time {end}")
    for column in ("steps", "Newton iterations", "largest error", "time"):
        table.add_column(column, justify="right")
    for steps in (25, 50, 100, 200):
        begin = time.perf_counter()
        x, iterations = implicit_euler(brusselator, start, end / steps, steps)
        seconds = short_time(time.perf_counter() - begin)
        table.add_row(str(steps), str(iterations), f"{(x - expected).abs().max():.1e}", seconds)
    console().print(table)


if __name__ == "__main__":
    main()
