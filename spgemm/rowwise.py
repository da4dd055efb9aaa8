"""Row-wise: Gustavson's algorithm over C's known pattern, with no memory for each multiply-add.

Each thread sums a row of `C` in an array over all columns, then gathers the row from it and clears the entries it used.
"""

from __future__ import annotations

import numpy as np
import torch

from ..runtime import kernel, run_rows, unsigned
from . import products_cuda
from .lanes import accumulate_row, block_width
from .methods import BoundProduct, Method, Product
from .operands import flat


@kernel
def _multiply_one(first, last, a_indptr, a_indices, b_indptr, b_indices, columns, c_indptr, c_indices, a, b, c):
    sums = np.zeros(columns, c.dtype)
    for row in range(first, last):
        for p in range(a_indptr[row], a_indptr[row + 1]):
            k = a_indices[p]
            value = a[p]
            b_row = b[b_indptr[k] : b_indptr[k + 1]]
            places = b_indices[b_indptr[k] : b_indptr[k + 1]]
            for q in range(len(b_row)):
                sums[places[q]] += value * b_row[q]
        c_row = c[c_indptr[row] : c_indptr[row + 1]]
        places = c_indices[c_indptr[row] : c_indptr[row + 1]]
        for entry in range(len(c_row)):
            c_row[entry] = sums[places[entry]]
            sums[places[entry]] = 0


@kernel
def _multiply(
    first, last, a_indptr, a_indices, b_indptr, b_indices, columns, c_indptr, c_indices,
    a, a_batch, b, b_batch, c, batch,
):  # fmt: skip
    lane = 0
    while lane < batch:
        width = block_width(batch - lane)
        a_lane = lane if a_batch > 1 else 0
        b_lane = lane if b_batch > 1 else 0
        sums = np.zeros(columns * width, c.dtype)
        for row in range(first, last):
            for p in range(a_indptr[row], a_indptr[row + 1]):
                k = a_indices[p]
                at_a = np.int64(p) * a_batch + a_lane
                at_b = np.int64(b_indptr[k]) * b_batch + b_lane
                accumulate_row(
                    sums, 0, width, b_indices, b_indptr[k], b_indptr[k + 1], a, at_a, a_batch, b, at_b, b_batch, width
                )
            for entry in range(c_indptr[row], c_indptr[row + 1]):
                at = np.int64(c_indices[entry]) * width
                at_c = np.int64(entry) * batch + lane
                for sample in range(width):
                    c[at_c + sample] = sums[at + sample]
                    sums[at + sample] = 0
        lane += width


class Rowwise(Method):
    """Gustavson over a known pattern."""

    name = "rowwise"
    automatic = True

    @classmethod
    def index_nbytes(cls, product: Product) -> int:
        return product.row_nbytes

    def __init__(self, product: Product) -> None:
        self.product = product
        self.work = product.work

    def multiply(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        left, right, product = self.product.a, self.product.b, self.product.c
        indices = (left.indptr, left.indices, right.indptr, unsigned(right.indices))
        pattern = (product.shape[1], product.indptr, unsigned(product.indices))
        if c.shape[1] == 1:
            run_rows(_multiply_one, self.work, *indices, *pattern, a.reshape(-1), b.reshape(-1), c.reshape(-1))
        else:
            run_rows(_multiply, self.work, *indices, *pattern, *flat(a, b, c), lanes=c.shape[1])

    def bind(self, device: torch.device, dtype: torch.dtype, batches: tuple[int, int]) -> BoundProduct:
        return products_cuda.rowwise_launch(self.product, device, dtype, batches)
