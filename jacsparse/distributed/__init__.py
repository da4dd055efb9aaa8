"""Work over several processes, on torch.distributed: messages between ranks, and scans across them."""

from .exclusive_scan import RankScan, exclusive_scan
from .gradients import sum_gradients
from .rank_group import RankGroup
from .ranks import Incoming, RankError, Ranks, ranks_of
from .rates import JACOBIANS, MATRICES, VECTORS, interconnect_of

__all__ = [
    "JACOBIANS",
    "MATRICES",
    "VECTORS",
    "Incoming",
    "RankError",
    "RankGroup",
    "RankScan",
    "Ranks",
    "exclusive_scan",
    "interconnect_of",
    "ranks_of",
    "sum_gradients",
]
