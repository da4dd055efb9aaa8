"""Sums of products on vectors of samples, for the weights that are left of a layer.

A tile of output positions stays in registers while all weights of its output channel run over it: each weight takes one
broadcast, and one load and one multiply-add for each position that it reaches. What lies outside the plane is neither
stored nor read.

Addresses and steps between them are in bytes.
"""

from __future__ import annotations

from ..codegen import Register, Variable, call
from ..runtime import inlined, kernel
from .vectors import TileWriter, on_tile


@on_tile(15, 1)
def correlate_tile(
    write, x, x_row, y, y_row, y_column, y_start, winners, distance, values, offsets, starts, groups, count, shared,
    bias, floor,
):  # fmt: skip
    """``y[p] = max(floor, bias[0] + Σ_k values[k] * x[p + offsets[k]])`` for the positions of a tile.

    A tile that adds has another summand, which lies at a distance from `y`. With pooling, `y` has the maximum of each
    window. `winners`, which the tile may leave alone, has a byte for each element of `y`: the place in the window where
    the maximum is, or one past the last place where it is the floor. Of a tile with `Tile.shared`, what it shares is
    left to the tile before it.
    """
    tile, start = write.tile, write.filled(write.load(bias, write.element))
    sums = {
        (side, position): Variable(write.zero if side else start)
        for side in range(tile.unrolled)
        for position in tile.positions
    }
    rows = [x + x_row * row for row in range(tile.rows)]
    for bounds, first, last in write.weights(groups, count, starts):
        for place, side in write.side_by_side(first, last):
            weight = write.filled(write.load(values + place * tile.itemsize, write.element))
            for position, loaded in write.inputs(rows, write.load_index(offsets, place), bounds):
                total = sums[side, position]
                total.value = write.multiply_add(weight, loaded, total.value)
    results = {
        position: write.added([sums[side, position].value for side in range(tile.unrolled)])
        for position in tile.positions
    }
    for columns in write.cases(shared, (0, *tile.shared)) if tile.shared else (0,):
        _put_results(write, results, floor, (y, y_row, y_column), y_start, winners, distance, columns)


