"""Dense: a factor is full, so arithmetic finds its entries and its indices are never enumerated.

BLAS multiplies two full factors. Where one is sparse, whole rows of the right factor are added up.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from ..patterns import Full
from ..runtime import frozen, inlined, kernel, memory_for, row_starts, run_rows, unsigned
from . import products_cuda
from .lanes import accumulate_row, block_width, write_sum_of_rows
from .methods import BoundProduct, Method, Product
from .operands import flat, matrices

#: What is known of a row of the right factor while a product is computed.
UNKNOWN, ZERO, LIVE, NOT_FINITE = range(4)

#: Terms that are listed before they are added; a longer row has room too.
LISTED = 2048


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


@inlined
def _row_state(row, magnitude, infinity):
    """Of a row of numbers, given as their bits: `ZERO`, `LIVE` or `NOT_FINITE`."""
    # Numbers without their signs are ordered as their bits are, which compare several at once.
    largest = row[0] & magnitude
    for q in range(1, len(row)):
        number = row[q] & magnitude
        largest = number if number > largest else largest
    if largest >= infinity:
        return NOT_FINITE
    return LIVE if largest != 0 else ZERO


@inlined
def _list_terms(indices, a, states, bits, magnitude, infinity, columns, values, starts, count):
    """Append the terms of a row of A that must be added, as values and as starts of rows of B; return the new count.

    `count` and `indices` are unsigned.
    """
    for p in range(len(indices)):
        inner, value = indices[p], a[p]
        start = np.int64(inner) * columns
        if states[inner] == UNKNOWN:
            # The row is read from memory once, here. Other threads may write the same byte at the same time.
            states[inner] = _row_state(bits[start : start + columns], magnitude, infinity)
        state = states[inner]
        values[count], starts[count] = value, start
        # Zero times a finite number adds nothing, not even a sign, to a sum that began with zero. It is left out
        # without a branch, which would be guessed wrongly for every other element.
        count += np.uint64(((value != 0) | (state == NOT_FINITE)) & ((state != ZERO) | (value - value != 0)))
    return count


@kernel
def _sparse_full_one(first, last, indptr, indices, states, bits, magnitude, infinity, columns, c_indptr, a, b, c):
    room = np.int64(LISTED)
    for row in range(first, last):
        room = max(room, np.int64(indptr[row + 1]) - np.int64(indptr[row]))
    values, starts, stops = np.empty(room, c.dtype), np.empty(room, np.int64), np.empty(room, np.int64)
    row = first
    while row < last:
        # The terms of several rows are listed before the first is added, so that the processor adds one row while it
        # fetches the next one's.
        begin, count = row, np.uint64(0)
        while row < last and row - begin < room and np.int64(indptr[row + 1]) - np.int64(indptr[begin]) <= room:
            entries = slice(indptr[row], indptr[row + 1])
            count = _list_terms(
                indices[entries], a[entries], states, bits, magnitude, infinity, columns, values, starts, count
            )
            stops[row - begin] = count
            row += 1
        term = np.int64(0)
        for listed in range(begin, row):
            stop = stops[listed - begin]
            if c_indptr[listed + 1] > c_indptr[listed]:
                write_sum_of_rows(c, np.int64(c_indptr[listed]), columns, values, starts, term, stop, b, 0)
            term = stop


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


class DenseProduct(Method):
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
            bits = np.dtype(f"u{b.itemsize}").type
            magnitude, infinity = np.array([-0.0, np.inf], b.dtype).view(bits)
            states = (np.full(inner, UNKNOWN, dtype=np.uint8), b.reshape(-1).view(bits), ~magnitude, infinity)
            pattern = (left.indptr, unsigned(left.indices), *states, columns, self.c_indptr)
            run_rows(_sparse_full_one, self.work, *pattern, a.reshape(-1), b.reshape(-1), c.reshape(-1))
        elif self.full_b:
            indices = (left.indptr, left.indices, columns, np.arange(columns, dtype=np.uint32), self.c_indptr)
            run_rows(_sparse_full, self.work, *indices, *flat(a, b, c), lanes=batch)
        else:
            work = np.arange(rows + 1) * right.nnz
            run_rows(_full_sparse, work, inner, self.columns, right.indptr, self.place, *flat(a, b, c), lanes=batch)

    def _multiply_full(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        (m, k), (_, n), batch = self.product.a.shape, self.product.b.shape, c.shape[1]
        if a.shape[1] == 1:
            # Samples are more columns.
            torch.mm(a.view(m, k), b.view(k, n * b.shape[1]), out=c.view(m, n * batch))
            return
        with memory_for("a full product, the batch first", c.shape, c.dtype, c.device, batch):
            matrices(c, m, n).copy_(torch.matmul(matrices(a, m, k), matrices(b, k, n)))

    def bind(self, device: torch.device, dtype: torch.dtype, batches: tuple[int, int]) -> BoundProduct:
        a, b = self.product.a, self.product.b
        if self.full_a and self.full_b:
            return self._multiply_full
        if self.full_b:
            return products_cuda.sparse_full_launch(a, b.shape[1], self.c_indptr, device, dtype, batches)
        return products_cuda.full_sparse_launch(a.shape, self._columns_of_b, device, dtype, batches)

    @functools.cached_property
    def _columns_of_b(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For B's columns that C has: where their entries start, in which rows these are, and their places in B."""
        transposed = self.product.b.T
        counts = np.diff(transposed.indptr)
        occupied = (counts > 0) | isinstance(self.product.c.structure, Full)
        starts = row_starts(counts[occupied], transposed.indptr.dtype)
        return frozen(starts), transposed.indices, self.product.b.transposition
