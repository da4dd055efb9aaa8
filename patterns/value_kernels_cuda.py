"""The functions of `value_kernels` on CUDA tensors."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from ..runtime import (
    INDEX,
    REAL,
    THREADS,
    KernelFile,
    allocated,
    blocks,
    c_type,
    host_flag,
    index_type,
    instances,
    multiprocessors,
    uploaded,
)

_FILE = KernelFile(
    Path(__file__).parent / "kernels" / "values.cu",
    (
        *instances("take", REAL, ("int",)),
        *instances("repeat_rows", REAL, INDEX),
        *instances("positive", REAL),
        *instances("selected", REAL, INDEX),
        *instances("note_infinite", REAL),
    ),
)


def _values(entries: int, batch: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return allocated("values of a Jacobian", (entries, batch), dtype, device, batch)


def take(source: torch.Tensor, place: np.ndarray) -> torch.Tensor:
    """``source.flatten()[place]``, shape ``(len(place), 1)``; the places are those of a weight, below 2^31."""
    source = source.detach().contiguous()
    out = _values(len(place), 1, source.dtype, source.device)
    kernel = f"take<{c_type(source.dtype)}, int>"
    indices = uploaded(place, source.device, torch.int32)
    _FILE.launch(kernel, [blocks(len(place))], [THREADS], source, indices, len(place), out, device=source.device)
    return out


def repeat_rows(source: torch.Tensor, start: np.ndarray, indptr: np.ndarray) -> torch.Tensor:
    """Values, ``(nnz, 1)``: each row is a run of `source` that begins at ``start[row]``."""
    rows, nnz = len(indptr) - 1, int(indptr[-1])
    out = _values(nnz, 1, source.dtype, source.device)
    starts = uploaded(indptr, source.device, index_type(indptr))
    # Threads for each row: the average number of its entries, up to a warp.
    width = min(32, 1 << max(0, math.ceil(math.log2(max(1, nnz / max(1, rows))))))
    _FILE.launch(
        f"repeat_rows<{c_type(source.dtype)}, {c_type(starts.dtype)}>",
        [blocks(rows, THREADS // width)],
        [width, THREADS // width],
        source,
        uploaded(start, source.device),
        starts,
        rows,
        out,
        device=source.device,
    )
    return out


def positive(source: torch.Tensor) -> torch.Tensor:
    """One where an element is not ``<= 0``, else zero; ``(batch, ...)`` to ``(elements, batch)``."""
    batch, elements = source.shape[0], math.prod(source.shape[1:])
    out = _values(elements, batch, source.dtype, source.device)
    _FILE.launch(
        f"positive<{c_type(source.dtype)}>",
        [blocks(elements, 32) * blocks(batch, 32)],
        [32, 8],
        source.detach().contiguous(),
        batch,
        elements,
        out,
        device=source.device,
    )
    return out


def selected(winner: torch.Tensor, window: np.ndarray, position: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """One for each entry whose position wins its window, else zero; winners int64, ``(batch, ...)``."""
    batch, entries = winner.shape[0], len(window)
    out = _values(entries, batch, dtype, winner.device)
    index = index_type(window, position)
    _FILE.launch(
        f"selected<{c_type(dtype)}, {c_type(index)}>",
        [blocks(entries * batch)],
        [THREADS],
        winner.reshape(batch, math.prod(winner.shape[1:])).T.contiguous(),
        uploaded(window, winner.device, index),
        uploaded(position, winner.device, index),
        entries,
        batch,
        out,
        device=winner.device,
    )
    return out


def note_infinite(values: torch.Tensor) -> None:
    """Set the `host_flag` of the values' device where one of them is not finite, without waiting for that."""
    device, count = values.device, values.numel()
    grid = [min(blocks(count), 8 * multiprocessors(device))]
    kernel = f"note_infinite<{c_type(values.dtype)}>"
    _FILE.launch(kernel, grid, [THREADS], values.contiguous(), count, host_flag(device), device=device)
