"""Products of matrices with known patterns: planned once, after which only numbers move."""

from . import dense, merge, rowwise, scale, slots  # noqa: F401  (importing a method registers it)
from .estimate import KEYS, counts, fresh_keys, spread
from .methods import METHODS
from .plan import DEFAULT_MEMORY_LIMIT, ProductPlan, plan_product, planned
from .sparse_jacobian import SparseJacobian
from .sums import SumPlan, plan_sum, sum_pattern
from .symbolic import meeting, multiply_adds, product_meeting, product_pattern
from .vectors import matvec

__all__ = [
    "DEFAULT_MEMORY_LIMIT",
    "KEYS",
    "METHODS",
    "ProductPlan",
    "SparseJacobian",
    "SumPlan",
    "counts",
    "fresh_keys",
    "matvec",
    "meeting",
    "multiply_adds",
    "plan_product",
    "plan_sum",
    "planned",
    "product_meeting",
    "product_pattern",
    "spread",
    "sum_pattern",
]
