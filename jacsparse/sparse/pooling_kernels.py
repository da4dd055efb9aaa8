"""Max-pooling of blocks: a function for a window of each position, and the kernel that goes over all windows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from ..runtime import kernel
from .vectors import INT64, VectorWriter, call, on_tile

#: Of each function: the address of the first position that lies in the plane, the steps to the next row and column, how
#: many rows and columns of the window lie there, their numbers: the first one, and the step from row to row; and the
#: addresses of the window's output and of its winner.
_ARGUMENTS = 9


def _positions(write: VectorWriter, x: Any, steps: Any, counts: Any, numbers: Any) -> Iterator[tuple[Any, Any]]:
    """The code's place for each position of a window: its address, and its number in each lane."""
    first, number_step = numbers
    with write.each(INT64(0), counts[0]) as row, write.each(INT64(0), counts[1]) as column:
        address = write.shifted(write.shifted(x, steps[0], row), steps[1], column)
        number = write.builder.add(write.shifted(first, number_step, row), column)
        yield address, _as_bytes(write, number)


def _as_bytes(write: VectorWriter, number: Any) -> Any:
    return write.repeated(write.builder.trunc(number, ir.IntType(8)), write.bytes)


@on_tile(_ARGUMENTS)
def find_winners(write, x, x_row, x_column, rows, columns, number, number_step, y, winner):
    """Set the output to the maximum, and the winner to its number."""
    best, at = (cgutils.alloca_once(write.builder, kind) for kind in (write.vector, write.bytes))
    write.builder.store(write.load(x), best)
    write.builder.store(_as_bytes(write, number), at)
    for address, each in _positions(write, x, (x_row, x_column), (rows, columns), (number, number_step)):
        larger = write.larger(write.builder.load(best), write.builder.load(at), write.load(address), each)
        for vector, place in zip(larger, (best, at), strict=True):
            write.builder.store(vector, place)
    write.store(write.builder.load(best), y)
    write.store(write.builder.load(at), winner)


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
def add_to_winners(write, x, x_row, x_column, rows, columns, number, number_step, y, winner):
    """Add the output to the position that has won."""
    won, gradient = write.load(winner, write.bytes), write.load(y)
    for address, each in _positions(write, x, (x_row, x_column), (rows, columns), (number, number_step)):
        value = write.builder.select(write.builder.icmp_unsigned("==", won, each), gradient, write.zero)
        write.store(write.builder.fadd(write.load(address), value), address)


@on_tile(_ARGUMENTS)
def take_winners(write, x, x_row, x_column, rows, columns, number, number_step, y, winner):
    """Set the output to the position that has won, or to zero where none has."""
    won, taken = write.load(winner, write.bytes), cgutils.alloca_once(write.builder, write.vector)
    write.builder.store(write.zero, taken)
    for address, each in _positions(write, x, (x_row, x_column), (rows, columns), (number, number_step)):
        wins = write.builder.icmp_unsigned("==", won, each)
        write.builder.store(write.builder.select(wins, write.load(address), write.builder.load(taken)), taken)
    write.store(write.builder.load(taken), y)


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
    """Call a function for each window; rows are planes of a block, and addresses are in bytes."""
    rows, columns, out_rows, out_columns = sizes
    width = lanes * itemsize
    for plane in range(first, last):
        for position in range(out_rows * out_columns):
            top = position // out_columns * window[2] - window[4]
            left = position % out_columns * window[3] - window[5]
            # Which rows and columns of the window lie in the plane.
            begin_i, begin_j = max(0, -(top // window[6])), max(0, -(left // window[7]))
            end_i, end_j = (
                min(window[0], -((top - rows) // window[6])),
                min(window[1], -((left - columns) // window[7])),
            )
            at = plane * out_rows * out_columns + position
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
                ),
            )
