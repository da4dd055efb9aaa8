"""The size that each block row of a solution is expected to have, from the norms of the system's blocks."""

from __future__ import annotations

import functools
import math

import torch

from ..patterns import Diagonal, Identity
from .blocks import Block, Work
from .solver import scaled_right
from .systems import BlockTriangular


def expected_exponents(system: BlockTriangular, *, bits: int = 0) -> dict[int, torch.Tensor]:
    """The exponents of two of each block row's expected size, for each sample.

    A row is as large as its right-hand side, or as what the largest row before it becomes by a block ``N = D⁻¹ A`` that
    turns a random vector of length 1 into one of length ``‖N‖_F / √n``. Gradients of early layers, which may be 1e-16
    of the last ones, then count as much as those.

    Parameters
    ----------
    system : BlockTriangular
        The system.
    bits : int
        How many powers of two each block adds, so that the solution decays by so many from a row to those that depend
        on it, whatever the blocks do.

    Returns
    -------
    dict of int to Tensor, each (batch,)
        Integers as float64: a power of two scales without rounding.
    """
    right = scaled_right(system, Work())
    exponents: dict[int, torch.Tensor] = {}
    for nodes in system.levels:
        for node in nodes:
            largest = right[node].abs().double()
            sizes = [largest.amax(dim=0).log2() if len(largest) else largest.new_full((system.batch,), -torch.inf)]
            inverse = system.inverse.blocks[node, node]
            for column in system.reads[node]:
                gain = _gain(inverse, system.off_diagonal.blocks[node, column])
                sizes.append(exponents[column] + gain + bits)
            size = functools.reduce(torch.maximum, sizes)
            exponents[node] = torch.where(size.isfinite(), size, 0.0).round()
    return exponents


def times_power(part: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """A part of a vector times powers of two, which may be beyond the range of its dtype where the product is not."""
    info = torch.finfo(part.dtype)
    # No two numbers of the dtype are further apart, and a third of that is within its range.
    most = math.ceil(math.log2(info.max) - math.log2(info.tiny * info.eps))
    exponent = exponent.clamp(-most, most)
    third = (exponent / 3).trunc()
    for power in (third, third, exponent - 2 * third):
        part = part * torch.exp2(power).to(part)
    return part


def _gain(inverse: Block, block: Block) -> torch.Tensor:
    """The base-2 logarithm of ``‖D⁻¹ A‖_F / √n`` of each sample; where D⁻¹ is no diagonal, of the norms' product."""
    rows, columns = block.pattern.shape
    if not block.pattern.nnz or not inverse.pattern.nnz:
        return torch.tensor([-torch.inf], dtype=torch.float64, device=block.values.device)
    squares = block.values.double().square()
    sums = squares.new_zeros(rows, squares.shape[1])
    sums.index_add_(0, torch.from_numpy(block.pattern.rows.astype("int64")).to(sums.device), squares)
    weights = inverse.values.double().square()
    if isinstance(inverse.pattern.structure, Diagonal | Identity):
        return (sums * weights).sum(dim=0).div(columns).log2() / 2
    return (sums.sum(dim=0).div(columns).log2() + weights.sum(dim=0).div(rows).log2()) / 2
