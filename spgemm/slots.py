"""Slots: for each multiply-add its place in C's row.

The multiply-adds of row ``i`` run in the order of A's entries ``(i, k)`` and, within one, of B's entries ``(k, j)``.
The plan stores for each only the place of ``j`` in row ``i`` of `C`, in the narrowest integer that the longest row
allows. The row is its own accumulator and stays in the first-level cache, and reading two bytes replaces a search.

Lower bound: 2 bytes of slot, one load, multiply, add and store for each multiply-add; C is written once.
"""

from __future__ import annotations

import functools
from typing import ClassVar

import numpy as np
import torch

from ..patterns import Pooling
from ..runtime import announced_where_long, frozen, kernel, run_rows, unsigned
from . import products_cuda
from .lanes import accumulate_row, block_width
from .merge import Lists, Merge
from .methods import BoundProduct, Method, Product
from .operands import flat


@kernel
def _find_slots(first, last, work, a_indptr, a_indices, b_indptr, b_indices, columns, c_indptr, c_indices, slot):
    place = np.empty(columns, slot.dtype)
    for row in range(first, last):
        start = c_indptr[row]
        for entry in range(start, c_indptr[row + 1]):
            place[c_indices[entry]] = entry - start
        t = work[row]
        for p in range(a_indptr[row], a_indptr[row + 1]):
            k = a_indices[p]
            for q in range(b_indptr[k], b_indptr[k + 1]):
                slot[t] = place[b_indices[q]]
                t += 1


@kernel
def _multiply_one(first, last, work, a_indptr, a_indices, b_indptr, c_indptr, slot, a, b, c):
    for row in range(first, last):
        c_row = c[c_indptr[row] : c_indptr[row + 1]]
        c_row[:] = 0
        t = work[row]
        for p in range(a_indptr[row], a_indptr[row + 1]):
            k = a_indices[p]
            value = a[p]
            b_row = b[b_indptr[k] : b_indptr[k + 1]]
            slots = slot[t : t + len(b_row)]
            t += len(b_row)
            for q in range(len(b_row)):
                c_row[slots[q]] += value * b_row[q]


@kernel
def _multiply_one_entry_rows(first, last, a_indptr, a_indices, c_indptr, slot, a, b, c):
    # B's row k is its entry k, so that the multiply-adds are numbered as A's entries.
    for row in range(first, last):
        c_row = c[c_indptr[row] : c_indptr[row + 1]]
        c_row[:] = 0
        entries = slice(a_indptr[row], a_indptr[row + 1])
        values, inner, slots = a[entries], a_indices[entries], slot[entries]
        for p in range(len(values)):
            c_row[slots[p]] += values[p] * b[inner[p]]


@kernel
def _multiply(first, last, work, a_indptr, a_indices, b_indptr, c_indptr, slot, a, a_batch, b, b_batch, c, batch):
    for row in range(first, last):
        start = np.int64(c_indptr[row]) * batch
        c[start : np.int64(c_indptr[row + 1]) * batch] = 0
        lane = 0
        while lane < batch:
            width = block_width(batch - lane)
            a_lane = lane if a_batch > 1 else 0
            b_lane = lane if b_batch > 1 else 0
            t = work[row]
            for p in range(a_indptr[row], a_indptr[row + 1]):
                k = a_indices[p]
                at_a = np.int64(p) * a_batch + a_lane
                at_b = np.int64(b_indptr[k]) * b_batch + b_lane
                after = t + b_indptr[k + 1] - b_indptr[k]
                accumulate_row(c, start + lane, batch, slot, t, after, a, at_a, a_batch, b, at_b, b_batch, width)
                t = after
            lane += width


