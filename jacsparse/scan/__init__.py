"""Back-propagation as a scan over Jacobians."""

from .autograd_scan import scanned
from .calls import backward, vjp
from .scanner import Scanner

__all__ = ["Scanner", "backward", "scanned", "vjp"]
