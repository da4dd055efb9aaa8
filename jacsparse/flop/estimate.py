"""Estimates of the time and the memory that counting a schedule takes, without making products of patterns."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..patterns import Diagonal, Full, Pattern
from ..runtime import thread_count
from ..schedule import Schedule
from ..spgemm import counts, fresh_keys, spread
from ..stages import Region

#: Pairs of entries that a thread looks at per second, about, and seconds of a count without products.
PAIRS, START = 2.5e8, 0.5
#: Pairs and bytes beyond which it does not matter how many more there are.
ENOUGH, ENOUGH_BYTES = 1e10, 2**33
#: Entries of all factors, at most, for which products are estimated: a few seconds.
_BUDGET = 1e8
#: Bytes of an entry of a pattern.
_ENTRY = 4


@dataclass(frozen=True)
class CountEstimate:
    """What counting a schedule takes, about.

    Attributes
    ----------
    schedule : str
        The schedule's name.
    pairs : float
        Pairs of entries that products of matrices go through one by one, over all samples.
    nbytes : float
        Bytes of the patterns of these products; 0 where they are not estimated.
    complete : bool
        Whether all products are estimated. If not, those that are take long enough, and the figures are lower bounds.
    """

    schedule: str
    pairs: float
    nbytes: float
    complete: bool

    @property
    def seconds(self) -> float:
        """Time on this machine's threads."""
        return START + self.pairs / (PAIRS * thread_count()) if self.pairs else 0.0


def estimate_count(
    plan: Schedule, factors: Sequence[Pattern | Region], runs: int = 1, enough: float = math.inf
) -> CountEstimate:
    """Estimate the pairs of entries and the bytes of a schedule's products of matrices.

    Parameters
    ----------
    plan : Schedule
        The schedule.
    factors : sequence of Pattern or Region
        The transposed Jacobians of the stages, from the network's input to its output.
    runs : int
        How often the schedule is counted.
    enough : float
        Pairs beyond which no further product is estimated.
    """
    n = plan.n
    # The stages that each matrix spans, from 0.
    spans = {n - stage: (stage, stage) for stage in range(n)}
    users = Counter(value for step in plan.products for value in (step.left, step.right))
    once = {step.left for step in plan.products if step.kind == "mv" and users[step.left] == 1}
    unused = {stage for stage, factor in enumerate(factors) if isinstance(factor, Region)}
    if all(step.kind == "mv" for step in plan.products):
        return CountEstimate(plan.name, 0.0, 0.0, True)
    surely = sum(_least_pairs(factors[stage]) for stage in unused)
    entries = sum(factor.nnz for factor in factors if isinstance(factor, Region))
    if runs * surely > enough or entries > _BUDGET:
        return CountEstimate(plan.name, runs * max(surely, entries), 0.0, False)
    pairs, nbytes, complete = 0.0, 0.0, True
    for step in plan.products:
        if step.kind != "mm":
            continue
        (first, middle), (start, last) = spans[step.left], spans[step.right]
        spans[step.out] = (first, last)
        if runs * pairs > enough or nbytes > ENOUGH_BYTES:
            complete = False
            continue
        left, right = factors[first : middle + 1], factors[start : last + 1]
        for stage in unused & {first, start}:
            region = factors[stage]
            assert isinstance(region, Region)
            unused.discard(stage)
            pairs += region.estimate
            nbytes += _ENTRY * float(_row_counts([region]).sum())
        if _is_counted(left, right):
            rows = _row_counts(right)
            pairs += float(_column_counts(left) @ rows)
        if step.out not in once:
            nbytes += _ENTRY * float(_row_counts([*left, *right]).sum())
    return CountEstimate(plan.name, runs * pairs, nbytes, complete)


def _least_pairs(factor: Pattern | Region) -> float:
    """A lower bound on the pairs of entries to make a region's matrix: where two of its edges meet."""
    if isinstance(factor, Pattern):
        return 0.0
    # The entries of each column of the matrices that lead to a vertex, past diagonal ones.
    arrived: dict[object, np.ndarray] = {}
    pairs = 0.0
    for source, target, pattern in factor.edges:
        if isinstance(pattern.structure, Diagonal):
            passed = arrived.get(source)
        else:
            passed = pattern.structure.column_counts()
            if source in arrived:
                pairs += float(arrived[source] @ pattern.structure.row_counts().astype(np.float64))
        if passed is not None:
            arrived[target] = passed + arrived[target] if target in arrived else passed.astype(np.float64)
    return pairs


def _is_counted(left: Sequence[Pattern | Region], right: Sequence[Pattern | Region]) -> bool:
    """Whether a product looks at pairs of entries: one with a diagonal or a full matrix does not."""
    return not any(
        len(span) == 1 and isinstance(span[0], Pattern) and isinstance(span[0].structure, (Diagonal, Full))
        for span in (left, right)
    )


def _row_counts(span: Sequence[Pattern | Region]) -> np.ndarray:
    """About how many entries each row of a product has."""
    if len(span) == 1 and isinstance(span[0], Pattern):
        return span[0].structure.row_counts().astype(np.float64)
    columns = span[-1].shape[1]
    keys = fresh_keys(columns, 0)
    for factor in reversed(span):
        edges, start, stop = _edges(factor)
        keys = _passed([(target, source, pattern) for source, target, pattern in reversed(edges)], stop, start, keys,
                       factor.shape[0])  # fmt: skip
    return counts(keys, np.array([columns]))[:, 0].astype(np.float64)


def _column_counts(span: Sequence[Pattern | Region]) -> np.ndarray:
    """About how many entries each column of a product has."""
    if len(span) == 1 and isinstance(span[0], Pattern):
        return span[0].structure.column_counts().astype(np.float64)
    rows = span[0].shape[0]
    keys = fresh_keys(rows, 0)
    for factor in span:
        edges, start, stop = _edges(factor)
        transposed = [(source, target, pattern.T) for source, target, pattern in edges]
        keys = _passed(transposed, start, stop, keys, factor.shape[1])
    return counts(keys, np.array([rows]))[:, 0].astype(np.float64)


def _edges(factor: Pattern | Region) -> tuple[Sequence[tuple[object, object, Pattern]], object, object]:
    if isinstance(factor, Region):
        return factor.edges, factor.start, factor.stop
    return [(0, 1, factor)], 0, 1


def _passed(
    edges: Iterable[tuple[object, object, Pattern]], start: object, stop: object, keys: np.ndarray, size: int
) -> np.ndarray:
    """The keys that a factor passes on from one end to the other; infinite ones where no path leads."""
    for vertex, vertex_keys in spread(edges, start, keys):
        if vertex == stop:
            return vertex_keys
    return np.full((size, keys.shape[1]), np.inf, dtype=np.float32)
