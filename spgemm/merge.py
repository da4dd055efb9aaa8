"""Merge: for each entry of `C` the list of pairs of entries that meet in it.

Each entry is then a sum of its own, which suits a device with a thread for each entry. It takes 8 bytes and two reads
for each multiply-add, so on a CPU `slots` is faster.
"""

from __future__ import annotations

import numpy as np
import torch

from ..runtime import frozen, index_dtype, kernel, run_rows
from . import products_cuda
from .methods import Method, Product
from .operands import flat


@kernel
def _count_pairs(first, last, a_indptr, a_indices, b_indptr, b_indices, columns, c_indptr, c_indices, starts):
    counts = np.zeros(columns, np.int64)
    for row in range(first, last):
        for p in range(a_indptr[row], a_indptr[row + 1]):
            k = a_indices[p]
            for q in range(b_indptr[k], b_indptr[k + 1]):
                counts[b_indices[q]] += 1
        for entry in range(c_indptr[row], c_indptr[row + 1]):
            starts[entry + 1] = counts[c_indices[entry]]
            counts[c_indices[entry]] = 0


@kernel
def _list_pairs(
    first, last, a_indptr, a_indices, b_indptr, b_indices, columns, c_indptr, c_indices, starts, left, right
):
    following = np.empty(columns, np.int64)
    for row in range(first, last):
        for entry in range(c_indptr[row], c_indptr[row + 1]):
            following[c_indices[entry]] = starts[entry]
        for p in range(a_indptr[row], a_indptr[row + 1]):
            k = a_indices[p]
            for q in range(b_indptr[k], b_indptr[k + 1]):
                place = following[b_indices[q]]
                left[place] = p
                right[place] = q
                following[b_indices[q]] += 1


@kernel
def _multiply(first, last, starts, left, right, a, a_batch, b, b_batch, c, batch):
    for entry in range(first, last):
        at_c = np.int64(entry) * batch
        c[at_c : at_c + batch] = 0
        for place in range(starts[entry], starts[entry + 1]):
            at_a = np.int64(left[place]) * a_batch
            at_b = np.int64(right[place]) * b_batch
            for sample in range(batch):
                c[at_c + sample] += a[at_a + (sample if a_batch > 1 else 0)] * b[at_b + (sample if b_batch > 1 else 0)]


class Merge(Method):
    """A list of pairs for each entry of `C`."""

    name = "merge"

    @classmethod
    def _place_dtype(cls, product: Product) -> np.dtype:
        return np.dtype(index_dtype(max(product.a.nnz, product.b.nnz), 0, 0))

    @classmethod
    def index_nbytes(cls, product: Product) -> int:
        return 2 * product.multiply_adds * cls._place_dtype(product).itemsize + 8 * (product.c.nnz + 1)

    def __init__(self, product: Product) -> None:
        a, b, c = product.a, product.b, product.c
        indices = (a.indptr, a.indices, b.indptr, b.indices, c.shape[1], c.indptr, c.indices)
        starts = np.zeros(c.nnz + 1, dtype=np.int64)
        run_rows(_count_pairs, product.work, *indices, starts)
        np.cumsum(starts, out=starts)
        left, right = (np.empty(product.multiply_adds, dtype=self._place_dtype(product)) for _ in range(2))
        run_rows(_list_pairs, product.work, *indices, starts, left, right)
        self.starts, self.left, self.right = frozen(starts), frozen(left), frozen(right)

    def multiply(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        run_rows(_multiply, self.starts, self.starts, self.left, self.right, *flat(a, b, c), lanes=c.shape[1])

    def multiply_on_device(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        products_cuda.merge(self.starts, self.left, self.right, a, b, c)
