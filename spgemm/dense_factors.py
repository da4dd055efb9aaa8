"""Factors of dense blocks by LAPACK, which PyTorch calls for all blocks of all samples: LU, or Cholesky's.

A matrix whose rows and columns fall into groups that do not meet is block diagonal after both are ordered by group.
Blocks that are smaller than the largest get ones on the diagonal. A dense matrix is one block.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse.csgraph
import torch

from ..patterns import Pattern, gathered
from .factors import FactorPlan, Factors, singular

#: Rows of values that are transposed together: as many samples' lines stay in the caches.
_ROWS = 512
#: The largest size of blocks that one call of LAPACK's LU factorisation takes together.
_TOGETHER = 64


class _DenseFactors(Factors):
    """The factors of blocks ``(samples, count, size, size)``; row `i` of a matrix is at place ``rows[i]`` in these."""

    def __init__(self, rows: torch.Tensor, matrices: torch.Tensor) -> None:
        self._rows, self._shape = rows, matrices.shape
        self.factor(matrices)

    def factor(self, matrices: torch.Tensor) -> None:
        # LAPACK's columns lie one after the other, as rows do here: the transposed matrices are factored in place.
        self._lu = matrices.mT
        self._pivots = torch.empty(matrices.shape[:3], dtype=torch.int32)
        info = torch.empty(matrices.shape[:2], dtype=torch.int32)
        # Large ones one by one: after torch.set_num_threads, MKL hangs where threads of PyTorch's factor several.
        step = 1 if matrices.shape[-1] > _TOGETHER else max(info.numel(), 1)
        parts = (each.flatten(0, 1).split(step) for each in (matrices, self._pivots, info))
        for block, pivots, each in zip(*parts, strict=True):
            lu = block.mT
            torch.linalg.lu_factor_ex(lu, out=(lu, pivots, each))
        if info.any():
            raise singular(int(info.flatten(1).any(1).nonzero()[0]))

    def solve(self, b: torch.Tensor, transposed: bool) -> torch.Tensor:
        samples, count, size, _ = self._shape
        blocks = b.new_zeros((samples, count * size, b.shape[2])).index_copy_(1, self._rows, b)
        x = self.solve_blocks(blocks.view(samples, count, size, b.shape[2]), transposed)
        return x.reshape(blocks.shape).index_select(1, self._rows)

    def solve_blocks(self, b: torch.Tensor, transposed: bool) -> torch.Tensor:
        return torch.linalg.lu_solve(self._lu, self._pivots, b, adjoint=not transposed)

    def logdet(self) -> torch.Tensor:
        return self._lu.diagonal(dim1=-2, dim2=-1).abs().log().sum((1, 2))


class _CholeskyFactors(_DenseFactors):
    def factor(self, matrices: torch.Tensor) -> None:
        self._lower, info = torch.linalg.cholesky_ex(matrices)
        if info.any():
            sample = int(info.flatten(1).any(1).nonzero()[0])
            raise ValueError(
                f'sample {sample} of the Jacobian is not positive definite; factorize(method="auto") takes any matrix'
            )

    def solve_blocks(self, b: torch.Tensor, transposed: bool) -> torch.Tensor:
        return torch.cholesky_solve(b, self._lower)

    def logdet(self) -> torch.Tensor:
        return 2 * self._lower.diagonal(dim1=-2, dim2=-1).log().sum((1, 2))


class BlockDiagonal(FactorPlan):
    """LU factors of the blocks of a matrix that is block diagonal in some order of its rows and columns."""

    name = "block_diagonal"

    def __init__(self, pattern: Pattern) -> None:
        self.patterns, n = (pattern,), pattern.shape[0]
        self._count, groups = self.groups(pattern) if pattern.nnz < n * n else (min(n, 1), np.zeros(n, int))
        sizes = np.bincount(groups, minlength=self._count)
        size = self._size = int(sizes.max(initial=0))
        block, place = np.indices((self._count, size))
        used = place < sizes[:, None]
        rows = np.empty(n, np.int64)
        rows[np.argsort(groups, kind="stable")] = (block * size + place)[used]
        self._rows = torch.from_numpy(rows)
        self._unused = torch.from_numpy((block * size * size + place * (size + 1))[~used])
        # None where each element of one block is an entry.
        self._entries = None
        if pattern.nnz < n * n:
            self._entries = torch.from_numpy(rows[pattern.rows] * size + rows[pattern.indices] % size)
        self.nbytes = sum(each.nbytes for each in (self._rows, self._unused, self._entries) if each is not None)

    def groups(self, pattern: Pattern) -> tuple[int, np.ndarray]:
        """The number of groups of rows and columns, and the group of each."""
        return scipy.sparse.csgraph.connected_components(pattern.to_scipy(), directed=False)  # type: ignore[no-any-return]

    def cost(self, samples: int, solutions: int) -> float:
        n = self._size
        each = 0.02 + 0.005 * n**2 + 2e-5 * n**3 + solutions * (0.012 * n + 0.0004 * n**2)
        return 15 + samples * self._count * each

    def factors(self, values: torch.Tensor) -> Factors:
        return _DenseFactors(self._rows, self._matrices(values))

    def _matrices(self, values: torch.Tensor) -> torch.Tensor:
        shape = (values.shape[1], self._count, self._size, self._size)
        if self._entries is not None:
            places = values.new_zeros((shape[1] * shape[2] * shape[3], shape[0]))
            values = places.index_copy_(0, self._entries, values).index_fill_(0, self._unused, 1)
        matrices = values.new_empty((shape[0], len(values)))
        rows = _ROWS if shape[0] > 1 else max(len(values), 1)
        for first in range(0, len(values), rows):
            matrices[:, first : first + rows] = values[first : first + rows].T
        return matrices.view(shape)


class DenseLU(BlockDiagonal):
    """LU factors of the matrix as a dense one."""

    name = "dense"

    def groups(self, pattern: Pattern) -> tuple[int, np.ndarray]:
        return 1, np.zeros(pattern.shape[0], int)


class Cholesky(BlockDiagonal):
    """Cholesky factors of the blocks of a symmetric positive definite matrix, at half of LU's operations."""

    name = "cholesky"
    automatic = False

    def factors(self, values: torch.Tensor) -> Factors:
        pattern = self.patterns[0]
        if pattern != pattern.T or not torch.equal(values, gathered(values, pattern.transposition)):
            raise ValueError(
                "the Jacobian is not symmetric, as Cholesky factors need: J.gram() and hessian() are, to the last bit; "
                'factorize(method="auto") takes any matrix'
            )
        return _CholeskyFactors(self._rows, self._matrices(values))
