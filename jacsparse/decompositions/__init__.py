"""Operators as compositions of others: those without a rule of their own, and calls whose arguments ask for one."""

from .complex_numbers import ComplexParts, operator_on_parts
from .selections import selection
from .sparse_products import MadeMatrix, indices_of, is_sparse, operator_on_elements
from .table import decomposition
from .weighted import WEIGHTED

__all__ = [
    "WEIGHTED",
    "ComplexParts",
    "MadeMatrix",
    "decomposition",
    "indices_of",
    "is_sparse",
    "operator_on_elements",
    "operator_on_parts",
    "selection",
]
