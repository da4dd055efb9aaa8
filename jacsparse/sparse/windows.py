"""Which input positions an output position reads, and tiles of output positions whose sums fit the registers.

A convolution and its input gradient are one kind of operator: each output position adds up, over taps, inputs at
``in_step * position + offset``. The input gradient of a convolution with a stride has as many phases as the stride has
positions, and each tap belongs to one of them.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

import numpy as np

from ..runtime import frozen

Pair = tuple[int, int]

#: Kernels with more taps have tiles of one row, so that there are few ways in which a border cuts a tile.
_MOST_TAPS = 25


class Window(NamedTuple):
    """The window of a convolution: `padding` is that before the first row and column."""

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair


class Tap(NamedTuple):
    """One offset: the output positions ``phase + out_step * i`` read the input at ``in_step * i + offset``."""

    phase: Pair
    offset: Pair


class Reading(NamedTuple):
    """What each output position reads."""

    in_size: Pair
    out_size: Pair
    in_step: Pair
    out_step: Pair
    #: In the order of an output channel's weights.
    taps: tuple[Tap, ...]


class PlaneTiles(NamedTuple):
    """The tiles of a plane, all of one size.

    Within a tile, a tap reaches those of its positions whose inputs are no border: a rectangle. Taps with the same
    rectangle that follow each other form a group.
    """

    rows: int
    columns: int
    #: The step between input columns.
    step: int
    #: Rectangles ``(first row, last row, first column, last column)``, the last ones exclusive.
    rectangles: tuple[tuple[int, int, int, int], ...]
    #: For each tile: its first input position, first output position, the address of its first group, how many groups,
    #: and how many of its columns are the tile's before it too.
    table: np.ndarray
    #: For each group: its first tap, its last one (exclusive), and its rectangle.
    groups: np.ndarray


def places(window: Window) -> list[Pair]:
    """The kernel's places ``(row, column)`` in the order of an output channel's weights.

    Columns are outermost: where a tile is one row, all places of one column reach the same positions of it.
    """
    rows, columns = window.kernel
    return [(row, column) for column in range(columns) for row in range(rows)]


def transposed_places(window: Window) -> list[Pair]:
    """The kernel's places in the order of an input channel's weights: phase by phase."""
    return sorted(places(window), key=lambda place: (_phase(window, place)[::-1], place[::-1]))


def _phase(window: Window, place: Pair) -> Pair:
    """Which input positions, modulo the stride, meet a place of the kernel."""
    _, stride, padding, dilation = window
    row, column = ((place[axis] * dilation[axis] - padding[axis]) % stride[axis] for axis in (0, 1))
    return row, column


def reading(window: Window, in_size: Pair, out_size: Pair) -> Reading:
    """What a convolution's outputs read of its input."""
    _, stride, padding, dilation = window
    offsets = [(row * dilation[0] - padding[0], column * dilation[1] - padding[1]) for row, column in places(window)]
    return Reading(in_size, out_size, stride, (1, 1), tuple(Tap((0, 0), offset) for offset in offsets))


