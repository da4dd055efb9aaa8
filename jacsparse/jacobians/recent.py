"""The way to a Jacobian's values in later runs of a graph, which belongs to that graph.

All tensors and numbers are the run's. So a result is of what the function computes now.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from ..patterns import UnsupportedOperatorError
from ..spgemm import SparseJacobian
from ..stages import Chain, ChainCache, agree, recent_chains
from ..tracing import Graph, Trace
from .evaluator import Evaluator
from .evaluators import evaluator_of
from .gradients import Gradient
from .products import ChainProducts
from .traced_function import TracedFunction, same_numbers

_LOGGER = logging.getLogger("jacsparse")
#: The calls of a graph before a way other than by its chain is looked for; and those where the chain's products and
#: sums move more than `LARGE` values. Looking takes about as long as these calls do, the first one above all, so that
#: few calls of a function cost about twice what they need, however many there will be.
BEFORE, BEFORE_LARGE = 2, 8
LARGE = 2**21


class Plan:
    """How the Jacobian of a graph is computed: in its first runs by its chain, later in the way of least cost.

    A `ProductPlan` is of one product. The patterns of the chain hold while the same weights are zero.
    """

    def __init__(self, chain: Chain) -> None:
        self.chain, self._runs = chain, 0
        #: The numbers of the first run, and whether those of another one were others.
        self._numbers: Sequence[Any] | None = None
        self._numbers_vary = False
        self._chosen: Evaluator | None = None

    def jacobian(self, trace: Trace) -> SparseJacobian | None:
        """The Jacobian of a run by the way that was chosen, if that holds for the run's numbers."""
        # Other threads may replace it meanwhile.
        evaluator = self._chosen
        if evaluator is None:
            return None
        function = evaluator.function
        if not same_numbers(*(function.fixed_scalars(each) for each in (trace, function.trace))):
            if not function.numbers_vary:
                self._chosen, self._runs = None, self._before
            return None
        return SparseJacobian(evaluator.pattern, evaluator.values(trace))

    def choose(self, trace: Trace, expected: SparseJacobian) -> None:
        """Count a run; after enough of them choose a way for later ones, if it pays and gives this run's Jacobian."""
        self._runs += 1
        self._numbers = trace.scalars if self._numbers is None else self._numbers
        self._numbers_vary |= not same_numbers(self._numbers, trace.scalars)
        # The chain of pruned weights changes with these.
        if self.chain.pruned_weights or self._runs != 1 + self._before:
            return
        function = TracedFunction(trace, self.chain, numbers_vary=self._numbers_vary)
        try:
            evaluator = evaluator_of(function)
            if isinstance(evaluator, ChainProducts) or evaluator.pattern != expected.pattern:
                return
            actual = evaluator.values(trace)
        except UnsupportedOperatorError:
            return
        # PyTorch's derivatives of many vectors at once may be wrong.
        if agree(actual, expected.values):
            _LOGGER.debug("later runs: %s%s", evaluator.name, evaluator.details)
            function.forget(module=True)
            self._chosen = evaluator

    @functools.cached_property
    def _before(self) -> int:
        """The runs before one in which a way is looked for."""
        return BEFORE_LARGE if len(self.chain) > 1 and self.chain.accumulation.moved > LARGE else BEFORE


def plan_of(graph: Graph, chain: Chain, pruned: bool) -> Plan:
    """The plan of a graph's chain, for patterns with or without pruned weights; a new one after another chain's."""
    plan: Plan | None = graph.cache.get(("plan", pruned))
    if plan is None or plan.chain is not chain:
        plan = graph.cache["plan", pruned] = Plan(chain)
    return plan


def recent_graphs(f: Callable[..., Any], pruned: bool) -> ChainCache:
    """The graphs of a module, or of the code that a function runs, for patterns with or without pruned weights."""
    if isinstance(f, Gradient):
        return recent_chains(f.f, pruned=pruned, of="gradient")
    return recent_chains(f, pruned=pruned)
