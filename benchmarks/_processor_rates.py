"""How fast a core multiplies and adds vectors, by where they come from; and what a kernel of sparse layers does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import torch

from jacsparse.codegen import Variable, call
from jacsparse.runtime import run_rows
from jacsparse.sparse.convolution import Correlation
from jacsparse.sparse.vectors import Tile, on_tile
from jacsparse.sparse.windows import Pair

from ._calls import Call
from ._context import Context

#: Sums that are under way at once in the loops that find rates: enough for a multiply-add to begin in each cycle.
_SUMS = 16
#: Vectors of a run of such a loop.
_VECTORS = 2**22
#: Elements between what threads write or read, which so share no cache line.
_APART = 1024


class Cache(NamedTuple):
    """A core's cache of data: its bytes, how many lines a set has, and the bytes of a line."""

    nbytes: int
    ways: int
    line: int = 64

    @classmethod
    def of_level(cls, level: int) -> Cache:
        """The cache of level 1 or 2, as Linux tells it; elsewhere as most processors have it.

        Examples
        --------
        >>> Cache.of_level(1).nbytes >= 2**14
        True
        """
        for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
            names = ("level", "type", "size", "ways_of_associativity", "coherency_line_size")
            try:
                texts = [(folder / name).read_text(encoding="utf-8").strip() for name in names]
            except OSError:
                # Not all firmware tells everything of a cache.
                continue
            number, kind, size, ways, line = texts
            if number == str(level) and kind != "Instruction" and size.endswith("K") and int(ways) and int(line):
                return cls(1024 * int(size[:-1]), int(ways), int(line))
        return (cls(2**15, 8), cls(2**20, 8))[level - 1]


# The loops go `rounds` times over `count` vectors from the address `x` on, and leave what they add up at `sums`.


@contextmanager
def _each_vector(write: Any, x: Any, count: Any, rounds: Any) -> Iterator[list[Any]]:
    """The loops' body: the addresses of `_SUMS` vectors that lie side by side."""
    with write.each(0, rounds), write.each(0, count, _SUMS) as place:
        begin = x + place * write.width
        yield [begin + write.width * number for number in range(_SUMS)]


def _add_up(write: Any, x: Any, count: Any, rounds: Any, sums: Any, from_memory: bool) -> None:
    left, right = (write.load(x + write.width * number) for number in range(2))
    totals = [Variable(write.zero) for _ in range(_SUMS)]
    with _each_vector(write, x, count, rounds) as addresses:
        for total, address in zip(totals, addresses, strict=True):
            factor = write.load(address) if from_memory else right
            total.value = write.multiply_add(left, factor, total.value)
    write.put(write.added([total.value for total in totals]), sums)


@on_tile(4)
def _of_registers(write, x, count, rounds, sums):  # type: ignore[no-untyped-def]
    _add_up(write, x, count, rounds, sums, from_memory=False)


@on_tile(4)
def _of_memory(write, x, count, rounds, sums):  # type: ignore[no-untyped-def]
    _add_up(write, x, count, rounds, sums, from_memory=True)


@on_tile(4)
def _of_lanes(write, x, count, rounds, sums):  # type: ignore[no-untyped-def]
    with _each_vector(write, x, count, rounds) as addresses:
        for number, address in enumerate(addresses):
            write.add_lanes([write.load(address)], sums + write.tile.itemsize * number)


@numba.njit(nogil=True)
def _on_rows(first, last, function, x, step, count, rounds, sums, width):  # type: ignore[no-untyped-def]
    for row in range(first, last):
        call(function, (x + row * step, count, rounds, sums + row * width))


def _run(function: int, x: torch.Tensor, tile: Tile, rounds: int = 1) -> tuple[Call, int]:
    """A run of a loop on each row of float32, a row for each thread; and how many vectors of a row it goes over."""
    count = x.shape[1] // tile.lanes // _SUMS * _SUMS
    sums, work = torch.zeros(len(x), _APART), _VECTORS * np.arange(len(x) + 1)
    arguments = (x.data_ptr(), x.stride(0) * tile.itemsize, count, rounds, sums.data_ptr(), sums.stride(0) * 4)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        run_rows(_on_rows, work, function, *arguments)
        # Held as long as the run is.
        return x, sums

    return run, count * rounds


class Rates(NamedTuple):
    """What all threads together do each second with vectors of as many bytes."""

    #: Vectors in registers that are multiplied and added.
    multiply_adds: float
    #: Vectors whose lanes are added up.
    lane_sums: float
    #: Vectors that are loaded, multiplied and added: from the first-level cache, and from the second.
    first: float
    second: float
    width: int
    threads: int