def transposed_reading(window: Window, in_size: Pair, out_size: Pair) -> Reading:
    """What the gradient of a convolution's input reads of its output's: `in_size` is the convolution's."""
    _, stride, padding, dilation = window
    taps = []
    for place in transposed_places(window):
        phase = _phase(window, place)
        row, column = ((phase[axis] + padding[axis] - place[axis] * dilation[axis]) // stride[axis] for axis in (0, 1))
        taps.append(Tap(phase, (row, column)))
    return Reading(out_size, in_size, (1, 1), stride, tuple(taps))


@functools.lru_cache(maxsize=1024)
def tiles(reading: Reading, most: int, pool: Pair = (1, 1), along: int = 1) -> PlaneTiles:
    """Tiles of at most `most` vectors that cover all output positions.

    A vector is a position, or as many columns as `along` says.

    Where the columns are no multiple of a tile's, the last tile of a row begins earlier, and what two tiles share is
    computed twice. With `pool`, tiles are made of whole windows of as many rows and columns, of which each leaves one
    output position.
    """
    phases = sorted(itertools.product(range(reading.out_step[0]), range(reading.out_step[1])))
    sizes = {phase: _phase_size(reading, phase) for phase in phases}
    present = [phase for phase in phases if min(sizes[phase]) > 0]
    rows, columns = _tile_size([sizes[phase] for phase in present], most, len(reading.taps), pool, along)
    rectangles: dict[tuple[int, int, int, int], int] = {}
    table: list[tuple[int, ...]] = []
    groups: list[tuple[int, int, int]] = []
    for phase in present:
        height, width = sizes[phase]
        lefts = _starts(width, columns)
        for top, number in itertools.product(range(0, height, rows), range(len(lefts))):
            corner = top, lefts[number]
            shared = columns - lefts[number] + lefts[number - 1] if number else 0
            found = _groups(reading, phase, corner, (rows, columns), rectangles)
            at_in = corner[0] * reading.in_step[0] * reading.in_size[1] + corner[1] * reading.in_step[1]
            at_out = (phase[0] + corner[0] * reading.out_step[0]) // pool[0] * (reading.out_size[1] // pool[1])
            at_out += (phase[1] + corner[1] * reading.out_step[1]) // pool[1]
            table.append((at_in, at_out, len(groups), len(found), shared))
            groups += found
    places, of_groups = (np.array(each, dtype=np.int64).reshape(-1, width) for each, width in ((table, 5), (groups, 3)))
    of_groups = frozen(of_groups.astype(np.int32))
    places[:, 2] = of_groups.ctypes.data + of_groups.strides[0] * places[:, 2]
    return PlaneTiles(rows, columns, reading.in_step[1], tuple(rectangles), frozen(places), of_groups)


def _phase_size(reading: Reading, phase: Pair) -> Pair:
    rows, columns = (-(-(reading.out_size[axis] - phase[axis]) // reading.out_step[axis]) for axis in (0, 1))
    return max(rows, 0), max(columns, 0)


def _tile_size(sizes: list[Pair], most: int, taps: int, pool: Pair, along: int) -> Pair:
    """Rows and columns of tiles: as many columns as fit, and as many rows as divide all heights."""
    narrowest = min((columns for _, columns in sizes), default=1)
    if along > 1:
        columns = along * (1 if narrowest % along else _largest_divisor(narrowest // along, most, 1))
    elif pool == (1, 1):
        columns = -(-narrowest // -(-narrowest // most))
    else:
        columns = _largest_divisor(narrowest, most // pool[0], pool[1])
    heights = {rows for rows, _ in sizes}
    fitting = pool[0] if taps > _MOST_TAPS else most // (columns // along)
    return _largest_divisor(math.gcd(*heights), fitting, pool[0]), columns


def _largest_divisor(size: int, most: int, unit: int) -> int:
    """The largest divisor of `size` that is a multiple of `unit` and at most `most`, or `unit`."""
    return max(count for count in range(unit, max(most, unit) + 1, unit) if size % count == 0 or count == unit)


def _starts(width: int, columns: int) -> list[int]:
    return sorted({min(start, width - columns) for start in range(0, width, columns)})


def _groups(
    reading: Reading, phase: Pair, corner: Pair, size: Pair, rectangles: dict[tuple[int, int, int, int], int]
) -> list[tuple[int, int, int]]:
    groups: list[tuple[int, int, int]] = []
    for number, tap in enumerate(reading.taps):
        if tap.phase != phase:
            continue
        (top, bottom), (left, right) = (
            _reached(
                corner[axis] * reading.in_step[axis] + tap.offset[axis],
                reading.in_step[axis],
                size[axis],
                reading.in_size[axis],
            )
            for axis in (0, 1)
        )
        if top >= bottom or left >= right:
            continue
        rectangle = rectangles.setdefault((top, bottom, left, right), len(rectangles))
        if groups and groups[-1][1:] == (number, rectangle):
            groups[-1] = (groups[-1][0], number + 1, rectangle)
        else:
            groups.append((number, number + 1, rectangle))
    return groups


def inside(window: Window, in_size: Pair, out_size: Pair) -> float:
    """The share of a window's products that do not meet the border."""
    shares = []
    for axis, (taps, step) in enumerate(zip(window.kernel, window.stride, strict=True)):
        starts = [tap * window.dilation[axis] - window.padding[axis] for tap in range(taps)]
        spans = [_reached(start, step, out_size[axis], in_size[axis]) for start in starts]
        shares.append(sum(max(0, last - first) for first, last in spans) / max(1, taps * out_size[axis]))
    return math.prod(shares)


def _reached(start: int, step: int, count: int, size: int) -> Pair:
    """Which ``i < count`` have ``0 <= start + step * i < size``."""
    return max(0, -(start // step)), min(count, -((start - size) // step))
