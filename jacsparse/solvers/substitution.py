"""Substitution: each node once all nodes that it depends on are solved."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
                totals = {node: _total(system, node, values, work) for node in nodes}
            with work.level():
                values |= {node: work.apply((system.inverse.blocks[node, node], totals[node])) for node in nodes}
        return values


def _total(system: BlockTriangular, node: int, values: Vector, work: Work) -> torch.Tensor:
    """``c + A u`` of one node."""
    factors = [(system.off_diagonal.blocks[node, column], values[column]) for column in system.reads[node]]
    return system.right[node] + work.apply(*factors) if factors else system.right[node]