class Slots(Method):
    """A place in C's row for each multiply-add."""

    name = "slots"
    automatic = True
    device_substitute: ClassVar[str | None] = "merge"

    @classmethod
    def _slot_dtype(cls, product: Product) -> np.dtype:
        longest = int(product.c.structure.row_counts().max(initial=1))
        return np.dtype(np.min_scalar_type(max(0, longest - 1)))

    @classmethod
    def index_nbytes(cls, product: Product) -> int:
        return product.multiply_adds * cls._slot_dtype(product).itemsize + product.row_nbytes

    def __init__(self, product: Product) -> None:
        self.product, self.work = product, product.work

    @functools.cached_property
    def indices(self) -> tuple[np.ndarray, ...]:
        """The index arrays, which the first product on a CPU makes: one on a GPU has lists of pairs in their place."""
        product, a, b, c = self.product, self.product.a, self.product.b, self.product.c
        slot = np.empty(product.multiply_adds, dtype=self._slot_dtype(product))
        factors = (a.indptr, a.indices, b.indptr, b.indices, b.shape[1])
        with announced_where_long(f"finding the places of {product.multiply_adds:,} multiply-adds, which are kept"):
            run_rows(_find_slots, self.work, self.work, *factors, c.indptr, c.indices, slot)
        return (self.work, a.indptr, a.indices, b.indptr, c.indptr, frozen(slot))

    @functools.cached_property
    def _has_one_entry_rows(self) -> bool:
        return bool((self.product.b.structure.row_counts() == 1).all())

    def multiply(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        if c.shape[1] > 1:
            run_rows(_multiply, self.work, *self.indices, *flat(a, b, c), lanes=c.shape[1])
            return
        one = (a.reshape(-1), b.reshape(-1), c.reshape(-1))
        if self._has_one_entry_rows:
            left = self.product.a
            indices = (left.indptr, unsigned(left.indices), self.product.c.indptr, self.indices[-1])
            run_rows(_multiply_one_entry_rows, self.work, *indices, *one)
        else:
            run_rows(_multiply_one, self.work, *self.indices, *one)


@kernel
def _select_left(first, last, work, a_indptr, a_indices, b_indptr, c_indptr, slot, winner, b, b_batch, c, batch):
    for row in range(first, last):
        start = np.int64(c_indptr[row]) * batch
        c[start : np.int64(c_indptr[row + 1]) * batch] = 0
        t = work[row]
        for p in range(a_indptr[row], a_indptr[row + 1]):
            window = a_indices[p]
            length = b_indptr[window + 1] - b_indptr[window]
            for lane in range(batch):
                if winner[window, lane] == row:
                    lane_b = lane if b_batch > 1 else 0
                    at_b = np.int64(b_indptr[window]) * b_batch + lane_b
                    for q in range(length):
                        c[start + np.int64(slot[t + q]) * batch + lane] += b[at_b + q * b_batch]
            t += length


@kernel
def _select_right(
    first, last, work, a_indptr, a_indices, b_indptr, c_indptr, slot, b_indices, a, a_batch, winner, c, batch
):
    zero = c.dtype.type(0)
    for row in range(first, last):
        start = np.int64(c_indptr[row]) * batch
        for place in range(start, np.int64(c_indptr[row + 1]) * batch):
            c[place] = zero
        t = work[row]
        for p in range(a_indptr[row], a_indptr[row + 1]):
            k = a_indices[p]
            for q in range(b_indptr[k], b_indptr[k + 1]):
                window = b_indices[q]
                at_a, at_c = np.int64(p) * a_batch, start + np.int64(slot[t]) * batch
                t += 1
                for lane in range(batch):
                    # A branch on the winner would often be mispredicted.
                    value = a[at_a + (lane if a_batch > 1 else 0)]
                    c[at_c + lane] += value if winner[window, lane] == k else zero


def _selects(structure: object) -> bool:
    """Whether a factor is max-pooling's transposed Jacobian, in which each column has the row that wins its window."""
    return isinstance(structure, Pooling) and structure.selects and structure.transposed


class Select(Slots):
    """A per-sample selection times a matrix: it moves values without multiplying, and needs no one-hot values.

    The selecting factor's values are its winners: int32, shape ``(windows, batch)``, for each window the row (of the
    transposed Jacobian) that it selects. Where both factors select, the left one does, and the right one's values are
    ordinary.
    """

    name = "select"
    automatic = selects = True
    device_substitute = None

    @classmethod
    def obstacle(cls, product: Product) -> str | None:
        if _selects(product.a.structure) or _selects(product.b.structure):
            return None
        return "neither factor is the transposed Jacobian of max-pooling"

    def __init__(self, product: Product) -> None:
        super().__init__(product)
        self.left = _selects(product.a.structure)

    @property
    def winners(self) -> str | None:
        return "a" if self.left else "b"

    def multiply(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        batch = c.shape[1]
        if self.left:
            flat_b = (b.reshape(-1), b.shape[1])
            run_rows(_select_left, self.work, *self.indices, a, *flat_b, c.reshape(-1), batch, lanes=batch)
        else:
            flat_a = (a.reshape(-1), a.shape[1])
            columns = self.product.b.indices
            run_rows(_select_right, self.work, *self.indices, columns, *flat_a, b, c.reshape(-1), batch, lanes=batch)

    def bind(self, device: torch.device, dtype: torch.dtype, batches: tuple[int, int]) -> BoundProduct:
        product, lists = self.product, self._lists
        selecting = product.a.indices, product.a.rows if self.left else product.c.indices
        return products_cuda.merge_launch(lists, device, dtype, batches, selecting, self.winners)

    @functools.cached_property
    def _lists(self) -> Lists:
        """On a device the pairs of each entry tell which may be selected."""
        return Merge(self.product).lists
