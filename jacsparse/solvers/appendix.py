"""One level of cyclic reduction as the scaling and permutation matrices of the paper's appendix (Naumov, section 7)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .systems import BlockBidiagonal


class Reduction(NamedTuple):
    """A system's matrix M, its scaling S and its permutation P: ``(S M P)(Pᵀ u) = S c`` are two systems apart."""

    matrix: torch.Tensor
    scaling: torch.Tensor
    permutation: torch.Tensor
    #: The block rows in their new order.
    order: list[int]

    @property
    def reduced(self) -> torch.Tensor:
        """``S M P``, as equations 30 and 31 show it."""
        return self.scaling @ self.matrix @ self.permutation


def explicit_reduction(system: BlockBidiagonal, sample: int = 0) -> Reduction:
    """One sample's matrices: S and P of a lower triangular system, T and Q of an upper one.

    For an even number of blocks as well as for an odd one. As printed, the off-diagonal blocks of equations 40 and 41
    lack a minus sign; those of the system here have it.

    Raises
    ------
    ValueError
        Where a diagonal block's inverse is singular, so that the block itself does not exist.
    """
    sizes, count = system.sizes, len(system.sizes)
    starts = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()]).tolist()
    total, like = starts[-1], system.right[0]
    inverses = [_dense(system.inverse.blocks[node, node], sample) for node in range(count)]
    matrix, scaling = like.new_zeros(total, total), torch.eye(total, dtype=like.dtype)

    def span(node: int) -> slice:
        return slice(starts[node], starts[node + 1])

    for node, inverse in enumerate(inverses):
        if not bool(torch.linalg.matrix_rank(inverse) == len(inverse)):
            raise ValueError(f"the inverse of diagonal block {node} is singular; the block itself does not exist")
        matrix[span(node), span(node)] = torch.linalg.inv(inverse)
    for (row, column), block in system.off_diagonal.blocks.items():
        dense = _dense(block, sample)
        matrix[span(row), span(column)] = -dense
        scaling[span(row), span(column)] = dense @ inverses[column]
    # One half has the last block row of an upper system, or the first one of a lower system.
    parity = (count - 1) % 2 if system.upper else 1
    order = [n for n in range(count) if n % 2 == parity] + [n for n in range(count) if n % 2 != parity]
    if system.upper:
        order = [n for n in range(count) if n % 2 != parity] + [n for n in range(count) if n % 2 == parity]
    columns = torch.cat([torch.arange(starts[node], starts[node + 1]) for node in order])
    permutation = torch.eye(total, dtype=like.dtype)[:, columns]
    # The rows move as the unknowns do.
    return Reduction(matrix, permutation.T @ scaling, permutation, order)


def _dense(block: object, sample: int) -> torch.Tensor:
    from ..spgemm import SparseJacobian
    from .blocks import Block

    assert isinstance(block, Block)
    values = block.values[:, sample if block.values.shape[1] > 1 else 0].unsqueeze(1)
    return SparseJacobian(block.pattern, values).todense()
