"""Back-propagation as a scan over Jacobians."""

from .autograd_scan import Puller, scanned
from .calls import backward, vjp
from .scanner import Scanner

__all__ = ["Puller", "Scanner", "backward", "scanned", "vjp"]
