"""Products of matrices whose patterns are known: planned once, then only numbers move."""

from ._matvec import matvec
from ._methods import METHODS
from ._plan import DEFAULT_MEMORY_LIMIT, ProductPlan, plan_product
from ._sum import SumPlan, plan_sum, sum_pattern
from ._symbolic import meeting, multiply_adds, product_meeting, product_pattern

__all__ = [
    "DEFAULT_MEMORY_LIMIT",
    "METHODS",
    "ProductPlan",
    "SumPlan",
    "matvec",
    "meeting",
    "multiply_adds",
    "plan_product",
    "plan_sum",
    "product_meeting",
    "product_pattern",
    "sum_pattern",
]
