"""Back-propagation as a scan over Jacobians."""

from .autograd_scan import Puller, scanned
from .calls import backward, backward_by, vjp
from .scanner import BY_AUTOGRAD, Scanner, Scanners, scanner_of
from .stage_ranks import StageRanks

__all__ = [
    "BY_AUTOGRAD",
    "Puller",
    "Scanner",
    "Scanners",
    "StageRanks",
    "backward",
    "backward_by",
    "scanned",
    "scanner_of",
    "vjp",
]
