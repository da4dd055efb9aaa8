"""The order of least predicted cost in which a chain's Jacobians are multiplied.

A chain's product ``J_1ᵀ J_2ᵀ ... J_nᵀ`` is computed from products of its intervals. The cheapest way to an interval is
the cheapest way to two parts of it, and their product: matrix-chain dynamic programming, with costs that depend on how
full each interval is. A stage that is a graph of operators becomes one matrix, or its operators are multiplied one by
one by the product beside them, whichever costs less.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
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
#: Fixed cost of each product, sum or operator's backward, in multiply-adds: about 100 µs.
START = 200_000
#: Fixed cost of a backward pass: about 500 µs.
PASS = 1_000_000

#: Bytes of one tensor's keys that are passed through the stages at once, and of counts that are kept for all stages.
KEY_BYTES = 2**27
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

    def __str__(self) -> str:
        if self.how == "stage":
            return f"J{self.stage + 1}"
        if self.how in ("through", "backward"):
            return f"J{self.stage + 1}{'*' if self.how == 'backward' else ''}·{self.right}"
        return f"({self.left}·{self.right if self.right else f'J{self.stage + 1}'})"


class Estimates:
    """Estimated entries of intervals of stages, and multiply-adds of their products."""

    def __init__(self, stages: Sequence[Stage]) -> None:
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
        self._sampled = min(SAMPLED, 1 + KEY_BYTES // (2 * n * n))
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
    digest = hashlib.blake2b(f"{KEYS} {DENSE} {START} {PASS}".encode())
    for stage in stages:
        numbers: dict[Any, int] = {}
        ends = [numbers.setdefault(vertex, len(numbers)) for vertex in (stage.start, stage.stop)]
        digest.update(f"{stage.in_shape} {stage.out_shape} {stage.hooked} {stage.backward_work} {ends}".encode())
        for edge in stage.edges:
            ends = [numbers.setdefault(vertex, len(numbers)) for vertex in (edge.source, edge.target)]
            digest.update(f"{ends} {edge.transposed_pattern.digest}".encode())
    return digest.hexdigest()


def _packed(order: Order) -> dict[str, np.ndarray]:
    """An order as an array: the bytes of its JSON."""
    return {"order": np.frombuffer(json.dumps(asdict(order)).encode(), dtype=np.uint8)}


def _unpacked(fields: dict[str, Any]) -> Order:
    parts = {name: _unpacked(fields[name]) for name in ("left", "right") if fields[name] is not None}
    return Order(**{**fields, **parts})


def _cheapest(stages: Sequence[Stage]) -> Order:
    n = len(stages)
    estimates = Estimates(stages)
    # Cost of each stage's own backward for one column.
    backward = [DENSE * stage.backward_work for stage in stages]
    start = [START * len(stage.edges) for stage in stages]
    best: dict[tuple[int, int], Order] = {}
    # The cheapest order that begins with an own backward: another own backward before it joins its pass.
    passing: dict[tuple[int, int], Order] = {}
    for number, stage in enumerate(stages):
        costs = estimates.through if stage.operator is None else estimates.entries
        best[number, number] = Order("stage", number, cost=start[number] + float(costs[number, number]))
    for length in range(1, n):
        for first in range(n - length):
            last = first + length
            ways = [
                (best[first, middle].cost + best[middle + 1, last].cost + meets[first, last - middle - 1], middle)
                for middle, meets in enumerate(estimates.meets[first:last], start=first)
            ]
            cost, middle = min(ways)
            cost += START
            left, right = best[first, last - 1], best[first + 1, last]
            orders = [Order("product", left=best[first, middle], right=best[middle + 1, last], cost=cost)]
            if stages[first].operator is None:
                cost = right.cost + start[first] + estimates.through[first, last]
                orders.append(Order("through", first, right=right, cost=cost))
            if stages[last].operator is None:
                cost = left.cost + start[last] + estimates.onward[last, first]
                orders.append(Order("from", last, left=left, cost=cost))
            if not stages[first].hooked:
                behind, cost, onwards = right, right.cost + PASS, passing.get((first + 1, last))
                if onwards is not None and onwards.cost < cost:
                    behind, cost = onwards, onwards.cost
                cost += start[first] + math.prod(stages[last].out_shape) * backward[first]
                orders.append(Order("backward", first, right=behind, cost=cost))
            orders = [replace(order, cost=float(order.cost + estimates.entries[first, last])) for order in orders]
            best[first, last] = min(orders, key=lambda order: order.cost)
            for order in orders:
                if order.how == "backward":
                    passing[first, last] = order
    return best[0, n - 1]


def accumulated(stages: Sequence[Stage], order: Order) -> Accumulation:
    """The products and sums of a chain's transposed Jacobian; keys of leaves are (number of the stage, edge)."""
    accumulation = Accumulation((math.prod(stages[0].in_shape), math.prod(stages[-1].out_shape)))

    def leaf(number: int, edge: Edge) -> int:
        return accumulation.leaf((number, edge), edge.transposed_pattern)

    def add(order: Order) -> int | None:
        stage = stages[order.stage]
        if order.how == "product":
            assert order.left is not None and order.right is not None
            left, right = add(order.left), add(order.right)
            return None if left is None or right is None else accumulation.multiply(left, right)
        if order.how == "stage":
            return stage.joined(accumulation, lambda edge: leaf(order.stage, edge))
        if order.how == "backward":
            return add_pass(order)
        assert order.how in ("through", "from"), order.how
        interval = add(order.left if order.how == "from" else order.right)  # type: ignore[arg-type]
        return None if interval is None else _multiply(accumulation, stage, order, interval, leaf)

    def add_pass(order: Order) -> int | None:
        """Add the product of an interval and the stages before it that go by their own backward, in one pass."""
        span = [order]
        while span[-1].right is not None and span[-1].right.how == "backward":
            span.append(span[-1].right)
        assert span[-1].right is not None
        interval = add(span[-1].right)
        if interval is None:
            return None
        # Computes the pattern of the product.
        shadow = Accumulation(patterns_only=True)
        product: int | None = shadow.leaf(None, accumulation.matrices[interval].pattern)
        for node in reversed(span):
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
        return accumulation.add_pulled((order.stage, span[-1].stage), interval, shadow.matrices[product].pattern)

    accumulation.result = add(order)
    return accumulation


def _multiply(accumulation: Accumulation, stage: Stage, order: Order, interval: int, leaf: Any) -> int | None:
    """Add the product of an interval's matrix and a stage's operators, multiplied one by one."""
    edges = [(edge.source, edge.target, leaf(order.stage, edge)) for edge in stage.edges]
    # The interval leads to, or from, the vertex None.
    if order.how == "from":
        return eliminate(accumulation, [(None, stage.start, interval), *edges], None, stage.stop, in_turn=True)
    before = [(stage.stop, None, interval), *reversed(edges)]
    return eliminate(accumulation, before, stage.start, None, in_turn=True)
