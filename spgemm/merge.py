"""Merge: for each entry of `C` the list of pairs of entries that meet in it.

Each entry is then a sum of its own, which suits a device, whose threads share entries. Entries of C that follow each
other reach few entries of A, and each of these a row of B. So a tile of entries of C counts A's from its first one, and
B's within its row: two bytes for a multiply-add, or 8 where a tile reaches more than 256 entries of A, or B has longer
rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ..runtime import frozen, index_dtype, kernel, run_rows
from . import products_cuda
from .methods import Launch, Method, Product
from .operands import flat

#: Entries of a tile: the first of these for which bytes suffice. The kernel holds as many entries of A as bytes count.
TILES, BYTE = (256, 128, 64, 32), 256


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
    first, last, a_indptr, a_indices, b_indptr, b_indices, columns, c_indptr, c_indices, starts, narrow, tile, tiles,
    left, right,
):  # fmt: skip
    following, origin = np.empty(columns, np.int64), np.zeros(columns, np.int64)
    for row in range(first, last):
        for entry in range(c_indptr[row], c_indptr[row + 1]):
            following[c_indices[entry]] = starts[entry]
            if narrow:
                origin[c_indices[entry]] = tiles[entry // tile, 1]
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
def _multiply(first, last, tile, tiles, starts, left, right, b_starts, a, a_batch, b, b_batch, c, batch):
    for number in range(first, last):
        begin, after = number * tile, min((number + 1) * tile, len(starts))
        for entry in range(begin, after):
            at_c = np.int64(entry) * batch
            c[at_c : at_c + batch] = 0
            end = tiles[number + 1, 0]
            if entry + 1 < after:
                end = tiles[number, 0] + np.int64(starts[entry + 1])
            for place in range(tiles[number, 0] + np.int64(starts[entry]), end):
                p, q = np.int64(left[place]) + tiles[number, 1], np.int64(right[place])
                if len(b_starts):
                    q += b_starts[p]
                at_a, at_b = p * a_batch, q * b_batch
                for sample in range(batch):
                    value = a[at_a + (sample if a_batch > 1 else 0)]
                    c[at_c + sample] += value * b[at_b + (sample if b_batch > 1 else 0)]


class Lists(NamedTuple):
    """The lists of pairs of all entries, one behind the other.

    Attributes
    ----------
    tile : int
        Entries of a tile.
    tiles : ndarray
        For each tile where its lists start, the first entry of A that `left` counts from, and how many it may reach.
    starts : ndarray
        For each entry where its list starts among the tile's.
    left, right : ndarray
        For each pair the entries of A and of B; bytes count from the tile's first one and from the row of B.
    b_starts : ndarray
        Where bytes are stored, the first entry of B's row for each entry of A.
    """

    tile: int
    tiles: np.ndarray
    starts: np.ndarray
    left: np.ndarray
    right: np.ndarray
    b_starts: np.ndarray


def _tiling(product: Product) -> tuple[int, np.ndarray]:
    """Entries of a tile, and the range of A's entries for each; 0 where these or B's rows are too long for bytes."""
    a, b, c = product.a, product.b, product.c
    if _places(product) == np.int32 and b.structure.row_counts().max(initial=0) <= BYTE:
        for tile in TILES:
            ends = np.append(np.arange(0, c.nnz, tile), c.nnz)
            rows = np.searchsorted(c.indptr, ends, side="right") - 1
            last = np.searchsorted(c.indptr, ends[1:])
            reached = np.stack([a.indptr[rows[:-1]], a.indptr[last]], axis=1).astype(np.int64)
            if np.diff(reached).max(initial=0) <= BYTE:
                return tile, reached
    return 0, np.zeros((-(-c.nnz // TILES[0]), 2), np.int64)


def _places(product: Product) -> np.dtype:
    return np.dtype(index_dtype(max(product.a.nnz, product.b.nnz), 0, 0))


class Merge(Method):
    """A list of pairs for each entry of `C`."""

    name = "merge"

    @classmethod
    def index_nbytes(cls, product: Product) -> int:
        tile, reached = _tiling(product)
        pairs, entries = product.multiply_adds, product.c.nnz
        if tile:
            return 2 * pairs + 2 * entries + 24 * (len(reached) + 1) + 4 * product.a.nnz
        return 2 * pairs * _places(product).itemsize + 4 * entries + 24 * (len(reached) + 1)

    def __init__(self, product: Product) -> None:
        a, b, c = product.a, product.b, product.c
        self.product = product
        indices = (a.indptr, a.indices, b.indptr, b.indices, c.shape[1], c.indptr, c.indices)
        starts = np.zeros(c.nnz + 1, dtype=np.int64)
        run_rows(_count_pairs, product.work, *indices, starts)
        np.cumsum(starts, out=starts)
        narrow, reached = _tiling(product)
        tile = narrow or TILES[0]
        tiles = np.zeros((len(reached) + 1, 3), np.int64)
        tiles[:, 0] = np.append(starts[:-1:tile], starts[-1])
        tiles[:-1, 1], tiles[:-1, 2] = reached[:, 0], reached[:, 1] - reached[:, 0]
        left, right = (
            np.empty(product.multiply_adds, dtype=np.uint8 if narrow else _places(product)) for _ in range(2)
        )
        run_rows(_list_pairs, product.work, *indices, starts, bool(narrow), tile, tiles, left, right)
        within = starts[:-1] - np.repeat(tiles[:-1, 0], tile)[: c.nnz]
        b_starts = b.indptr[a.indices] if narrow else np.zeros(0, np.int32)
        arrays = (tiles, within.astype(np.uint16 if narrow else np.uint32), left, right, b_starts)
        self.lists = Lists(tile, *map(frozen, arrays))

    def multiply(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        work = np.ascontiguousarray(self.lists.tiles[:, 0])
        run_rows(_multiply, work, *self.lists, *flat(a, b, c), lanes=c.shape[1])

    def bind(self, device: torch.device, dtype: torch.dtype, batches: tuple[int, int]) -> Launch:
        return products_cuda.merge(self.lists, self.product.c.nnz, device, dtype, batches)
