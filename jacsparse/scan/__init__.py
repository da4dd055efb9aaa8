"""Back-propagation as a scan over Jacobians."""

from .autograd_scan import Puller, scanned
from .calls import backward, backward_by, vjp
from .scanner import Scanner

__all__ = ["Puller", "Scanner", "backward", "backward_by", "scanned", "vjp"]
