"""A cache of plans in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .plan import ProductPlan


class PlanCache:
    """The most recently used plans, for any number of threads; `limit` is in bytes of their indices."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self._lock = threading.Lock()
        self._plans: OrderedDict[Hashable, ProductPlan] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], ProductPlan]) -> ProductPlan:
        """The plan of a key: the stored one, or else what `make` returns."""
        with self._lock:
            plan = self._plans.get(key)
            if plan is not None:
                self._plans.move_to_end(key)
                return plan
        plan = make()
        with self._lock:
            if key not in self._plans and _nbytes(plan) <= self.limit:
                self._plans[key] = plan
                self.nbytes += _nbytes(plan)
            while self.nbytes > self.limit:
                self.nbytes -= _nbytes(self._plans.popitem(last=False)[1])
        return plan

    def clear(self) -> None:
        """Remove all plans."""
        with self._lock:
            self._plans.clear()
            self.nbytes = 0

    def __len__(self) -> int:
        return len(self._plans)


def _nbytes(plan: ProductPlan) -> int:
    return plan.nbytes + sum(pattern.index_nbytes for pattern in (plan.a, plan.b, plan.pattern))


#: The plans that `plan_product` returns.
PLAN_CACHE = PlanCache(512 * 2**20)
