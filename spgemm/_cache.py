"""Plans that were used before, in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._plan import ProductPlan

__all__ = ["PLANS", "PlanCache"]


class PlanCache:
    """The plans used last, as many as keep within a number of bytes; any number of threads may ask it.

    Parameters
    ----------
    limit : int
        Bytes of index arrays, those of the plans' patterns included.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self._lock = threading.Lock()
        self._plans: OrderedDict[Hashable, ProductPlan] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], ProductPlan]) -> ProductPlan:
        """The plan of a key, made where it is not held."""
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
        """Let go of all plans."""
        with self._lock:
            self._plans.clear()
            self.nbytes = 0

    def __len__(self) -> int:
        return len(self._plans)


def _nbytes(plan: ProductPlan) -> int:
    return plan.nbytes + sum(pattern.index_nbytes for pattern in (plan.a, plan.b, plan.pattern))


#: Those that `plan_product` returns.
PLANS = PlanCache(512 * 2**20)
