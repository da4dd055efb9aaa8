"""Max-pooling of blocks: a function for a window of each position, and the kernel that goes over all windows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from ..runtime import kernel
from .vectors import INT64, VectorWriter, call, on_tile

#: Of each function of windows, which lie side by side in a row and are alike: the address of the first one's first
#: position that is in the plane, the steps to the next row and column, how many rows and columns of a window are in the
#: plane, the positions' numbers: the first one, and the step from row to row; the addresses of the first output and
#: winner; how many windows there are, and the step from one to the next.
_ARGUMENTS = 11


def _windows(write: VectorWriter, x: Any, y: Any, winner: Any, count: Any, step: Any) -> Iterator[tuple[Any, Any, Any]]:
    """The code's place for each window: its first position, its output and its winner."""
    with write.each(INT64(0), count) as number:
        at = (x, step), (y, write.width), (winner, write.tile.lanes)
        yield tuple(write.shifted(begin, distance, number) for begin, distance in at)


def _positions(write: VectorWriter, x: Any, steps: Any, counts: Any, numbers: Any) -> Iterator[tuple[Any, Any]]:
    """The code's places for the positions of a window: their addresses, and their numbers in each lane.

    Windows of the tile's size have a place for each position, all others one for any.
    """
    builder, size, (first, number_step) = write.builder, write.tile.pool, numbers
    whole = [builder.icmp_signed("==", count, INT64(full)) for count, full in zip(counts, size, strict=True)]
    with builder.if_else(builder.and_(*whole)) as (unrolled, otherwise):
        with unrolled:
            for row, column in itertools.product(*map(range, size)):
                address = write.shifted(write.shifted(x, steps[0], row), steps[1], column)
                yield address, write.integer(row * size[1] + column)
        with otherwise, write.each(INT64(0), counts[0]) as row, write.each(INT64(0), counts[1]) as column:
            address = write.shifted(write.shifted(x, steps[0], row), steps[1], column)
            yield address, write.integers(builder.add(write.shifted(first, number_step, row), column))


@on_tile(_ARGUMENTS)
def find_winners(write, x, x_row, x_column, rows, columns, number, number_step, y, winner, count, step):
    """Set the outputs to the maxima, and the winners to their numbers."""
    builder = write.builder
    best, at = (cgutils.alloca_once(builder, vector.type) for vector in (write.zero, write.integer(0)))
    least = ir.Constant(write.vector, [float("-inf")] * write.tile.lanes)
    for first, output, won in _windows(write, x, y, winner, count, step):
        # Dilated windows may have no position in the plane.
        builder.store(least, best)
        builder.store(write.integers(number), at)
        for address, each in _positions(write, first, (x_row, x_column), (rows, columns), (number, number_step)):
            larger = write.larger(builder.load(best), builder.load(at), write.load(address), each)
            for vector, place in zip(larger, (best, at), strict=True):
                builder.store(vector, place)
        write.store(builder.load(best), output)
        write.store(builder.trunc(builder.load(at), write.bytes), won)


@on_tile(6)
def set_row(write, x, x_row, y, marks, count, total):
    """Set a row of windows to the gradients of the windows, and add these to ``total[0]``.

    The windows are the tile's, and cover each position once. A gradient stands where its window's winner is, as bytes
    of `marks` say, and the other positions get zeros. The marks of windows of one position are the outputs: those that
    are not above zero have no gradient.
    """
    builder, (rows, columns) = write.builder, write.tile.pool
    alone = (rows, columns) == (1, 1)
    added = cgutils.alloca_once_value(builder, write.zero)
    with write.each(INT64(0), count) as window:
        gradient = write.load(write.shifted(y, write.width, window))
        if alone:
            won, none = write.load(write.shifted(marks, write.width, window)), write.zero
            lost = builder.fcmp_ordered("<=", won, none)
        else:
            won = write.widened(write.load(write.shifted(marks, write.tile.lanes, window), write.bytes))
            lost = builder.icmp_unsigned("==", won, write.integer(rows * columns))
        passed = builder.select(lost, write.zero, gradient)
        builder.store(builder.fadd(builder.load(added), passed), added)
        for row in range(rows):
            first = write.shifted(write.shifted(x, x_row, row), columns * write.width, window)
            for column in range(columns):
                value = passed
                if not alone:
                    wins = builder.icmp_unsigned("==", won, write.integer(row * columns + column))
                    value = builder.select(wins, gradient, write.zero)
                write.store(value, write.shifted(first, write.width, column))
    write.add_lanes([builder.load(added)], total)


