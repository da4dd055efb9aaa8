"""Kernels that fill values, or look at them: each is one pass over memory.

Sources lie as PyTorch keeps them, the batch outermost; values have the batch innermost. Where there is one sample the
two agree, and the flat kernels run along the entries instead of the batch.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from . import _values_cuda
from ._cuda import memory_for, on_device, uploaded
from ._runtime import SIMD, kernel, run_rows

__all__ = [
    "any_nonzero_at",
    "batch_last",
    "gathered",
    "placed",
    "positive",
    "repeat_rows",
    "repeated",
    "selected",
    "take",
]


@kernel
def _take(first, last, source, place, out):
    place, out = place[first:last], out[first:last]
    for entry in range(len(out)):
        out[entry] = source[place[entry]]


@kernel
def _repeat(first, last, source, start, indptr, out):
    for row in range(first, last):
        entry, size = indptr[row], indptr[row + 1] - indptr[row]
        own, template = out[entry : entry + size], source[start[row] : start[row] + size]
        for place in range(len(own)):
            own[place] = template[place]


@kernel
def _repeat_shifted(first, last, source, start, indptr, out, shift):
    for row in range(first, last):
        entry, size = indptr[row], indptr[row + 1] - indptr[row]
        own, template, more = out[entry : entry + size], source[start[row] : start[row] + size], shift[row]
        for place in range(len(own)):
            own[place] = template[place] + more


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
        own = out[channel * entries : (channel + 1) * entries]
        own[:] = 0
        winners = winner[channel * windows : (channel + 1) * windows]
        for window in range(len(winners)):
            own[entry[winners[window]]] = one


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
def _any_nonzero_at(first, last, source, where, found):
    source, where = source[first:last], where[first:last]
    some = False
    for place in range(len(source)):
        some |= (source[place] != 0) & where[place]
    if some:
        found[0] = True


def any_nonzero_at(source: torch.Tensor, where: torch.Tensor) -> bool:
    """Whether an element is not zero where a mask is true; both flat."""
    if on_device(source) or source.dtype not in (torch.float32, torch.float64):
        return bool(((source != 0) & where).any())
    found = np.zeros(1, dtype=bool)
    run_rows(_any_nonzero_at, len(source), _flat(source), where.numpy(), found)
    return bool(found[0])


def take(source: torch.Tensor, place: np.ndarray) -> torch.Tensor:
    """``source.flatten()[place]`` as values that all samples share, shape ``(len(place), 1)``."""
    if on_device(source):
        return _values_cuda.take(source, place)
    out = torch.empty((len(place), 1), dtype=source.dtype)
    run_rows(_take, len(place), _flat(source), place, out.numpy().reshape(-1))
    return out


def repeated(template: torch.Tensor, start: np.ndarray, indptr: np.ndarray, work: np.ndarray) -> torch.Tensor:
    """Values whose each row is what `template`, ``(entries, 1)``, holds from ``start[row]`` on; ``(nnz, 1)``."""
    if on_device(template):
        return _values_cuda.repeat_rows(template, start, indptr)
    out = torch.empty((int(indptr[-1]), 1), dtype=template.dtype)
    repeat_rows(template.numpy().reshape(-1), start, indptr, work, out.numpy().reshape(-1))
    return out


def repeat_rows(
    source: np.ndarray,
    start: np.ndarray,
    indptr: np.ndarray,
    work: np.ndarray,
    out: np.ndarray,
    shift: np.ndarray | None = None,
) -> None:
    """Fill each row of `out` with what `source` holds from ``start[row]`` on, plus ``shift[row]`` where given."""
    if shift is None:
        run_rows(_repeat, work, source, start, indptr, out)
    else:
        run_rows(_repeat_shifted, work, source, start, indptr, out, shift)


def positive(source: torch.Tensor) -> torch.Tensor:
    """One where an element is not ``<= 0``, else zero; ``(batch, ...)`` to ``(elements, batch)``."""
    if on_device(source):
        return _values_cuda.positive(source)
    batch, elements = _sizes(source)
    out = torch.empty((elements, batch), dtype=source.dtype)
    if batch == 1:
        run_rows(_positive, elements, _flat(source), out.numpy().reshape(-1))
    else:
        run_rows(_positive_batch, elements, _flat(source).reshape(batch, elements), out.numpy(), lanes=batch)
    return out


def selected(winner: torch.Tensor, window: np.ndarray, position: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """One for each entry whose position is its window's winner, else zero.

    Parameters
    ----------
    winner : Tensor of int64, (batch, ...)
        Position that wins each window.
    window, position : ndarray of int, (entries,)
        Of each entry.
    dtype : torch.dtype
        Of the result, ``(entries, batch)``.
    """
    if on_device(winner):
        return _values_cuda.selected(winner, window, position, dtype)
    batch, windows = _sizes(winner)
    out = torch.empty((len(window), batch), dtype=dtype)
    if batch == 1:
        run_rows(_selected, len(window), _flat(winner), window, position, out.numpy().reshape(-1))
    else:
        places = _flat(winner).reshape(batch, windows)
        run_rows(_selected_batch, len(window), places, window, position, out.numpy(), lanes=batch)
    return out


def placed(winner: torch.Tensor, entry: np.ndarray, entries: int, dtype: torch.dtype) -> torch.Tensor:
    """As `selected`, for windows that do not overlap: zeros, and a one at each winner.

    Parameters
    ----------
    winner : Tensor of int64, (batch, channels, ...)
        Position in its channel that wins each window.
    entry : ndarray of uint32, (positions,)
        The one entry of each position of a channel, among the channel's.
    entries : int
        Of a channel.
    dtype : torch.dtype
        Of the result, ``(channels · entries, batch)``.
    """
    batch, windows = _sizes(winner)
    channels = winner.shape[1]
    out = torch.empty((channels * entries, batch), dtype=dtype)
    work = np.arange(channels + 1) * (entries // SIMD)
    # Unsigned: a signed place might be a negative one, which would be a check for each.
    places, sizes = _flat(winner).view(np.uint64), (windows // max(1, channels), entry, entries)
    if batch == 1:
        run_rows(_placed, work, places, *sizes, out.numpy().reshape(-1))
    else:
        run_rows(_placed_batch, work, places.reshape(batch, windows), *sizes, out.numpy(), lanes=batch)
    return out


def gathered(values: torch.Tensor, place: np.ndarray) -> torch.Tensor:
    """The rows of `values` at these places, a read-only array."""
    if on_device(values):
        places = uploaded(place, values.device)
        shape = (len(place), *values.shape[1:])
        with memory_for("reordered values", shape, values.dtype, values.device, math.prod(shape[1:])):
            return values[places]
    return values[torch.from_numpy(place.astype(np.int64))]


def batch_last(tensor: torch.Tensor) -> torch.Tensor:
    """``(batch, ...)`` as ``(elements, batch)``, contiguous."""
    batch, elements = _sizes(tensor)
    return tensor.reshape(batch, elements).T.contiguous()


def _sizes(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.shape[0], math.prod(tensor.shape[1:])


def _flat(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().numpy().reshape(-1)
