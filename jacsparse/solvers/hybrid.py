"""Hybrid: diagonal blocks directly, the whole iteratively."""

from __future__ import annotations

from dataclasses import dataclass

from .blocks import BlockMatrix, Vector, Work, add
from .solver import Iterated, Iteration
from .systems import BlockTriangular


@dataclass(frozen=True)
class Hybrid(Iteration):
    """Block Jacobi over the groups of a two-level system, whose diagonal blocks are solved by reduction.

    Its residual is that of `Solution` with the diagonal blocks of groups in place of those of nodes: ``u'`` solves all
    groups from ``c`` and what the other groups' ``u`` pass on. After as many iterations as there are groups it is exact
    (Naumov, section 3.4).

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
        inner, outer = system.within_groups()
        reducing, solving = Work(), Work()
        # Powers N^(2^i) of N = D⁻¹ A within groups, by reduction.
        powers = list[BlockMatrix]()
        with reducing.level():
            power = system.inverse.times(inner, reducing)
        while power.blocks:
            powers.append(power)
            with reducing.level() as level:
                power = power.times(power, reducing)
                level.store((block for each in (*powers, power) for block in each.blocks.values()), system.blocks)

        def solved(right: Vector, work: Work) -> Vector:
            """The solution within groups, ``Π (I + N^(2^i)) D⁻¹ c``."""
            with work.level():
                values = system.inverse.apply(right, work)
            for power in powers:
                with work.level():
                    values = add(values, power.apply(values, work))
            return values

        values = solved(system.right, solving) if self.guess is None else self.first(system, solving)
        # The power that a level of the solution needs is a result of the level before.
        work.add_side_by_side((reducing, solving))

        def sweep(values: Vector) -> Vector:
            with work.level():
                right = add(outer.apply(values, work), system.right)
            return solved(right, work)

        return self.iterate(system, values, sweep)
