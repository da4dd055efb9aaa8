"""Sums of products on vectors of samples, for the weights that are left of a layer.

A tile of output positions stays in registers while all weights of its output channel run over it: each weight takes one
broadcast, and one load and one multiply-add for each position that it reaches. What lies outside the plane is neither
stored nor read. LLVM is told so directly, since Numba's own loops keep no array in registers.

Addresses and steps between them are in bytes.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from ..runtime import kernel
from .windows import Tiles

_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
#: Sums of a weight's products that run side by side, so that none waits for the one before.
_CHAINS = 4


class _Tile(NamedTuple):
    """What a kernel is compiled for; as text, it is part of the kernel's key in the cache."""

    itemsize: int
    lanes: int
    rows: int
    columns: int
    step: int
    rectangles: tuple[tuple[int, int, int, int], ...]

    @property
    def positions(self) -> list[tuple[int, int]]:
        return [(row, column) for row in range(self.rows) for column in range(self.columns)]

    @property
    def unrolled(self) -> int:
        """How many weights run side by side, so that as many sums are under way as an addition takes cycles."""
        return -(-_CHAINS // len(self.positions))


def _described(itemsize: int, lanes: int, tiles: Tiles) -> str:
    return repr((itemsize, lanes, tiles.rows, tiles.columns, tiles.step, tiles.rectangles))


class _Writer:
    """Writes LLVM's instructions on vectors of a tile."""

    def __init__(self, builder: Any, tile: _Tile) -> None:
        self.builder, self.tile = builder, tile
        self.element = ir.FloatType() if tile.itemsize == 4 else ir.DoubleType()
        self.vector = ir.VectorType(self.element, tile.lanes)
        self.width = tile.lanes * tile.itemsize
        self._multiply_add = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(self.vector, [self.vector] * 3),
            f"llvm.fmuladd.v{tile.lanes}f{8 * tile.itemsize}",
        )

    def shifted(self, address: Any, step: Any, count: Any) -> Any:
        """``address + step * count``; each is a number here or one of the kernel's."""
        step, count = (ir.Constant(_INT64, each) if isinstance(each, int) else each for each in (step, count))
        return self.builder.add(address, self.builder.mul(step, count))

    def load(self, address: Any, kind: Any = None) -> Any:
        kind = self.vector if kind is None else kind
        loaded = self.builder.load(self.builder.inttoptr(address, kind.as_pointer()))
        loaded.align = 4 if kind == _INT32 else self.tile.itemsize
        return loaded

    def load_index(self, address: Any, place: Any) -> Any:
        """The int32 at ``address[place]``, as int64."""
        return self.builder.sext(self.load(self.shifted(address, 4, place), _INT32), _INT64)

    def store(self, vector: Any, address: Any) -> None:
        stored = self.builder.store(vector, self.builder.inttoptr(address, self.vector.as_pointer()))
        stored.align = self.tile.itemsize

    def filled(self, number: Any) -> Any:
        undefined = ir.Constant(self.vector, ir.Undefined)
        one = self.builder.insert_element(undefined, number, ir.Constant(_INT32, 0))
        return self.builder.shuffle_vector(one, undefined, self._lanes([0] * self.tile.lanes))

    def multiply_add(self, a: Any, b: Any, total: Any) -> Any:
        """``a * b + total``, rounded once where the processor does so."""
        return self.builder.call(self._multiply_add, [a, b, total])

    def halved(self, a: Any, b: Any) -> Any:
        """Sums of two neighbours each: those of `a`, then those of `b`."""
        even, odd = (
            self.builder.shuffle_vector(a, b, self._lanes([2 * lane + first for lane in range(self.tile.lanes)]))
            for first in (0, 1)
        )
        return self.builder.fadd(even, odd)

    def added(self, vectors: list[Any]) -> Any:
        """The sum of some vectors, two by two."""
        while len(vectors) > 1:
            odd = vectors[-1:] if len(vectors) % 2 else []
            pairs = zip(vectors[::2], vectors[1::2], strict=False)
            vectors = [self.builder.fadd(*pair) for pair in pairs] + odd
        return vectors[0]

    def weights(self, groups: Any, count: Any, starts: Any) -> Iterator[tuple[tuple[int, int, int, int], Any, Any]]:
        """For each rectangle, the code's place for the weights ``first`` to ``last`` of a group that has it."""
        builder = self.builder
        with cgutils.for_range(builder, count) as loop:
            group = self.shifted(groups, 12, loop.index)
            first, last = (self.load_index(starts, self.load_index(group, place)) for place in (0, 1))
            rectangle = self.load(self.shifted(group, 4, 2), _INT32)
            end, never = (builder.append_basic_block(name) for name in ("end", "never"))
            switch = builder.switch(rectangle, never)
            builder.position_at_end(never)
            builder.unreachable()
            for number, bounds in enumerate(self.tile.rectangles):
                block = builder.append_basic_block(f"rectangle{number}")
                switch.add_case(ir.Constant(_INT32, number), block)
                builder.position_at_end(block)
                yield bounds, first, last
                builder.branch(end)
            builder.position_at_end(end)

    @contextmanager
    def each(self, first: Any, last: Any, step: int = 1) -> Iterator[Any]:
        with cgutils.for_range_slice(self.builder, first, last, ir.Constant(_INT64, step)) as (place, _):
            yield place

    def inputs(self, rows: list[Any], offset: Any, bounds: tuple[int, int, int, int]) -> Iterator[tuple[Any, Any]]:
        """Each position of a rectangle, and the input that a weight with that offset meets there."""
        top, bottom, left, right = bounds
        distance = self.builder.mul(offset, ir.Constant(_INT64, self.width))
        for row in range(top, bottom):
            start = self.builder.add(rows[row], distance)
            for column in range(left, right):
                yield (row, column), self.load(self.shifted(start, column * self.tile.step * self.width, 1))

    def _lanes(self, places: list[int]) -> Any:
        return ir.Constant(ir.VectorType(_INT32, len(places)), places)


