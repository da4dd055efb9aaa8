"""Implicit Euler steps of a stiff system with the arguments of torchdiffeq's ``odeint``, by Newton's method.

``python -m examples.implicit_euler`` compares the Brusselator with a solution of SciPy's Radau to ten digits.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import torch

import jacsparse
from jacsparse.terminal import console, new_table, short_time

from .equations import brusselator, initial_values
from .radau import solve_by_radau, sparse_jacobian


def odeint(
    f: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], y0: torch.Tensor, t: torch.Tensor, *, steps: int = 1
) -> torch.Tensor:
    """The states at times `t`, ``(len(t), *y0.shape)``: ``y' = f(t, y)`` from `y0`, in as many steps between two times.

    It is part of autograd, to `y0` and to what `f` reads: each step's backward pass solves one transposed system.
    """

    def residual(end: torch.Tensor, y: torch.Tensor, t: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return end - y - h * f(t, end)

    prepared = jacsparse.prepare_jacobian(residual, y0.detach(), y0.detach(), t[0], t[1] - t[0])
    y, states = y0, [y0]
    for begin, end in itertools.pairwise(t):
        h = (end - begin) / steps
        for number in range(1, steps + 1):
            y = jacsparse.newton(prepared, y, y, begin + number * h, h)
        states.append(y)
    return torch.stack(states)


def main(n: int = 32, end: float = 0.5) -> None:
    """Print the error of the solution for smaller and smaller steps."""
    start = initial_values(n)
    fine = solve_by_radau(start, end, tolerance=1e-10, jac=sparse_jacobian(start)[0])
    expected = torch.from_numpy(fine.y[:, -1]).reshape(start.shape)
    table = new_table(f"Brusselator on {n} × {n} points until time {end}")
    for column in ("steps", "largest error", "time"):
        table.add_column(column, justify="right")
    for steps in (25, 50, 100, 200):
        begin = time.perf_counter()
        *_, last = odeint(lambda _, y: brusselator(y), start, torch.tensor([0.0, end], dtype=start.dtype), steps=steps)
        seconds = short_time(time.perf_counter() - begin)
        table.add_row(str(steps), f"{(last - expected).abs().max():.1e}", seconds)
    console().print(table)


if __name__ == "__main__":
    main()
