"""Products of matrices whose patterns are known: planned once, then only numbers move."""

from ._matvec import matvec
from ._methods import METHODS
from ._plan import DEFAULT_MEMORY_LIMIT, ProductPlan, plan_product
from ._symbolic import meeting, multiply_adds, product_meeting, product_pattern

__all__ = [
    "DEFAULT_MEMORY_LIMIT",
    "METHODS",
    "ProductPlan",
    "matvec",
    "meeting",
    "multiply_adds",
    "plan_product",
    "product_meeting",
    "product_pattern",
]
