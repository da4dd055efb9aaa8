"""Kernels that fill or read values, each in one pass over memory.

Sources have the batch outermost, as PyTorch lays them out; values have the batch innermost. With one sample the two
agree, and the flat kernels run along the entries instead of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..runtime import SIMD, frozen, kernel, memory_for, on_device, run_rows, uploaded
from . import value_kernels_cuda

if TYPE_CHECKING:
    from .pattern import Pattern
    from .rules import Call

#: Elements of a run that are copied in the time of one elementary operation: four times as many as are looked up.
_COPYING = 4 * SIMD


@kernel
def _take(first, last, source, place, out):
    place, out = place[first:last], out[first:last]
    for entry in range(len(out)):
        out[entry] = source[place[entry]]


@kernel
def _repeat(first, last, source, start, indptr, out):
    for row in range(first, last):
        entry, size = indptr[row], indptr[row + 1] - indptr[row]
        values, template = out[entry : entry + size], source[start[row] : start[row] + size]
        for place in range(len(values)):
            values[place] = template[place]


@kernel
def _repeat_shifted(first, last, source, start, indptr, out, shift):
    for row in range(first, last):
        entry, size = indptr[row], indptr[row + 1] - indptr[row]
        values, template, offset = out[entry : entry + size], source[start[row] : start[row] + size], shift[row]
        for place in range(len(values)):
            values[place] = template[place] + offset


@kernel
def _positive(first, last, source, out):
    source, out = source[first:last], out[first:last]
    zero, one = out.dtype.type(0), out.dtype.type(1)
    for entry in range(len(out)):
        # Not `> 0`: PyTorch lets the gradient of a NaN pass.
        out[entry] = zero if source[entry] <= zero else one


@kernel
def _positive_batch(first, last, source, out):
    for entry in range(first, last):
        for sample in range(out.shape[1]):
            out[entry, sample] = 0 if source[sample, entry] <= 0 else 1


@kernel
def _selected(first, last, winner, window, position, out):
    window, position, out = window[first:last], position[first:last], out[first:last]
    zero, one = out.dtype.type(0), out.dtype.type(1)
    for entry in range(len(out)):
        out[entry] = one if winner[window[entry]] == position[entry] else zero


@kernel
def _placed(first, last, winner, windows, entry, entries, out):
    one = out.dtype.type(1)
    for channel in range(first, last):
        values = out[channel * entries : (channel + 1) * entries]
        values[:] = 0
        winners = winner[channel * windows : (channel + 1) * windows]
        for window in range(len(winners)):
            values[entry[winners[window]]] = one


@kernel
def _placed_batch(first, last, winner, windows, entry, entries, out):
    for channel in range(first, last):
        start = channel * entries
        out[start : start + entries] = 0
        for window in range(channel * windows, (channel + 1) * windows):
            for sample in range(out.shape[1]):
                out[start + np.int64(entry[winner[sample, window]]), sample] = 1


@kernel
def _selected_batch(first, last, winner, window, position, out):
    for entry in range(first, last):
        for sample in range(out.shape[1]):
            out[entry, sample] = 1 if winner[sample, window[entry]] == position[entry] else 0


@kernel
def _any_nonzero_at(first, last, source, mask, result):
    source, mask = source[first:last], mask[first:last]
    nonzero = False
    for place in range(len(source)):
        nonzero |= (source[place] != 0) & mask[place]
    if nonzero:
        result[0] = True


def any_nonzero_at(source: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether an element is not zero where a mask is true; both flat."""
    if on_device(source) or source.dtype not in (torch.float32, torch.float64):
        return bool(((source != 0) & mask).any())
    result = np.zeros(1, dtype=bool)
    run_rows(_any_nonzero_at, len(source), _flat(source), mask.numpy(), result)
    return bool(result[0])


def take(source: torch.Tensor, place: np.ndarray) -> torch.Tensor:
    """``source.flatten()[place]`` as values that all samples share, shape ``(len(place), 1)``."""
    if on_device(source):
        return value_kernels_cuda.take(source, place)
    out = torch.empty((len(place), 1), dtype=source.dtype, device="cpu")
    # Elements are looked up one by one.
    run_rows(_take, len(place), _flat(source), place, out.numpy().reshape(-1), lanes=SIMD)
    return out


def constants(call: Call, pattern: Pattern, make: Callable[[], np.ndarray]) -> torch.Tensor:
    """Numbers that a call's arguments decide alone, made once for a pattern, on the input's device: to be read."""
    key = call.operator, call.in_shape, repr(call.arguments)
    numbers = pattern._constants.get(key)
    if numbers is None:
        numbers = pattern._constants[key] = frozen(make())
    return uploaded(numbers, call.input.device, call.input.dtype)


