"""Layers and regions of pruned networks at the cost of the weights that are left: samples last, on the CPU."""

from .conversion import LayerChoice, SparseModel, SparsityReport, densify, sparsify
from .freezing import FrozenModel, freeze
from .layers import SparseConv2d, SparseLayer, SparseLinear

__all__ = [
    "FrozenModel",
    "LayerChoice",
    "SparseConv2d",
    "SparseLayer",
    "SparseLinear",
    "SparseModel",
    "SparsityReport",
    "densify",
    "freeze",
    "sparsify",
]
