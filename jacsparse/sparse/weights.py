"""Where a layer's weights that are left stand: per output channel, and per input channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from ..runtime import frozen, row_starts
from .windows import Window, places, transposed_places


@dataclass(frozen=True, eq=False)
class Entries:
    """Weights in rows, a row for each channel that is computed; in a row, tap by tap."""

    #: The number of channels that are computed, and of those that are read.
    channels: int
    sources: int
    #: For each channel and tap, its first weight; at the end, their number.
    starts: np.ndarray
    #: For each weight, the channel that it reads, and its tap.
    source: np.ndarray
    tap: np.ndarray


@dataclass(frozen=True, eq=False)
class WeightPlaces:
    """The places of the weights that are left, for both directions; copies of a layer share them.

    Parameters
    ----------
    mask : Tensor of bool, shape (out_channels, in_channels // groups, rows, columns)
        Which weights are left.
    window : Window
        The convolution's window.
    groups : int
        Its groups.
    """

    #: Flat places in the dense weight, in the order in which the layer holds its weights.
    places: torch.Tensor
    #: Each weight's output channel.
    outputs: torch.Tensor
    forward: Entries
    transposed: Entries
    #: For each weight of `transposed`, its number in the layer's order.
    order: torch.Tensor
    #: For each weight in the layer's order, its number in `transposed`.
    inverse: torch.Tensor

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    @classmethod
    def of(cls, mask: torch.Tensor, window: Window, groups: int) -> WeightPlaces:
        out_channels, group_inputs, rows, columns = mask.shape
        output, source, row, column = (index.numpy() for index in mask.nonzero(as_tuple=True))
        flat = np.ravel_multi_index((output, source, row, column), tuple(mask.shape))
        source = source + output // (out_channels // groups) * group_inputs
        forward_tap, transposed_tap = (
            _numbers(order, (rows, columns))[row, column] for order in (places(window), transposed_places(window))
        )
        order = np.lexsort((source, forward_tap, output))
        output, source, flat, forward_tap, transposed_tap = (
            array[order] for array in (output, source, flat, forward_tap, transposed_tap)
        )
        back = np.lexsort((output, transposed_tap, source))
        in_channels, taps = group_inputs * groups, rows * columns
        return cls(
            torch.from_numpy(flat),
            torch.from_numpy(output),
            _entries(out_channels, in_channels, taps, output, source, forward_tap),
            _entries(in_channels, out_channels, taps, source[back], output[back], transposed_tap[back]),
            torch.from_numpy(back.astype(np.int32)),
            torch.from_numpy(np.argsort(back).astype(np.int32)),
        )


def _numbers(order: list[tuple[int, int]], shape: tuple[int, int]) -> np.ndarray:
    numbers = np.empty(shape, dtype=np.int32)
    for number, place in enumerate(order):
        numbers[place] = number
    return numbers


def _entries(
    channels: int, sources: int, taps: int, channel: np.ndarray, source: np.ndarray, tap: np.ndarray
) -> Entries:
    counts = np.bincount(channel.astype(np.int64) * taps + tap, minlength=channels * taps)
    return Entries(
        channels,
        sources,
        frozen(row_starts(counts, np.int32)),
        frozen(source.astype(np.int32)),
        frozen(tap.astype(np.int32)),
    )
