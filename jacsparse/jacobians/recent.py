"""The graphs of recent functions by the code that runs, each with the way to its Jacobian's values.

The code only finds candidates: a run has one of these graphs where it makes the same calls, and all tensors and numbers
are the run's. So a result is of what the function computes now.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Sequence
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from ..patterns import UnsupportedOperatorError
from ..spgemm import SparseJacobian
from ..stages import Chain, ChainCache, agree
from ..tracing import Graph, Trace, parts_of
from .evaluator import Evaluator
from .evaluators import evaluator_of
from .gradients import Gradient
from .products import ChainProducts
from .replays import jacobian_values, of_run
from .traced_function import TracedFunction, same_numbers

_LOGGER = logging.getLogger("jacsparse")
#: The calls of a graph before a way other than by its chain is looked for; and those where the chain's products and
#: sums move more than `LARGE` values. Looking takes about as long as these calls do, the first one above all, so that
#: few calls of a function cost about twice what they need, however many there will be.
BEFORE, BEFORE_LARGE = 2, 8
LARGE = 2**21


class Plan:
    """How the Jacobian of a graph is computed: in its first runs by its chain, later in the way of least cost.

    The patterns of the chain hold while the same weights are zero.
    """

    def __init__(self, chain: Chain) -> None:
        self.chain, self._runs = chain, 0
        #: The numbers of the first run, and whether those of another one were others.
        self._numbers: Sequence[Any] | None = None
        self._numbers_vary = False
        self._chosen: tuple[TracedFunction, Evaluator] | None = None

    def values(self, trace: Trace) -> SparseJacobian | None:
        """The Jacobian of a run by the way that was chosen, if that holds for the run's numbers."""
        # Other threads may replace it meanwhile.
        chosen = self._chosen
        if chosen is None:
            return None
        function, evaluator = chosen
        if not same_numbers(*(function.fixed_scalars(each) for each in (trace, function.trace))):
            if not function.numbers_vary:
                self._chosen, self._runs = None, self._before
            return None
        return SparseJacobian(evaluator.pattern, jacobian_values(function, evaluator, trace, of_run))

    def add(self, trace: Trace, expected: SparseJacobian) -> None:
        """Choose a way for later runs, where that pays and gives this run's Jacobian."""
        self._runs += 1
        self._numbers = trace.scalars if self._numbers is None else self._numbers
        self._numbers_vary |= not same_numbers(self._numbers, trace.scalars)
        # The chain of pruned weights changes with these.
        if self.chain.pruned_weights or self._runs != 1 + self._before:
            return
        function = TracedFunction(trace, self.chain, numbers_vary=self._numbers_vary)
        try:
            evaluator = evaluator_of(function, replays=False)
            if isinstance(evaluator, ChainProducts) or evaluator.pattern != expected.pattern:
                return
            actual = jacobian_values(function, evaluator, trace, of_run)
        except UnsupportedOperatorError:
            return
        # PyTorch's derivatives of many vectors at once may be wrong.
        if agree(actual, expected.values):
            _LOGGER.debug("later runs: %s%s", evaluator.name, evaluator.details)
            function.forget(module=True)
            self._chosen = function, evaluator

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
    """The graphs of the code that a function runs, for patterns with or without pruned weights."""
    return _cache_of(_code_of(f), pruned)


@functools.lru_cache(maxsize=32)
def _cache_of(code: Hashable, pruned: bool) -> ChainCache:
    return ChainCache(pruned=pruned)


def _code_of(f: Any) -> Hashable:
    """What tells functions apart that probably make other calls."""
    if isinstance(f, Gradient):
        return Gradient, _code_of(f.f)
    if isinstance(f, functools.partial):
        return _code_of(f.func)
    if isinstance(f, MethodType):
        return _code_of(f.__func__)
    if isinstance(f, FunctionType):
        return f.__code__
    if isinstance(f, nn.Module):
        return type(f), tuple(map(type, parts_of(f)))
    return f"{type(f).__module__}.{type(f).__qualname__}"
