"""Check that a whole Jacobian fits into memory before it is computed."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .chains import Chain

#: A Jacobian takes at least this share of its estimated size.
SURE = 0.5


def machine_memory(device: torch.device) -> int:
    """Bytes of memory of a device."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_size(chain: Chain, itemsize: int, device: torch.device) -> None:
    """Raise MemoryError where a chain's Jacobian is too large for a device; `itemsize` is the bytes of an entry."""
    rows, columns = math.prod(chain.out_shape), math.prod(chain.in_shape)
    memory = machine_memory(device)
    if rows * columns * itemsize <= SURE * memory:
        return
    entries = chain.estimated_entries
    nbytes = entries * itemsize
    if SURE * nbytes > memory:
        raise MemoryError(
            f"{chain.name}: its Jacobian, {rows:,} × {columns:,} with about {entries:.1e} entries, takes about "
            f"{nbytes / 2**30:,.0f} GiB, and {device} has {memory / 2**30:,.0f}; take products with it, by "
            "jacsparse.vjp or jacsparse.nn.Scan, or the Jacobian of a part of the module, or fewer samples"
        )
