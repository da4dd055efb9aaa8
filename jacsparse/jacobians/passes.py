"""A step's sums and products as kernels run them: along runs where there are long ones, and else row by row.

Equations on a grid have the same terms at all points but near the border. So each row of a step repeats one a few rows
before it, with the same weights, and each of its factors lies one further than that row's, or some other constant
distance. Along a run of such rows no index is read for each term, and several rows are added at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..runtime import SIMD, index_dtype, row_starts, run_rows, unsigned, within_rows
from . import kernels
from .terms import Step

#: The rows of the shortest run that pays, and the terms of the smallest step: a second kernel takes time to call.
SHORTEST, FEWEST = 16, 10_000
#: The largest distance from a row to the next one of its run, and the rows that a distance is judged by.
FARTHEST, SAMPLE = 64, 4096


@dataclass(frozen=True)
class Runs:
    """Some rows of a step as runs, and the other rows that have terms."""

    #: The distance from each row of a run to the next one.
    stride: int
    #: The first row of each run, and its number of rows.
    start: np.ndarray
    length: np.ndarray
    #: The rows outside of all runs.
    others: np.ndarray


def runs_of(step: Step) -> Runs:
    """The runs of a step; none where it is small, or most of its terms would be in none."""
    if len(step.left) < FEWEST:
        return no_runs(step)
    counts, stride = np.diff(step.indptr), _stride_of(step)
    place = np.arange(len(counts))
    order = np.argsort(place % stride, kind="stable")
    begin = np.maximum.accumulate(np.where(_continues(step, order, stride), 0, place))
    # Long runs become several, which several threads may share.
    first = np.flatnonzero((place - begin) % kernels.LONGEST == 0)
    start, length = order[first], np.diff(np.append(first, len(order)))
    long = (length >= SHORTEST) & (counts[start] > 0)
    if 2 * (counts[start] * length)[long].sum() < len(step.left):
        return no_runs(step)
    others = np.sort(order[np.repeat(~long, length)])
    # Neighbouring runs read and write the same memory.
    runs = np.flatnonzero(long)[np.argsort(start[long])]
    return Runs(stride, start[runs], length[runs], others[counts[others] > 0])


def no_runs(step: Step) -> Runs:
    """All rows that have terms, and no run."""
    rows = np.flatnonzero(np.diff(step.indptr))
    return Runs(1, rows[:0], rows[:0], rows)


def _continues(step: Step, order: np.ndarray, stride: int) -> np.ndarray:
    """Whether each row of an order belongs to a run with the row before it, which lies `stride` before."""
    counts = np.diff(step.indptr)
    continues = np.append(False, (np.diff(order) == stride) & (np.diff(counts[order]) == 0))[: len(order)]
    places = np.flatnonzero(continues)
    before, row = order[places - 1], order[places]
    terms, pair = _terms_of(step, before)
    next_terms = terms + (step.indptr[row] - step.indptr[before])[pair]
    alike = step.monomial[next_terms] == step.monomial[terms]
    alike &= step.coefficient[next_terms] == step.coefficient[terms]
    # Each distance equals the one that led to the row before, unless that row begins a run.
    earlier = np.arange(len(terms)) - (counts[before] * continues[places - 1])[pair]
    for factor in step.factors:
        distance = factor[next_terms] - factor[terms]
        alike &= distance == distance[earlier]
    continues[places[pair[~alike]]] = False
    return continues


def _stride_of(step: Step) -> int:
    """The distance of rows at which most are alike, judged by their first factors."""
    rows = len(step.indptr) - 1
    sample = np.arange(0, rows - 2 * FARTHEST, max(1, rows // SAMPLE))
    counts = np.diff(step.indptr)
    # A row without terms has no first factor, and is like no other.
    factor = np.append(step.left, 0)[step.indptr[:-1]]
    best, most = 1, 0
    for stride in range(1, FARTHEST + 1):
        row, second, third = sample, sample + stride, sample + 2 * stride
        alike = (counts[row] == counts[second]) & (factor[second] - factor[row] == factor[third] - factor[second])
        count = int((alike & (counts[row] > 0)).sum())
        # Rows repeat at multiples of a distance too.
        if count > 1.05 * most:
            best, most = stride, count
    return best


def _terms_of(step: Step, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The terms of rows of a step, one row after the other; and for each the place of its row among `rows`."""
    counts = np.diff(step.indptr)[rows]
    row = np.repeat(np.arange(len(rows)), counts)
    return step.indptr[rows][row] + within_rows(counts), row


class _Call(NamedTuple):
    """A kernel, what `run_rows` takes as its work, and its arguments before the weights."""

    kernel: str
    work: np.ndarray | int
    arguments: list[Any]


def in_turn(steps: Sequence[Step]) -> list[Step]:
    """The same steps; small ones before the last are one, a row of which may read rows before it.

    The variable that the last step would compute first is 1, by which that step multiplies the terms of sums.
    """
    *before, last = steps
    if len(before) < 2 or sum(len(step.left) for step in before) >= FEWEST:
        return list(steps)
    rights = [np.full_like(step.left, last.first) if step.right is None else step.right for step in before]
    indptr = row_starts(np.concatenate([np.diff(step.indptr) for step in before]), np.int64)
    left, monomial, coefficient = (
        np.concatenate([getattr(step, name) for step in before]) for name in ("left", "monomial", "coefficient")
    )
    return [Step(before[0].first, indptr, left, np.concatenate(rights), monomial, coefficient), last]


class Pass:
    """A step as kernels run it, with unsigned indices, over the rows that have terms; runs are for one sample."""

    def __init__(self, step: Step, batch: int) -> None:
        self.step = step
        #: Whether rows read others, so that one thread computes them in order.
        self._in_turn = any(factor.max(initial=-1) >= step.first for factor in step.factors)
        counts, runs = np.diff(step.indptr), runs_of(step) if batch == 1 else no_runs(step)
        factors = [unsigned(factor) for factor in step.factors]
        self._adds = self._in_turn or step.right is None or len(runs.start) > 0 or bool((counts != 1).any())
        if not self._adds:
            self._calls = [_Call("weighted_products", len(counts), factors)]
            return
        kind, terms = "sums" if step.right is None else "products", [unsigned(step.indptr), *factors]
        # Loops along runs are vectorised, but not what reads and writes their results.
        work_of_runs = row_starts(runs.length * (counts[runs.start] // SIMD + 2), np.int64)
        others = runs.others.astype(index_dtype(0, len(counts), 0))
        calls = [
            _Call(f"add_{kind}_of_runs", work_of_runs, [runs.stride, runs.start, runs.length, *terms]),
            _Call(f"add_weighted_{kind}", row_starts(counts[others], step.indptr.dtype), [unsigned(others), *terms]),
        ]
        self._calls = [call for call in calls if np.size(call.work) > 1]

    def run(self, weight: np.ndarray, variables: np.ndarray, out: np.ndarray, constant: np.ndarray | int) -> None:
        """Compute the step's variables, ``(variables,)`` or ``(variables, batch)``, from those before it."""
        if self._adds:
            out[...] = constant
        suffix, lanes = ("", 1) if out.ndim == 1 else ("_batch", out.shape[1])
        for call in self._calls:
            kernel = getattr(kernels, call.kernel + suffix)
            if self._in_turn:
                kernel(0, np.size(call.work) - 1, *call.arguments, weight, variables, out)
            else:
                run_rows(kernel, call.work, *call.arguments, weight, variables, out, lanes=lanes)