def _put_results(write, results, floor, plane, y_start, winners, distance, shared):
    """Write a tile's sums, or the maximum of each window of them, but for the first columns, which it shares."""
    tile, (y, y_row, y_column), least = write.tile, plane, write.filled(floor)
    window_rows, window_columns = tile.pool
    # Two columns of a vector become one.
    pooled = TileWriter(write.builder, tile._replace(lanes=tile.lanes // 2)) if tile.along else write
    for row, column in tile.positions:
        if row % window_rows or column % window_columns:
            continue
        place = y + y_row * (row // window_rows) + y_column * (column // window_columns)
        if tile.pool == (1, 1):
            result = results[row, column]
            if tile.adds:
                result = result + write.load(place + distance)
            # A sum that is no number is not below the floor.
            result = write.select(result < least, least, result)
            write.put_without(shared - column, result, place, write.spacing)
            continue
        window = [
            each
            for i in range(window_rows)
            for each in (
                pooled.split(results[row + i, column])
                if tile.along
                else [results[row + i, column + j] for j in range(window_columns)]
            )
        ]
        best, winner = pooled.winner(window, pooled.filled(floor))
        without = (shared - column) // window_columns
        pooled.put_without(without, best, place, write.spacing)
        if tile.winners:
            pooled.put_without(without, winner, winners + (place - y_start) // tile.itemsize, 1)


@on_tile(14)
def add_products(
    write, x, x_row, y, y_row, y_column, y_start, winners, offsets, starts, groups, count, shared, sums, total
):
    """``sums[k] += Σ_p y[p] * x[p + offsets[k]]`` and ``total[0] += Σ_p y[p]``, over all lanes.

    Both are over the positions of a tile, without the first columns that it shares with the tile before it. With
    pooling, `y` has an element for each window, which belongs to the position that has won, as `winners` say.
    """
    tile, factors = write.tile, {}
    window_rows, window_columns = tile.pool
    for row, column in tile.positions:
        place = y + y_row * (row // window_rows) + y_column * (column // window_columns)
        factor = write.load(place)
        if tile.pool != (1, 1):
            winner = write.load(winners + (place - y_start) // tile.itemsize, write.bytes).to(write.integer)
            number = row % window_rows * window_columns + column % window_columns
            factor = write.select(winner.equals(number), factor, write.zero)
        factors[row, column] = write.select(write.before(column, shared), write.zero, factor)
    write.add_lanes(list(factors.values()), total)
    rows = [x + x_row * row for row in range(tile.rows)]
    for bounds, first, last in write.weights(groups, count, starts):
        with write.each(first, last) as place:
            products: list[Register] = []
            for position, loaded in write.inputs(rows, write.load_index(offsets, place), bounds):
                write.add_product(products, factors[position], loaded)
            write.add_lanes(products, sums + place * tile.itemsize)


@on_tile(14)
def correlate_and_multiply(
    write, x, x_row, y, y_row, y_column, distance, values, order, offsets, starts, groups, count, shared, sums
):
    """What `correlate_tile` and `add_products` compute of the same inputs, each of which is loaded once.

    ``y[p] = Σ_k values[order[k]] * x[p + offsets[k]]`` and ``sums[k] += Σ_p factors[p] * x[p + offsets[k]]``, where
    the factors lie at a distance from `y`.
    """
    tile = write.tile
    places = {(row, column): y + y_row * row + y_column * column for row, column in tile.positions}
    factors = {
        (row, column): write.select(write.before(column, shared), write.zero, write.load(at + distance))
        for (row, column), at in places.items()
    }
    results = {(side, position): Variable(write.zero) for side in range(tile.unrolled) for position in tile.positions}
    rows = [x + x_row * row for row in range(tile.rows)]
    for bounds, first, last in write.weights(groups, count, starts):
        for place, side in write.side_by_side(first, last):
            weight = write.load(values + write.load_index(order, place) * tile.itemsize, write.element)
            weight, products = write.filled(weight), list[Register]()
            for position, loaded in write.inputs(rows, write.load_index(offsets, place), bounds):
                result = results[side, position]
                result.value = write.multiply_add(weight, loaded, result.value)
                write.add_product(products, factors[position], loaded)
            write.add_lanes(products, sums + place * tile.itemsize)
    for position, at in places.items():
        write.put(write.added([results[side, position].value for side in range(tile.unrolled)]), at)


@inlined
def _tile_of(item, table, position, x, x_block, y, y_block):
    """The number of a tile in the table, and the addresses where it begins in its block of samples of `x` and `y`."""
    block, number = item // len(table), item % len(table)
    return number, x + block * x_block + table[number, 0] * position, y + block * y_block + table[number, 1] * position


@kernel
def correlate(
    first, last, correlate_tile, table, starts, taps, channels, values, offsets, bias, itemsize, floor, winners,
    distance, position, x, x_block, x_row, y, y_block, y_row, y_column, y_channel,
):  # fmt: skip
    """Sums over weights by a function of a tile; rows are the output channels of each tile of each block of samples."""
    for item in range(first // channels, (last - 1) // channels + 1):
        number, x_tile, y_tile = _tile_of(item, table, position, x, x_block, y, y_block)
        for channel in range(max(first - item * channels, 0), min(last - item * channels, channels)):
            planes = (x_tile, x_row, y_tile + channel * y_channel, y_row, y_column, y)
            weights = (values, offsets, starts + 4 * channel * taps, table[number, 2], table[number, 3])
            last_ones = (table[number, 4], bias + itemsize * channel, floor)
            call(correlate_tile, (*planes, winners, distance, *weights, *last_ones))


@kernel
def multiply(
    first, last, add_products, table, starts, taps, offsets, winners, blocks, position, sums, bias_sums, x, x_block,
    x_row, y, y_block, y_row, y_column, y_channel,
):  # fmt: skip
    """Weights' and biases' gradients by a function of a tile; rows are output channels.

    All channels go over one tile before the next: the inputs of a tile fit the second-level cache.
    """
    sums[starts[first * taps] : starts[last * taps]] = 0
    bias_sums[first:last] = 0
    starts_begin, sums_begin, bias_begin = starts.ctypes.data, sums.ctypes.data, bias_sums.ctypes.data
    for item in range(blocks * len(table)):
        number, x_tile, y_tile = _tile_of(item, table, position, x, x_block, y, y_block)
        for channel in range(first, last):
            planes = (x_tile, x_row, y_tile + channel * y_channel, y_row, y_column, y)
            weights = (offsets, starts_begin + 4 * channel * taps, table[number, 2], table[number, 3])
            gradients = (table[number, 4], sums_begin, bias_begin + channel * sums.itemsize)
            call(add_products, (*planes, winners, *weights, *gradients))


@kernel
def differentiate(
    first, last, correlate_and_multiply, table, starts, taps, values, order, offsets, blocks, distance, position, sums,
    x, x_block, x_row, y, y_block, y_row, y_column, y_channel,
):  # fmt: skip
    """Sums over weights and the weights' gradients by a function of a tile; rows are the channels of the former."""
    sums[starts[first * taps] : starts[last * taps]] = 0
    starts_begin, sums_begin = starts.ctypes.data, sums.ctypes.data
    for item in range(blocks * len(table)):
        number, x_tile, y_tile = _tile_of(item, table, position, x, x_block, y, y_block)
        for channel in range(first, last):
            planes = (x_tile, x_row, y_tile + channel * y_channel, y_row, y_column, distance)
            weights = (values, order, offsets, starts_begin + 4 * channel * taps, table[number, 2], table[number, 3])
            call(correlate_and_multiply, (*planes, *weights, table[number, 4], sums_begin))
