"""Batch normalisation of blocks: functions for the vectors of a plane, and kernels that go over all channels.

A channel's elements are read several times in a row, so that they come from the second-level cache but for the first
time. In the last block, only the first lanes hold samples.

Addresses and widths are in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..codegen import DOUBLE, INT64, Register, Variable, call
from ..runtime import inlined, kernel
from .vectors import TileWriter, on_tile

#: Vectors whose sums are added up in the elements' dtype; the sums of as many are added in float64.
_SUMMED = 256


@contextmanager
def _two_sums(write: TileWriter, totals: Register) -> Iterator[Any]:
    """What adds vectors to two sums, in several chains; in the end all lanes are added to the float64 of `totals`."""
    sums = [[Variable(write.zero) for _ in range(write.tile.unrolled)] for _ in range(2)]

    def add(side: int, value: Register, factor: Register) -> None:
        """Add a value to the first sum, and its product with a factor to the second one."""
        sums[0][side].value += value
        sums[1][side].value = write.multiply_add(value, factor, sums[1][side].value)

    yield add
    for number, chains in enumerate(sums):
        write.add_lanes([chain.value for chain in chains], totals + 8 * number, DOUBLE)


@on_tile(4, 1)
def sum_deviations(write, x, count, samples, totals, centre):
    """``totals[0] += Σ (x - centre)`` and ``totals[1] += Σ (x - centre)²`` over the lanes of samples."""
    is_sample, centre = write.first_lanes(samples), write.filled(centre)
    with _two_sums(write, totals) as add:
        for place, side in write.side_by_side(write.value(0, INT64), count):
            deviation = write.select(is_sample, write.load(x + place * write.width) - centre, write.zero)
            add(side, deviation, deviation)


def _normalise(write, x, other, y, count, samples, centre, scale, shift, floor):
    is_sample = write.first_lanes(samples)
    centre, scale, shift, floor = (write.filled(each) for each in (centre, scale, shift, floor))
    with write.each(0, count) as place:
        distance = place * write.width
        result = write.multiply_add(write.load(x + distance) - centre, scale, shift)
        if other is not None:
            result = result + write.load(other + distance)
        # What is no number is not below the floor.
        result = write.select(result < floor, floor, result)
        write.put(write.select(is_sample, result, write.zero), y + distance)


@on_tile(5, 4)
def normalise(write, x, other, y, count, samples, centre, scale, shift, floor):
    """``y = max(floor, (x - centre) * scale + shift)``, and zeros in lanes without samples."""
    _normalise(write, x, None, y, count, samples, centre, scale, shift, floor)


@on_tile(5, 4)
def normalise_and_add(write, x, other, y, count, samples, centre, scale, shift, floor):
    """``y = max(floor, (x - centre) * scale + shift + other)``, and zeros in lanes without samples."""
    _normalise(write, x, other, y, count, samples, centre, scale, shift, floor)


@on_tile(7, 2)
def mask_and_sum(write, gradient, x, y, masked, count, samples, totals, centre, floor):
    """Set `masked` to the gradient where ``y > floor``, and ``totals += Σ masked, Σ masked * (x - centre)``.

    A floor that is no number masks nothing but lanes without samples.
    """
    is_sample, centre, floor = write.first_lanes(samples), write.filled(centre), write.filled(floor)
    with _two_sums(write, totals) as add:
        for place, side in write.side_by_side(write.value(0, INT64), count):
            distance = place * write.width
            of_output, value, output = (write.load(each + distance) for each in (gradient, x, y))
            of_sum = write.select((output <= floor) | ~is_sample, write.zero, of_output)
            write.put(of_sum, masked + distance)
            add(side, of_sum, value - centre)


@on_tile(5, 4)
def set_gradient(write, gradient, x, of_x, count, samples, centre, scale, slope, shift):
    """``of_x = scale * gradient + slope * (x - centre) + shift``, and zeros in lanes without samples."""
    is_sample = write.first_lanes(samples)
    centre, scale, slope, shift = (write.filled(each) for each in (centre, scale, slope, shift))
    with write.each(0, count) as place:
        distance = place * write.width
        of_sum, value = (write.load(each + distance) for each in (gradient, x))
        moved = write.multiply_add(slope, value - centre, shift)
        result = write.select(is_sample, write.multiply_add(scale, of_sum, moved), write.zero)
        write.put(result, of_x + distance)


@inlined
def _place_of(block, channel, channels, vectors, width):
    """Where a channel's plane begins in a block."""
    return (block * channels + channel) * vectors * width


