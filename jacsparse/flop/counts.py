"""A schedule run over patterns of matrices, and over masks of the vectors' entries."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..patterns import Pattern
from ..schedule import Schedule, Step, run
from ..spgemm import meeting, multiply_adds, product_meeting, product_pattern
from ..stages import Region, is_light, matrix_of
from .estimate import applied_once

#: The value of the gradient of the network's input; no other has this number.
INPUT = -2


@dataclass
class Count:
    """The counted multiply-adds of one step, those over full vectors, and entries of its result and its factors."""

    pairs: int
    executed: int
    nnz: int
    left_nnz: int
    right_nnz: int


def input_step(plan: Schedule) -> Step:
    """The product that gives the gradient of the network's input, after all steps of a schedule."""
    level = max((step.level for step in plan.steps), default=-1) + 1
    return Step(INPUT, plan.n, plan.gradients[-1], "mv", level, "down")


class Counts:
    """The counts of all products of a schedule; values are patterns of matrices, and masks of the vectors' entries.

    The pattern of a product that only one vector multiplies is not computed; the vector passes through both factors.
    """

    def __init__(self, schedule: Schedule, factors: Sequence[Pattern | Region]) -> None:
        self.schedule, self.factors = schedule, factors
        #: The regions whose matrices no product has used yet.
        self._unused = {schedule.n - at: each for at, each in enumerate(factors) if isinstance(each, Region)}
        self._applied_once = applied_once(schedule)
        #: The counts of all products and of the gradient of the network's input, by value.
        self.steps: dict[int, Count] = {}

    def run(self, after_product: Callable[[], None] = lambda: None) -> Counts:
        """Count all products, including dead ones, and the gradient of the network's input."""
        self._after_product = after_product
        last = [input_step(self.schedule)] if self.schedule.n else []
        run([*self.schedule.products, *last], self._multiply, self._apply, self._element, kept=())
        return self

    def _element(self, value: int) -> Pattern | Region | np.ndarray:
        return self.factors[self.schedule.n - value] if value else full_mask(self.factors)

    def _multiply(
        self, step: Step, left: Pattern | Region, right: Pattern | Region
    ) -> Pattern | tuple[Pattern, Pattern]:
        left, right = matrix_of(left), matrix_of(right)
        regions = [self._unused.pop(value) for value in (step.left, step.right) if value in self._unused]
        pairs = multiply_adds(left, right) + sum(region.multiply_adds for region in regions)
        # Where the pattern is not computed, the factors stand for it.
        product = (left, right) if step.out in self._applied_once else product_pattern(left, right)
        self._add(step, Count(pairs, pairs, 0 if isinstance(product, tuple) else product.nnz, left.nnz, right.nnz))
        return product

    def _apply(self, step: Step, left: Pattern | Region | tuple[Pattern, Pattern], right: np.ndarray) -> np.ndarray:
        if isinstance(left, tuple):
            nnz, pairs = product_meeting(*left, right)
            self.steps[step.left].nnz, total, reached = nnz, int(pairs.sum()), pairs > 0
        else:
            # A vector passes through a region operator by operator, as in back-propagation.
            pairs_of_edges, reached = multiply_mask(left, right)
            nnz, total = left.nnz, sum(int(pairs.sum()) for pairs in pairs_of_edges.values())
        self._add(step, Count(total, nnz, int(reached.sum()), nnz, int(right.sum())))
        return reached

    def _add(self, step: Step, count: Count) -> None:
        self.steps[step.out] = count
        if step.out != INPUT:
            self._after_product()

    def over_full_vectors(self) -> list[float]:
        """FLOP of the live steps over full vectors, each step as the schedule has it."""
        return [2.0 * self.steps[step.out].executed for step in self.schedule.products if step.live]

    def executed(self, *, by_name: bool) -> dict[int, float]:
        """FLOP of each live step, by its value, as the scan executes it.

        Light matrices wait for a vector where the schedule was given `by_name`.
        """
        n, factors = self.schedule.n, self.factors if by_name else ()
        light = {n - at for at, each in enumerate(factors) if isinstance(each, Pattern) and is_light(each)}
        schedule, products = self.schedule.deferred(light)
        if n:
            products[INPUT] = (input_step(schedule),)
        # Where nothing waits, these products were counted.
        counts = Counts(schedule, self.factors).run().steps if light else self.steps
        return {
            value: 2.0 * math.fsum(counts[each.out].executed for each in steps) for value, steps in products.items()
        }

    def sizes(self) -> dict[int, int]:
        """Entries of each factor and result, by value."""
        sizes = {self.schedule.n - stage: factor.nnz for stage, factor in enumerate(self.factors)}
        return sizes | {value: count.nnz for value, count in self.steps.items()}


def full_mask(factors: Sequence[Pattern | Region]) -> np.ndarray:
    """The mask of a full gradient of the last factor's output."""
    return np.ones(factors[-1].shape[1] if factors else 0, dtype=np.bool_)


def multiply_mask(
    factor: Pattern | Region, mask: np.ndarray, read: dict[int, int] | None = None
) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """The pairs of entries that meet in each row of each edge, and the mask of the product with a masked vector.

    The elements of the vectors that each edge reads go into `read`.
    """
    if not isinstance(factor, Region):
        factor = Region(factor.shape, [(0, 1, factor)], 0, 1)
    reached, pairs = {factor.stop: mask}, dict[int, np.ndarray]()
    for number in reversed(range(len(factor.edges))):
        source, target, pattern = factor.edges[number]
        if target in reached:
            if read is not None:
                read[number] = int(np.count_nonzero(reached[target]))
            rows = pairs[number] = meeting(pattern, reached[target])
            reached[source] = reached[source] | (rows > 0) if source in reached else rows > 0
            if number in factor.coupling and rows.any():
                each, more = divmod(factor.coupling[number], len(rows))
                pairs[number] = each + (np.arange(len(rows)) < more)
    return pairs, reached.get(factor.start, np.zeros(factor.shape[0], dtype=np.bool_))
