"""Loops that compute elements, each of as many operations as it pays to fuse.

All points of a loop are computed by the same expressions, of elements at other places in the same memories. What either
costs decides which elements are stored for other loops, and which are computed wherever they are read.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ..runtime import index_dtype, within_rows
from .elements import ElementGraph, Elements, of_kinds, sorted_places, unrepeated
from .kernels import SHARED, UNREAD, find_runs, sort_columns
from .operations import ElementOperation
from .tiles import RowTiles, Scratch

#: The cost of storing an element, or of loading one, relative to a sum of two numbers in registers; on a GPU, where a
#: loop that others wait for is one more launch beside.
MEMORY, DEVICE_MEMORY = 4, 16
#: The most that it may cost to compute an element wherever it is read.
MOST_COST = 100
#: The most operations of which each reads the one before without memory between: expressions are made recursively.
MOST_NESTED = 64
#: The most entries of a row that one point of a loop computes.
MOST_ROW_ENTRIES = 24
#: The least share of rows that are computed row by row, where they are alike.
SHARE = 8
#: The rows of which all samples are computed before those of others.
BLOCK = 128
#: Points of a run on average, below which each point has places of its own; and the most points of a run.
SHORTEST, LONGEST = 4, 4096


@dataclass(frozen=True)
class Place:
    """Where a point reads or writes: a memory, which of the loop's sequences of places, and a distance from these."""

    memory: Any
    dtype: torch.dtype
    sequence: int
    distance: int


#: A number, a place from which it is loaded, or an operation and the places of its operands among the expressions.
Expression = float | bool | Place | tuple[ElementOperation, tuple[int, ...]]


@dataclass(frozen=True)
class FusedLoop:
    """Points that are computed by the same expressions.

    Its runs are points whose places are `strides` apart, or single points.

    Attributes
    ----------
    expressions : list
        What a point computes, in order.
    stores : list of (int, Place)
        The expressions that are stored, and where.
    runs : ndarray of int, (1 + sequences, runs)
        The number of points of each run, and the places of the first one in each sequence.
    strides : list of int or None
        How far the places of a sequence are apart along runs; None where all runs are single points.
    points : int
        The number of points.
    level : int
        How many loops one after the other store what it reads.
    tiles : ndarray of int, (tiles + 1,), or None
        Where the runs of each tile begin; None where all tiles read what the loop stores.
    """

    expressions: list[Expression]
    stores: list[tuple[int, Place]]
    runs: np.ndarray
    strides: list[int] | None
    points: int
    level: int
    tiles: np.ndarray | None = None

    @property
    def work(self) -> int:
        """Elementary operations of a point."""
        costs = (1 if not isinstance(each, tuple) else each[0].cost for each in self.expressions)
        return sum(costs) + len(self.stores)


#: The memory of the results.
OUT = "out"


