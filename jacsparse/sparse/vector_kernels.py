"""Sums of products on vectors of samples, for the weights that are left of a layer.

A tile of output positions stays in registers while all weights of its output channel run over it: each weight takes one
broadcast, and one load and one multiply-add for each position that it reaches. What lies outside the plane is neither
stored nor read.

Addresses and steps between them are in bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from ..runtime import kernel
from .vectors import CHAINS, INT64, VectorWriter, call, on_tile


@on_tile(13, 1)
def correlate_tile(
    write, x, x_row, y, y_row, y_column, y_start, winners, values, offsets, starts, groups, count, bias, floor
):
    """``y[p] = max(floor, bias[0] + Σ_k values[k] * x[p + offsets[k]])`` for the positions of a tile.

    With pooling, `y` has the maximum of each window. `winners`, which the tile may leave alone, has a byte for each
    element of `y`: the place in the window where the maximum is, or one past the last place where it is the floor.
    """
    builder, compiled = write.builder, write.tile
    sums = {
        (side, position): cgutils.alloca_once(builder, write.vector)
        for side in range(compiled.unrolled)
        for position in compiled.positions
    }
    start = write.filled(write.load(bias, write.element))
    for (side, _), total in sums.items():
        builder.store(write.zero if side else start, total)
    rows = [write.shifted(x, x_row, row) for row in range(compiled.rows)]

    def add(place: Any, side: int, bounds: tuple[int, int, int, int]) -> None:
        weight = write.filled(write.load(write.shifted(values, compiled.itemsize, place), write.element))
        for position, loaded in write.inputs(rows, write.load_index(offsets, place), bounds):
            total = sums[side, position]
            builder.store(write.multiply_add(weight, loaded, builder.load(total)), total)

    for bounds, first, last in write.weights(groups, count, starts):
        if compiled.unrolled > 1:
            whole = builder.and_(builder.sub(last, first), ir.Constant(INT64, -compiled.unrolled))
            single = builder.add(first, whole)
            with write.each(first, single, compiled.unrolled) as place:
                for side in range(compiled.unrolled):
                    add(write.shifted(place, side, 1), side, bounds)
            first = single
        with write.each(first, last) as place:
            add(place, 0, bounds)
    results = {}
    for position in compiled.positions:
        results[position] = builder.load(sums[0, position])
        for side in range(1, compiled.unrolled):
            results[position] = builder.fadd(results[position], builder.load(sums[side, position]))
    least = write.filled(floor)
    window_rows, window_columns = compiled.pool
    # Two columns of a vector become one.
    pooled = VectorWriter(builder, compiled._replace(lanes=compiled.lanes // 2)) if compiled.along else write
    for row, column in compiled.positions:
        if row % window_rows or column % window_columns:
            continue
        place = write.shifted(write.shifted(y, y_row, row // window_rows), y_column, column // window_columns)
        if compiled.pool == (1, 1):
            # A sum that is no number is not below the floor.
            below = builder.fcmp_ordered("<", results[row, column], least)
            write.store(builder.select(below, least, results[row, column]), place)
            continue
        window = [
            each
            for i in range(window_rows)
            for each in (
                pooled.split(results[row + i, column])
                if compiled.along
                else [results[row + i, column + j] for j in range(window_columns)]
            )
        ]
        best, winner = pooled.winner(window, pooled.filled(floor))
        pooled.store(best, place)
        if compiled.winners:
            distance = builder.udiv(builder.sub(place, y_start), ir.Constant(INT64, compiled.itemsize))
            pooled.store(winner, builder.add(winners, distance))


@on_tile(14)
def add_products(
    write, x, x_row, y, y_row, y_column, y_start, winners, offsets, starts, groups, count, shared, sums, total
):
    """``sums[k] += Σ_p y[p] * x[p + offsets[k]]`` and ``total += Σ_p y[p]``, for each lane by itself.

    Both are over the positions of a tile, without the first columns that it shares with the tile before it. With
    pooling, `y` has an element for each window, which belongs to the position that has won, as `winners` say.
    """
    builder, compiled = write.builder, write.tile
    window_rows, window_columns = compiled.pool
    factors = {}
    for row, column in compiled.positions:
        place = write.shifted(write.shifted(y, y_row, row // window_rows), y_column, column // window_columns)
        factor = write.load(place)
        if compiled.pool != (1, 1):
            distance = builder.udiv(builder.sub(place, y_start), ir.Constant(INT64, compiled.itemsize))
            winner = write.widened(write.load(builder.add(winners, distance), write.bytes))
            number = write.integer(row % window_rows * window_columns + column % window_columns)
            factor = builder.select(builder.icmp_unsigned("==", winner, number), factor, write.zero)
        factors[row, column] = builder.select(write.before(column, shared), write.zero, factor)
    write.store(write.added([write.load(total), *factors.values()]), total)
    rows = [write.shifted(x, x_row, row) for row in range(compiled.rows)]
    channel = write.load_index(starts, ir.Constant(INT64, 0))
    for bounds, first, last in write.weights(groups, count, starts):
        with write.each(first, last) as place:
            address = write.shifted(sums, write.width, builder.sub(place, channel))
            totals = [write.load(address)]
            for number, (position, loaded) in enumerate(write.inputs(rows, write.load_index(offsets, place), bounds)):
                chain = number % CHAINS
                if chain < len(totals):
                    totals[chain] = write.multiply_add(factors[position], loaded, totals[chain])
                else:
                    totals.append(builder.fmul(factors[position], loaded))
            write.store(write.added(totals), address)


@on_tile(2)
def add_lanes(write, sums, out):
    """``out[k] = Σ_lane sums[k, lane]`` for as many ``k`` as there are lanes."""
    vectors = [write.load(write.shifted(sums, write.width, number)) for number in range(write.tile.lanes)]
    while len(vectors) > 1:
        vectors = [write.halved(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    write.store(vectors[0], out)


@kernel
def correlate(
    first, last, correlate_tile, table, starts, taps, channels, values, offsets, bias, itemsize, floor, winners,
    position, x, x_block, x_row, y, y_block, y_row, y_column, y_channel,
):  # fmt: skip
    """Sums over weights by a function of a tile; rows are the output channels of each tile of each block of samples."""
    for item in range(first // channels, (last - 1) // channels + 1):
        block, number = item // len(table), item % len(table)
        x_tile = x + block * x_block + table[number, 0] * position
        y_tile = y + block * y_block + table[number, 1] * position
        for channel in range(max(first - item * channels, 0), min(last - item * channels, channels)):
            call(
                correlate_tile,
                (
                    x_tile,
                    x_row,
                    y_tile + channel * y_channel,
                    y_row,
                    y_column,
                    y,
                    winners,
                    values,
                    offsets,
                    starts + 4 * channel * taps,
                    table[number, 2],
                    table[number, 3],
                    bias + itemsize * channel,
                    floor,
                ),
            )


@kernel
def multiply(
    first, last, add_products, add_lanes, lanes, table, starts, taps, offsets, winners, blocks, panel, position,
    gradient, bias_gradient, x, x_block, x_row, y, y_block, y_row, y_column, y_channel,
):  # fmt: skip
    """Weights' and biases' gradients by functions of a tile; rows are output channels.

    As many tiles as make a panel have inputs that fit the second-level cache; all channels go over one panel before the
    next.
    """
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
                call(
                    add_products,
                    (
                        x + block * x_block + table[number, 0] * position,
                        x_row,
                        y + block * y_block + table[number, 1] * position + channel * y_channel,
                        y_row,
                        y_column,
                        y,
                        winners,
                        offsets,
                        starts.ctypes.data + 4 * channel * taps,
                        table[number, 2],
                        table[number, 3],
                        table[number, 4],
                        sums.ctypes.data,
                        total.ctypes.data,
                    ),
                )
            bias_gradient[channel] += total.sum()
            for place in range(start, stop, lanes):
                call(add_lanes, (sums[place - start :].ctypes.data, totals.ctypes.data))
                for lane in range(min(lanes, stop - place)):
                    gradient[place + lane] += totals[lane]
