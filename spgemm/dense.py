"""Dense: a factor is full, so arithmetic finds its entries and its indices are never enumerated.

BLAS multiplies two full factors. Where one is sparse, whole rows of the right factor are added up.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from ..patterns import Full
from ..runtime import SIMD, frozen, kernel, memory_for, row_starts, run_rows
from . import products_cuda
from .lanes import accumulate_row, block_width, write_sum_of_rows
from .methods import Method, Product
from .operands import flat, matrices


@kernel
def _sparse_full(first, last, indptr, indices, columns, order, c_indptr, a, a_batch, b, b_batch, c, batch):
    for row in range(first, last):
        start = np.int64(c_indptr[row]) * batch
        c[start : np.int64(c_indptr[row + 1]) * batch] = 0
        lane = 0
        while lane < batch:
            width = block_width(batch - lane)
            a_lane = lane if a_batch > 1 else 0
            b_lane = lane if b_batch > 1 else 0
            for p in range(indptr[row], indptr[row + 1]):
                at_a = np.int64(p) * a_batch + a_lane
                at_b = np.int64(indices[p]) * columns * b_batch + b_lane
                accumulate_row(c, start + lane, batch, order, 0, columns, a, at_a, a_batch, b, at_b, b_batch, width)
            lane += width


@kernel
def _scan_rows(first, last, bits, magnitude, infinity, live, finite):
    for row in range(first, last):
        # Numbers without their signs are ordered as their bits are, which compare several at once.
        largest = bits[row, 0] & magnitude
        for q in range(1, bits.shape[1]):
            number = bits[row, q] & magnitude
            largest = number if number > largest else largest
        live[row], finite[row] = largest != 0, largest < infinity


@kernel
def _sparse_full_one(first, last, indptr, indices, live, columns, c_indptr, a, b, c):
    most = np.int64(0)
    for row in range(first, last):
        terms = np.int64(indptr[row + 1]) - np.int64(indptr[row])
        most = terms if terms > most else most
    values, starts = np.empty(most, c.dtype), np.empty(most, np.int64)
    zeros_count = not live[len(live) - 1]
    for row in range(first, last):
        if c_indptr[row + 1] == c_indptr[row]:
            continue
        count = 0
        for p in range(indptr[row], indptr[row + 1]):
            values[count] = a[p]
            starts[count] = np.int64(indices[p]) * columns
            # Without a branch, which would be guessed wrongly for every other element.
            count += ((a[p] != 0) | zeros_count) & live[indices[p]]
        write_sum_of_rows(c, np.int64(c_indptr[row]), columns, values, starts, count, b)


@kernel
def _full_sparse(first, last, inner, columns, indptr, place, a, a_batch, b, b_batch, c, batch):
    for row in range(first, last):
        start = np.int64(row) * columns * batch
        c[start : start + columns * batch] = 0
        lane = 0
        while lane < batch:
            width = block_width(batch - lane)
            a_lane = lane if a_batch > 1 else 0
            b_lane = lane if b_batch > 1 else 0
            for k in range(inner):
                at_a = (np.int64(row) * inner + k) * a_batch + a_lane
                at_b = np.int64(indptr[k]) * b_batch + b_lane
                accumulate_row(
                    c, start + lane, batch, place, indptr[k], indptr[k + 1], a, at_a, a_batch, b, at_b, b_batch, width
                )
            lane += width


def _live_rows(a: np.ndarray, b: np.ndarray, rows: int) -> np.ndarray:
    """Whether each row of `b` must be added; and, as the last element, whether zeros of `a` may be skipped."""
    # Zero times a finite number adds nothing, not even a sign, to a sum that began with zero.
    live, finite = np.empty(rows + 1, dtype=np.bool_), np.empty(rows, dtype=np.bool_)
    columns = b.size // max(1, rows)
    bits = np.dtype(f"u{b.itemsize}").type
    magnitude, infinity = np.array([-0.0, np.inf], b.dtype).view(bits)
    work = np.arange(rows + 1) * (columns // SIMD)
    run_rows(_scan_rows, work, b.reshape(rows, columns).view(bits), ~magnitude, infinity, live, finite)
    live[-1] = finite.all()
    if not np.isfinite(a).all():
        live[:-1] = True
    return live


class Dense(Method):
    """At least one factor is full."""

    name = "dense"
    automatic = True

    @classmethod
    def obstacle(cls, product: Product) -> str | None:
        if isinstance(product.a.structure, Full) or isinstance(product.b.structure, Full):
            return None
        return "neither factor is full"

    @classmethod
    def index_nbytes(cls, product: Product) -> int:
        sparse_left = 0 if isinstance(product.a.structure, Full) else 2 * product.row_nbytes
        return sparse_left + (0 if isinstance(product.b.structure, Full) else 4 * product.b.nnz)

    def __init__(self, product: Product) -> None:
        self.product = product
        a, b, c = product.a.structure, product.b.structure, product.c
        self.full_a, self.full_b, full_c = isinstance(a, Full), isinstance(b, Full), isinstance(c.structure, Full)
        if self.full_a and not self.full_b:
            # C has the columns of b that have entries, or all where it is full: the rank of a column is its place.
            occupied = b.column_counts() > 0
            rank = np.arange(len(occupied)) if full_c else np.cumsum(occupied) - 1
            self.place = rank[product.b.indices].astype(np.uint32)
            self.columns = int(rank[-1]) + 1 if len(rank) else 0
        if not self.full_a:
            # C has the rows of a that have entries, or all where it is full.
            counts = a.row_counts()
            self.c_indptr = frozen(row_starts(((counts > 0) | full_c) * c.shape[1], np.int64))
            self.work = row_starts(counts, np.int64) * c.shape[1]

    def multiply(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        left, right, batch = self.product.a, self.product.b, c.shape[1]
        (rows, inner), columns = left.shape, right.shape[1]
        if self.full_a and self.full_b:
            # PyTorch's product runs on as many threads as everything else.
            self._multiply_full(*map(torch.from_numpy, (a, b, c)))
        elif self.full_b and batch == 1:
            pattern = (left.indptr, left.indices, _live_rows(a, b, inner))
            one = (a.reshape(-1), b.reshape(-1), c.reshape(-1))
            run_rows(_sparse_full_one, self.work, *pattern, columns, self.c_indptr, *one)
        elif self.full_b:
            indices = (left.indptr, left.indices, columns, np.arange(columns, dtype=np.uint32), self.c_indptr)
            run_rows(_sparse_full, self.work, *indices, *flat(a, b, c), lanes=batch)
        else:
            work = np.arange(rows + 1) * right.nnz
            run_rows(_full_sparse, work, inner, self.columns, right.indptr, self.place, *flat(a, b, c), lanes=batch)

    def _multiply_full(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        product = torch.matmul(matrices(a, *self.product.a.shape), matrices(b, *self.product.b.shape))
        c.reshape(*self.product.c.shape, c.shape[1]).copy_(product.movedim(0, 2))

    def multiply_on_device(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        if self.full_a and self.full_b:
            with memory_for("a full product, the batch first", c.shape, c.dtype, c.device, c.shape[1]):
                self._multiply_full(a, b, c)
        elif self.full_b:
            products_cuda.sparse_full(self.product.a, self.product.b.shape[1], self.c_indptr, a, b, c)
        else:
            products_cuda.full_sparse(self.product.a.shape[1], self._columns_of_b, a, b, c)

    @functools.cached_property
    def _columns_of_b(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For B's columns that C has: where their entries start, in which rows these are, and their places in B."""
        transposed = self.product.b.T
        counts = np.diff(transposed.indptr)
        occupied = (counts > 0) | isinstance(self.product.c.structure, Full)
        starts = row_starts(counts[occupied], transposed.indptr.dtype)
        return frozen(starts), transposed.indices, self.product.b.transposition
