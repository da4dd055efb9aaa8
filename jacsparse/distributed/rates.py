"""Round numbers by which an exchange is chosen; the benchmark ``rank_scan`` has measured ones beside them."""

from __future__ import annotations

import torch.distributed as dist

from ..interconnect import Interconnect
from .ranks import Ranks

#: Multiply-adds per second of one thread: of products with vectors, of dense matrices, and of stages to one Jacobian.
VECTORS, MATRICES, JACOBIANS = 1e9, 4e9, 2e8


def interconnect_of(ranks: Ranks) -> Interconnect:
    """What messages take by a group's back end: over NVLink, or, as measured, over TCP in one machine."""
    nccl = dist.get_backend(ranks.group) == "nccl"
    return Interconnect(2e-5, 1e11) if nccl else Interconnect(2e-4, 1e9)
