"""Cuts of a chain into blocks for several workers that take about equally long."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ..spgemm import multiply_adds, product_pattern
from .accumulation import Region, matrix_of

if TYPE_CHECKING:
    from ..patterns import Pattern

#: An estimate may be this many times the true multiply-adds of a matrix.
DOUBT = 2


def boundaries(factors: Sequence[Pattern | Region], workers: int) -> list[int]:
    """Places of the scan's array at which blocks begin, for a short predicted time; ``[0]`` where no split pays.

    For each place and number of blocks before it, the search continues only the split by which the gradient arrives
    there first. Another split may be the best of all, because each worker then still goes through its block.

    A matrix-vector step costs the entries of its matrix. The reduction of a block costs the multiply-adds of its
    products, and of the matrices of stages with several operators. The search skips a reduction that alone costs more
    than all linear steps, because its patterns would be the largest: so the matrix of a block never has more entries
    than all factors together.
    """
    n = len(factors)
    if workers == 1 or n < 3:
        return [0]
    # Place j of the array holds the transposed Jacobian of stage n - j (stages from 0).
    places = [factors[n - place] for place in range(1, n)]
    through = np.concatenate([[0, 0], np.cumsum([factor.nnz for factor in places])])
    total = int(through[n])
    reduce = _reductions(places, total)

    def makespan(begins: list[int]) -> int:
        """The time at which the last worker finishes: the gradient enters each block in turn."""
        time = int(through[begins[1]]) if len(begins) > 1 else total
        finish = time
        for begin, stop in pairwise([*begins[1:], n]):
            finish = max(finish, time + int(through[stop] - through[begin]))
            if stop < n:
                cost, nnz = reduce[begin, stop]
                time = max(time, cost) + nnz
        return finish

    # By place: the time at which the gradient arrives there first, and the beginnings of the blocks before it.
    entered = {place: (int(through[place]), [0]) for place in range(1, n)}
    answer = [0]
    for _ in range(1, min(workers, n)):
        following: dict[int, tuple[int, list[int]]] = {}
        for begin, (_time, begins) in entered.items():
            answer = min(answer, [*begins, begin], key=makespan)
        for (begin, stop), (cost, nnz) in reduce.items():
            if begin in entered and stop < n:
                time, begins = entered[begin]
                ready = max(time, cost) + nnz
                if stop not in following or ready < following[stop][0]:
                    following[stop] = (ready, [*begins, begin])
        if not following:
            break
        entered = following
    return answer


def _reductions(factors: Sequence[Pattern | Region], limit: int) -> dict[tuple[int, int], tuple[int, int]]:
    """The cost of each block's reduction, and the product's entries, by the block's begin and end, which count from 1.

    Blocks have at least two places, and costs below `limit`.
    """
    reductions = {}
    for begin in range(len(factors)):
        cost = _matrix_cost(factors[begin], limit)
        if cost >= limit:
            continue
        product = matrix_of(factors[begin])
        for place in range(begin + 1, len(factors)):
            cost += _matrix_cost(factors[place], limit - cost)
            if cost >= limit:
                break
            matrix = matrix_of(factors[place])
            cost += multiply_adds(matrix, product)
            if cost >= limit:
                break
            product = product_pattern(matrix, product)
            reductions[begin + 1, place + 2] = (cost, product.nnz)
    return reductions


def _matrix_cost(factor: Pattern | Region, limit: int) -> int:
    """Multiply-adds to compute the matrix of a factor: an estimate where they are far beyond the limit."""
    if not isinstance(factor, Region):
        return 0
    estimate = int(factor.estimate)
    return estimate if estimate > DOUBT * limit else factor.multiply_adds
