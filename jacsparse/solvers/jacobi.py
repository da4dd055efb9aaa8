"""Jacobi's iteration: all block rows at once, each from the others' last values."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

from .blocks import Work
from .solver import Iterated, Iteration, swept
from .systems import BlockTriangular


@dataclass(frozen=True)
class Jacobi(Iteration):
    """``u ← D⁻¹ (A u + c)`` (Naumov, equations 36 and 37).

    After as many iterations as the system is deep it is exact from ``D⁻¹ c``, and after one more from any guess. Where
    no row of ``|D⁻¹ A|`` adds up to 1, the error decreases by the largest of these sums in each iteration.

    η iterations take η + 1 sweeps, one more than equation 46 counts: the last one shows that the residual is small.

    Parameters
    ----------
    tolerance, limit, guess
        As `Iteration` takes them.

    Examples
    --------
    >>> import torch
    >>> from jacsparse.solvers import BlockBidiagonal
    >>> system = BlockBidiagonal([0.5 * torch.eye(2)] * 3, [torch.ones(1, 2)] * 4)
    >>> solution = Jacobi().solve(system)
    >>> solution.values[0].tolist(), solution.iterations, solution.work.steps
    ([[1.875, 1.875]], 3, 4)
    """

    name = "jacobi"

    def run(self, system: BlockTriangular, work: Work) -> Iterated:
        return self.iterate(system, self.first(system, work), lambda values: swept(system, values, work))


@dataclass(frozen=True)
class Richardson(Iteration):
    """``u ← u + ω (D⁻¹ (A u + c) - u)``, Richardson's iteration on the scaled system (equations 38 and 39).

    Parameters
    ----------
    omega : float
        The step ω, in (0, 2); with 1 it is Jacobi's iteration.
    tolerance, limit, guess
        As `Iteration` takes them.

    Examples
    --------
    >>> import torch
    >>> from jacsparse.solvers import BlockBidiagonal
    >>> system = BlockBidiagonal([0.5 * torch.eye(2)] * 3, [torch.ones(1, 2)] * 4)
    >>> solution = Richardson(omega=0.9, limit=100).solve(system)
    >>> solution.values[0].round(decimals=3).tolist(), solution.converged
    ([[1.875, 1.875]], True)
    """

    name = "richardson"
    omega: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.omega, Real) or not 0 < self.omega < 2:
            raise ValueError(f"omega is {self.omega!r}; expected a number between 0 and 2")

    def run(self, system: BlockTriangular, work: Work) -> Iterated:
        return self.iterate(system, self.first(system, work), lambda values: swept(system, values, work), self.omega)
