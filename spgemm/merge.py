"""Merge: for each entry of `C` the list of pairs of entries that meet in it.

Each entry is then a sum of its own, which suits a device with many threads; on a CPU `slots` is faster. Entries of C
that follow each other reach few entries of A, and each of these a row of B. So a tile of entries of C counts A's from
its first one, and B's within its row: two bytes for a multiply-add, or 8 where a factor has rows of more than 256.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ..runtime import frozen, index_dtype, inlined, kernel, run_rows
from . import products_cuda
from .methods import BoundProduct, Method, Product
from .operands import flat

#: Entries of a tile at most, and what bytes count: the kernel holds as many entries of A.
TILE, BYTE = 256, 256


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
    first, last, a_indptr, a_indices, b_indptr, b_indices, columns, c_indptr, c_indices, starts, narrow, tiles,
    left, right,
):  # fmt: skip
    following, origin = np.empty(columns, np.int64), np.empty(columns, np.int64)
    number = np.searchsorted(tiles[:, 0], np.int64(c_indptr[first]), side="right") - 1
    for row in range(first, last):
        for entry in range(c_indptr[row], c_indptr[row + 1]):
            if entry == tiles[number + 1, 0]:
                number += 1
            following[c_indices[entry]] = starts[entry]
            origin[c_indices[entry]] = tiles[number, 2]
        for p in range(a_indptr[row], a_indptr[row + 1]):
            k = a_indices[p]
            b_first = np.int64(b_indptr[k])
            for q in range(b_first, b_indptr[k + 1]):
                column = b_indices[q]
                place = following[column]
                left[place] = p - origin[column]
                right[place] = q - b_first if narrow else q
                following[column] += 1


@kernel
def _multiply(first, last, tiles, starts, left, right, b_starts, a, a_batch, b, b_batch, c, batch):
    for number in range(first, last):
        begin, lists, origin = tiles[number, 0], tiles[number, 1], tiles[number, 2]
        after = tiles[number + 1, 0]
        for entry in range(begin, after):
            at_c = entry * batch
            c[at_c : at_c + batch] = 0
            end = tiles[number + 1, 1]
            if entry + 1 < after:
                end = lists + np.int64(starts[entry + 1])
            for place in range(lists + np.int64(starts[entry]), end):
                p, q = origin + np.int64(left[place]), np.int64(right[place])
                if len(b_starts) > 0:
                    q += b_starts[p]
                at_a, at_b = p * a_batch, q * b_batch
                for sample in range(batch):
                    value = a[at_a + (sample if a_batch > 1 else 0)]
                    c[at_c + sample] += value * b[at_b + (sample if b_batch > 1 else 0)]


class Lists(NamedTuple):
    """The lists of pairs of all entries, one behind the other.

    Attributes
    ----------
    tiles : ndarray
        For each tile, and for the end: its first entry, where its lists start, the first entry of A that `left` counts
        from, and how many of A's entries follow that it may reach.
    starts : ndarray
        For each entry where its list starts among the tile's.
    left, right : ndarray
        For each pair the entries of A and of B; bytes count from the tile's first one and from the row of B.
    b_starts : ndarray
        Where bytes are stored, the first entry of B's row for each entry of A.
    """

    tiles: np.ndarray
    starts: np.ndarray
    left: np.ndarray
    right: np.ndarray
    b_starts: np.ndarray


@kernel
def _cut(first, last, a_indptr, c_indptr, narrow, tiles, count):
    begin, origin, reached = np.int64(c_indptr[first]), np.int64(a_indptr[first]), np.int64(0)
    for row in range(first, last):
        before, after, a_after = np.int64(c_indptr[row]), np.int64(c_indptr[row + 1]), np.int64(a_indptr[row + 1])
        if before == after:
            continue
        if narrow and begin < before and a_after - origin > BYTE:
            _close(tiles, count, begin, origin, reached)
            begin = before
        if begin == before:
            origin = np.int64(a_indptr[row])
        reached = a_after
        while after - begin >= TILE:
            _close(tiles, count, begin, origin, reached)
            begin, origin = begin + TILE, np.int64(a_indptr[row])
    if begin < c_indptr[last]:
        _close(tiles, count, begin, origin, reached)
    tiles[count[0], 0] = c_indptr[last]


@inlined
def _close(tiles, count, begin, origin, reached):
    """Append a tile that begins with an entry, and reaches A's entries from `origin` to `reached`."""
    tiles[count[0], 0], tiles[count[0], 2], tiles[count[0], 3] = begin, origin, reached - origin
    count[0] += 1


def _is_narrow(product: Product) -> bool:
    """Whether lists are bytes."""
    longest = max(int(each.structure.row_counts().max(initial=0)) for each in (product.a, product.b))
    return _places(product) == np.int32 and longest <= BYTE


def _places(product: Product) -> np.dtype:
    return np.dtype(index_dtype(max(product.a.nnz, product.b.nnz), 0, 0))


class Merge(Method):
    """A list of pairs for each entry of `C`."""

    name = "merge"

    @classmethod
    def index_nbytes(cls, product: Product) -> int:
        pairs, entries, rows = product.multiply_adds, product.c.nnz, product.a.shape[0]
        tiles = 32 * (entries // TILE + rows + 1)
        if _is_narrow(product):
            return 2 * pairs + 2 * entries + 4 * product.a.nnz + tiles
        return 2 * pairs * _places(product).itemsize + 4 * entries + tiles

    def __init__(self, product: Product) -> None:
        a, b, c = product.a, product.b, product.c
        narrow = _is_narrow(product)
        indices = (a.indptr, a.indices, b.indptr, b.indices, c.shape[1], c.indptr, c.indices)
        starts = np.zeros(c.nnz + 1, dtype=np.int64)
        run_rows(_count_pairs, product.work, *indices, starts)
        np.cumsum(starts, out=starts)
        # A row ends one tile at most before that is full.
        tiles, count = np.zeros((c.nnz // TILE + c.shape[0] + 1, 4), np.int64), np.zeros(1, np.int64)
        _cut(0, c.shape[0], a.indptr, c.indptr, narrow, tiles, count)
        tiles = tiles[: count[0] + 1].copy()
        tiles[:, 1] = starts[tiles[:, 0]]
        left, right = (
            np.empty(product.multiply_adds, dtype=np.uint8 if narrow else _places(product)) for _ in range(2)
        )
        if not narrow:
            tiles[:, 2:] = 0
        run_rows(_list_pairs, product.work, *indices, starts, narrow, tiles, left, right)
        within = starts[:-1] - np.repeat(tiles[:-1, 1], np.diff(tiles[:, 0]))
        b_starts = b.indptr[a.indices] if narrow else np.zeros(0, np.int32)
        arrays = (tiles, within.astype(np.uint16 if narrow else np.uint32), left, right, b_starts)
        self.lists = Lists(*map(frozen, arrays))

    def multiply(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        work = np.ascontiguousarray(self.lists.tiles[:, 1])
        run_rows(_multiply, work, *self.lists, *flat(a, b, c), lanes=c.shape[1])

    def bind(self, device: torch.device, dtype: torch.dtype, batches: tuple[int, int]) -> BoundProduct:
        return products_cuda.merge_launch(self.lists, device, dtype, batches)
