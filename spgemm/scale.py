"""Scale: one factor is diagonal, so `C` has the other factor's pattern and each value is one product.

Lower bound: the other factor's values are read once and written once; a diagonal on the right takes an index for each.
"""

from __future__ import annotations

import numpy as np
import torch

from ..patterns import Diagonal, Full, Pattern
from ..runtime import SIMD, kernel, run_rows, unsigned
from . import products_cuda
from .methods import BoundProduct, Method, Product


@kernel
def _scale_rows(first, last, indptr, diagonal, values, c):
    batch = c.shape[1]
    for row in range(first, last):
        for entry in range(indptr[row], indptr[row + 1]):
            for sample in range(batch):
                d = diagonal[row, sample if diagonal.shape[1] > 1 else 0]
                c[entry, sample] = d * values[entry, sample if values.shape[1] > 1 else 0]


@kernel
def _scale_columns(first, last, indices, diagonal, values, c):
    batch = c.shape[1]
    for entry in range(first, last):
        column = indices[entry]
        for sample in range(batch):
            d = diagonal[column, sample if diagonal.shape[1] > 1 else 0]
            c[entry, sample] = values[entry, sample if values.shape[1] > 1 else 0] * d


@kernel
def _scale_rows_one(first, last, indptr, diagonal, values, c):
    for row in range(first, last):
        d = diagonal[row]
        for entry in range(indptr[row], indptr[row + 1]):
            c[entry] = d * values[entry]


@kernel
def _scale_columns_one(first, last, indices, diagonal, values, c):
    for entry in range(first, last):
        c[entry] = values[entry] * diagonal[indices[entry]]


class Scale(Method):
    """A diagonal factor scales the other one's rows or columns."""

    name = "scale"
    automatic = True

    @classmethod
    def obstacle(cls, product: Product) -> str | None:
        if isinstance(product.a.structure, Diagonal) or isinstance(product.b.structure, Diagonal):
            return None
        return "neither factor is diagonal"

    @classmethod
    def index_nbytes(cls, product: Product) -> int:
        return 0

    def __init__(self, product: Product) -> None:
        self.left = isinstance(product.a.structure, Diagonal)
        self.other: Pattern = product.b if self.left else product.a

    def multiply(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        diagonal, values = (a, b) if self.left else (b, a)
        if isinstance(self.other.structure, Full):
            self._scale_full(*map(torch.from_numpy, (diagonal, values, c)))
            return
        batch = c.shape[1]
        arrays = [array.reshape(-1) if batch == 1 else array for array in (diagonal, values, c)]
        if self.left:
            scale, indptr = _scale_rows_one if batch == 1 else _scale_rows, self.other.indptr
            run_rows(scale, indptr, indptr, *arrays, lanes=batch)
        else:
            scale, indices = _scale_columns_one if batch == 1 else _scale_columns, unsigned(self.other.indices)
            # Elements of the diagonal are looked up one by one.
            run_rows(scale, self.other.nnz, indices, *arrays, lanes=SIMD * batch)

    def bind(self, device: torch.device, dtype: torch.dtype, batches: tuple[int, int]) -> BoundProduct:
        if not isinstance(self.other.structure, Full):
            return products_cuda.scale_launch(self.other, self.left, device, dtype, batches)
        return self._scale_full if self.left else lambda a, b, c: self._scale_full(b, a, c)

    def _scale_full(self, diagonal: torch.Tensor, values: torch.Tensor, c: torch.Tensor) -> None:
        """Scale a full matrix without its indices."""
        shape = self.other.shape
        factor = diagonal.unsqueeze(1 if self.left else 0)
        torch.mul(factor, values.reshape(*shape, values.shape[1]), out=c.reshape(*shape, c.shape[1]))
