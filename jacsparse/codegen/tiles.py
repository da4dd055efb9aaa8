"""Where elements are stored for other loops, and the tiles of rows that take the same memory one after the other."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass

import numpy as np
import torch

from ..runtime import index_dtype, unsigned
from .elements import ElementGraph, in_own_order, unrepeated
from .kernels import SHARED, UNREAD, place_elements, widen_ranges

#: About how many bytes are stored for a tile, which caches shall hold; and at most.
TILE, MOST_TILE = 2**16, 2**18
#: The least number of tiles that pay, and of elements on average that a tile stores one after the other.
FEWEST, FEWEST_TOGETHER = 4, 4
#: Tiles have a multiple of so many rows where they have many: neighbours that are computed together, of which there are
#: mostly 2, 3, 4, 6, 8 or 12, are of one tile.
TOGETHER = 24
#: What is stored for several tiles must be no more than one part in so many.
SHARE = 4


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
        self._graph, self._stored = graph, [graph.nodes[place] for place in sorted(graph.stored & needed)]
        nbytes, rows = sum(node.count * node.dtype.itemsize for node in self._stored), len(indptr) - 1
        self.count, self.of_entries = min(nbytes // TILE, np.iinfo(np.int16).max), None
        if tiled and FEWEST <= self.count <= rows:
            size = rows / self.count
            if size > 4 * TOGETHER:
                size = size // TOGETHER * TOGETHER
                self.count = math.ceil(rows / size)
            of_entries = np.repeat((np.arange(rows) // size).astype(np.int16), np.diff(indptr))
            self.of_elements = self._readers(graph, needed, entries, of_entries)
            self.places, self.scratch, neighbours = self._placed()
            if self._pays(neighbours, nbytes):
                self.of_entries = of_entries
        if self.of_entries is None:
            self.of_elements = np.full(graph.count, SHARED, np.int16)
            self.places, self.scratch, _ = self._placed()
        del self._graph, self._stored

    def _pays(self, neighbours: float, nbytes: int) -> bool:
        """Whether neighbours are mostly of one tile, few elements are of several, and what a tile stores is little."""
        sizes = [(memory.of_tile, count * memory.dtype.itemsize) for memory, count in self.scratch.items()]
        of_tile, shared = (sum(size for of_tile, size in sizes if of_tile == kind) for kind in (True, False))
        return neighbours <= 1 / FEWEST_TOGETHER and of_tile <= MOST_TILE and SHARE * shared <= nbytes

    def _readers(
        self, graph: ElementGraph, needed: Set[int], entries: np.ndarray, of_entries: np.ndarray
    ) -> np.ndarray:
        """The tile of each element that one alone reads, itself or through others."""
        first, last = (np.full(graph.count, tile, np.int16) for tile in (self.count, UNREAD))
        tiles = np.repeat(of_entries, entries.shape[1])
        widen_ranges(0, entries.size, unsigned(in_own_order(entries).reshape(-1)), tiles, tiles, first, last)
        for place in sorted(needed, reverse=True):
            node = graph.nodes[place]
            if node.operation is None:
                continue
            where = slice(node.first, node.first + node.count)
            low, high = first[where], last[where]
            for operand in node.operands:
                numbers = unsigned(in_own_order(unrepeated(operand)))
                if len(numbers) == len(low):
                    widen_ranges(0, len(low), numbers, low, high, first, last)
                else:
                    widen_ranges(0, 1, numbers, low.min(keepdims=True), high.max(keepdims=True), first, last)
        last[first < last] = SHARED
        return last

    def _placed(self) -> tuple[np.ndarray, dict[Scratch, int], float]:
        """The places of stored elements, those of a tile one after the other, and how many each memory holds.

        Also the largest share of a dtype's elements whose neighbours are of other tiles.
        """
        graph, scratch, most = self._graph, dict[Scratch, int](), 0.0
        places = np.zeros(graph.count, index_dtype(graph.count, 0, 0))
        for dtype in dict.fromkeys(node.dtype for node in self._stored):
            nodes = [node for node in self._stored if node.dtype == dtype]
            # Behind those of tiles there are `UNREAD` and `SHARED`.
            counts, changes = np.zeros(self.count + 2, np.int64), np.zeros(1, np.int64)
            for node in nodes:
                place_elements(node.first, node.first + node.count, self.of_elements, places, counts, changes)
            *of_tiles, _, shared = counts.tolist()
            sizes = {Scratch(dtype): shared, Scratch(dtype, of_tile=True): max(of_tiles, default=0)}
            scratch |= {memory: count for memory, count in sizes.items() if count}
            most = max(most, changes[0] / sum(node.count for node in nodes))
        return places, scratch, most