@intrinsic(prefer_literal=True)
def _correlate_tile(context, tile, x, x_row, y, y_row, y_column, values, offsets, starts, groups, count, bias, floor):
    """``y[p] = max(floor, bias + Σ_k values[k] * x[p + offsets[k]])`` for the positions of a tile."""
    compiled = _Tile(*ast.literal_eval(tile.literal_value))

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, x, x_row, y, y_row, y_column, values, offsets, starts, groups, count, bias, floor = args
        write = _Writer(builder, compiled)
        sums = {
            (side, position): cgutils.alloca_once(builder, write.vector)
            for side in range(compiled.unrolled)
            for position in compiled.positions
        }
        start, zero = write.filled(bias), ir.Constant(write.vector, [0.0] * compiled.lanes)
        for (side, _), total in sums.items():
            builder.store(zero if side else start, total)
        rows = [write.shifted(x, x_row, row) for row in range(compiled.rows)]

        def add(place: Any, side: int, bounds: tuple[int, int, int, int]) -> None:
            weight = write.filled(write.load(write.shifted(values, compiled.itemsize, place), write.element))
            for position, loaded in write.inputs(rows, write.load_index(offsets, place), bounds):
                total = sums[side, position]
                builder.store(write.multiply_add(weight, loaded, builder.load(total)), total)

        for bounds, first, last in write.weights(groups, count, starts):
            if compiled.unrolled > 1:
                whole = builder.and_(builder.sub(last, first), ir.Constant(_INT64, -compiled.unrolled))
                single = builder.add(first, whole)
                with write.each(first, single, compiled.unrolled) as place:
                    for side in range(compiled.unrolled):
                        add(write.shifted(place, side, 1), side, bounds)
                first = single
            with write.each(first, last) as place:
                add(place, 0, bounds)
        least = write.filled(floor)
        for row, column in compiled.positions:
            total = builder.load(sums[0, (row, column)])
            for side in range(1, compiled.unrolled):
                total = builder.fadd(total, builder.load(sums[side, (row, column)]))
            # A sum that is no number is not below the floor.
            total = builder.select(builder.fcmp_ordered("<", total, least), least, total)
            write.store(total, write.shifted(write.shifted(y, y_row, row), y_column, column))
        return context.get_dummy_value()

    return types.void(tile, *[types.int64] * 10, bias, floor), generate


@intrinsic(prefer_literal=True)
def _add_products(context, tile, x, x_row, y, y_row, y_column, offsets, starts, groups, count, shared, sums, total):
    """``sums[k] += Σ_p y[p] * x[p + offsets[k]]`` and ``total += Σ_p y[p]``, for each lane by itself.

    Both are over the positions of a tile, without the first columns that it shares with the tile before it.
    """
    compiled = _Tile(*ast.literal_eval(tile.literal_value))

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, x, x_row, y, y_row, y_column, offsets, starts, groups, count, shared, sums, total = args
        write = _Writer(builder, compiled)
        zero = ir.Constant(write.vector, [0.0] * compiled.lanes)
        factors = {}
        for row, column in compiled.positions:
            factor = write.load(write.shifted(write.shifted(y, y_row, row), y_column, column))
            before = builder.icmp_signed("<", ir.Constant(_INT64, column), shared)
            factors[row, column] = builder.select(before, zero, factor)
        write.store(write.added([write.load(total), *factors.values()]), total)
        rows = [write.shifted(x, x_row, row) for row in range(compiled.rows)]
        channel = write.load_index(starts, ir.Constant(_INT64, 0))
        for bounds, first, last in write.weights(groups, count, starts):
            with write.each(first, last) as place:
                address = write.shifted(sums, write.width, builder.sub(place, channel))
                totals = [write.load(address)]
                for number, (position, loaded) in enumerate(
                    write.inputs(rows, write.load_index(offsets, place), bounds)
                ):
                    chain = number % _CHAINS
                    if chain < len(totals):
                        totals[chain] = write.multiply_add(factors[position], loaded, totals[chain])
                    else:
                        totals.append(builder.fmul(factors[position], loaded))
                write.store(write.added(totals), address)
        return context.get_dummy_value()

    return types.void(tile, *[types.int64] * 12), generate


