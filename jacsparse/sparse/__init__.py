"""Layers and regions of pruned networks at the cost of the weights that are left: samples last, on the CPU."""

from .layers import SparseConv2d, SparseLayer, SparseLinear

__all__ = ["SparseConv2d", "SparseLayer", "SparseLinear"]
