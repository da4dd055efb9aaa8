"""Gradients of sums, from those of what ReLU, or ReLU and max-pooling, leave of them."""

from __future__ import annotations

import math

import torch

from ..runtime import SIMD, run_rows
from .deferred import Deferred
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


class GradientOfSums(Deferred):
    """The gradient of sums before it is computed, so that other kernels may read what it is computed from."""

    def __init__(
        self,
        y: torch.Tensor,
        marks: torch.Tensor,
        window: Pair = (1, 1),
        source: Deferred | None = None,
        has_two_summands: bool = False,
    ) -> None:
        self.y, self.marks, self.window = y, marks, window
        blocks, channels, rows, columns, lanes = y.shape
        self.shape, self.dtype = (blocks, channels, rows * window[0], columns * window[1], lanes), y.dtype
        #: The ReLU's output, where the windows' winners are those after ReLU.
        self.source = source
        #: Whether the sums have two summands, with this gradient each.
        self.has_two_summands = has_two_summands
        #: For each channel, all of it added, once it is computed.
        self.sums: torch.Tensor | None = None

    def compute(self) -> torch.Tensor:
        x, self.sums = gradient_of_sums(self.y, self.marks, self.window)
        return x
