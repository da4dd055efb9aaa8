"""Max-pooling of blocks: a function for a window of each position, and the kernel that goes over all windows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from ..codegen import BYTE, Register, Variable, call
from ..runtime import kernel
from .vectors import TileWriter, on_tile

#: Of each function of windows, which lie side by side in a row and are alike: the address of the first one's first
#: position that is in the plane, the steps to the next row and column, how many rows and columns of a window are in the
#: plane, the positions' numbers: the first one, and the step from row to row; the addresses of the first output and
#: winner; how many windows there are, and the step from one to the next.
_ARGUMENTS = 11


def _windows(
    write: TileWriter, x: Register, y: Register, winner: Register, count: Register, step: Register
) -> Iterator[tuple[Register, Register, Register]]:
    """The code's place for each window: its first position, its output and its winner."""
    with write.each(0, count) as number:
        yield x + step * number, y + number * write.width, winner + number * write.tile.lanes


def _positions(
    write: TileWriter, x: Register, steps: Any, counts: Any, numbers: Any
) -> Iterator[tuple[Register, Register]]:
    """The code's places for the positions of a window: their addresses, and their numbers in each lane.

    Windows of the tile's size have a place for each position, all others one for any.
    """
    size, (first, number_step) = write.tile.pool, numbers
    for is_whole in write.either(counts[0].equals(size[0]) & counts[1].equals(size[1])):
        if is_whole:
            for row, column in itertools.product(*map(range, size)):
                yield x + steps[0] * row + steps[1] * column, write.numbered(row * size[1] + column)
        else:
            with write.each(0, counts[0]) as i, write.each(0, counts[1]) as j:
                yield x + steps[0] * i + steps[1] * j, write.numbered(first + number_step * i + j)


@on_tile(_ARGUMENTS)
def find_winners(write, x, x_row, x_column, rows, columns, number, number_step, y, winner, count, step):
    """Set the outputs to the maxima, and the winners to their numbers."""
    best, at = Variable(write.zero), Variable(write.numbered(0))
    for first, output, won in _windows(write, x, y, winner, count, step):
        # Dilated windows may have no position in the plane.
        best.value, at.value = write.filled(float("-inf")), write.numbered(number)
        for address, each in _positions(write, first, (x_row, x_column), (rows, columns), (number, number_step)):
            best.value, at.value = write.larger(best.value, at.value, write.load(address), each)
        write.put(best.value, output)
        write.put(at.value.to(BYTE), won)


@on_tile(6)
def set_row(write, x, x_row, y, marks, count, total):
    """Set a row of windows to the gradients of the windows, and add these to ``total[0]``.

    The windows are the tile's, and cover each position once. A gradient stands where its window's winner is, as bytes
    of `marks` say, and the other positions get zeros. The marks of windows of one position are the outputs: those that
    are not above zero have no gradient.
    """
    rows, columns = write.tile.pool
    alone, added = (rows, columns) == (1, 1), Variable(write.zero)
    with write.each(0, count) as window:
        gradient = write.load(y + window * write.width)
        if alone:
            lost = write.load(marks + window * write.width) <= 0.0
        else:
            won = write.load(marks + window * write.tile.lanes, write.bytes).to(write.integer)
            lost = won.equals(rows * columns)
        passed = write.select(lost, write.zero, gradient)
        added.value += passed
        for row in range(rows):
            first = x + x_row * row + window * (columns * write.width)
            for column in range(columns):
                value = passed
                if not alone:
                    value = write.select(won.equals(row * columns + column), gradient, write.zero)
                write.put(value, first + column * write.width)
    write.add_lanes([added.value], total)


@on_tile(_ARGUMENTS)
def add_to_winners(write, x, x_row, x_column, rows, columns, number, number_step, y, winner, count, step):
    """Add the outputs to the positions that have won."""
    for first, output, at in _windows(write, x, y, winner, count, step):
        won, gradient = write.load(at, write.bytes).to(write.integer), write.load(output)
        for address, each in _positions(write, first, (x_row, x_column), (rows, columns), (number, number_step)):
            value = write.select(won.equals(each), gradient, write.zero)
            write.put(write.load(address) + value, address)


@on_tile(_ARGUMENTS)
def take_winners(write, x, x_row, x_column, rows, columns, number, number_step, y, winner, count, step):
    """Set the outputs to the positions that have won, or to zero where none has."""
    taken = Variable(write.zero)
    for first, output, at in _windows(write, x, y, winner, count, step):
        won = write.load(at, write.bytes).to(write.integer)
        taken.value = write.zero
        for address, each in _positions(write, first, (x_row, x_column), (rows, columns), (number, number_step)):
            taken.value = write.select(won.equals(each), write.load(address), taken.value)
        write.put(taken.value, output)


@kernel
def on_channels(first, last, set_row, x, y, marks, sums, blocks, channels, rows, columns, window, width, marks_width):
    """Call a function for each row of windows; rows are channels, and addresses and widths are in bytes."""
    sums[first:last] = 0
    sums_begin = sums.ctypes.data
    for channel in range(first, last):
        for block in range(blocks):
            for row in range(rows):
                at = ((block * channels + channel) * rows + row) * columns
                planes = (x + at * window[0] * window[1] * width, columns * window[1] * width, y + at * width)
                call(set_row, (*planes, marks + at * marks_width, columns, sums_begin + channel * sums.itemsize))


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
                steps = (window[6] * columns * width, window[7] * width)
                positions = (end_i - begin_i, end_j - begin_j, begin_i * window[1] + begin_j, window[1])
                outputs = (y + at * width, winners + at * lanes, count, window[3] * width)
                call(function, (x + source * width, *steps, *positions, *outputs))
                out_column += count