@on_tile(_ARGUMENTS)
def add_to_winners(write, x, x_row, x_column, rows, columns, number, number_step, y, winner, count, step):
    """Add the outputs to the positions that have won."""
    builder = write.builder
    for first, output, at in _windows(write, x, y, winner, count, step):
        won, gradient = write.widened(write.load(at, write.bytes)), write.load(output)
        for address, each in _positions(write, first, (x_row, x_column), (rows, columns), (number, number_step)):
            value = builder.select(builder.icmp_unsigned("==", won, each), gradient, write.zero)
            write.store(builder.fadd(write.load(address), value), address)


@on_tile(_ARGUMENTS)
def take_winners(write, x, x_row, x_column, rows, columns, number, number_step, y, winner, count, step):
    """Set the outputs to the positions that have won, or to zero where none has."""
    builder, taken = write.builder, cgutils.alloca_once(write.builder, write.vector)
    for first, output, at in _windows(write, x, y, winner, count, step):
        won = write.widened(write.load(at, write.bytes))
        builder.store(write.zero, taken)
        for address, each in _positions(write, first, (x_row, x_column), (rows, columns), (number, number_step)):
            wins = builder.icmp_unsigned("==", won, each)
            builder.store(builder.select(wins, write.load(address), builder.load(taken)), taken)
        write.store(builder.load(taken), output)


@kernel
def on_channels(first, last, set_row, x, y, marks, sums, blocks, channels, rows, columns, window, width, marks_width):
    """Call a function for each row of windows; rows are channels, and addresses and widths are in bytes."""
    sums[first:last] = 0
    sums_begin = sums.ctypes.data
    for channel in range(first, last):
        for block in range(blocks):
            for row in range(rows):
                at = ((block * channels + channel) * rows + row) * columns
                call(
                    set_row,
                    (
                        x + at * window[0] * window[1] * width,
                        columns * window[1] * width,
                        y + at * width,
                        marks + at * marks_width,
                        columns,
                        sums_begin + channel * sums.itemsize,
                    ),
                )


@kernel
def on_windows(first, last, function, x, y, winners, sizes, window, lanes, itemsize):
    """Call a function for all windows of a plane; rows are planes of a block, and addresses are in bytes.

    Windows of a row that lie in the plane from their first column to their last are done by one call.
    """
    rows, columns, out_rows, out_columns = sizes
    width, span = lanes * itemsize, (window[1] - 1) * window[7] + 1
    for plane in range(first, last):
        for out_row in range(out_rows):
            top = out_row * window[2] - window[4]
            # Which rows of the windows lie in the plane, and then which columns.
            begin_i, end_i = max(0, -(top // window[6])), min(window[0], -((top - rows) // window[6]))
            out_column = 0
            while out_column < out_columns:
                left, count = out_column * window[3] - window[5], 1
                begin_j, end_j = 0, window[1]
                if left < 0 or left + span > columns:
                    begin_j, end_j = max(0, -(left // window[7])), min(window[1], -((left - columns) // window[7]))
                else:
                    count = min((columns - span - left) // window[3] + 1, out_columns - out_column)
                at = (plane * out_rows + out_row) * out_columns + out_column
                source = (plane * rows + top + begin_i * window[6]) * columns + left + begin_j * window[7]
                call(
                    function,
                    (
                        x + source * width,
                        window[6] * columns * width,
                        window[7] * width,
                        end_i - begin_i,
                        end_j - begin_j,
                        begin_i * window[1] + begin_j,
                        window[1],
                        y + at * width,
                        winners + at * lanes,
                        count,
                        window[3] * width,
                    ),
                )
                out_column += count
