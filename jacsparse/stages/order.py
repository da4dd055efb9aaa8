"""The order of least predicted cost in which a chain's Jacobians are multiplied.

A chain's product ``J_1ᵀ J_2ᵀ ... J_nᵀ`` is computed from products of its intervals. The cheapest way to an interval is
the cheapest way to two parts of it, and their product: matrix-chain dynamic programming, with costs that depend on how
full each interval is. A stage that is a graph of operators becomes one matrix, or its operators are multiplied one by
one by the product beside them, whichever costs less. A chain that is too long to compare all of these is multiplied
stage by stage, from its end or from its start.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ..runtime import cached_arrays
from ..spgemm import KEYS, counts, fresh_keys, spread
from .accumulation import Accumulation
from .elimination import eliminate
from .stage import Edge, Stage

#: The packages whose sources decide which order is the best.
_PACKAGES = tuple(f"jacsparse.{room}" for room in ("patterns", "spgemm", "stages"))

#: Cost of a multiply-add of an operator's own dense backward, relative to one of sparse products: measured on CPUs,
#: where convolutions of PyTorch reach 10 to 90 billion a second and sparse products 2 to 15.
DENSE = 1 / 8
#: Fixed cost of each operator's values, product, sum or backward, in multiply-adds: about 100 µs.
START = 200_000
#: Fixed cost of a backward pass: about 500 µs.
PASS = 1_000_000

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

    Those begin at the chain's start or end at its end, and are multiplied by single stages.
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
            return
        ahead = [
            np.zeros((min(size, self._sampled), n - place), dtype=np.float32) for place, size in enumerate(self._sizes)
        ]
        for chunk in chunks:
            for number, later, scale, reached in self._passed(chunk, self.through, backwards=True):
                self.entries[number, later] = scale * reached.sum(axis=0)
                ahead[number][:, later.start - number : later.stop - number] = reached
        # Multiply-adds of the product of two intervals that meet behind each stage, by the first and the last stage.
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


def best_order(stages: Sequence[Stage]) -> Order:
    """The cheapest order of the products of a chain of at least one stage, cached on disk."""
    if len(stages) == 1:
        return Order("stage", 0)
    order = cached_arrays(f"order {_digest(stages)}", lambda: _packed(_cheapest(stages)), packages=_PACKAGES)
    return _unpacked(json.loads(order["order"].tobytes()))


def _digest(stages: Sequence[Stage]) -> str:
    """A digest of all that the best order depends on."""
    digest = hashlib.blake2b(f"{KEYS} {DENSE} {START} {PASS} {len(stages) > MOST_STAGES}".encode())
    for stage in stages:
        numbers: dict[Any, int] = {}
        ends = [numbers.setdefault(vertex, len(numbers)) for vertex in (stage.start, stage.stop)]
        digest.update(f"{stage.in_shape} {stage.out_shape} {stage.hooked} {stage.backward_work} {ends}".encode())
        for edge in stage.edges:
            ends = [numbers.setdefault(vertex, len(numbers)) for vertex in (edge.source, edge.target)]
            digest.update(f"{ends} {edge.transposed_pattern.digest}".encode())
    return digest.hexdigest()


def _packed(order: Order) -> dict[str, np.ndarray]:
    """An order as an array: the bytes of the JSON of its parts."""
    parts = [[p.how, p.stage, p.left is not None, p.right is not None, p.cost] for p in order.parts]
    return {"order": np.frombuffer(json.dumps(parts).encode(), dtype=np.uint8)}


def _unpacked(parts: Sequence[tuple[str, int, bool, bool, float]]) -> Order:
    orders = list[Order]()
    for how, stage, has_left, has_right, cost in parts:
        right = orders.pop() if has_right else None
        left = orders.pop() if has_left else None
        orders.append(Order(how, stage, left, right, cost))
    return orders[0]


class _Candidates:
    """Orders of intervals that a stage is multiplied by, with predicted costs."""

    def __init__(self, stages: Sequence[Stage], estimates: Estimates) -> None:
        self.stages, self.estimates = stages, estimates
        #: Cost of each stage's own backward for one column; and of beginning with it.
        self.backward = [DENSE * stage.backward_work for stage in stages]
        self.start = [START * len(stage.edges) for stage in stages]

    def alone(self, number: int) -> Order:
        """The matrix of a stage."""
        costs = self.estimates.entries if self.stages[number].operator else self.estimates.through
        return Order("stage", number, cost=self.start[number] + float(costs[number, number]))

    def before(self, first: int, last: int, right: Order, passing: Order | None) -> Iterator[Order]:
        """A stage times the interval behind it; `passing` is the best order of that which begins with an own backward.

        Another own backward before it joins its pass.
        """
        stage = self.stages[first]
        if stage.operator is None:
            cost = right.cost + self.start[first] + self.estimates.through[first, last]
            yield Order("through", first, right=right, cost=cost)
        if not stage.hooked:
            behind, cost = right, right.cost + PASS
            if passing is not None and passing.cost < cost:
                behind, cost = passing, passing.cost
            cost += self.start[first] + math.prod(self.stages[last].out_shape) * self.backward[first]
            yield Order("backward", first, right=behind, cost=cost)

    def behind(self, first: int, last: int, left: Order) -> Iterator[Order]:
        """The interval before a stage times that stage."""
        if self.stages[last].operator is None:
            cost = left.cost + self.start[last] + self.estimates.onward[last, first]
            yield Order("from", last, left=left, cost=cost)

    def with_entries(self, orders: Iterable[Order], first: int, last: int) -> list[Order]:
        """The same orders of an interval, whose costs have those of its entries too."""
        entries = self.estimates.entries[first, last]
        return [replace(order, cost=float(order.cost + entries)) for order in orders]


def _cheapest(stages: Sequence[Stage]) -> Order:
    n = len(stages)
    if n > MOST_STAGES:
        return _in_turn(stages)
    estimates = Estimates(stages)
    candidates = _Candidates(stages, estimates)
    best: dict[tuple[int, int], Order] = {(number, number): candidates.alone(number) for number in range(n)}
    # The cheapest order that begins with an own backward.
    passing: dict[tuple[int, int], Order] = {}
    for length in range(1, n):
        for first in range(n - length):
            last = first + length
            ways = [
                (best[first, middle].cost + best[middle + 1, last].cost + meets[first, last - middle - 1], middle)
                for middle, meets in enumerate(estimates.meets[first:last], start=first)
            ]
            cost, middle = min(ways)
            orders = [Order("product", left=best[first, middle], right=best[middle + 1, last], cost=cost + START)]
            orders += candidates.before(first, last, best[first + 1, last], passing.get((first + 1, last)))
            orders += candidates.behind(first, last, best[first, last - 1])
            orders = candidates.with_entries(orders, first, last)
            best[first, last] = min(orders, key=_cost)
            passing.update(((first, last), order) for order in orders if order.how == "backward")
    return best[0, n - 1]


def _in_turn(stages: Sequence[Stage]) -> Order:
    """The cheaper one of the orders that multiply stage by stage, from the chain's end and from its start."""
    n = len(stages)
    estimates = Estimates(stages, at_ends=True)
    candidates = _Candidates(stages, estimates)
    from_end, passing = candidates.alone(n - 1), None
    for first in range(n - 2, -1, -1):
        orders = list(candidates.before(first, n - 1, from_end, passing))
        if stages[first].operator is not None:
            left = Order("stage", first, cost=candidates.start[first])
            cost = left.cost + from_end.cost + START + estimates.through[first, n - 1]
            orders.append(Order("product", left=left, right=from_end, cost=cost))
        orders = candidates.with_entries(orders, first, n - 1)
        from_end = min(orders, key=_cost)
        passing = next((order for order in orders if order.how == "backward"), None)
    from_start = candidates.alone(0)
    for last in range(1, n):
        orders = list(candidates.behind(0, last, from_start))
        if stages[last].operator is not None:
            right = Order("stage", last, cost=candidates.start[last])
            cost = from_start.cost + right.cost + START + estimates.onward[last, 0]
            orders.append(Order("product", left=from_start, right=right, cost=cost))
        from_start = min(candidates.with_entries(orders, 0, last), key=_cost)
    return min(from_end, from_start, key=_cost)


def _cost(order: Order) -> float:
    return order.cost


def accumulated(stages: Sequence[Stage], order: Order) -> Accumulation:
    """The products and sums of a chain's transposed Jacobian; keys of leaves are (number of the stage, edge)."""
    accumulation = Accumulation((math.prod(stages[0].in_shape), math.prod(stages[-1].out_shape)))

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
    (accumulation.result,) = numbers
    return accumulation


def _multiply(accumulation: Accumulation, stage: Stage, order: Order, interval: int, leaf: Any) -> int | None:
    """Add the product of an interval's matrix and a stage's operators, multiplied one by one."""
    edges = [(edge.source, edge.target, leaf(order.stage, edge)) for edge in stage.edges]
    # The interval leads to, or from, the vertex None.
    if order.how == "from":
        return eliminate(accumulation, [(None, stage.start, interval), *edges], None, stage.stop, in_turn=True)
    before = [(stage.stop, None, interval), *reversed(edges)]
    return eliminate(accumulation, before, stage.start, None, in_turn=True)
