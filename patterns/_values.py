"""Kernels that fill values: each is one pass over memory.

Sources lie as PyTorch keeps them, the batch outermost; values have the batch innermost. Where there is one sample the
two agree, and the flat kernels run along the entries instead of the batch.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from ._runtime import kernel, run_rows

__all__ = ["batch_last", "positive", "selected", "take"]


@kernel
def _take(first, last, source, place, out):
    for entry in range(first, last):
        out[entry] = source[place[entry]]


@kernel
def _positive(first, last, source, out):
    for entry in range(first, last):
        # Not `> 0`: PyTorch lets the gradient of a NaN pass.
        out[entry] = 0 if source[entry] <= 0 else 1


@kernel
def _positive_batch(first, last, source, out):
    for entry in range(first, last):
        for sample in range(out.shape[1]):
            out[entry, sample] = 0 if source[sample, entry] <= 0 else 1


@kernel
def _selected(first, last, winner, window, position, out):
    for entry in range(first, last):
        out[entry] = 1 if winner[window[entry]] == position[entry] else 0


@kernel
def _selected_batch(first, last, winner, window, position, out):
    for entry in range(first, last):
        for sample in range(out.shape[1]):
            out[entry, sample] = 1 if winner[sample, window[entry]] == position[entry] else 0


def take(source: torch.Tensor, place: np.ndarray) -> torch.Tensor:
    """``source.flatten()[place]`` as values that all samples share, shape ``(len(place), 1)``."""
    out = torch.empty((len(place), 1), dtype=source.dtype)
    run_rows(_take, len(place), _flat(source), place, out.numpy().reshape(-1))
    return out


def positive(source: torch.Tensor) -> torch.Tensor:
    """One where an element is not ``<= 0``, else zero; ``(batch, ...)`` to ``(elements, batch)``."""
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
    batch, windows = _sizes(winner)
    out = torch.empty((len(window), batch), dtype=dtype)
    if batch == 1:
        run_rows(_selected, len(window), _flat(winner), window, position, out.numpy().reshape(-1))
    else:
        places = _flat(winner).reshape(batch, windows)
        run_rows(_selected_batch, len(window), places, window, position, out.numpy(), lanes=batch)
    return out


def batch_last(tensor: torch.Tensor) -> torch.Tensor:
    """``(batch, ...)`` as ``(elements, batch)``, contiguous."""
    batch, elements = _sizes(tensor)
    return tensor.reshape(batch, elements).T.contiguous()


def _sizes(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.shape[0], math.prod(tensor.shape[1:])


def _flat(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().contiguous().view(-1).numpy()
