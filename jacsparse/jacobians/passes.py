"""A step's sums and products as kernels run them: along runs where there are long ones, and else row by row.

Equations on a grid have the same terms at all points but near the border. So each row of a step repeats one a few rows
before it, with the same weights, and each of its factors lies one further than that row's, or some other constant
distance. Along a run of such rows no index is read for each term, and several rows are added at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..runtime import SIMD, row_starts, run_rows
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
    """The runs of a step; none where most of its terms would be in none."""
    counts = np.diff(step.indptr)
    stride = _stride_of(step)
    order = np.argsort(np.arange(len(counts)) % stride, kind="stable")
    first = np.append(0, np.flatnonzero(~_continues(step, order, stride)) + 1)[: len(order)]
    length = np.diff(np.append(first, len(order)))
    # Long runs become several, which several threads may share.
    parts = -(-length // kernels.LONGEST)
    earlier = (np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)) * kernels.LONGEST
    first = np.repeat(first, parts) + earlier
    length = np.minimum(np.repeat(length, parts) - earlier, kernels.LONGEST)
    long = (length >= SHORTEST) & (counts[order[first]] > 0)
    if 2 * (counts[order[first]] * length)[long].sum() < len(step.left):
        long[:] = False
    others = np.sort(order[np.repeat(~long, length)])
    start, length = order[first[long]], length[long]
    # Neighbouring runs read and write the same memory.
    by_start = np.argsort(start)
    return Runs(stride, start[by_start], length[by_start], others[counts[others] > 0])


def _continues(step: Step, order: np.ndarray, stride: int) -> np.ndarray:
    """Whether each row of an order but the last belongs to a run with the row after it, which lies `stride` further."""
    counts = np.diff(step.indptr)
    here, after = order[:-1], order[1:]
    continues = (after == here + stride) & (counts[here] == counts[after])
    pairs = np.flatnonzero(continues)
    here, after = here[pairs], after[pairs]
    terms, pair = _terms_of(step, here)
    next_terms = terms + (step.indptr[after] - step.indptr[here])[pair]
    alike = (step.monomial[next_terms] == step.monomial[terms]) & (
        step.coefficient[next_terms] == step.coefficient[terms]
    )
    # Distances are those between the two rows before, where these belong together too.
    chained = np.append(False, np.diff(pairs) == 1)[: len(pairs)]
    before = np.arange(len(terms)) - (counts[here] * chained)[pair]
    for factor in _factors_of(step):
        distance = factor[next_terms] - factor[terms]
        alike &= distance == distance[before]
    continues[pairs[pair[~alike]]] = False
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


def _factors_of(step: Step) -> list[np.ndarray]:
    return [step.left] if step.right is None else [step.left, step.right]


def _terms_of(step: Step, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The terms of rows of a step, one row after the other; and for each the place of its row among `rows`."""
    counts = np.diff(step.indptr)[rows]
    row = np.repeat(np.arange(len(rows)), counts)
    return np.arange(len(row)) + (step.indptr[rows] - (np.cumsum(counts) - counts))[row], row


class _Call(NamedTuple):
    """A kernel, what `run_rows` takes as its work, its other arguments, and its part of the weights."""

    kernel: str
    work: np.ndarray | int
    arguments: list[Any]
    weights: slice


class Pass:
    """A step as kernels run it, with unsigned indices, over the rows that have terms.

    Parameters
    ----------
    step : Step
        The step.
    batch : int
        The number of samples; runs are for one alone.

    Attributes
    ----------
    coefficient, monomial : ndarray
        Those of the step's terms, in the order in which `run` takes their weights.
    """

    def __init__(self, step: Step, batch: int) -> None:
        self.step = step
        counts = np.diff(step.indptr)
        others = np.flatnonzero(counts)
        runs = Runs(1, others[:0], others[:0], others)
        if batch == 1 and len(step.left) >= FEWEST:
            runs = runs_of(step)
        of_runs, of_others = (_terms_of(step, rows)[0] for rows in (runs.start, runs.others))
        terms = np.concatenate([of_runs, of_others])
        self.coefficient, self.monomial = step.coefficient[terms], step.monomial[terms]
        self._adds = step.right is None or len(of_runs) > 0 or bool((counts != 1).any())
        kind = "sums" if step.right is None else "products"
        self._calls: list[_Call] = []
        if len(of_runs):
            # Loops along runs are vectorised, but not what reads and writes their results.
            work = row_starts(runs.length * (counts[runs.start] // SIMD + 2), np.int64)
            arguments = [runs.stride, *_along(step, runs)]
            self._calls.append(_Call(f"add_{kind}_of_runs", work, arguments, slice(0, len(of_runs))))
        if len(of_others):
            factors = [unsigned(factor[of_others]) for factor in _factors_of(step)]
            starts, weights = row_starts(counts[runs.others], step.indptr.dtype), slice(len(of_runs), None)
            arguments = [unsigned(runs.others.astype(starts.dtype)), unsigned(starts), *factors]
            self._calls.append(
                _Call(f"add_weighted_{kind}", starts, arguments, weights)
                if self._adds
                else _Call("weighted_products", len(counts), factors, weights)
            )

    def run(self, weight: np.ndarray, variables: np.ndarray, out: np.ndarray, constant: np.ndarray | int) -> None:
        """Compute the step's variables, ``(variables,)`` or ``(variables, batch)``, from those before it."""
        if self._adds:
            out[...] = constant
        suffix, lanes = ("", 1) if out.ndim == 1 else ("_batch", out.shape[1])
        for call in self._calls:
            kernel = getattr(kernels, call.kernel + suffix)
            run_rows(kernel, call.work, *call.arguments, weight[call.weights], variables, out, lanes=lanes)


def _along(step: Step, runs: Runs) -> list[np.ndarray]:
    """The first row and the length of each run, where its terms start, and each factor's first place and distance."""
    terms, _ = _terms_of(step, runs.start)
    next_terms, _ = _terms_of(step, runs.start + runs.stride)
    arrays = [runs.start, runs.length, row_starts(np.diff(step.indptr)[runs.start], np.int64)]
    for factor in _factors_of(step):
        arrays += [factor[terms], factor[next_terms].astype(np.int64) - factor[terms]]
    return [array.astype(np.int64) for array in arrays]


def unsigned(array: np.ndarray) -> np.ndarray:
    """The same memory as unsigned numbers: none is negative."""
    return array.view(f"u{array.itemsize}")
