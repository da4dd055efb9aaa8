"""In which order a chain's Jacobians are multiplied: the one of least predicted cost.

The chain's product ``J_1ᵀ J_2ᵀ ... J_nᵀ`` is made of products of its intervals. The cheapest way to each interval is
the cheapest way to two that it is made of, and their product: matrix-chain dynamic programming, over costs that depend
on how full each interval is. A stage that is a graph of operators is a matrix of its own, or is passed operator by
operator by the product beside it, whichever costs less.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ._accumulation import Accumulation
from ._stages import Edge, Stage
from .patterns._store import remembered
from .spgemm._estimate import KEYS, counts, fresh_keys, spread

__all__ = ["Order", "accumulated", "best_order"]

#: What a multiply-add of an operator's own dense backward costs, in those of sparse products: measured on CPUs, where
#: convolutions of PyTorch reach 10 to 90 billion a second and sparse products 2 to 15.
DENSE = 1 / 8
#: What each product, sum or operator's backward takes beside that: about 100 µs.
START = 200_000
#: What beginning a backward pass takes: about 500 µs.
PASS = 1_000_000

#: Bytes of keys of one tensor that are passed on at once.
AT_ONCE = 2**26
#: Elements of a tensor that stand for all where products of intervals meet.
SAMPLED = 2**16


_HOWS = ("stage", "product", "through", "from", "backward")


@dataclass(frozen=True)
class Order:
    """How the product of an interval of stages is made.

    Attributes
    ----------
    how : {"stage", "product", "through", "from", "backward"}
        One stage's matrix; the product of two intervals; a stage's operators applied to the interval behind it, from
        the left; or to the interval before it, from the right; or the operators' own dense backward, run on all
        columns of the interval behind.
    stage : int
        For all but a product of two intervals.
    left, right : Order or None
        The intervals.
    cost : float
        Predicted, in multiply-adds.
    """

    how: str
    stage: int = -1
    left: Order | None = None
    right: Order | None = None
    cost: float = 0.0

    def __str__(self) -> str:
        if self.how == "stage":
            return f"J{self.stage + 1}"
        if self.how in ("through", "backward"):
            return f"J{self.stage + 1}{'*' if self.how == 'backward' else ''}·{self.right}"
        return f"({self.left}·{self.right if self.right else f'J{self.stage + 1}'})"


class _Estimates:
    """Multiply-adds that take each interval of stages further, by keys that are passed through the stages.

    Attributes
    ----------
    entries : ndarray, (stages, stages)
        Of each interval, by its first and last stage.
    through : ndarray, (stages, stages)
        Multiply-adds of taking a stage's operators, one by one, to the left of an interval: by stage and last stage.
    onward : ndarray, (stages, stages)
        The same to the right of an interval: by stage and first stage.
    meets : list of ndarray
        Of the product of intervals that meet behind each stage: by first stage, and by last from the next one on.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        n = len(stages)
        sizes = np.array([math.prod(stages[0].in_shape), *(math.prod(stage.out_shape) for stage in stages)])
        self.entries, self.through, self.onward = np.zeros((3, n, n))
        largest = max((max(edge.pattern.shape) for stage in stages for edge in stage.edges), default=1)
        width = max(1, AT_ONCE // (4 * KEYS * int(largest)))
        chunks = [range(first, min(first + width, n)) for first in range(0, n, width)]
        samples = [_sampled(int(size)) for size in sizes]
        # How many elements of each later stage's output depend on elements of a tensor. Keys begin there.
        ahead = [np.zeros((len(own), n - place), dtype=np.float32) for place, own in enumerate(samples)]
        for chunk in chunks:
            keys = np.empty((sizes[chunk[-1] + 1], 0), dtype=np.float32)
            for number in reversed(range(chunk[-1] + 1)):
                later = range(max(number, chunk[0]), chunk[-1] + 1)
                if number in chunk:
                    keys = np.hstack([fresh_keys(int(sizes[number + 1]), number), keys])
                columns = sizes[1:][later.start : later.stop]
                for vertex, own in _passed_keys(stages[number], keys, backwards=True):
                    reached = counts(own, columns)
                    for edge in stages[number].edges:
                        if edge.target == vertex:
                            work = edge.pattern.structure.column_counts() @ reached
                            self.through[number, later.start : later.stop] += work
                    if vertex == stages[number].start:
                        following = own
                        self.entries[number, later.start : later.stop] = reached.sum(axis=0)
                        ahead[number][:, later.start - number : later.stop - number] = reached[samples[number]]
                keys = following
        # On how many elements of each earlier stage's input each element depends.
        self.meets = [np.zeros((number + 1, n - number - 1)) for number in range(n)]
        for chunk in chunks:
            keys = np.empty((sizes[chunk[0]], 0), dtype=np.float32)
            for number in range(chunk[0], n):
                sooner = slice(chunk[0], min(number, chunk[-1]) + 1)
                if number in chunk:
                    keys = np.hstack([keys, fresh_keys(int(sizes[number]), n + number)])
                for vertex, own in _passed_keys(stages[number], keys, backwards=False):
                    reached = counts(own, sizes[sooner])
                    for edge in stages[number].edges:
                        if edge.source == vertex:
                            self.onward[number, sooner] += edge.pattern.structure.row_counts() @ reached
                    if vertex == stages[number].stop:
                        following = own
                        part = samples[number + 1]
                        scale = sizes[number + 1] / max(1, len(part))
                        self.meets[number][sooner] = scale * (reached[part].T @ ahead[number + 1])
                keys = following


def _sampled(size: int) -> np.ndarray:
    """Some of so many elements, by number: all, or as many as tell a sum over them."""
    if size <= SAMPLED:
        return np.arange(size)
    return np.sort(np.random.default_rng(size).choice(size, SAMPLED, replace=False))


def _passed_keys(stage: Stage, keys: np.ndarray, *, backwards: bool) -> Iterator[tuple[Any, np.ndarray]]:
    """Keys at one end of a stage passed to all its vertices; infinite at the other end where no path leads there."""
    if backwards:
        first, last, edges = stage.stop, stage.start, [(e.target, e.source, e.pattern) for e in reversed(stage.edges)]
    else:
        first, last, edges = stage.start, stage.stop, [(e.source, e.target, e.pattern.T) for e in stage.edges]
    arrived = False
    for vertex, own in spread(edges, first, keys):
        arrived |= vertex == last
        yield vertex, own
    if not arrived:
        size = math.prod(stage.in_shape if backwards else stage.out_shape)
        yield last, np.full((size, keys.shape[1]), np.inf, dtype=np.float32)


def best_order(stages: Sequence[Stage]) -> Order:
    """The cheapest order of a chain's products, of at least one stage; where it was found before, that one."""
    if len(stages) == 1:
        return Order("stage", 0)
    found = remembered(f"order {_digest(stages)}", lambda: _packed(_cheapest(stages)))
    return _unpacked(zip(found["how"].tolist(), found["stage"].tolist(), found["cost"].tolist(), strict=True))


def _digest(stages: Sequence[Stage]) -> str:
    """Of all that decides upon an order."""
    digest = hashlib.blake2b(f"{KEYS} {DENSE} {START} {PASS}".encode())
    for stage in stages:
        numbers: dict[Any, int] = {}
        ends = [numbers.setdefault(vertex, len(numbers)) for vertex in (stage.start, stage.stop)]
        digest.update(f"{stage.in_shape} {stage.out_shape} {stage.hooked} {stage.backward_work} {ends}".encode())
        for edge in stage.edges:
            ends = [numbers.setdefault(vertex, len(numbers)) for vertex in (edge.source, edge.target)]
            digest.update(f"{ends} {edge.pattern.digest}".encode())
    return digest.hexdigest()


def _packed(order: Order) -> dict[str, np.ndarray]:
    """An order as arrays: each node before what it is made of, the left one first."""
    nodes, waiting = [], [order]
    while waiting:
        nodes.append(waiting.pop())
        waiting += [part for part in (nodes[-1].right, nodes[-1].left) if part is not None]
    return {
        "how": np.array([_HOWS.index(node.how) for node in nodes]),
        "stage": np.array([node.stage for node in nodes]),
        "cost": np.array([node.cost for node in nodes]),
    }


def _unpacked(nodes: Iterator[tuple[int, int, float]]) -> Order:
    number, stage, cost = next(nodes)
    how = _HOWS[number]
    left = _unpacked(nodes) if how in ("product", "from") else None
    right = _unpacked(nodes) if how in ("product", "through", "backward") else None
    return Order(how, stage, left, right, cost)


def _cheapest(stages: Sequence[Stage]) -> Order:
    n = len(stages)
    estimates = _Estimates(stages)
    # Where an operator's own backward may be asked, what it takes for each column.
    backward = [math.inf if stage.hooked else DENSE * stage.backward_work for stage in stages]
    start = [START * len(stage.edges) for stage in stages]
    best: dict[tuple[int, int], Order] = {}
    # The cheapest that begins with an operator's own backward: one more before it needs no pass of its own.
    passing: dict[tuple[int, int], Order] = {}
    for number, stage in enumerate(stages):
        own = estimates.through if stage.operator is None else estimates.entries
        best[number, number] = Order("stage", number, cost=start[number] + float(own[number, number]))
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
                cost, onwards = right.cost + PASS, passing.get((first + 1, last))
                if onwards is not None and onwards.cost < cost:
                    cost, right = onwards.cost, onwards
                cost += start[first] + math.prod(stages[last].out_shape) * backward[first]
                orders.append(Order("backward", first, right=right, cost=cost))
            orders = [replace(each, cost=float(each.cost + estimates.entries[first, last])) for each in orders]
            best[first, last] = min(orders, key=lambda order: order.cost)
            if orders[-1].how == "backward":
                passing[first, last] = orders[-1]
    return best[0, n - 1]


def accumulated(stages: Sequence[Stage], order: Order) -> tuple[Accumulation, int | None]:
    """Products and sums that make a chain's transposed Jacobian; leaves are stages' numbers and their edges'.

    The matrix is None where the output does not depend on the input.
    """
    accumulation = Accumulation()

    def leaf(number: int, edge: Edge) -> int:
        return accumulation.leaf((number, edge), edge.pattern)

    def made(order: Order) -> int | None:
        stage = stages[order.stage]
        if order.how == "product":
            assert order.left is not None and order.right is not None
            left, right = made(order.left), made(order.right)
            return None if left is None or right is None else accumulation.multiply(left, right)
        if order.how == "stage":
            return stage.joined(accumulation, lambda edge: leaf(order.stage, edge))
        if order.how == "backward":
            return pulled(order)
        beside = made(order.left if order.how == "from" else order.right)  # type: ignore[arg-type]
        return None if beside is None else _passed(accumulation, stage, order, beside, leaf)

    def pulled(order: Order) -> int | None:
        """All stages in a row that go by their own backward, in one pass of it."""
        span = [order]
        while span[-1].right is not None and span[-1].right.how == "backward":
            span.append(span[-1].right)
        assert span[-1].right is not None
        beside = made(span[-1].right)
        # Only which positions it fills.
        shadow = Accumulation(patterns_only=True)
        passed = None if beside is None else shadow.leaf(None, accumulation.matrices[beside].pattern)
        for each in reversed(span):
            if passed is not None:
                passed = _passed(shadow, stages[each.stage], each, passed, lambda _, e: shadow.leaf(None, e.pattern))
        if beside is None or passed is None:
            return None
        return accumulation.pulled((order.stage, span[-1].stage), beside, shadow.matrices[passed].pattern)

    return accumulation, made(order)


def _passed(accumulation: Accumulation, stage: Stage, order: Order, beside: int, leaf: Any) -> int | None:
    """An interval's matrix taken through a stage's operators, one by one."""
    backwards = order.how != "from"
    first, last = (stage.stop, stage.start) if backwards else (stage.start, stage.stop)
    terms: dict[Any, list[int]] = {first: [beside]}
    done: dict[Any, int] = {}

    def at(vertex: Any) -> int | None:
        if vertex not in done and vertex in terms:
            done[vertex] = accumulation.add(terms[vertex])
        return done.get(vertex)

    for edge in reversed(stage.edges) if backwards else stage.edges:
        source, target = (edge.target, edge.source) if backwards else (edge.source, edge.target)
        own = at(source)
        if own is not None:
            matrix = leaf(order.stage, edge)
            product = accumulation.multiply(matrix, own) if backwards else accumulation.multiply(own, matrix)
            terms.setdefault(target, []).append(product)
    return at(last)
