"""Check that a whole Jacobian fits into memory before it is computed."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..patterns import Diagonal, Full
from ..spgemm import counts, fresh_keys, spread

if TYPE_CHECKING:
    from .stage import Stage

#: A Jacobian takes at least this share of its estimated size.
SURE = 0.5


def machine_memory(device: torch.device) -> int:
    """Bytes of memory of a device."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_size(name: str, stages: Sequence[Stage], itemsize: int, device: torch.device) -> None:
    """Raise MemoryError where the product of the Jacobians of at least one stage is too large for a device.

    `name` is the module's, and `itemsize` the bytes of the values of one entry.
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
    """An estimate of the product's entries, and the bytes of their values and indices."""
    operator = stages[0].operator if len(stages) == 1 else None
    if operator is not None:
        pattern = operator.transposed_pattern
        indices = 0 if isinstance(pattern.structure, (Diagonal, Full)) else pattern.index_nbytes
        return pattern.nnz, pattern.nnz * itemsize + indices
    outputs = math.prod(stages[-1].out_shape)
    edges = [(e.target, e.source, e.transposed_pattern) for stage in reversed(stages) for e in reversed(stage.edges)]
    for vertex, keys in spread(edges, stages[-1].stop, fresh_keys(outputs, 0)):
        if vertex == stages[0].start:
            entries = float(counts(keys, np.array([outputs])).sum())
            return entries, entries * itemsize
    return 0.0, 0.0
