"""Operators as compositions of others: those without a rule of their own, and calls whose arguments ask for one."""

from .selections import selection
from .sparse_products import MadeMatrix, indices_of, is_sparse, operator_on_elements
from .table import decomposition
from .weighted import WEIGHTED

__all__ = ["WEIGHTED", "MadeMatrix", "decomposition", "indices_of", "is_sparse", "operator_on_elements", "selection"]
