"""Gradients of sums, from those of what ReLU, or ReLU and max-pooling, leave of them."""

from __future__ import annotations

import math

import torch
from numba.core import cgutils

from ..runtime import SIMD, kernel, run_rows
from .kernel_runs import empty
from .processor import vector_widths
from .vectors import INT64, Tile, call, on_tile
from .windows import Pair

#: How many elementary operations take the time in which a vector is written to memory.
_STORE = 5


@on_tile(6)
def set_row(write, x, x_row, y, kept, count, total):
    """Set a row of windows to the gradients of the windows, and add these to ``total[0]``.

    The windows are the tile's, and cover each position once. A gradient stands where its window's winner is, as the
    bytes that were kept say, and the other positions get zeros. Of windows of one position the outputs were kept: those
    that are not above zero have no gradient.
    """
    builder, (rows, columns) = write.builder, write.tile.pool
    alone = (rows, columns) == (1, 1)
    added = cgutils.alloca_once_value(builder, write.zero)
    with write.each(INT64(0), count) as window:
        gradient = write.load(write.shifted(y, write.width, window))
        if alone:
            won, none = write.load(write.shifted(kept, write.width, window)), write.zero
            lost = builder.fcmp_ordered("<=", won, none)
        else:
            won = write.widened(write.load(write.shifted(kept, write.tile.lanes, window), write.bytes))
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


@kernel
def on_channels(first, last, set_row, x, y, kept, sums, blocks, channels, rows, columns, window, width, kept_width):
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
                        kept + at * kept_width,
                        columns,
                        sums_begin + channel * sums.itemsize,
                    ),
                )


def gradient_of_sums(y: torch.Tensor, kept: torch.Tensor, window: Pair = (1, 1)) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of sums from `y`, that of their maxima in windows after ReLU, and for each channel all of it added.

    Parameters
    ----------
    y : Tensor
        Blocks, contiguous, of an element for each window.
    kept : Tensor
        The windows' winners, in bytes; or the outputs, where a window is one position.
    window : tuple of int
        Rows and columns of the windows, which cover each position once.
    """
    blocks, channels, rows, columns, lanes = y.shape
    x = empty((blocks, channels, rows * window[0], columns * window[1], lanes), y.dtype)
    sums = torch.empty(channels, dtype=y.dtype)
    if window == (1, 1):
        # A plane is one row of the widest vectors that it is made of.
        elements = rows * columns * lanes
        lanes = math.gcd(elements, vector_widths()[0] // y.itemsize)
        rows, columns = 1, elements // lanes
    tile = Tile(y.itemsize, lanes, pool=window)
    run_rows(
        on_channels,
        channels,
        set_row(tile),
        x.data_ptr(),
        y.data_ptr(),
        kept.data_ptr(),
        sums.numpy(),
        blocks,
        channels,
        rows,
        columns,
        window,
        lanes * y.itemsize,
        lanes * kept.itemsize,
        lanes=_STORE * SIMD * blocks * rows * columns * window[0] * window[1],
    )
    return x, sums
