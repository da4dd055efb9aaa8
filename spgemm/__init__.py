"""Products of matrices with known patterns: planned once, after which only numbers move."""

from .banded import Banded
from .dense import DenseProduct
from .dense_factors import BlockDiagonal, Cholesky, DenseLU
from .estimate import KEYS, counts, fresh_keys, spread
from .factorization import Factorization
from .factors import FACTORIZATIONS, FactorPlan
from .lu import SparseLU
from .merge import Merge
from .methods import METHODS, Method, Product
from .plan import ProductPlan, check_limit, plan_product, planned
from .plan_cache import PLAN_CACHE
from .row_groups import RowGroups
from .rowwise import Rowwise
from .scale import Scale
from .slots import Select, Slots
from .sparse_jacobian import SparseJacobian, unchecked_jacobian
from .strips import StripProduct
from .sums import SumPlan, plan_sum, sum_pattern
from .symbolic import PACKED, meeting, multiply_adds, product_meeting, product_pattern
from .vectors import matvec

__all__ = [
    "FACTORIZATIONS",
    "KEYS",
    "METHODS",
    "PACKED",
    "PLAN_CACHE",
    "FactorPlan",
    "Factorization",
    "Method",
    "Product",
    "ProductPlan",
    "RowGroups",
    "SparseJacobian",
    "StripProduct",
    "SumPlan",
    "check_limit",
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
    "unchecked_jacobian",
]

# ``auto`` tries them in this order.
METHODS.update({method.name: method for method in (Select, Scale, DenseProduct, Slots, Rowwise, Merge)})
FACTORIZATIONS.update({plan.name: plan for plan in (Banded, DenseLU, BlockDiagonal, SparseLU, Cholesky)})
