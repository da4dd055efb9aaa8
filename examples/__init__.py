"""Worked examples of sparse Jacobians, each a file to copy from: ``python -m examples.implicit_euler`` and so on."""

from .equations import brusselator, initial_values

__all__ = ["brusselator", "initial_values"]
