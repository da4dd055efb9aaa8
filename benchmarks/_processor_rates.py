"""How fast a core multiplies and adds vectors, from its registers and from its first-level cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numba
import numpy as np
import torch

from jacsparse.codegen import Variable, call
from jacsparse.runtime import run_rows
from jacsparse.sparse.vectors import Tile, on_tile

from ._calls import Call
from ._context import Context

#: Sums that are under way at once in the loops that find rates: enough for a multiply-add to begin in each cycle.
_SUMS = 16
#: Vectors of a run of such a loop.
_VECTORS = 2**22
#: Elements between what threads write or read, which so share no cache line.
_APART = 1024
#: Bytes that lie in the first-level cache of any processor, beside the little that the loops need.
_IN_FIRST_LEVEL = 2**14


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
    #: Vectors that are loaded from the first-level cache, multiplied and added.
    first: float
    width: int
    threads: int


def measured_rates(lanes: int, context: Context) -> Rates:
    """The rates of vectors of as many float32, from the fastest runs; RuntimeError where they cannot be measured."""
    tile, threads = Tile(4, lanes), context.threads
    x = torch.zeros(threads, _IN_FIRST_LEVEL // 4 + _APART)[:, : _IN_FIRST_LEVEL // 4]
    rounds = -(-_VECTORS * 4 * lanes // _IN_FIRST_LEVEL)
    loops = {"multiply_adds": _of_registers, "first": _of_memory}
    runs = {name: _run(function(tile), x, tile, rounds) for name, function in loops.items()}
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
