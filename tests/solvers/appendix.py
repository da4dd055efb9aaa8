"""One level of cyclic reduction as the scaling and permutation matrices of the paper's appendix (Naumov, section 7).

A plain reference: the matrices that the paper prints, which the library never makes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from jacsparse import SparseJacobian
from jacsparse.solvers import BlockTriangular


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


def explicit_reduction(system: BlockTriangular, sample: int = 0) -> Reduction:
    """One sample's matrices: S and P of a lower triangular system, T and Q of an upper one.

    For an even number of blocks as well as for an odd one. As printed, the off-diagonal blocks of equations 40 and 41
    lack a minus sign; those of the system here have it.

    Parameters
    ----------
    system : BlockTriangular
        A chain in the order of its nodes: a `BlockBidiagonal`, or a module's from `propagation`.
    sample : int
        The sample, from 0.

    Raises
    ------
    ValueError
        Where the system is no such chain or has no such sample, or the inverse of a diagonal block is singular, as
        that of ReLU is where f' = 0: the block itself does not exist.
    """
    count = len(system.sizes)
    upper = _is_upper(system)
    if type(sample) is not int or not 0 <= sample < system.batch:
        raise ValueError(f"sample is {sample!r}; expected one of 0 to {system.batch - 1}")
    system = system.sample(sample)
    inverses = [_dense(system, node, node) for node in range(count)]
    spans, stop = list[slice](), 0
    for size in system.sizes:
        spans.append(slice(stop, stop + size))
        stop += size
    identity = torch.eye(stop, dtype=inverses[0].dtype, device=inverses[0].device)
    matrix, scaling = torch.zeros_like(identity), identity.clone()
    for node, (inverse, span) in enumerate(zip(inverses, spans, strict=True)):
        block, info = torch.linalg.inv_ex(inverse)
        if bool(info):
            raise ValueError(
                f"the inverse of diagonal block {node} is singular in sample {sample}, as where f' = 0: the block, and "
                "the matrix of the system, do not exist; take another sample or activation"
            )
        matrix[span, span] = block
    for row, column in system.off_diagonal.blocks:
        dense = _dense(system, row, column)
        matrix[spans[row], spans[column]] = -dense
        scaling[spans[row], spans[column]] = dense @ inverses[column]
    # The second half has the last block row of an upper system, and the first one of a lower system.
    first = count % 2 if upper else 1
    order = [node for parity in (first, 1 - first) for node in range(count) if node % 2 == parity]
    permutation = identity[:, torch.cat([torch.arange(stop)[spans[node]] for node in order]).to(identity.device)]
    # The rows move as the unknowns do.
    return Reduction(matrix, permutation.T @ scaling, permutation, order)


def _is_upper(system: BlockTriangular) -> bool:
    """Whether a chain is an upper triangular system; ValueError where the system is no chain in its nodes' order."""
    places, steps = set(system.off_diagonal.blocks), range(len(system.sizes) - 1)
    upper = places == {(node, node + 1) for node in steps}
    if not upper and places != {(node + 1, node) for node in steps}:
        raise ValueError(f"{system!r} is no chain in the order of its nodes, as a BlockBidiagonal is")
    return upper


def _dense(system: BlockTriangular, row: int, column: int) -> torch.Tensor:
    """A block of a system of one sample as a matrix."""
    block = (system.inverse if row == column else system.off_diagonal).blocks[row, column]
    return SparseJacobian(block.pattern, block.values).todense()
