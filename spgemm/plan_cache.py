"""A cache of plans in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Protocol, TypeVar, cast

from ..patterns import Pattern


class CachedPlan(Protocol):
    """What patterns decide of a computation."""

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """The patterns that the plan refers to."""

    @property
    def nbytes(self) -> int:
        """Bytes of the plan's index arrays, without those of the patterns."""


AnyPlan = TypeVar("AnyPlan", bound=CachedPlan)


class PlanCache:
    """The most recently used plans, for any number of threads; `limit` is in bytes of their indices."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self._lock = threading.Lock()
        self._plans: OrderedDict[Hashable, CachedPlan] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], AnyPlan]) -> AnyPlan:
        """The plan of a key: the stored one, or else what `make` returns."""
        with self._lock:
            plan = self._plans.get(key)
            if plan is not None:
                self._plans.move_to_end(key)
                return cast(AnyPlan, plan)
        new = make()
        with self._lock:
            if key not in self._plans and _nbytes(new) <= self.limit:
                self._plans[key] = new
                self.nbytes += _nbytes(new)
            while self.nbytes > self.limit:
                self.nbytes -= _nbytes(self._plans.popitem(last=False)[1])
        return new

    def clear(self) -> None:
        """Remove all plans."""
        with self._lock:
            self._plans.clear()
            self.nbytes = 0

    def __len__(self) -> int:
        return len(self._plans)


def _nbytes(plan: CachedPlan) -> int:
    return plan.nbytes + sum(pattern.index_nbytes for pattern in plan.patterns)


#: The plans of products, sums and factorisations, colourings, and symmetric parts.
PLAN_CACHE = PlanCache(512 * 2**20)
