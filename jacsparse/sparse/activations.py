"""Gradients of sums, from those of what ReLU, or ReLU and max-pooling, leave of them."""

from __future__ import annotations

import math

import torch

from ..runtime import SIMD, run_rows
from .kernel_runs import empty
from .pooling_kernels import on_channels, set_row
from .processor import vector_widths
from .vectors import Tile
from .windows import Pair

#: How many elementary operations take the time in which a vector is written to memory.
_STORE = 5


def gradient_of_sums(y: torch.Tensor, marks: torch.Tensor, window: Pair = (1, 1)) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of sums from `y`, that of their maxima in windows after ReLU, and for each channel all of it added.

    Parameters
    ----------
    y : Tensor
        Blocks, contiguous, of an element for each window.
    marks : Tensor
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
        marks.data_ptr(),
        sums.numpy(),
        blocks,
        channels,
        rows,
        columns,
        window,
        lanes * y.itemsize,
        lanes * marks.itemsize,
        lanes=_STORE * SIMD * blocks * rows * columns * window[0] * window[1],
    )
    return x, sums
