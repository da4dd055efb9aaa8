"""Layers and regions of pruned networks at the cost of the weights that are left: samples last, on the CPU."""

from .conversion import BUSY, LayerChoice, SparseModel, SparsityReport, densify, sparsify
from .convolutional import SparseConv1d, SparseConv2d
from .frozen_models import FrozenModel, freeze
from .layers import SparseLayer
from .linear import SparseLinear

__all__ = [
    "BUSY",
    "FrozenModel",
    "LayerChoice",
    "SparseConv1d",
    "SparseConv2d",
    "SparseLayer",
    "SparseLinear",
    "SparseModel",
    "SparsityReport",
    "densify",
    "freeze",
    "sparsify",
]
