"""Where to cut a chain so that several workers take about equally long."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ._accumulation import Region, matrix_of
from .spgemm import multiply_adds, product_pattern

if TYPE_CHECKING:
    from .patterns import Pattern

__all__ = ["boundaries"]

#: How much less making a matrix may take than is estimated.
DOUBT = 2


def boundaries(factors: Sequence[Pattern | Region], workers: int) -> list[int]:
    """Places of the scan's array at which blocks begin, for a short predicted time; ``[0]`` where no split pays.

    For each place and number of blocks before it, the search goes on only with the split by which the gradient gets
    there first. The best of all splits may be another, as each worker has its own block still to go through.

    The cost of a matrix-vector step is its matrix' entries, that of a block's reduction its products' multiply-adds,
    those included that make the one matrix of a stage of several operators. A reduction that alone takes longer than
    going linearly is not looked at, as its patterns would be the largest: so no block's matrix has more entries than
    all factors together.
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
        """When the last worker is done: each block is entered in turn, and then gone through."""
        time = int(through[begins[1]]) if len(begins) > 1 else total
        finish = time
        for begin, stop in pairwise([*begins[1:], n]):
            finish = max(finish, time + int(through[stop] - through[begin]))
            if stop < n:
                cost, nnz = reduce[begin, stop]
                time = max(time, cost) + nnz
        return finish

    # entered[j]: the blocks before place j by which the gradient gets there first, and when.
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
    """For blocks of at least two places whose reduction costs less than `limit`: that, and the product's entries.

    Places count from 1.
    """
    found = {}
    for begin in range(len(factors)):
        cost = _making(factors[begin], limit)
        if cost >= limit:
            continue
        product = matrix_of(factors[begin])
        for place in range(begin + 1, len(factors)):
            cost += _making(factors[place], limit - cost)
            if cost >= limit:
                break
            matrix = matrix_of(factors[place])
            cost += multiply_adds(matrix, product)
            if cost >= limit:
                break
            product = product_pattern(matrix, product)
            found[begin + 1, place + 2] = (cost, product.nnz)
    return found


def _making(factor: Pattern | Region, limit: int) -> int:
    """Multiply-adds that make the matrix of a factor; where they are far beyond the limit, about as many."""
    if not isinstance(factor, Region):
        return 0
    estimate = int(factor.estimate)
    return estimate if estimate > DOUBT * limit else factor.multiply_adds
