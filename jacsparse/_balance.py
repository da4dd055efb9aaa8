"""Where to cut a chain so that several workers take about equally long."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from .spgemm import multiply_adds, product_pattern

if TYPE_CHECKING:
    from ._chain import Chain

__all__ = ["boundaries"]


def boundaries(chain: Chain, workers: int) -> list[int]:
    """Places of the scan's array at which blocks begin, for the least predicted time; ``[0]`` where no split pays.

    The cost of a matrix-vector step is its matrix' entries, that of a block's reduction its products' multiply-adds.
    A reduction that alone takes longer than going linearly is not looked at: its patterns would be the largest.
    """
    n = len(chain)
    if workers == 1 or n < 3:
        return [0]
    # Place j of the array holds the transposed Jacobian of stage n - j (stages from 0).
    matrices = [None] + [chain.stages[n - place].pattern for place in range(1, n)]
    apply = np.array([0] + [matrix.nnz for matrix in matrices[1:] if matrix is not None])
    through = np.concatenate([[0], np.cumsum(apply)])
    total = int(through[n])
    reduce = _reductions(matrices, total)

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
    for _ in range(1, workers):
        following: dict[int, tuple[int, list[int]]] = {}
        for begin, (_time, begins) in entered.items():
            answer = min(answer, [*begins, begin], key=makespan)
        for (begin, stop), (cost, nnz) in reduce.items():
            if begin in entered and stop < n:
                time, begins = entered[begin]
                ready = max(time, cost) + nnz
                if stop not in following or ready < following[stop][0]:
                    following[stop] = (ready, [*begins, begin])
        entered = following
    return answer


def _reductions(matrices: list, limit: int) -> dict[tuple[int, int], tuple[int, int]]:
    """For blocks of at least two places whose reduction costs less than `limit`: that, and the product's entries."""
    found = {}
    for begin in range(1, len(matrices)):
        product, cost = matrices[begin], 0
        for place in range(begin + 1, len(matrices)):
            cost += multiply_adds(matrices[place], product)
            if cost >= limit:
                break
            product = product_pattern(matrices[place], product)
            found[begin, place + 1] = (cost, product.nnz)
    return found