@inlined
def _on_planes(
    function, x, other, y, channel, channels, blocks, vectors, lanes, last_samples, width, centre, scale, shift, last
):  # fmt: skip
    """Call a function of one plane of `x`, `other` and `y` for each of a channel's planes."""
    for block in range(blocks):
        begin = _place_of(block, channel, channels, vectors, width)
        samples = last_samples if block == blocks - 1 else lanes
        call(function, (x + begin, other + begin, y + begin, vectors, samples, centre, scale, shift, last))


@kernel
def measure_channels(
    first, last, sum_deviations, x, centres, moments, blocks, vectors, lanes, last_samples, width, count
):  # fmt: skip
    """Each channel's mean, rounded, and its mean and variance; rows are channels."""
    channels, moments_begin = len(centres), moments.ctypes.data
    for channel in range(first, last):
        centres[channel] = 0
        shift = 0.0
        for again in range(2):
            centre = centres[channel]
            moments[channel] = 0
            for block in range(blocks):
                begin = x + _place_of(block, channel, channels, vectors, width)
                samples = last_samples if block == blocks - 1 else lanes
                for vector in range(0, vectors, _SUMMED):
                    summed = min(_SUMMED, vectors - vector)
                    sums = moments_begin + 16 * channel
                    call(sum_deviations, (begin + vector * width, summed, samples, sums, centre))
            shift = moments[channel, 0] / count
            if not again:
                centres[channel] = shift
        variance = moments[channel, 1] / count - shift * shift
        moments[channel, 0] = centres[channel] + shift
        # Rounding alone makes it negative; what is no number stays so.
        moments[channel, 1] = 0.0 if variance < 0 else variance


@kernel
def normalise_channels(
    first, last, normalise, x, other, y, centres, moments, weight, bias, eps, floor, blocks, vectors, lanes,
    last_samples, width,
):  # fmt: skip
    """Normalise each channel by its mean and variance; rows are channels."""
    channels, kind = len(centres), centres.dtype.type
    for channel in range(first, last):
        scale = weight[channel] / math.sqrt(moments[channel, 1] + eps)
        shift = bias[channel] - (moments[channel, 0] - centres[channel]) * scale
        _on_planes(
            normalise, x, other, y, channel, channels, blocks, vectors, lanes, last_samples, width,
            centres[channel], kind(scale), kind(shift), floor,
        )  # fmt: skip


@kernel
def differentiate_channels(
    first, last, mask_and_sum, set_gradient, gradient, x, y, masked, of_x, centres, moments, weight, eps, floor, sums,
    blocks, vectors, lanes, last_samples, width, count,
):  # fmt: skip
    """The gradients of what is normalised, unless its address is 0, and of bias and weight; rows are channels."""
    channels, kind, sums_begin = len(centres), centres.dtype.type, sums.ctypes.data
    for channel in range(first, last):
        sums[channel] = 0
        for block in range(blocks):
            begin = _place_of(block, channel, channels, vectors, width)
            samples = last_samples if block == blocks - 1 else lanes
            for vector in range(0, vectors, _SUMMED):
                at, summed, totals = begin + vector * width, min(_SUMMED, vectors - vector), sums_begin + 16 * channel
                addresses = (gradient + at, x + at, y + at, masked + at)
                call(mask_and_sum, (*addresses, summed, samples, totals, centres[channel], floor))
        inverse, shift = 1 / math.sqrt(moments[channel, 1] + eps), moments[channel, 0] - centres[channel]
        sums[channel, 1] = (sums[channel, 1] - shift * sums[channel, 0]) * inverse
        if of_x:
            scale = weight[channel] * inverse
            slope = -scale * inverse * sums[channel, 1] / count
            moved = -scale * sums[channel, 0] / count - slope * shift
            _on_planes(
                set_gradient, masked, x, of_x, channel, channels, blocks, vectors, lanes, last_samples, width,
                centres[channel], kind(scale), kind(slope), kind(moved),
            )  # fmt: skip
