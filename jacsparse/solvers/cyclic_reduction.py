"""Cyclic reduction: at each level, every block row replaces the unknown that it depends on by what that depends on."""

from __future__ import annotations

from dataclasses import dataclass

from .blocks import BlockMatrix, Vector, Work, add
from .solver import TriangularSolver
from .substitution import Substitution
from .systems import BlockTriangular


@dataclass(frozen=True)
class CyclicReduction(TriangularSolver):
    """Parallel cyclic reduction, in a logarithmic number of levels (Naumov, section 3.1).

    ``D_k u_k = A_k u_{k+s} + c_k`` becomes one over twice the stride: ``A_k ← A_k D⁻¹_{k+s} A_{k+s}`` and
    ``c_k ← c_k + A_k D⁻¹_{k+s} c_{k+s}``, as in equations 30 and 31, whose two halves go on apart.

    Parameters
    ----------
    depth : int, optional
        The most levels; the independent systems that are left are then solved by substitution. All levels by default.
    nested : bool, optional
        Whether a system with `groups` is reduced in two levels, as section 3.1 does for recurrent networks: groups by
        the inverses of their diagonal blocks, which are found by reduction themselves. By default where it has groups.

    Notes
    -----
    A chain of l blocks takes ⌈log2(l + 1)⌉ levels. Where diagonals differ between samples, as in a mini-batch, all
    reduced blocks do: section 3.3's "remain the same" holds before the first level alone. Products of many blocks may
    overflow where no solution does.

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
    nested: bool | None = None

    def __post_init__(self) -> None:
        if self.depth is not None and (
            not isinstance(self.depth, int) or isinstance(self.depth, bool) or self.depth < 0
        ):
            raise ValueError(f"depth is {self.depth!r}; expected a number of levels, or None for all")

    def obstacle(self, system: BlockTriangular) -> str | None:
        if self.nested and system.groups is None:
            return "nested reduction needs a system with groups, as that of a recurrent network"
        if self.depth is not None and (self.nested or (self.nested is None and system.groups is not None)):
            return "a depth is for systems without groups; pass nested=False"
        return None

    def run(self, system: BlockTriangular, work: Work) -> Vector:
        if system.groups is not None and self.nested is not False:
            return _nested(system, work)
        matrix, right, levels = system.off_diagonal, system.right, 0
        while matrix.blocks and (self.depth is None or levels < self.depth):
            with work.level() as level:
                following = system.inverse.times(matrix, work)
                right = add(right, matrix.apply(system.inverse.apply(right, work), work))
                matrix = matrix.times(following, work)
                level.entries = matrix.entries
            levels += 1
        return Substitution().run(system.reduced(matrix, right), work)


class GroupInverse:
    """The inverse of a system's diagonal blocks, each of which is a group: ``Π (I + N^(2^i)) D⁻¹`` by reduction."""

    def __init__(self, system: BlockTriangular, work: Work) -> None:
        assert system.groups is not None
        number = {node: place for place, group in enumerate(system.groups) for node in group}
        blocks = system.off_diagonal.blocks
        inner = BlockMatrix({place: block for place, block in blocks.items() if number[place[0]] == number[place[1]]})
        #: The blocks between groups.
        self.outer = BlockMatrix({place: block for place, block in blocks.items() if place not in inner.blocks})
        self._inverse, self.powers = system.inverse, []
        with work.level():
            power = system.inverse.times(inner, work)
        while power.blocks:
            self.powers.append(power)
            with work.level() as level:
                power = power.times(power, work)
                level.entries = power.entries + self.entries

    @property
    def entries(self) -> int:
        """Entries of the powers."""
        return sum(power.entries for power in self.powers)

    def apply(self, x: Vector, work: Work) -> Vector:
        """The product with a vector."""
        with work.level():
            x = self._inverse.apply(x, work)
        for power in self.powers:
            with work.level():
                x = add(x, power.apply(x, work))
        return x

    def times(self, matrix: BlockMatrix, work: Work) -> BlockMatrix:
        """The product with a matrix."""
        with work.level():
            matrix = self._inverse.times(matrix, work)
        for power in self.powers:
            with work.level() as level:
                matrix = matrix.plus(power.times(matrix, work), work)
                level.entries = matrix.entries + self.entries
        return matrix


def _nested(system: BlockTriangular, work: Work) -> Vector:
    inverse = GroupInverse(system, work)
    outer, right = inverse.outer, system.right
    while outer.blocks:
        following, solved = inverse.times(outer, work), inverse.apply(right, work)
        with work.level() as level:
            right = add(right, outer.apply(solved, work))
            outer = outer.times(following, work)
            level.entries = outer.entries + following.entries + inverse.entries
    return inverse.apply(right, work)
