"""A scan: the steps of a schedule over affine maps, as back-propagation is scanned (BPPSA)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..schedule import Schedule, Step, by_level, parse, resolve, run
from .blocks import Block, Vector, Work
from .solver import TriangularSolver
from .systems import BlockTriangular


class _Affine(NamedTuple):
    """``u -> matrix u + offset``."""

    matrix: Block
    offset: torch.Tensor


@dataclass(frozen=True)
class PrefixScan(TriangularSolver):
    """The exclusive scan of a chain's maps ``u_k = D⁻¹_k (A_k u_{k+1} + c_k)``, by any schedule of its products.

    Parameters
    ----------
    schedule : Schedule or str
        As `jacsparse.schedule.resolve` takes it, for one stage more than there are blocks.

    Notes
    -----
    Products of many blocks may overflow where no solution does.

    Examples
    --------
    >>> import torch
    >>> from jacsparse.solvers import BlockBidiagonal
    >>> system = BlockBidiagonal([torch.eye(2)] * 7, [torch.ones(1, 2)] * 8)
    >>> PrefixScan("blelloch").solve(system).values[0].tolist()
    [[8.0, 8.0]]
    """

    name = "scan"
    schedule: Schedule | str = "blelloch"

    def __post_init__(self) -> None:
        if parse(self.schedule)[0] == "balanced" and not isinstance(self.schedule, Schedule):
            raise ValueError(f"schedule is {self.schedule!r}, which weighs a module's stages; pass another name")

    def obstacle(self, system: BlockTriangular) -> str | None:
        if not system.is_bidiagonal:
            return "a scan goes along one chain, and in this system a layer reads several others"
        lengths = sorted({len(chain) for chain in _chains(system)})
        if isinstance(self.schedule, Schedule) and lengths != [self.schedule.n]:
            return f"its schedule is for {self.schedule.n} stages, and the system has chains of {lengths} block rows"
        return None

    def chain_schedule(self, system: BlockTriangular) -> Schedule | None:
        (chain, *others) = _chains(system)
        return None if others else resolve(self.schedule, len(chain))

    def run(self, system: BlockTriangular, work: Work) -> Vector:
        values, works = Vector(), list[Work]()
        for chain in _chains(system):
            works.append(Work())
            values |= self._scanned(system, chain, works[-1])
        work.add_side_by_side(works)
        return values

    def _scanned(self, system: BlockTriangular, chain: list[int], work: Work) -> Vector:
        """The solution along one chain of nodes."""
        inverses = {node: system.inverse.blocks[node, node] for node in chain}
        with work.level():
            offsets = {node: work.apply((inverse, system.right[node])) for node, inverse in inverses.items()}
            maps = {
                place: _Affine(work.product((inverses[node], system.off_diagonal.blocks[node, before])), offsets[node])
                for place, (before, node) in enumerate(itertools.pairwise(chain), 1)
            }
        states = {0: offsets[chain[0]]}
        values: dict[int, Any] = {**states, **maps}
        schedule = resolve(self.schedule, len(chain))
        levels = list(by_level(schedule.live_steps()))
        last_read = {
            value: number for number, steps in enumerate(levels) for step in steps for value in (step.left, step.right)
        }

        def multiply(_: Step, left: _Affine, right: _Affine) -> _Affine:
            offset = work.apply((left.matrix, right.offset)) + left.offset
            return _Affine(work.product((left.matrix, right.matrix)), offset)

        def apply(step: Step, left: _Affine, right: torch.Tensor) -> torch.Tensor:
            states[step.out] = work.apply((left.matrix, right)) + left.offset
            return states[step.out]

        for number, steps in enumerate(levels):
            with work.level() as level:
                run(steps, multiply, apply, values=values)
                values = {value: each for value, each in values.items() if last_read.get(value, -1) > number}
                level.store((each.matrix for each in values.values() if isinstance(each, _Affine)), system.blocks)
        return dict(zip(chain, (states[value] for value in schedule.gradients), strict=True))


def _chains(system: BlockTriangular) -> list[list[int]]:
    """The chains of a bi-diagonal system, each in the order of solving."""
    following = {column: row for row, column in system.off_diagonal.blocks}
    chains = [[start] for start in system.levels[0]]
    for chain in chains:
        while chain[-1] in following:
            chain.append(following[chain[-1]])
    return chains