def repeated(template: torch.Tensor, start: np.ndarray, indptr: np.ndarray) -> torch.Tensor:
    """Values, ``(nnz, 1)``: each row is a run of `template`, ``(entries, 1)``, that begins at ``start[row]``."""
    if on_device(template):
        return value_kernels_cuda.repeat_rows(template, start, indptr)
    out = torch.empty((int(indptr[-1]), 1), dtype=template.dtype, device="cpu")
    run_rows(_repeat, indptr // _COPYING, template.numpy().reshape(-1), start, indptr, out.numpy().reshape(-1))
    return out


def repeated_shifted(template: np.ndarray, start: np.ndarray, indptr: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """Indices, ``(nnz,)``: each row is a run of `template` that begins at ``start[row]``, plus ``shift[row]``."""
    out = np.empty(int(indptr[-1]), dtype=template.dtype)
    run_rows(_repeat_shifted, indptr // _COPYING, template, start, indptr, out, shift)
    return out


def positive(source: torch.Tensor) -> torch.Tensor:
    """One where an element is not ``<= 0``, else zero; ``(batch, ...)`` to ``(elements, batch)``."""
    if on_device(source):
        return value_kernels_cuda.positive(source)
    batch, elements = _sizes(source)
    out = torch.empty((elements, batch), dtype=source.dtype, device="cpu")
    if batch == 1:
        run_rows(_positive, elements, _flat(source), out.numpy().reshape(-1))
    else:
        run_rows(_positive_batch, elements, _flat(source).reshape(batch, elements), out.numpy(), lanes=batch)
    return out


def selected(winner: torch.Tensor, window: np.ndarray, position: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """One for each entry whose position wins its window, else zero, ``(entries, batch)``; winners ``(batch, ...)``."""
    if on_device(winner):
        return value_kernels_cuda.selected(winner, window, position, dtype)
    batch, windows = _sizes(winner)
    out = torch.empty((len(window), batch), dtype=dtype, device="cpu")
    if batch == 1:
        run_rows(_selected, len(window), _flat(winner), window, position, out.numpy().reshape(-1))
    else:
        winners = _flat(winner).reshape(batch, windows)
        run_rows(_selected_batch, len(window), winners, window, position, out.numpy(), lanes=batch)
    return out


def placed(winner: torch.Tensor, entry: np.ndarray, entries: int, dtype: torch.dtype) -> torch.Tensor:
    """As `selected`, for windows that do not overlap; `entry` maps positions of a channel to its `entries` entries."""
    # Winners are int64, (batch, channels, ...).
    batch, windows = _sizes(winner)
    channels = winner.shape[1]
    out = torch.empty((channels * entries, batch), dtype=dtype, device="cpu")
    work = np.arange(channels + 1) * (entries // SIMD)
    # Unsigned: signed indices may be negative, and would be checked one by one.
    winners, sizes = _flat(winner).view(np.uint64), (windows // max(1, channels), entry, entries)
    if batch == 1:
        run_rows(_placed, work, winners, *sizes, out.numpy().reshape(-1))
    else:
        run_rows(_placed_batch, work, winners.reshape(batch, windows), *sizes, out.numpy(), lanes=batch)
    return out


def gathered(values: torch.Tensor, place: np.ndarray) -> torch.Tensor:
    """The rows of `values` at the places in a read-only array."""
    if on_device(values):
        places = uploaded(place, values.device)
        shape = (len(place), *values.shape[1:])
        with memory_for("reordered values", shape, values.dtype, values.device, math.prod(shape[1:])):
            return values[places]
    # Gradients are slower with 32-bit places.
    return rows_at(values, torch.from_numpy(place.astype(np.int64)))


def rows_at(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The rows of `values` at some places, several times as fast as ``values[places]``."""
    if values.ndim == 2 and values.shape[1] == 1:
        # Several times as fast again as from a matrix.
        return values[:, 0].index_select(0, places)[:, None]
    return values.index_select(0, places)


def batch_last(tensor: torch.Tensor) -> torch.Tensor:
    """``(batch, ...)`` as ``(elements, batch)``, contiguous."""
    batch, elements = _sizes(tensor)
    return tensor.reshape(batch, elements).T.contiguous()


def _sizes(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.shape[0], math.prod(tensor.shape[1:])


def _flat(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().numpy().reshape(-1)
