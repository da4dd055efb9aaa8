"""Worked examples of sparse Jacobians, each a file to copy from: ``python -m examples.implicit_euler`` and so on."""

from .equations import brusselator, initial_values
from .least_squares import levenberg_marquardt
from .scenes import by_scipy, synthetic

__all__ = ["brusselator", "by_scipy", "initial_values", "levenberg_marquardt", "synthetic"]
