"""Dense: a factor is full, so its entries are found by arithmetic and its indices are never enumerated.

Two full factors are a matrix product for BLAS. Where one is sparse, rows of the full one are added up whole.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from ..patterns import Full
from ..patterns._cuda import memory_for
from ..patterns._runtime import SIMD, kernel, run_rows
from ..patterns._structure import frozen
from . import _cuda
from ._lanes import accumulate_row, block_width
from ._methods import Method, Product

__all__ = ["Dense"]


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
def _scan_rows(first, last, b, live, finite):
    for row in range(first, last):
        own = b[row]
        held, difference = False, own.dtype.type(0)
        for q in range(len(own)):
            held |= own[q] != 0
            # Zero, but for what is not finite.
            difference += own[q] - own[q]
        live[row], finite[row] = held, difference == 0


@kernel
def _sparse_full_one(first, last, indptr, indices, live, columns, c_indptr, a, b, c):
    values, starts = np.empty(4, c.dtype), np.empty(4, np.int64)
    for row in range(first, last):
        out = c[c_indptr[row] : c_indptr[row + 1]]
        out[:] = 0
        count = 0
        for p in range(indptr[row], indptr[row + 1]):
            if (a[p] == 0 and live[len(live) - 1]) or not live[indices[p]]:
                continue
            values[count] = a[p]
            starts[count] = np.int64(indices[p]) * columns
            count += 1
            if count == 4:
                count = 0
                one, two = b[starts[0] : starts[0] + columns], b[starts[1] : starts[1] + columns]
                three, four = b[starts[2] : starts[2] + columns], b[starts[3] : starts[3] + columns]
                v, w, x, y = values[0], values[1], values[2], values[3]
                # Four terms at once, so that the sums are read and written a quarter as often; in the same order.
                for q in range(len(out)):
                    out[q] = (((out[q] + v * one[q]) + w * two[q]) + x * three[q]) + y * four[q]
        for rest in range(count):
            one, v = b[starts[rest] : starts[rest] + columns], values[rest]
            for q in range(len(out)):
                out[q] += v * one[q]


@kernel
def _full_sparse(first, last, inner, indptr, place, a, a_batch, b, b_batch, c, columns, batch):
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


def _live(a: np.ndarray, b: np.ndarray, rows: int) -> np.ndarray:
    """Which rows of `b` need not be left out; and last, whether zeros of `a` may be.

    Zero times what is finite adds nothing, not even a sign, to a sum that began with zero.
    """
    live, finite = np.empty(rows + 1, dtype=np.bool_), np.empty(rows, dtype=np.bool_)
    work = np.arange(rows + 1) * (b.size // max(1, rows) // SIMD)
    run_rows(_scan_rows, work, b.reshape(rows, b.size // max(1, rows)), live, finite)
    live[-1] = finite.all()
    if not np.isfinite(a).all():
        live[:-1] = True
    return live


class Dense(Method):
    """At least one factor is full."""

    name = "dense"

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
        a, b = product.a.structure, product.b.structure
        self.full_a, self.full_b = isinstance(a, Full), isinstance(b, Full)
        if self.full_a and not self.full_b:
            # C's columns are those of b that hold anything: a column's rank among them is its place in each row.
            held = b.column_counts() > 0
            # Where C is taken to be full it has a place for each column.
            rank = np.arange(len(held)) if isinstance(product.c.structure, Full) else np.cumsum(held) - 1
            self.place = rank[product.b.indices].astype(np.uint32)
            self.columns = int(rank[-1]) + 1 if len(rank) else 0
        if not self.full_a:
            # Where each of C's rows starts: rows of a without an entry have none.
            self.c_indptr = np.zeros(product.c.shape[0] + 1, dtype=np.int64)
            held = (a.row_counts() > 0) | isinstance(product.c.structure, Full)
            np.cumsum(held * product.c.shape[1], out=self.c_indptr[1:])
            self.c_indptr = frozen(self.c_indptr)
            self.work = np.append(0, np.cumsum(a.row_counts())) * product.c.shape[1]

    def multiply(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        batch = c.shape[1]
        (rows, inner), columns = self.product.a.shape, self.product.b.shape[1]
        flat = (a.reshape(-1), a.shape[1], b.reshape(-1), b.shape[1], c.reshape(-1))
        if self.full_a and self.full_b:
            # PyTorch's, on as many threads as everything else.
            self._multiply_full(*map(torch.from_numpy, (a, b, c)))
        elif self.full_b and batch == 1:
            pattern = (self.product.a.indptr, self.product.a.indices)
            one = (a.reshape(-1), b.reshape(-1), c.reshape(-1))
            run_rows(_sparse_full_one, self.work, *pattern, _live(a, b, inner), columns, self.c_indptr, *one)
        elif self.full_b:
            order = np.arange(columns, dtype=np.uint32)
            indices = (self.product.a.indptr, self.product.a.indices, columns, order, self.c_indptr)
            run_rows(_sparse_full, self.work, *indices, *flat, batch, lanes=batch)
        else:
            work = np.arange(rows + 1) * self.product.b.nnz
            run_rows(
                _full_sparse, work, inner, self.product.b.indptr, self.place, *flat, self.columns, batch, lanes=batch
            )

    def _multiply_full(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        (rows, inner), columns = self.product.a.shape, self.product.b.shape[1]
        left = a.reshape(rows, inner, a.shape[1]).movedim(2, 0)
        right = b.reshape(inner, columns, b.shape[1]).movedim(2, 0)
        c.reshape(rows, columns, c.shape[1]).copy_(torch.matmul(left, right).movedim(0, 2))

    def multiply_on_device(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        if self.full_a and self.full_b:
            with memory_for("a full product, the batch first", c.shape, c.dtype, c.device, c.shape[1]):
                self._multiply_full(a, b, c)
        elif self.full_b:
            _cuda.sparse_full(self.product.a, self.product.b.shape[1], self.c_indptr, a, b, c)
        else:
            _cuda.full_sparse(self.product.a.shape[1], self._columns_of_b, a, b, c)

    @functools.cached_property
    def _columns_of_b(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """B's columns that C has: where their entries start, whose rows these are in, and their places."""
        b, transposed = self.product.b, self.product.b.T
        counts = np.diff(transposed.indptr)
        held = (counts > 0) | isinstance(self.product.c.structure, Full)
        starts = np.append(0, np.cumsum(counts[held])).astype(transposed.indptr.dtype)
        return frozen(starts), transposed.indices, b.transposition