class Fusion:
    """The loops that compute some elements.

    Where much is stored for others, rows are computed in tiles: all loops of one tile, then those of the next, whose
    elements take the same memory. Loops that store what several tiles read come before.

    Parameters
    ----------
    graph : ElementGraph
        The elements.
    entries : ndarray of int, (entries, batch)
        Those that are wanted, which are stored one after the other.
    indptr : ndarray of int
        Where the entries of each row begin; the entries of a row are computed together.
    on_device : bool
        Whether a GPU runs them, which has no tiles, and which computes more in the time that memory takes.

    Attributes
    ----------
    loops : list of FusedLoop
        The loops, in order, those of tiles last.
    scratch : dict of Scratch to int
        How many elements are stored for other loops.
    """

    def __init__(
        self,
        graph: ElementGraph,
        entries: np.ndarray,
        indptr: np.ndarray,
        dtype: torch.dtype,
        *,
        on_device: bool = False,
    ) -> None:
        self.graph, self.dtype = graph, dtype
        #: By the places of nodes, how many stored ones they are made of one after the other, themselves among them.
        self.depths = np.zeros(len(graph.nodes), np.int64)
        self._makers = [[graph.makers(operand) for operand in node.operands] for node in graph.nodes]
        wanted = graph.makers(entries)
        self._choose(wanted, DEVICE_MEMORY if on_device else MEMORY)
        self._tiles = RowTiles(graph, self._needed, entries, indptr, tiled=not on_device)
        self.scratch = self._tiles.scratch
        self._classify([*itertools.chain(*self._makers), wanted])
        loops = [*self._of_stored(), *self._of_entries(entries, indptr)]
        self.loops = sorted(loops, key=lambda loop: loop.tiles is not None)

    def _choose(self, wanted: Sequence[int], memory: int) -> None:
        """Choose which nodes are needed, and which are stored, at what memory costs."""
        nodes, stored = self.graph.nodes, self.graph.stored
        costs, nested = np.zeros(len(nodes)), np.zeros(len(nodes), np.int64)
        for place, node in enumerate(nodes):
            if node.operation is not None:
                before = set[int]().union(*self._makers[place])
                operands = sum(1 if each in stored else costs[each] for each in before)
                costs[place] = min(MOST_COST, node.operation.cost + operands)
                nested[place] = 1 + max((nested[each] for each in before if each not in stored), default=0)
                if nested[place] == MOST_NESTED:
                    stored.add(place)
            elif node.constant is None:
                costs[place] = 1
        self._needed = set(wanted)
        # By the elements that are read, how often at most.
        times: list[dict[Any, float]] = [{} for _ in nodes]
        for each in wanted:
            times[each][None] = 1.0
        for place in range(len(nodes) - 1, -1, -1):
            node = nodes[place]
            if place not in self._needed or node.operation is None:
                continue
            often = sum(times[place].values())
            if (often - 1) * costs[place] > memory * (1 + often):
                stored.add(place)
            if place in stored:
                often = 1.0
            for makers, operand in zip(self._makers[place], node.operands, strict=True):
                self._needed |= set(makers)
                of_operand = self.graph.places(operand) if len(makers) > 1 else None
                for maker in makers:
                    if nodes[maker].operation is None:
                        continue
                    read = operand if of_operand is None else operand[of_operand == maker]
                    key = len(read), int(read[0]), int(read[-1]), int(read.sum())
                    share = often * len(read) / nodes[maker].count
                    times[maker][key] = max(times[maker].get(key, 0.0), share)

    def _classify(self, together: Iterable[Sequence[int]]) -> None:
        """Number the classes of elements: those of one are computed alike.

        Those of nodes of one class are noted only where other nodes' elements are read together with them.
        """
        mixed = {maker for makers in together if len(makers) > 1 for maker in makers}
        self._classes = np.zeros(self.graph.count, np.int32)
        #: By the places of nodes, whether all elements are of one class.
        self._uniform = np.ones(len(self.graph.nodes), np.bool_)
        known: dict[Any, int] = {}
        for place, node in enumerate(self.graph.nodes):
            where = slice(node.first, node.first + node.count)
            if place in self.graph.stored:
                shared = self._tiles.of_elements[where] == SHARED
                apart = [bool(shared[:1].all())] if (shared == shared[:1]).all() else [False, True]
                kinds = [np.flatnonzero(shared == kind) for kind in apart] if len(apart) > 1 else [np.arange(0)]
                classes = [known.setdefault((node.dtype, kind), len(known)) for kind in apart]
            elif node.operation is None:
                kinds, classes = [np.arange(0)], [known.setdefault(place, len(known))]
            elif place in self._needed:
                varying = self._varying(place)
                kinds = [those for _, those in of_kinds(varying, node.count)] if varying else [np.arange(0)]
                classes = [known.setdefault((place, number), len(known)) for number in range(len(kinds))]
            else:
                continue
            self._uniform[place] = len(kinds) == 1
            if self._uniform[place] and place in mixed:
                self._classes[where] = classes[0]
            elif not self._uniform[place]:
                for number, those in zip(classes, kinds, strict=True):
                    self._classes[node.first + those] = number

    def _varying(self, place: int) -> list[np.ndarray]:
        """The classes of a node's operands, but for those whose elements are all of one class."""
        pairs = zip(self.graph.nodes[place].operands, self._makers[place], strict=True)
        return [
            self._classes[operand]
            for operand, makers in pairs
            if len(makers) > 1 or not (self._uniform[makers[0]] or len(unrepeated(operand)) == 1)
        ]

    def _of_stored(self) -> Iterator[FusedLoop]:
        """The loops that store elements for others, those first that the others read."""
        nodes, depths = self.graph.nodes, self.depths
        together: dict[tuple[int, int], list[int]] = defaultdict(list)
        for place, node in enumerate(nodes):
            if node.operation is None or place not in self._needed:
                continue
            depths[place] = max(depths[makers].max() for makers in self._makers[place]) + (place in self.graph.stored)
            if place in self.graph.stored:
                together[int(depths[place]), node.count].append(place)
        for _, places in sorted(together.items()):
            yield from self._storing_nodes(places)

    def _storing_nodes(self, places: Sequence[int]) -> Iterator[FusedLoop]:
        """The loops that store nodes of equal counts, together where their elements are alike in the same places."""
        together: dict[bytes, tuple[list[np.ndarray], list[int]]] = {}
        for place in places:
            node = self.graph.nodes[place]
            tiles = self._tiles.of_elements[node.first : node.first + node.count]
            rows = [np.minimum(tiles, 0, dtype=np.int32), *self._varying(place)]
            kinds = [those for first, those in of_kinds(rows, node.count) if tiles[first] != UNREAD]
            key = b"" if len(places) == 1 else b",".join(each.tobytes() for each in (*kinds, tiles))
            together.setdefault(key, (kinds, []))[1].append(place)
        for kinds, places in together.values():
            tiles = self._tiles.of_elements[self.graph.nodes[places[0]].first :]
            for those in kinds:
                is_shared = tiles[those[0]] == SHARED
                points = those if is_shared else those[sorted_places(tiles[those])]
                body = _Body(self, len(points), None if is_shared else tiles[points])
                for place in places:
                    node = self.graph.nodes[place]
                    memory, _, at = self._in_scratch(place, node.first + points)
                    body.store(body.computed(place, points), replace(memory, writes=True), node.dtype, at)
                yield body.loop(self._tiles.count)

    def _of_entries(self, entries: np.ndarray, indptr: np.ndarray) -> Iterator[FusedLoop]:
        """The loops that store the entries."""
        batch = entries.shape[1]
        counts, classes = np.diff(indptr), self._classes[entries]
        alone = []
        for count in np.unique(counts[counts > 0]):
            rows = np.flatnonzero(counts == count)
            # The places of the entries of a row and sample. Rows of a block, of one sample after the other.
            sample, row = np.divmod(np.arange(batch * len(rows)), max(1, len(rows)))
            order = np.lexsort((row, sample, row // BLOCK)) if batch > 1 else row
            members = (indptr[rows[row[order]]] + np.arange(count)[:, None]) * batch + sample[order]
            if count > MOST_ROW_ENTRIES:
                alone.append(members.reshape(-1))
                continue
            of_members = classes.reshape(-1)[members]
            sort_columns(0, members.shape[1], of_members, members)
            for _, those in of_kinds([*of_members], members.shape[1]):
                if SHARE * len(those) >= len(counts) * batch:
                    yield self._storing(entries, members[:, those])
                else:
                    alone.append(members[:, those].reshape(-1))
        if alone:
            members = np.sort(np.concatenate(alone))
            for _, those in of_kinds([classes.reshape(-1)[members]], len(members)):
                yield self._storing(entries, members[None, those])

    def _storing(self, entries: np.ndarray, members: np.ndarray) -> FusedLoop:
        """A loop that stores some entries of each point, ``(entries, points)``."""
        tiles = self._tiles.of_entries
        if tiles is not None:
            tiles = tiles[members[0] // entries.shape[1]]
            order = sorted_places(tiles)
            members, tiles = members[:, order], tiles[order]
        members = members.astype(index_dtype(entries.size, 0, 0))
        body = _Body(self, members.shape[1], tiles)
        for each in members:
            body.store(body.value(entries.reshape(-1)[each]), OUT, self.dtype, each)
        return body.loop(self._tiles.count)

    def address(self, numbers: np.ndarray) -> tuple[Any, torch.dtype, np.ndarray] | None:
        """The memory of elements of a class, its dtype and their places there; None where they are not in memory."""
        place = int(self.graph.places(numbers[:1])[0])
        node = self.graph.nodes[place]
        if place in self.graph.stored:
            return self._in_scratch(place, numbers)
        return (place, node.dtype, numbers - node.first) if node.operation is None else None

    def _in_scratch(self, place: int, numbers: np.ndarray) -> tuple[Scratch, torch.dtype, np.ndarray]:
        """The memory of stored elements, of one tile each or of all, its dtype and their places there."""
        dtype, of_tile = self.graph.nodes[place].dtype, self._tiles.of_elements[numbers[0]] != SHARED
        at = _slice_of(numbers)
        return Scratch(dtype, bool(of_tile)), dtype, self._tiles.places[numbers if at is None else at]


@dataclass
class _Body:
    """The expressions of a loop's points."""

    fusion: Fusion
    points: int
    #: The tile of each point, in order, where it is of one.
    tiles: np.ndarray | None
    expressions: list[Expression] = field(default_factory=list)
    stores: list[tuple[int, Place]] = field(default_factory=list)
    #: By what identifies them but for rare cases, the elements and the expressions that compute them.
    known: dict[Any, list[tuple[np.ndarray, int]]] = field(default_factory=lambda: defaultdict(list))
    #: The places of all points in each sequence; and the sequences, by what identifies them but for rare cases.
    places: list[np.ndarray] = field(default_factory=list)
    sequences: dict[Any, list[int]] = field(default_factory=lambda: defaultdict(list))
    #: As of the loop.
    level: int = 0

    def value(self, numbers: np.ndarray) -> int:
        """The expression that computes elements of a class, one for each point."""
        alike = self.known[int(numbers[0]), int(numbers[-1]), int(numbers[len(numbers) // 2])]
        for others, number in alike:
            if np.array_equal(others, numbers):
                return number
        graph = self.fusion.graph
        place = int(graph.places(numbers[:1])[0])
        node: Elements = graph.nodes[place]
        address = self.fusion.address(numbers)
        if node.constant is not None:
            number = self._added(node.constant)
        elif address is not None:
            self.level = max(self.level, int(self.fusion.depths[place]))
            number = self._added(self._place(*address))
        else:
            number = self.computed(place, numbers - node.first)
        alike.append((numbers, number))
        return number

    def computed(self, place: int, points: np.ndarray) -> int:
        """The expression of a node's operation, on some of its elements."""
        node: Elements = self.fusion.graph.nodes[place]
        assert node.operation is not None
        at = _slice_of(points)
        operands = [operand[points if at is None else at] for operand in node.operands]
        return self._added((node.operation, tuple(map(self.value, operands))))

    def store(self, value: int, memory: Any, dtype: torch.dtype, places: np.ndarray) -> None:
        """Store an expression."""
        self.stores.append((value, self._place(memory, dtype, places)))

    def _added(self, expression: Expression) -> int:
        self.expressions.append(expression)
        return len(self.expressions) - 1

    def _place(self, memory: Any, dtype: torch.dtype, places: np.ndarray) -> Place:
        """Where each point finds something: a distance from a sequence of places that may serve others too."""
        start = int(places[0])
        alike = self.sequences[int(places[-1]) - start, int(places[len(places) // 2]) - start]
        for sequence in alike:
            distance = start - int(self.places[sequence][0])
            if (places - self.places[sequence] == distance).all():
                return Place(memory, dtype, sequence, distance)
        alike.append(len(self.places))
        self.places.append(places)
        return Place(memory, dtype, alike[-1], 0)

    def loop(self, tiles: int) -> FusedLoop:
        """The loop, whose points are in runs where these are long, with so many tiles where they are of tiles."""
        runs = np.stack([np.ones(self.points, self.fusion.graph.dtype), *self.places])
        strides, breaks = np.zeros(len(self.places), np.int64), np.zeros(self.points, np.bool_)
        if self.tiles is not None:
            np.not_equal(self.tiles[1:], self.tiles[:-1], out=breaks[1:])
        breaks[0] = True
        find_runs(0, len(strides), runs[1:], self.points // SHORTEST, strides, breaks)
        begin = np.flatnonzero(breaks)
        single = self.points < SHORTEST * len(begin)
        if single:
            begin = np.arange(self.points)
        else:
            lengths = np.diff(np.append(begin, self.points))
            begin = np.repeat(begin, -(-lengths // LONGEST)) + LONGEST * within_rows(-(-lengths // LONGEST))
            runs = runs[:, begin]
            runs[0] = np.diff(np.append(begin, self.points))
        of_tiles = None if self.tiles is None else np.searchsorted(self.tiles[begin], np.arange(tiles + 1))
        step = None if single else strides.tolist()
        return FusedLoop(self.expressions, self.stores, runs, step, self.points, self.level, of_tiles)


def _slice_of(places: np.ndarray) -> slice | None:
    """The slice that has some places; None where these do not lie one after the other, as most do."""
    begin, end = int(places[0]), int(places[-1]) + 1
    if end - begin != len(places) or not (places[1:] - places[:-1] == 1).all():
        return None
    return slice(begin, end)
