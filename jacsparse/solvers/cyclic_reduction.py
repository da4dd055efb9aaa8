"""Cyclic reduction: at each level, every block row replaces the unknown that it depends on by what that depends on."""

from __future__ import annotations

from dataclasses import dataclass

from ..schedule import Schedule, cyclic_reduction
from .blocks import BlockMatrix, Vector, Work, add, identity_like
from .solver import TriangularSolver
from .substitution import Substitution
from .systems import BlockTriangular


@dataclass(frozen=True)
class CyclicReduction(TriangularSolver):
    """Parallel cyclic reduction, in a logarithmic number of levels (Naumov, section 3.1).

    ``u_k = N_k u_{k+s} + d_k``, with ``N = D⁻¹ A`` and ``d = D⁻¹ c``, becomes a row over twice the stride:
    ``N_k ← N_k N_{k+s}`` and ``d_k ← d_k + N_k d_{k+s}``. These are equations 30 and 31 with their rows multiplied by
    ``D⁻¹``; all rows are reduced, so that both halves go on apart.

    Parameters
    ----------
    depth : int, optional
        The most levels; the independent systems that are left are then solved by substitution. All levels by default.
    nested : bool
        Whether a system with `groups` is reduced within groups first, and then between them, as section 3.1 does for
        recurrent networks. `depth` then counts the levels between groups.

    Notes
    -----
    A system of depth l takes ⌈log2(l + 1)⌉ levels: ⌈log2(k + τ)⌉ for a recurrent network of k layers and τ steps.
    Nested reduction takes ⌈log2(k + 1)⌉ + ⌈log2 τ⌉, within the paper's O(log k · log τ). Counted for 1 to 4 layers and
    1 to 65 steps, it never takes fewer levels or stores fewer entries, and takes fewer multiply-adds at 2 steps alone:
    so it is not the default.

    Where diagonals differ between samples, as in a mini-batch, all reduced blocks do: section 3.3's "remain the same"
    holds before the first level alone. Products of many blocks may overflow where no solution does.

    Examples
    --------
    >>> import torch
    >>> from jacsparse.solvers import BlockBidiagonal
    >>> system = BlockBidiagonal([torch.eye(2)] * 7, [torch.ones(1, 2)] * 8)
    >>> solution = CyclicReduction().solve(system)
    >>> solution.values[0].tolist(), solution.work.steps
    ([[8.0, 8.0]], 3)
    """

    name = "cyclic_reduction"
    depth: int | None = None
    nested: bool = False

    def __post_init__(self) -> None:
        if self.depth is not None and (type(self.depth) is not int or self.depth < 0):
            raise ValueError(f"depth is {self.depth!r}; expected a number of levels, or None for all")

    def obstacle(self, system: BlockTriangular) -> str | None:
        if self.nested and system.groups is None:
            return "nested reduction needs a system with groups, as that of a recurrent network"
        return None

    def chain_schedule(self, system: BlockTriangular) -> Schedule | None:
        whole = system.is_bidiagonal and self.depth is None and len(system.levels[0]) == 1
        return cyclic_reduction(len(system.right)) if whole else None

    def run(self, system: BlockTriangular, work: Work) -> Vector:
        inner, outer = system.within_groups() if self.nested else (BlockMatrix({}), system.off_diagonal)
        with work.level():
            inner, outer = system.inverse.times(inner, work), system.inverse.times(outer, work)
            values = system.inverse.apply(system.right, work)
        while inner.blocks:
            with work.level() as level:
                values = add(values, inner.apply(values, work))
                outer = outer.plus(inner.times(outer, work))
                inner = inner.times(inner, work)
                level.store((*inner.blocks.values(), *outer.blocks.values()), system.blocks)
        levels = 0
        while outer.blocks and (self.depth is None or levels < self.depth):
            with work.level() as level:
                values = add(values, outer.apply(values, work))
                outer = outer.times(outer, work)
                level.store(outer.blocks.values(), system.blocks)
            levels += 1
        return Substitution().run(system.with_blocks(outer, identity_like(values), values), work)
