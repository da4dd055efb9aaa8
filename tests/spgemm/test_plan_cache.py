"""The cache of plans: what it stores, and what it counts."""

from __future__ import annotations

import pytest
from jacsparse.spgemm.plan_cache import PlanCache

from jacsparse import ProductPlan, plan_product
from tests.helpers import random_pattern


@pytest.fixture
def plans() -> list[ProductPlan]:
    sizes = (4, 5, 60)
    return [plan_product(random_pattern(n, n, 0.5, n), random_pattern(n, n, 0.5, 1), cache=False) for n in sizes]


def _bytes(*plans: ProductPlan) -> int:
    return sum(plan.nbytes + sum(pattern.index_nbytes for pattern in plan.patterns) for plan in plans)


def test_a_plan_over_the_limit_displaces_no_other(plans: list[ProductPlan]) -> None:
    small, other, large = plans
    cache = PlanCache(_bytes(small, other))
    for plan in (small, other, large):
        assert cache.get(id(plan), lambda plan=plan: plan) is plan
    assert (len(cache), cache.nbytes) == (2, _bytes(small, other))


def test_a_plan_made_twice_at_once_is_counted_once(plans: list[ProductPlan]) -> None:
    sooner, later, _ = plans
    cache = PlanCache(10 * _bytes(sooner, later))

    def make() -> ProductPlan:
        # Another caller comes while this one is making its plan.
        cache.get("key", lambda: sooner)
        return later

    assert cache.get("key", make) is later
    assert cache.nbytes == _bytes(sooner) and cache.get("key", make) is sooner
