"""The choice of the way to a Jacobian's values: of the least predicted cost.

Costs are those of the function's device, by the table in `jacsparse.stages`.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable

from ..codegen import may_be_loops
from ..patterns import Pattern, UnsupportedOperatorError
from ..runtime import on_device
from ..stages import check_size
from .colorings import Coloring, least_cost, row_coloring
from .colorings import coloring as cheapest_coloring
from .compressed import Compressed, seeds_at_once
from .evaluator import Evaluator
from .folding import Folding, passes_of
from .forward_accumulation import ForwardAccumulation
from .products import ChainProducts, FoldedProducts, GroupedProducts
from .products_with_vectors import WRONG_TANGENTS, may_be_compressed
from .terms import NotFoldableError
from .traced_function import TracedFunction

_LOGGER = logging.getLogger("jacsparse")


def evaluator_of(
    function: TracedFunction,
    method: str = "auto",
    *,
    compile: bool = False,
    coloring: Callable[[Pattern], Coloring] = cheapest_coloring,
) -> Evaluator:
    """The way to the values that was asked for, or the first of these that applies:

    1. `ChainProducts`, where values of an operator were registered: the other ways take PyTorch's derivatives.
    2. `Compressed`, where ``compressed`` or a pattern of one's own was asked for.
    3. `ForwardAccumulation`, for runs of many small calls that do the same; it is planned in the least time.
    4. `FoldedProducts` of elementwise operators, whatever other ways cost; `ChainProducts` where there is no entry.
    5. For ``products``, or where it may not be compressed, the one of the least cost of `FoldedProducts` with
       elements of factors and entries by a few backward passes, `GroupedProducts`, and `ChainProducts` in the order
       of `Chain.order`.
    6. The one of the least cost of these and `Compressed`, unless an operator has no forward mode.

    `Compressed` goes by backward passes alone with an operator of `WRONG_TANGENTS`, unless it is a Hessian's, of which
    the check finds wrong tangents. With `compile`, 6. compares `Compressed` with machine code and without: loops
    compute what no call that is left to PyTorch reads. On a GPU, `FoldedProducts` are those of `compile` alone. What
    is chosen is logged at the level DEBUG, and in 6. the costs of products and of colours. `PreparedJacobian.prepare`
    asks for ``products`` where a `Compressed` of 6. does not agree with autograd, and `JacobianPlan` takes
    `ChainProducts`.

    A new way is a subclass of `Evaluator` and a case here; a new name of one also goes into `options.METHODS` and
    `saved_programs`. `PreparedJacobian` and `PreparedHessian` ask whether the name is ``compressed``.
    """
    evaluator = _chosen(function, method, compile, coloring)
    _LOGGER.debug("values by %s%s", evaluator.name, evaluator.details)
    return evaluator


def _chosen(function: TracedFunction, method: str, compile: bool, coloring: Callable[[Pattern], Coloring]) -> Evaluator:
    """The way of `evaluator_of`."""
    folding, costs = Folding(function), function.chain.costs
    check_size(function.chain, function.x)

    def compressed(colors: Coloring, compile: bool = compile) -> Compressed:
        return Compressed(function, colors, compile=compile)

    def folded_products(cost: float | None = None) -> FoldedProducts | None:
        """Sums of products of local derivatives; if a cost is given, of all kinds, up to that cost.

        None where the entries are no such sums, or cost more, and on a GPU where nothing is compiled.
        """
        if on_device(function.x) and not compile:
            return None
        most, samples = None, 1 if function.shared else function.batch
        if cost is not None:
            most = int(cost / (costs.term * samples))
        try:
            folded = folding.folded(most=most)
        except NotFoldableError:
            return None
        if cost is not None and costs.term * samples * folding.algebra.terms + _cost_of_passes(folding) > cost:
            return None
        return FoldedProducts(function, folded, compile=compile)

    registered = function.chain.registered_values
    if registered and method == "compressed":
        raise registered[0].call.unsupported(
            f"method='compressed' takes PyTorch's derivative of {registered[0].call.operator}, whose values were "
            "registered and may be others",
            "pass method='products'",
        )
    if registered:
        return ChainProducts(function)
    if not function.replays:
        with contextlib.suppress(NotFoldableError):
            return ForwardAccumulation(function)
    # The star colouring of a Hessian has no rows; a check finds wrong tangents.
    if coloring is cheapest_coloring and any(node.overload in WRONG_TANGENTS for node in function.nodes):
        coloring = row_coloring
    if method == "compressed" or function.given is not None:
        colors = coloring(function.pattern)
        try:
            return compressed(colors)
        except UnsupportedOperatorError:
            # Backward passes alone may do, where an operator has no forward mode.
            if not colors.counts[0] or coloring is not cheapest_coloring:
                raise
            return compressed(row_coloring(function.pattern))
    sums = folded_products()
    if sums is not None:
        return sums
    products: Evaluator = ChainProducts(function)
    if not products.pattern.nnz:
        return products
    cost = _cost_of_products(function)
    grouped = GroupedProducts.of(function, cost)
    if grouped is not None:
        cost, products = grouped.cost, grouped
    if method == "products" or not may_be_compressed(function):
        return folded_products(cost) or products
    # Rows of many entries are coloured for minutes: not where no colouring could pay.
    calls, each = _cost_of_passes_with_seeds(function, compile=compile)
    if cost < calls + least_cost(function.pattern) * each:
        return folded_products(cost) or products
    colors = coloring(function.pattern)
    cost_of_colors, pays = _cost_of_colors(function, colors, compile=False), False
    if compile:
        compiled = _cost_of_colors(function, colors, compile=True)
        pays = compiled - costs.replay < cost_of_colors
        cost_of_colors = compiled if pays else cost_of_colors
    counts = sum(colors.counts)
    _LOGGER.debug("costs: products%s %.2g, %d colours %.2g", products.details, cost, counts, cost_of_colors)
    sums = folded_products(min(cost, cost_of_colors))
    if sums is not None or cost < cost_of_colors:
        return sums or products
    try:
        return compressed(colors, pays)
    except UnsupportedOperatorError:
        # An operator has no forward mode, or none for many seeds at once.
        return folded_products(cost) or products


def _cost_of_passes(folding: Folding) -> float:
    """The cost of the operators' backward passes that make local derivatives for folded products."""
    function, costs, cost = folding.function, folding.function.chain.costs, 0.0
    for edge in folding.by_passes:
        passes = passes_of(edge)
        values = passes * (edge.call.in_size + edge.call.out_size) + edge.pattern.nnz
        cost += passes * costs.call + costs.value * function.x.element_size() / 8 * function.batch * values
    return cost


