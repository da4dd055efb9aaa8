"""Substitution: each node once all nodes that it depends on are solved."""

from __future__ import annotations

from dataclasses import dataclass

from .blocks import Vector, Work
from .solver import TriangularSolver
from .systems import BlockTriangular


@dataclass(frozen=True)
class Substitution(TriangularSolver):
    """Forward or backward substitution, the sequential reference; nodes of one level side by side.

    Examples
    --------
    >>> import torch
    >>> from jacsparse.solvers import BlockBidiagonal
    >>> system = BlockBidiagonal([torch.eye(2)] * 3, [torch.ones(1, 2)] * 4)
    >>> solution = Substitution().solve(system)
    >>> solution.values[0].tolist(), solution.work.steps
    ([[4.0, 4.0]], 3)
    """

    name = "substitution"

    def run(self, system: BlockTriangular, work: Work) -> Vector:
        values: Vector = {}
        for nodes in system.levels:
            with work.level():
                for node in nodes:
                    total = system.right[node]
                    for column in system.reads[node]:
                        total = total + work.apply(system.off_diagonal.blocks[node, column], values[column])
                    values[node] = work.apply(system.inverse.blocks[node, node], total)
        return values
