"""The order of least predicted cost in which a chain's Jacobians are multiplied.

A chain's product ``J_1ᵀ J_2ᵀ ... J_nᵀ`` is computed from products of its intervals. The cheapest way to an interval is
the cheapest way to two parts of it, and their product: matrix-chain dynamic programming, with costs that depend on how
full each interval is. A stage that is a graph of operators becomes one matrix, or its operators are multiplied one by
one by the product beside them, whichever costs less. A chain that is too long to compare all of these is multiplied
stage by stage, from its end or from its start.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ..spgemm import KEYS, counts, fresh_keys, spread
from .accumulation import Accumulation
from .costs import Costs
from .elimination import eliminate
from .stage import Edge, Stage

#: Bytes of one tensor's keys that are passed through the stages at once, and of counts that are kept for all stages.
KEY_BYTES = 2**27
#: The longest chain of which all parenthesisations are compared: that takes a second, and eight times as long for one
#: of twice the length.
MOST_STAGES = 200
#: The most elements of a tensor that sums over all of them are estimated from.
SAMPLED = 2**14


@dataclass(frozen=True)
class Order:
    """A parenthesisation: how the product of an interval of stages is computed.

    `how` is one of ``stage``, the matrix of one stage; ``product``, the product of two intervals; ``through``, a stage,
    operator by operator, times the interval on its right; ``from``, the interval on its left times a stage, operator by
    operator; ``backward``, a stage times the interval on its right, by the operators' own dense backward.

    Printed, it is as ``((J1·J2*·J3)·J4)``: ``J1`` is the first stage's transposed Jacobian, and ``*`` marks a stage by
    its own backward.
    """

    how: str
    #: Number of the stage, from 0; -1 for a product of two intervals.
    stage: int = -1
    left: Order | None = None
    right: Order | None = None
    #: Predicted, in multiply-adds.
    cost: float = 0.0

    @property
    def parts(self) -> list[Order]:
        """The orders of all intervals, each behind those of its own parts: as deep as the chain is long."""
        waiting, parts = [self], list[Order]()
        while waiting:
            parts.append(waiting.pop())
            waiting += [part for part in (parts[-1].left, parts[-1].right) if part is not None]
        return parts[::-1]

    def __str__(self) -> str:
        texts = list[str]()
        for part in self.parts:
            stage = f"J{part.stage + 1}{'*' if part.how == 'backward' else ''}"
            right = stage if part.right is None else texts.pop()
            left = stage if part.left is None else texts.pop()
            in_brackets = part.how in ("product", "from")
            texts.append(f"({left}·{right})" if in_brackets else stage if part.how == "stage" else f"{left}·{right}")
        return texts[0]


class Estimates:
    """Estimated entries of intervals of stages, and multiply-adds of their products; on request `at_ends` alone.

    Those begin at the chain's start or end at its end, and are multiplied by single stages, of one operator each.
    """

    def __init__(self, stages: Sequence[Stage], *, at_ends: bool = False) -> None:
        n = len(stages)
        self._stages = stages
        self._sizes = np.array([math.prod(stages[0].in_shape), *(math.prod(stage.out_shape) for stage in stages)])
        # Entries of each interval, by its first and last stage; multiply-adds of a stage's operators, one by one, with
        # the interval on their right, by the stage and the last one; and on their left, by the stage and the first one.
        self.entries, self.through, self.onward = np.zeros((3, n, n))
        largest = max((max(edge.transposed_pattern.shape) for stage in stages for edge in stage.edges), default=1)
        width = max(1, KEY_BYTES // max(1, 4 * KEYS * int(largest)))
        chunks = [range(first, min(first + width, n)) for first in range(0, n, width)]
        # The number of elements of each later stage's output, where keys begin, that depend on an element of a tensor.
        self._sampled = SAMPLED if at_ends else min(SAMPLED, 1 + KEY_BYTES // (2 * n * n))
        if at_ends:
            for number, later, scale, reached in self._passed(range(n - 1, n), self.through, backwards=True):
                self.entries[number, later] = scale * reached.sum(axis=0)
            for number, sooner, scale, reached in self._passed(range(1), self.onward, backwards=False):
                self.entries[sooner, number] = scale * reached.sum(axis=0)
            self.meets: list[Any] = [defaultdict(lambda: math.inf) for _ in stages]
            for number in range(n - 1):
                if stages[number].operator is not None:
                    self.meets[number][number, n - number - 2] = self.through[number, n - 1]
                if stages[number + 1].operator is not None:
                    self.meets[number][0, 0] = self.onward[number + 1, 0]
            return
        ahead = [
            np.zeros((min(size, self._sampled), n - place), dtype=np.float32) for place, size in enumerate(self._sizes)
        ]
        for chunk in chunks:
            for number, later, scale, reached in self._passed(chunk, self.through, backwards=True):
                self.entries[number, later] = scale * reached.sum(axis=0)
                ahead[number][:, later.start - number : later.stop - number] = reached
        # Multiply-adds of the product of two intervals that meet behind each stage: by the first stage, and by how many
        # stages come behind the next one.
        self.meets = [np.zeros((number + 1, n - number - 1)) for number in range(n)]
        for chunk in chunks:
            # The number of elements of each earlier stage's input that an element depends on.
            for number, sooner, scale, reached in self._passed(chunk, self.onward, backwards=False):
                self.meets[number][sooner] = scale * (reached.T @ ahead[number + 1])

    def _passed(
        self, chunk: range, work: np.ndarray, *, backwards: bool
    ) -> Iterator[tuple[int, slice, float, np.ndarray]]:
        """Pass keys from the outputs of a chunk of stages to the chain's input, or from their inputs to its output.

        Each stage on the way yields its number, the stages of the chunk whose keys have passed it, and for a sample of
        the elements at its far end how many elements of each of these stages depend on them, after how many elements
        one of the sample stands for. The stage's multiply-adds with these intervals are added to `work`.
        """
        stages, sizes, n = self._stages, self._sizes, len(self._stages)
        # Where keys begin.
        begins = sizes[1:] if backwards else sizes[:-1]
        numbers = range(chunk[-1], -1, -1) if backwards else range(chunk[0], n)
        keys = np.empty((begins[numbers[0]], 0), dtype=np.float32)
        for number in numbers:
            if number in chunk:
                fresh = fresh_keys(int(begins[number]), number if backwards else n + number)
                keys = np.hstack([fresh, keys] if backwards else [keys, fresh])
            first, stop = (max(number, chunk[0]), chunk[-1]) if backwards else (chunk[0], min(number, chunk[-1]))
            passed, stage = slice(first, stop + 1), stages[number]
            edges = [(e.target, e.source, e.transposed_pattern) for e in reversed(stage.edges)]
            start, end = stage.stop, stage.start
            if not backwards:
                edges = [(e.source, e.target, e.pattern) for e in stage.edges]
                start, end = end, start
            following = None
            for vertex, vertex_keys in spread(edges, start, keys):
                part, scale = _sample(len(vertex_keys), self._sampled)
                reached = counts(vertex_keys[part], begins[passed])
                for source, _, pattern in edges:
                    if source == vertex:
                        work[number, passed] += scale * (pattern.structure.column_counts()[part] @ reached)
                if vertex == end:
                    following = vertex_keys
                    yield number, passed, scale, reached
            if following is None:
                # No path: infinite keys, which reach nothing.
                following = np.full((sizes[number + (not backwards)], keys.shape[1]), np.inf, dtype=np.float32)
            keys = following


def _sample(size: int, most: int) -> tuple[Any, float]:
    """The numbers of at most so many of `size` elements, equal for equal sizes; and how many each stands for."""
    if size <= most:
        return slice(None), 1.0
    return np.sort(np.random.default_rng(size).choice(size, most, replace=False)), size / most


def best_order(stages: Sequence[Stage], costs: Costs) -> Order:
    """The cheapest order of the products of a chain of at least one stage."""
    n = len(stages)
    if n == 1:
        return Order("stage", 0)
    at_ends = n > MOST_STAGES
    estimates = Estimates(stages, at_ends=at_ends)
    best = {(number, number): _alone(stage, number, estimates, costs) for number, stage in enumerate(stages)}
    # The cheapest order that begins with an own backward.
    passing: dict[tuple[int, int], Order] = {}
    for length in range(1, n):
        for first in {0, n - 1 - length} if at_ends else range(n - length):
            last, entries = first + length, estimates.entries[first, first + length]
            middles: Iterable[int] = range(first, last)
            if at_ends:
                middles = [m for m in {first, last - 1} if (first, m) in best and (m + 1, last) in best]
            candidates = _candidates(stages, first, last, middles, best, passing, estimates, costs)
            orders = [replace(order, cost=float(order.cost + entries)) for order in candidates]
            best[first, last] = min(orders, key=lambda order: order.cost)
            passing.update(((first, last), order) for order in orders if order.how == "backward")
    return best[0, n - 1]


def _alone(stage: Stage, number: int, estimates: Estimates, costs: Costs) -> Order:
    """The matrix of a stage."""
    work = estimates.entries if stage.operator else estimates.through
    return Order("stage", number, cost=costs.start * len(stage.edges) + float(work[number, number]))


def _candidates(
    stages: Sequence[Stage],
    first: int,
    last: int,
    middles: Iterable[int],
    best: dict[tuple[int, int], Order],
    passing: dict[tuple[int, int], Order],
    estimates: Estimates,
    costs: Costs,
) -> Iterator[Order]:
    """Orders of an interval from the best ones of its parts, with predicted costs but for those of its entries."""
    meets = estimates.meets
    ways = [
        (best[first, middle].cost + best[middle + 1, last].cost + meets[middle][first, last - middle - 1], middle)
        for middle in middles
    ]
    cost, middle = min(ways)
    yield Order("product", left=best[first, middle], right=best[middle + 1, last], cost=cost + costs.start)
    right, stage, start = best.get((first + 1, last)), stages[first], costs.start * len(stages[first].edges)
    if right is not None and stage.operator is None:
        yield Order("through", first, right=right, cost=right.cost + start + estimates.through[first, last])
    if right is not None and not stage.hooked:
        # Another own backward before one joins its pass.
        joined = passing.get((first + 1, last))
        behind, cost = right, right.cost + costs.backward_pass
        if joined is not None and joined.cost < cost:
            behind, cost = joined, joined.cost
        cost += start + math.prod(stages[last].out_shape) * costs.dense * stage.backward_work
        yield Order("backward", first, right=behind, cost=cost)
    left, stage = best.get((first, last - 1)), stages[last]
    if left is not None and stage.operator is None:
        cost = left.cost + costs.start * len(stage.edges) + estimates.onward[last, first]
        yield Order("from", last, left=left, cost=cost)


def accumulated(stages: Sequence[Stage], order: Order, costs: Costs) -> Accumulation:
    """The products and sums of a chain's transposed Jacobian; keys of leaves are (number of the stage, edge)."""
    accumulation = Accumulation((math.prod(stages[0].in_shape), math.prod(stages[-1].out_shape)), costs=costs)

    def leaf(number: int, edge: Edge) -> int:
        return accumulation.leaf((number, edge), edge.transposed_pattern)

    def add_pass(span: Sequence[Order], interval: int) -> int | None:
        """Add the product of an interval and the stages before it that go by their own backward, in one pass."""
        # Computes the pattern of the product.
        shadow = Accumulation(patterns_only=True)
        product: int | None = shadow.leaf(None, accumulation.matrices[interval].pattern)
        for node in span:
            if product is not None:
                product = _multiply(
                    shadow,
                    stages[node.stage],
                    node,
                    product,
                    lambda _, edge: shadow.leaf(None, edge.transposed_pattern),
                )
        if product is None:
            return None
        key = span[-1].stage, span[0].stage
        return accumulation.add_pulled(key, interval, shadow.matrices[product].pattern)

    # Of the intervals that are not multiplied yet; None is without any entry. And the stages of a pass, from the last.
    numbers, span = list[int | None](), list[Order]()
    parts = order.parts
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        stage = stages[part.stage]
        if part.how == "backward":
            span.append(part)
            if following is not None and following.how == "backward" and following.right is part:
                continue
            interval = numbers.pop()
            numbers.append(None if interval is None else add_pass(span, interval))
            span = []
        elif part.how == "product":
            right, left = numbers.pop(), numbers.pop()
            numbers.append(None if left is None or right is None else accumulation.multiply(left, right))
        elif part.how == "stage":
            numbers.append(stage.joined(accumulation, partial(leaf, part.stage)))
        else:
            assert part.how in ("through", "from"), part.how
            interval = numbers.pop()
            numbers.append(None if interval is None else _multiply(accumulation, stage, part, interval, leaf))
    accumulation.finish(*numbers)
    return accumulation


def _multiply(accumulation: Accumulation, stage: Stage, order: Order, interval: int, leaf: Any) -> int | None:
    """Add the product of an interval's matrix and a stage's operators, multiplied one by one."""
    edges = [(edge.source, edge.target, leaf(order.stage, edge)) for edge in stage.edges]
    # The interval leads to, or from, the vertex None.
    if order.how == "from":
        return eliminate(accumulation, [(None, stage.start, interval), *edges], None, stage.stop, in_turn=True)
    before = [(stage.stop, None, interval), *reversed(edges)]
    return eliminate(accumulation, before, stage.start, None, in_turn=True)
