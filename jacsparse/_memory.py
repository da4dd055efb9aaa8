"""Whether a whole Jacobian fits this machine, told before anything is made of it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from .patterns import Diagonal, Full
from .spgemm._estimate import counts, fresh_keys, spread

if TYPE_CHECKING:
    from ._stages import Stage

__all__ = ["check_size", "machine_memory"]

#: Share of the estimated size that is taken for certain.
SURE = 0.5


def machine_memory(device: torch.device) -> int:
    """Bytes of memory of a device."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_size(name: str, stages: Sequence[Stage], itemsize: int, device: torch.device) -> None:
    """Raise where the product of all stages' Jacobians is too large for a device.

    Parameters
    ----------
    name : str
        Of the module.
    stages : sequence of Stage
        The one next to the input first; at least one.
    itemsize : int
        Bytes of the values of one entry.
    device : torch.device
        Where they will be.

    Raises
    ------
    MemoryError
        With the matrix' size and what to do.
    """
    rows, columns = math.prod(stages[-1].out_shape), math.prod(stages[0].in_shape)
    memory = machine_memory(device)
    if rows * columns * itemsize <= SURE * memory:
        return
    entries, nbytes = _entries(stages, itemsize)
    if SURE * nbytes > memory:
        raise MemoryError(
            f"{name}: its Jacobian, {rows:,} × {columns:,} with about {entries:.1e} entries, takes about "
            f"{nbytes / 2**30:,.0f} GiB, and {device} has {memory / 2**30:,.0f}; take products with it, by "
            "jacsparse.vjp or jacsparse.nn.Scan, or the Jacobian of a part of the module, or fewer samples"
        )


def _entries(stages: Sequence[Stage], itemsize: int) -> tuple[float, float]:
    """About how many entries the product has, and the bytes of their values and indices."""
    operator = stages[0].operator if len(stages) == 1 else None
    if operator is not None:
        pattern = operator.pattern
        indices = 0 if isinstance(pattern.structure, (Diagonal, Full)) else pattern.index_nbytes
        return pattern.nnz, pattern.nnz * itemsize + indices
    outputs = math.prod(stages[-1].out_shape)
    edges = [(e.target, e.source, e.pattern) for stage in reversed(stages) for e in reversed(stage.edges)]
    keys = _at(stages[0].start, spread(edges, stages[-1].stop, fresh_keys(outputs, 0)))
    entries = 0.0 if keys is None else float(counts(keys, np.array([outputs])).sum())
    return entries, entries * itemsize


def _at(vertex: object, keys: Iterable[tuple[object, np.ndarray]]) -> np.ndarray | None:
    return next((own for each, own in keys if each == vertex), None)
