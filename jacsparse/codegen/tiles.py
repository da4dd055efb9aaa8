"""Where elements are stored for other loops, and the tiles of rows that take the same memory one after the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set
from dataclasses import dataclass

import numpy as np
import torch

from ..runtime import index_dtype
from .elements import ElementGraph, in_own_order, unrepeated
from .kernels import widen_ranges

#: About how many bytes are stored for a tile, which caches shall hold; and at most.
TILE, MOST_TILE = 2**16, 2**18
#: The least number of tiles that pay, and of elements on average that a tile stores one after the other.
FEWEST, FEWEST_TOGETHER = 4, 4
#: What is stored for several tiles must be no more than one part in so many.
SHARE = 4
#: In place of the tile of elements that several tiles read, or that none reads.
SHARED, UNREAD = -1, -2


@dataclass(frozen=True)
class Scratch:
    """The memory of a dtype for elements that are stored: those of one tile at a time, or those that all read."""

    dtype: torch.dtype
    of_tile: bool = False
    writes: bool = False


class RowTiles:
    """Consecutive rows of entries, of which loops compute one tile after the other, where much is stored for them.

    Parameters
    ----------
    graph : ElementGraph
        The elements.
    needed : set of int
        The places of the nodes that the entries are computed of.
    entries : ndarray of int, (entries, batch)
        The numbers of the entries.
    indptr : ndarray of int
        Where the entries of each row begin.
    tiled : bool
        Whether there may be tiles.

    Attributes
    ----------
    of_entries : ndarray of int, (entries,), or None
        The tile of each entry; None where there are no tiles.
    of_elements : ndarray of int
        The one tile that reads an element, `SHARED` or `UNREAD`.
    places : ndarray of int
        The places of stored elements in their memories.
    scratch : dict of Scratch to int
        How many elements each memory holds.
    """

    def __init__(
        self, graph: ElementGraph, needed: Set[int], entries: np.ndarray, indptr: np.ndarray, *, tiled: bool
    ) -> None:
        stored = [graph.nodes[place] for place in sorted(graph.stored & needed)]
        numbers: dict[torch.dtype, list[np.ndarray]] = defaultdict(list)
        for node in stored:
            numbers[node.dtype].append(graph.numbers(node))
        self._stored = {dtype: np.concatenate(those) for dtype, those in numbers.items()}
        nbytes, rows = sum(node.count * node.dtype.itemsize for node in stored), len(indptr) - 1
        self.count, self.of_entries = nbytes // TILE, None
        if tiled and FEWEST <= self.count <= rows:
            of_entries = np.repeat((np.arange(rows) * self.count // rows).astype(np.int32), np.diff(indptr))
            readers = self._readers(graph, needed, entries, of_entries)
            if self._pays(readers, nbytes):
                self.of_entries, self.of_elements = of_entries, readers
            del readers
        if self.of_entries is None:
            self.of_elements = np.full(graph.count, SHARED, np.int32)
        self.places, self.scratch = self._placed(self.of_elements)
        del self._stored

    def _pays(self, readers: np.ndarray, nbytes: int) -> bool:
        """Whether neighbours are mostly of one tile, few elements are of several, and what a tile stores is little."""
        of_tile = shared = 0
        for dtype, numbers in self._stored.items():
            tiles = readers[numbers]
            if np.count_nonzero(tiles[1:] != tiles[:-1]) * FEWEST_TOGETHER > len(tiles):
                return False
            of_tile += dtype.itemsize * int(np.bincount(tiles[tiles >= 0], minlength=1).max())
            shared += dtype.itemsize * int(np.count_nonzero(tiles == SHARED))
        return of_tile <= MOST_TILE and SHARE * shared <= nbytes

    def _readers(
        self, graph: ElementGraph, needed: Set[int], entries: np.ndarray, of_entries: np.ndarray
    ) -> np.ndarray:
        """The tile of each element that one alone reads, itself or through others."""
        first, last = np.full(graph.count, self.count, np.int32), np.full(graph.count, UNREAD, np.int32)
        tiles = np.repeat(of_entries, entries.shape[1])
        widen_ranges(0, entries.size, in_own_order(entries).reshape(-1), tiles, tiles, first, last)
        for place in sorted(needed, reverse=True):
            node = graph.nodes[place]
            where = slice(node.first, node.first + node.count)
            low, high = first[where], last[where]
            for operand in node.operands:
                numbers = in_own_order(unrepeated(operand))
                if len(numbers) == len(low):
                    widen_ranges(0, len(low), numbers, low, high, first, last)
                else:
                    widen_ranges(0, 1, numbers, low.min(keepdims=True), high.max(keepdims=True), first, last)
        last[first < last] = SHARED
        return last

    def _placed(self, readers: np.ndarray) -> tuple[np.ndarray, dict[Scratch, int]]:
        """The places of stored elements, those of a tile one after the other, and how many each memory holds."""
        places, scratch = np.zeros(len(readers), index_dtype(len(readers), 0, 0)), dict[Scratch, int]()
        for dtype, numbers in self._stored.items():
            tiles = readers[numbers]
            shared, own = numbers[tiles == SHARED], numbers[tiles >= 0]
            places[shared] = np.arange(len(shared))
            counts = np.bincount(tiles[tiles >= 0], minlength=1)
            order = np.argsort(readers[own], kind="stable")
            places[own[order]] = np.arange(len(own)) - np.repeat(np.cumsum(counts) - counts, counts)
            sizes = {Scratch(dtype): len(shared), Scratch(dtype, of_tile=True): int(counts.max())}
            scratch |= {memory: count for memory, count in sizes.items() if count}
        return places, scratch