@intrinsic(prefer_literal=True)
def _add_lanes(context, tile, sums, out):
    """``out[k] = Σ_lane sums[k, lane]`` for as many ``k`` as there are lanes."""
    compiled = _Tile(*ast.literal_eval(tile.literal_value))

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, sums, out = args
        write = _Writer(builder, compiled)
        vectors = [write.load(write.shifted(sums, write.width, number)) for number in range(compiled.lanes)]
        while len(vectors) > 1:
            vectors = [write.halved(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        write.store(vectors[0], out)
        return context.get_dummy_value()

    return types.void(tile, types.int64, types.int64), generate


def correlation_kernel(itemsize: int, lanes: int, tiles: Tiles) -> Callable[..., None]:
    """The kernel of sums over weights; its rows are the output channels of each tile of each block of samples."""
    return _correlation_kernel(_described(itemsize, lanes, tiles))


@functools.cache
def _correlation_kernel(tile: str) -> Callable[..., None]:
    @kernel
    def correlate(
        first, last, table, groups, starts, taps, channels, values, offsets, bias, floor, position,
        x, x_block, x_row, y, y_block, y_row, y_column, y_channel,
    ):  # fmt: skip
        for item in range(first // channels, (last - 1) // channels + 1):
            block, number = item // len(table), item % len(table)
            x_tile = x + block * x_block + table[number, 0] * position
            y_tile = y + block * y_block + table[number, 1] * position
            for channel in range(max(first - item * channels, 0), min(last - item * channels, channels)):
                _correlate_tile(
                    tile,
                    x_tile,
                    x_row,
                    y_tile + channel * y_channel,
                    y_row,
                    y_column,
                    values.ctypes.data,
                    offsets.ctypes.data,
                    starts.ctypes.data + 4 * channel * taps,
                    groups.ctypes.data + 12 * table[number, 2],
                    table[number, 3],
                    bias[channel],
                    floor,
                )

    return correlate


def products_kernel(itemsize: int, lanes: int, tiles: Tiles) -> Callable[..., None]:
    """The kernel of weights' and biases' gradients; its rows are output channels.

    As many tiles as make a panel have inputs that fit the second-level cache; all channels go over one panel before the
    next.
    """
    return _products_kernel(_described(itemsize, lanes, tiles))


@functools.cache
def _products_kernel(tile: str) -> Callable[..., None]:
    _, lanes, *_ = ast.literal_eval(tile)

    @kernel
    def multiply(
        first, last, table, groups, starts, taps, offsets, blocks, panel, position, gradient, bias_gradient,
        x, x_block, x_row, y, y_block, y_row, y_column, y_channel,
    ):  # fmt: skip
        count = len(table)
        longest = 0
        for channel in range(first, last):
            longest = max(longest, starts[(channel + 1) * taps] - starts[channel * taps])
        sums = np.empty((longest + lanes, lanes), gradient.dtype)
        totals, total = np.empty(lanes, gradient.dtype), np.empty(lanes, gradient.dtype)
        for begin in range(0, blocks * count, panel):
            for channel in range(first, last):
                start, stop = starts[channel * taps], starts[(channel + 1) * taps]
                sums[: stop - start] = 0
                total[:] = 0
                for item in range(begin, min(begin + panel, blocks * count)):
                    block, number = item // count, item % count
                    _add_products(
                        tile,
                        x + block * x_block + table[number, 0] * position,
                        x_row,
                        y + block * y_block + table[number, 1] * position + channel * y_channel,
                        y_row,
                        y_column,
                        offsets.ctypes.data,
                        starts.ctypes.data + 4 * channel * taps,
                        groups.ctypes.data + 12 * table[number, 2],
                        table[number, 3],
                        table[number, 4],
                        sums.ctypes.data,
                        total.ctypes.data,
                    )
                bias_gradient[channel] += total.sum()
                for place in range(start, stop, lanes):
                    _add_lanes(tile, sums[place - start :].ctypes.data, totals.ctypes.data)
                    for lane in range(min(lanes, stop - place)):
                        gradient[place + lane] += totals[lane]

    return multiply
