"""In which order a chain's Jacobians are multiplied: the one of least predicted cost.

The chain's product ``J_1ᵀ J_2ᵀ ... J_nᵀ`` is made of products of its intervals. The cheapest way to each interval is
the cheapest way to two that it is made of, and their product: matrix-chain dynamic programming, over costs that depend
on how full each interval is. A stage that is a graph of operators is a matrix of its own, or is passed operator by
operator by the product beside it, whichever costs less.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._accumulation import Accumulation
from ._stages import Edge, Stage
from .spgemm._estimate import KEYS, counts, fresh_keys, least

__all__ = ["Order", "accumulated", "best_order"]

#: What a multiply-add of an operator's own dense backward costs, in those of sparse products: measured on CPUs, where
#: convolutions of PyTorch reach 10 to 90 billion a second and sparse products 2 to 15.
DENSE = 1 / 8


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
    """Of each interval of stages: multiply-adds of its products, by keys that are taken through the stages.

    At each vertex (a tensor between operators) ``ahead[v][:, j]`` is how many elements of the output of stage `j`
    depend on each element of the vertex, and ``behind[v][:, i]`` on how many of the input of stage `i` it depends.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = stages
        n = len(stages)
        sizes = np.array([int(np.prod(stage.out_shape)) for stage in stages])
        before = np.array([int(np.prod(stage.in_shape)) for stage in stages])
        # Towards the output: keys start at each stage's output, and go back.
        self.ahead: list[dict[Any, np.ndarray]] = [{} for _ in stages]
        keys = np.full((int(sizes[-1]), n * KEYS), np.inf, dtype=np.float32)
        for number in reversed(range(n)):
            keys = np.ascontiguousarray(keys)
            keys[:, number * KEYS : (number + 1) * KEYS] = fresh_keys(int(sizes[number]), number)
            keys = self._taken(number, keys, self.ahead[number], sizes, backwards=True)
        # Towards the input: keys start at each stage's input, and go on.
        self.behind: list[dict[Any, np.ndarray]] = [{} for _ in stages]
        keys = np.full((int(before[0]), n * KEYS), np.inf, dtype=np.float32)
        for number in range(n):
            keys = np.ascontiguousarray(keys)
            keys[:, number * KEYS : (number + 1) * KEYS] = fresh_keys(int(before[number]), n + number)
            keys = self._taken(number, keys, self.behind[number], before, backwards=False)

    def _taken(
        self, number: int, keys: np.ndarray, kept: dict[Any, np.ndarray], limits: np.ndarray, *, backwards: bool
    ) -> np.ndarray:
        """Keys at one end of a stage taken to its other, the counts at each vertex kept."""
        stage = self.stages[number]
        first, last = (stage.stop, stage.start) if backwards else (stage.start, stage.stop)
        held = {first: keys}
        for edge in reversed(stage.edges) if backwards else stage.edges:
            source, target = (edge.target, edge.source) if backwards else (edge.source, edge.target)
            if source in held:
                pattern = edge.pattern if backwards else edge.pattern.T
                own = least(pattern, held[source])
                held[target] = np.minimum(held[target], own) if target in held else own
        kept.update({vertex: counts(own, limits) for vertex, own in held.items()})
        missing = np.full((int(np.prod(stage.in_shape if backwards else stage.out_shape)), keys.shape[1]), np.inf)
        return held.get(last, missing.astype(np.float32))

    def product(self, middle: int) -> np.ndarray:
        """Multiply-adds of the products of intervals that meet behind stage `middle`: ``(first, last)``."""
        behind, ahead = self.behind[middle], self.ahead[middle + 1]
        left = behind.get(self.stages[middle].stop)
        right = ahead.get(self.stages[middle + 1].start)
        n = len(self.stages)
        return np.zeros((n, n)) if left is None or right is None else left.T @ right

    def nnz(self, first: int) -> np.ndarray:
        """Entries of the intervals that begin with stage `first`, by their last stage."""
        own = self.ahead[first].get(self.stages[first].start)
        return np.zeros(len(self.stages)) if own is None else own.sum(axis=0)

    def through(self, number: int) -> np.ndarray:
        """Multiply-adds of taking a stage's operators, one by one, to the left of intervals, by their last stage."""
        held, edges = self.ahead[number], self.stages[number].edges
        met = ((held[edge.target], edge.pattern.structure) for edge in edges if edge.target in held)
        return self._total(structure.column_counts() @ columns for columns, structure in met)

    def onward(self, number: int) -> np.ndarray:
        """The same to the right of intervals, by their first stage."""
        held, edges = self.behind[number], self.stages[number].edges
        met = ((held[edge.source], edge.pattern.structure) for edge in edges if edge.source in held)
        return self._total(structure.row_counts() @ rows for rows, structure in met)

    def _total(self, terms: Iterable[np.ndarray]) -> np.ndarray:
        return sum(terms, np.zeros(len(self.stages)))


def best_order(stages: Sequence[Stage]) -> Order:
    """The cheapest order of a chain's products, of at least one stage."""
    n = len(stages)
    if n == 1:
        return Order("stage", 0)
    estimates = _Estimates(stages)
    entries = [estimates.nnz(first) for first in range(n)]
    through = [estimates.through(number) for number in range(n)]
    onward = [estimates.onward(number) for number in range(n)]
    meets = [estimates.product(middle) for middle in range(n - 1)]
    best: dict[tuple[int, int], Order] = {}
    for number, stage in enumerate(stages):
        own = through[number] if stage.operator is None else entries[number]
        best[number, number] = Order("stage", number, cost=float(own[number]))
    for length in range(1, n):
        for first in range(n - length):
            last = first + length
            ways = []
            for middle in range(first, last):
                left, right = best[first, middle], best[middle + 1, last]
                cost = left.cost + right.cost + float(meets[middle][first, last])
                ways.append(Order("product", left=left, right=right, cost=cost))
            if stages[first].operator is None:
                right = best[first + 1, last]
                ways.append(Order("through", first, right=right, cost=right.cost + float(through[first][last])))
            if not stages[first].hooked:
                right, columns = best[first + 1, last], math.prod(stages[last].out_shape)
                cost = right.cost + DENSE * columns * stages[first].backward_work
                ways.append(Order("backward", first, right=right, cost=cost))
            if stages[last].operator is None:
                left = best[first, last - 1]
                ways.append(Order("from", last, left=left, cost=left.cost + float(onward[last][first])))
            chosen = min(ways, key=lambda way: way.cost)
            best[first, last] = Order(
                chosen.how, chosen.stage, chosen.left, chosen.right, chosen.cost + float(entries[first][last])
            )
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
