"""Block triangular systems, as forward and backward propagation are (Naumov, section 2).

A row of node i reads ``D_i u_i - Σ_j A_ij u_j = c_i``, where the nodes j come before i in the order of solving. Systems
hold the inverses of the diagonal blocks, which are f' or f/y: multiplied by, they may be zero.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..patterns import Diagonal, Full, Identity, Pattern
from ..runtime import a_type
from ..spgemm import SparseJacobian
from .blocks import Block, BlockMatrix, Vector, diagonal_block, identity_block

_DTYPES = (torch.float32, torch.float64)


class BlockTriangular:
    """A system whose block rows can be solved one after the other: ``D u - A u = c``.

    Parameters
    ----------
    off_diagonal : mapping of (row, column) to block
        The blocks ``A``: each a SparseJacobian, or a dense Tensor ``(m, n)`` or, for each sample, ``(batch, m, n)``.
    right : sequence of Tensor, each (batch, n)
        The right-hand sides ``c``, for each node.
    inverse_diagonal : sequence, optional
        ``D⁻¹`` of each node: a Tensor ``(n,)`` or ``(batch, n)`` for a diagonal, ``(batch, n, n)`` for matrices, a
        SparseJacobian, or None for the identity. All identities where left out.
    groups : sequence of sequence of int, optional
        The diagonal blocks of a two-level system: lists that hold each node once, so that every node comes after those
        that it depends on.
    check_finite : bool
        Whether elements that are not finite are an error.

    Raises
    ------
    TypeError, ValueError
        Where a block is no matrix, is not finite or does not fit, the nodes depend on each other in a circle, or the
        groups do not hold them in order; the message names the block or the node.

    Notes
    -----
    Naumov, equations 13 and 14; a directed acyclic graph has more blocks than a chain. A system may share memory with
    the tensors that it was made of: writing to those changes it unchecked.
    """

    def __init__(
        self,
        off_diagonal: Mapping[tuple[int, int], Any],
        right: Sequence[torch.Tensor],
        *,
        inverse_diagonal: Sequence[Any] | None = None,
        groups: Sequence[Sequence[int]] | None = None,
        check_finite: bool = True,
    ) -> None:
        if not right:
            raise ValueError("right is empty; a system has at least one block row")
        self._check_finite = check_finite
        parts = [_part(f"right[{node}]", part, right[0], check_finite) for node, part in enumerate(right)]
        self.batch = max(part.shape[1] for part in parts)
        for node, part in enumerate(parts):
            if part.shape[1] not in (1, self.batch):
                raise ValueError(f"right[{node}] has {part.shape[1]} samples, and another part {self.batch}")
        self.right: Vector = {node: part.expand(-1, self.batch).contiguous() for node, part in enumerate(parts)}
        self.sizes = tuple(len(part) for part in parts)
        inverses = [None] * len(parts) if inverse_diagonal is None else list(inverse_diagonal)
        if len(inverses) != len(parts):
            raise ValueError(f"inverse_diagonal has {len(inverses)} blocks; expected {len(parts)}, as right has")
        self.inverse = BlockMatrix(
            {
                (node, node): self._block(f"inverse_diagonal[{node}]", inverse, (size, size), diagonal=True)
                for node, (inverse, size) in enumerate(zip(inverses, self.sizes, strict=True))
            }
        )
        blocks = {}
        for (row, column), block in off_diagonal.items():
            name = f"off_diagonal[{row}, {column}]"
            if not (0 <= row < len(parts) and 0 <= column < len(parts)) or row == column:
                raise ValueError(f"{name}: expected two different nodes of 0 to {len(parts) - 1}")
            blocks[row, column] = self._block(name, block, (self.sizes[row], self.sizes[column]))
        self.off_diagonal = BlockMatrix(blocks)
        if sum(map(len, self.levels)) != len(parts):
            raise ValueError("the nodes depend on each other in a circle; the system is not triangular")
        self.groups = None if groups is None else self._checked_groups(groups)

    def _checked_groups(self, groups: Sequence[Sequence[int]]) -> list[list[int]]:
        """The groups as lists, where they hold each node once, and in the order of solving."""
        order = [node for group in groups for node in group]
        counts, last = Counter(order), len(self.right) - 1
        for node in (*self.right, *order):
            if counts[node] != 1 or node not in self.right:
                raise ValueError(f"groups have node {node} {counts[node]} times; expected each of 0 to {last} once")
        place = {node: number for number, node in enumerate(order)}
        for row, column in self.off_diagonal.blocks:
            if place[row] < place[column]:
                raise ValueError(
                    f"groups have node {row} before node {column}, which it depends on by off_diagonal[{row}, "
                    f"{column}]; list groups, and nodes within them, in the order of solving"
                )
        return [list(group) for group in groups]

    def _block(self, name: str, block: Any, shape: tuple[int, int], *, diagonal: bool = False) -> Block:
        like = self.right[0]
        if block is None:
            return identity_block(shape[0], like)
        if isinstance(block, SparseJacobian):
            pattern, values = block.pattern, block.values.detach()
            if isinstance(pattern.structure, Identity) and not bool((values == 1).all()):
                pattern = Pattern.of(Diagonal(pattern.shape[0]))
            result = Block(pattern, values)
        elif not isinstance(block, torch.Tensor):
            raise TypeError(f"{name} is {a_type(block)}; expected a SparseJacobian or a torch.Tensor")
        elif block.layout != torch.strided:
            raise TypeError(
                f"{name} is a sparse tensor, {block.layout}; pass SparseJacobian(pattern, values), with a Pattern and "
                "values of shape (nnz, batch) or (nnz, 1)"
            )
        elif diagonal and block.ndim in (1, 2):
            _check_unambiguous(name, block)
            result = diagonal_block(_part(name, block, like, self._check_finite))
        elif block.ndim == 3 or (block.ndim == 2 and not diagonal):
            matrices = block.detach() if block.ndim == 3 else block.detach()[None]
            result = Block(Pattern.of(Full(*matrices.shape[1:])), matrices.flatten(1).T.contiguous())
        else:
            raise ValueError(
                f"{name} has shape {tuple(block.shape)}; expected a matrix, or (batch, m, n) for one for each sample"
            )
        if result.pattern.shape != shape:
            rows, columns = result.pattern.shape
            raise ValueError(f"{name} is {rows} × {columns}; expected {shape[0]} × {shape[1]}, as the right-hand sides")
        _check_numbers(name, result.values, like, self._check_finite)
        if result.values.shape[1] not in (1, self.batch):
            raise ValueError(f"{name} has {result.values.shape[1]} samples; the right-hand sides have {self.batch}")
        return result

    @functools.cached_property
    def reads(self) -> dict[int, list[int]]:
        """The nodes that each node depends on."""
        reads: dict[int, list[int]] = {node: [] for node in self.right}
        for row, column in self.off_diagonal.blocks:
            reads[row].append(column)
        return reads

    @functools.cached_property
    def levels(self) -> list[list[int]]:
        """The nodes in levels: each depends on nodes of earlier levels alone."""
        missing = {node: len(columns) for node, columns in self.reads.items()}
        readers: dict[int, list[int]] = {node: [] for node in self.right}
        for row, column in self.off_diagonal.blocks:
            readers[column].append(row)
        levels, ready = list[list[int]](), [node for node, count in missing.items() if not count]
        while ready:
            levels.append(ready)
            following = []
            for row in (row for node in ready for row in readers[node]):
                missing[row] -= 1
                if not missing[row]:
                    following.append(row)
            ready = following
        return levels

    @property
    def blocks(self) -> list[Block]:
        """The blocks beside the diagonal, and the inverses of those on it."""
        return [*self.off_diagonal.blocks.values(), *self.inverse.blocks.values()]

    def within_groups(self) -> tuple[BlockMatrix, BlockMatrix]:
        """The blocks beside the diagonal within groups, and those between groups."""
        assert self.groups is not None
        number = {node: place for place, group in enumerate(self.groups) for node in group}
        parts: tuple[dict[tuple[int, int], Block], ...] = ({}, {})
        for (row, column), block in self.off_diagonal.blocks.items():
            parts[number[row] != number[column]][row, column] = block
        return BlockMatrix(parts[0]), BlockMatrix(parts[1])

    @property
    def depth(self) -> int:
        """The most blocks of ``A`` that one node's solution goes through."""
        return len(self.levels) - 1

    def on_meta(self) -> BlockTriangular:
        """The system without numbers: solving it counts."""
        right = {node: part.to("meta") for node, part in self.right.items()}
        return self.with_blocks(self.off_diagonal.changed(Block.on_meta), self.inverse.changed(Block.on_meta), right)

    def with_blocks(self, off_diagonal: BlockMatrix, inverse: BlockMatrix, right: Vector) -> BlockTriangular:
        """The system of the same nodes with other blocks and another right-hand side."""
        other = object.__new__(BlockTriangular)
        other.__dict__.update(self.__dict__)
        for name in ("levels", "reads"):
            other.__dict__.pop(name, None)
        other.off_diagonal, other.inverse, other.right, other.batch = off_diagonal, inverse, right, right[0].shape[1]
        return other

    def sample(self, number: int) -> BlockTriangular:
        """The system of one sample."""
        at = slice(number, number + 1)
        right = {node: part[:, at] for node, part in self.right.items()}
        off_diagonal, inverse = (m.changed(lambda block: block.sample(at)) for m in (self.off_diagonal, self.inverse))
        return self.with_blocks(off_diagonal, inverse, right)

    @property
    def is_bidiagonal(self) -> bool:
        """Whether each node depends on one other at most, and one other at most on it."""
        rows, columns = ([place[axis] for place in self.off_diagonal.blocks] for axis in (0, 1))
        return len(set(rows)) == len(rows) and len(set(columns)) == len(columns)

    def __repr__(self) -> str:
        blocks = len(self.off_diagonal.blocks)
        return f"<{type(self).__name__} of {len(self.sizes)} block rows, {blocks} blocks, batch {self.batch}>"


