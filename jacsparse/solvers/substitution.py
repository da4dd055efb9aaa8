"""Substitution: each node once all nodes that it depends on are solved."""

from __future__ import annotations

from .blocks import Vector, Work, add
from .solver import TriangularSolver
from .systems import BlockTriangular


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
            rows = set(nodes)
            with work.level():
                terms = system.off_diagonal.between(rows, set(values)).apply(values, work)
                right = add(terms, {node: system.right[node] for node in nodes})
                values |= system.inverse.between(rows, rows).apply(right, work)
        return values