def measured_rates(lanes: int, context: Context) -> Rates:
    """The rates of vectors of as many float32, from the fastest runs; RuntimeError where they cannot be measured."""
    tile, threads = Tile(4, lanes), context.threads
    first, second = (Cache.of_level(level).nbytes for level in (1, 2))
    loops = {
        "multiply_adds": (_of_registers, first // 2),
        "lane_sums": (_of_lanes, first // 4),
        "first": (_of_memory, first // 2),
        "second": (_of_memory, second // 2),
    }
    runs = {}
    for name, (function, nbytes) in loops.items():
        x = torch.zeros(threads, nbytes // 4 + _APART)[:, : nbytes // 4]
        runs[name] = _run(function(tile), x, tile, -(-_VECTORS * 4 * lanes // nbytes))
    timings = context.under("rates").times({name: run for name, (run, _) in runs.items()})
    for timing in timings.values():
        if timing.problem:
            raise RuntimeError(timing.problem)
    rates = {name: threads * vectors / min(timings[name].seconds) for name, (_, vectors) in runs.items()}
    return Rates(**rates, width=4 * lanes, threads=threads)


def moved(read: Sequence[torch.Tensor], written: Sequence[torch.Tensor], rates: Rates) -> Call:
    """A run that reads some tensors of float32 and fills others, and does nothing else.

    What is less than a run of the loop is not read.
    """
    tile = Tile(4, rates.width // 4)
    rows = [(x.flatten(), min(rates.threads, x.numel() // (_SUMS * tile.lanes))) for x in read]
    parts = [x[: len(x) // count * count].view(count, -1) for x, count in rows if count]
    runs = [_run(_of_memory(tile), x, tile)[0] for x in parts]

    def run() -> None:
        for read_one in runs:
            read_one()
        for y in written:
            y.zero_()

    return run


class KernelWork(NamedTuple):
    """What a kernel does with the inputs of all blocks of samples."""

    #: Vectors of inputs that it loads.
    loads: int
    #: Weights that it meets, once for each tile that they reach.
    weights: int
    #: Bytes of the cache lines of what it reads and writes that are not in the first level when they are needed.
    missed: int

    @classmethod
    def of(
        cls, correlation: Correlation, y: torch.Tensor, pool: Pair = (1, 1), order: torch.Tensor | None = None
    ) -> KernelWork:
        """That of sums into blocks `y`, of which windows of `pool` leave one position, or of products with `y`.

        With `order`, the places of the sums' weights, it is that of both at once, as of `Correlation.with_products`.
        Vectors are the samples of a block, of which there are at least two. The loads and stores of one block run
        through a cache whose sets replace the line that was used least recently.
        """
        tiles = correlation._tiles if pool == (1, 1) else correlation._pooled_tiles(pool, winners=False)[0]
        reading = correlation.reading
        table = tiles.table.copy()
        # The table has the groups' addresses.
        table[:, 2] = (table[:, 2] - tiles.groups.ctypes.data) // tiles.groups.strides[0]
        vectors, windows = (
            np.array([*itertools.product(range(0, tiles.rows, rows), range(0, tiles.columns, columns))])
            for rows, columns in ((1, 1), pool)
        )
        in_steps = reading.in_step[0] * reading.in_size[1], tiles.step
        out_steps = reading.out_step[0] * y.shape[3], reading.out_step[1], y.shape[2] * y.shape[3]
        position, cache = correlation.lanes * y.itemsize, Cache.of_level(1)
        lines = np.full((2, cache.nbytes // cache.line // cache.ways, cache.ways), -1, dtype=np.int64)
        places = np.arange(len(correlation.entries.source)) if order is None else order.numpy()
        counted = _count(
            table, tiles.groups, np.array(tiles.rectangles, dtype=np.int64), correlation.entries.starts,
            correlation._taps, correlation._offsets.numpy(), vectors, windows // pool, in_steps, out_steps,
            position, places, order is not None, cache.line, lines,
        )  # fmt: skip
        return cls(*(len(y) * count for count in counted))


@numba.njit
def _touch(lines, clock, size, begin, nbytes):  # type: ignore[no-untyped-def]
    """Use bytes through a cache, and return how many of the bytes of their lines it lacked."""
    missed = 0
    for line in range(begin // size, (begin + nbytes - 1) // size + 1):
        lines_of_set, last_uses = lines[0, line % lines.shape[1]], lines[1, line % lines.shape[1]]
        way = 0
        for other in range(len(lines_of_set)):
            if lines_of_set[other] == line:
                way = other
                break
            if last_uses[other] < last_uses[way]:
                way = other
        missed += size * (lines_of_set[way] != line)
        clock[0] += 1
        lines_of_set[way], last_uses[way] = line, clock[0]
    return missed


@numba.njit
def _count(  # type: ignore[no-untyped-def]
    table,
    groups,
    rectangles,
    starts,
    taps,
    offsets,
    vectors,
    windows,
    in_steps,
    out_steps,
    position,
    places,
    with_products,
    size,
    lines,
):
    """Go through a kernel's loops as it does, tile by tile and channel by channel; what tiles hold comes last."""
    clock = np.zeros(1, np.int64)
    loads = weights = missed = 0
    # Arrays lie far apart.
    values, numbers, y, order, sums, factors = 1 << 40, 2 << 40, 3 << 40, 4 << 40, 5 << 40, 6 << 40
    for tile in range(len(table)):
        for channel in range((len(starts) - 1) // taps):
            for group in groups[table[tile, 2] : table[tile, 2] + table[tile, 3]]:
                top, bottom, left, right = rectangles[group[2]]
                for weight in range(starts[channel * taps + group[0]], starts[channel * taps + group[1]]):
                    weights += 1
                    missed += _touch(lines, clock, size, values + 4 * places[weight], 4)
                    missed += _touch(lines, clock, size, numbers + 4 * weight, 4)
                    if with_products:
                        missed += _touch(lines, clock, size, order + 4 * weight, 4)
                        missed += _touch(lines, clock, size, sums + 4 * weight, 4)
                    for row, column in vectors:
                        if top <= row < bottom and left <= column < right:
                            place = table[tile, 0] + offsets[weight] + row * in_steps[0] + column * in_steps[1]
                            loads += 1
                            missed += _touch(lines, clock, size, place * position, position)
            for row, column in windows:
                place = table[tile, 1] + row * out_steps[0] + column * out_steps[1] + channel * out_steps[2]
                missed += _touch(lines, clock, size, y + place * position, position)
                if with_products:
                    missed += _touch(lines, clock, size, factors + place * position, position)
    return loads, weights, missed