def _cost_of_products(function: TracedFunction) -> float:
    """The cost of the products and sums of the operators' matrices."""
    chain, costs = function.chain, function.chain.costs
    if not len(chain):
        return 0.0
    accumulation, batch = chain.accumulation, 1 if function.shared else function.batch
    values, multiply_adds = accumulation.work(batch, lambda key: key[1].shared)
    cost: float = costs.start * len(accumulation.matrices) + multiply_adds
    for span, columns in accumulation.passes:
        stages = chain.stages[span]
        # Gradients are written and read.
        values += 2 * batch * columns * sum(math.prod(stage.in_shape) for stage in stages)
        cost += costs.backward_pass + costs.dense * batch * columns * sum(stage.backward_work for stage in stages)
    return cost + costs.value * function.x.element_size() / 8 * values


def _cost_of_colors(function: TracedFunction, colors: Coloring, *, compile: bool) -> float:
    """The cost of products of the whole function with a seed for each colour; infinite where they do not compile."""
    left = 1.0
    if compile:
        if not seeds_at_once(function, colors, compile=True)[1]:
            return math.inf
        left = 1.0 if seeds_at_once(function, colors, compile=False)[1] else function.chain.costs.apart
    calls, each = _cost_of_passes_with_seeds(function, compile=compile, left=left)
    return calls + colors.cost * each


def _cost_of_passes_with_seeds(function: TracedFunction, *, compile: bool, left: float = 1.0) -> tuple[float, float]:
    """The cost of the calls on all seeds, and of each seed; PyTorch's calls between loops cost `left` times as much."""
    costs, calls, values, read_by_pytorch = function.chain.costs, 0.0, 0.0, set[int]()
    for node in reversed(function.nodes):
        # What PyTorch computes of a call, it reads from memory: no loop computes that.
        is_loop = compile and may_be_loops(node.name) and read_by_pytorch.isdisjoint(node.results)
        share = 1 / costs.compiled if is_loop else left
        calls, values = calls + share * costs.call, values + share * function.element_count(node)
        if not is_loop:
            read_by_pytorch.update(value for _, value in node.tensors)
    # Dense operators take a third of the time of a backward pass where many seeds run at once.
    dense = left * costs.dense / 3 * sum(stage.backward_work for stage in function.chain)
    return calls, costs.value * function.x.element_size() / 8 * values + function.batch * dense