class BlockBidiagonal(BlockTriangular):
    """A system of a chain: each block row has one block beside the diagonal.

    Parameters
    ----------
    off_diagonal : sequence of block
        ``A_k``, l blocks: upper, as backward propagation, ``D_k u_k - A_k u_{k+1} = c_k``; lower, as forward
        propagation, ``D_{k+1} u_{k+1} - A_k u_k = c_{k+1}``.
    right : sequence of Tensor, each (batch, n_k)
        The l + 1 right-hand sides.
    inverse_diagonal : sequence, optional
        ``D_k⁻¹``, l + 1 of them.
    diagonal : sequence, optional
        ``D_k`` instead, which are inverted: a Tensor ``(n,)`` or ``(batch, n)`` for a diagonal, ``(batch, n, n)`` for
        matrices, or a SparseJacobian.
    upper : bool
        Whether this is an upper triangular system.

    Raises
    ------
    TypeError, ValueError
        Where there are no blocks, a block is singular, not finite or does not fit; the message names it.

    Notes
    -----
    Naumov, equations 18 and 19.

    Examples
    --------
    >>> import torch
    >>> from jacsparse.solvers import solve
    >>> W, f = torch.tensor([[0.5, 0.0], [1.0, 2.0]]), torch.tensor([1.0, 0.0])
    >>> right = [torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2)]
    >>> system = BlockBidiagonal([W.T, W.T], right, inverse_diagonal=[None, f, None])
    >>> [part.tolist() for part in solve(system).values]
    [[[0.75, 0.0]], [[1.5, 0.0]], [[1.0, 1.0]]]
    """

    def __init__(
        self,
        off_diagonal: Sequence[Any],
        right: Sequence[torch.Tensor],
        *,
        inverse_diagonal: Sequence[Any] | None = None,
        diagonal: Sequence[Any] | None = None,
        upper: bool = True,
    ) -> None:
        if not off_diagonal:
            raise ValueError("off_diagonal is empty; a system of no layers has nothing to solve")
        if len(right) != len(off_diagonal) + 1:
            raise ValueError(f"right has {len(right)} parts; expected {len(off_diagonal) + 1}, one more than blocks")
        if diagonal is not None:
            if inverse_diagonal is not None:
                raise ValueError("diagonal and inverse_diagonal are both given; pass one of them")
            inverse_diagonal = [_inverted(f"diagonal[{node}]", block) for node, block in enumerate(diagonal)]
        places = {(k, k + 1) if upper else (k + 1, k): block for k, block in enumerate(off_diagonal)}
        super().__init__(places, right, inverse_diagonal=inverse_diagonal)


