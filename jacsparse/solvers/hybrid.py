"""Hybrid: diagonal blocks directly, the whole iteratively."""

from __future__ import annotations

from dataclasses import dataclass

from .blocks import Vector, Work, add
from .cyclic_reduction import GroupInverse
from .solver import Iterated, Iteration, relative_residual
from .systems import BlockTriangular


@dataclass(frozen=True)
class Hybrid(Iteration):
    """Block Jacobi over the groups of a two-level system, whose diagonal blocks are solved by reduction.

    After as many iterations as there are groups it is exact (Naumov, section 3.4).

    Parameters
    ----------
    tolerance, limit, guess
        As `Iteration` takes them; the first guess is the solution without what passes between groups.

    Examples
    --------
    >>> import torch
    >>> from jacsparse.solvers import propagation
    >>> rnn, x = torch.nn.RNN(3, 4, num_layers=2), torch.randn(5, 1, 3)
    >>> solution = Hybrid().solve(propagation(rnn, x, torch.ones(5, 1, 4)).system)
    >>> solution.converged, solution.iterations <= 5
    (True, True)
    """

    name = "hybrid"

    def obstacle(self, system: BlockTriangular) -> str | None:
        return None if system.groups is not None else "the system has no groups; recurrent networks' have"

    def run(self, system: BlockTriangular, work: Work) -> Iterated:
        tolerance, limit = self.tolerance_of(system), self.limit_of(system)
        inverse = GroupInverse(system, work)
        values: Vector = inverse.apply(system.right, work) if self.guess is None else self.first(system, work)
        history: list[float] = []
        for _ in range(limit + 1):
            with work.level():
                right = add(inverse.outer.apply(values, work), system.right)
            after = inverse.apply(right, work)
            history.append(relative_residual(after, values))
            if history[-1] <= tolerance or len(history) > limit:
                break
            values = after
        return Iterated(values, history, tolerance)