def _part(name: str, part: Any, like: torch.Tensor, check_finite: bool) -> torch.Tensor:
    """A part of a vector as ``(elements, batch)``."""
    if not isinstance(part, torch.Tensor):
        raise TypeError(f"{name} is {a_type(part)}; expected a torch.Tensor")
    if part.ndim not in (1, 2):
        raise ValueError(f"{name} has shape {tuple(part.shape)}; expected (batch, elements)")
    part = (part.detach() if part.ndim == 2 else part.detach()[None]).T
    _check_numbers(name, part, like, check_finite)
    return part.contiguous()


def _check_numbers(name: str, values: torch.Tensor, like: torch.Tensor, check_finite: bool) -> None:
    if values.dtype not in _DTYPES or values.dtype != like.dtype:
        raise TypeError(
            f"{name} is {values.dtype}; expected {like.dtype if like.dtype in _DTYPES else 'float32 or float64'}"
        )
    if values.device != like.device:
        raise ValueError(f"{name} is on {values.device} and right[0] on {like.device}; move them to one device")
    if check_finite and not values.is_meta and not bool(values.isfinite().all()):
        raise ValueError(f"{name} has elements that are not finite; solvers would spread them to all parts")


def _check_unambiguous(name: str, block: torch.Tensor) -> None:
    if block.ndim == 2 and block.shape[0] == block.shape[1] > 1:
        raise ValueError(
            f"{name} has shape {tuple(block.shape)}, which is a matrix or a diagonal for each sample; pass a matrix as "
            "(1, n, n), or diagonals as a SparseJacobian"
        )


def _inverted(name: str, block: Any) -> Any:
    """The inverse of a diagonal block; ValueError where it is singular."""
    if block is None:
        return None
    if isinstance(block, SparseJacobian):
        if isinstance(block.pattern.structure, Diagonal):
            return _reciprocal(name, block.values.T)
        block = torch.stack([block.todense(sample) for sample in range(block.batch)])
    if not isinstance(block, torch.Tensor):
        raise TypeError(f"{name} is {a_type(block)}; expected a SparseJacobian or a torch.Tensor")
    if not block.is_floating_point():
        raise TypeError(f"{name} is {block.dtype}; expected float32 or float64")
    _check_unambiguous(name, block)
    if block.ndim in (1, 2):
        return _reciprocal(name, block)
    if block.ndim != 3 or block.shape[1] != block.shape[2]:
        raise ValueError(f"{name} has shape {tuple(block.shape)}; expected (n,) or (batch, n), or (batch, n, n)")
    inverse, info = torch.linalg.inv_ex(block)
    if bool(info.any()):
        raise ValueError(f"{name} is singular; its system has no one solution")
    return inverse


def _reciprocal(name: str, values: torch.Tensor) -> torch.Tensor:
    if bool((values == 0).any()):
        raise ValueError(f"{name} is singular: a zero on its diagonal; where the inverse is known, as f', pass that")
    return values.reciprocal()
