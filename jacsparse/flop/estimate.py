"""Estimates of the time and the memory that counting a schedule takes, without making products of patterns."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..patterns import Convolution, Csr, Diagonal, Full, Pattern
from ..runtime import machine_memory, thread_count
from ..schedule import Schedule
from ..spgemm import PACKED, counts, fresh_keys, spread
from ..stages import Region
from ..terminal import duration
from ..terminal import nbytes as in_bytes

#: Pairs of entries that a thread looks at per second, about; bytes of indices that are written per second; and seconds
#: of a count without products.
PAIRS, BYTES, START = 4e8, 3.5e8, 0.3
#: The most seconds and bytes of what is done without being asked for.
LONG, LARGE = 20.0, 2**32
#: Pairs beyond which it does not matter how many more there are.
ENOUGH = 1e10
#: Entries of factors that estimates go through, at most: a few seconds.
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
    work : float
        Steps of the loops that go through the pairs: rows that are rather full are merged word by word.
    flop : float
        FLOP of the scan that multiplies the matrices, at least: those of the pairs of live products for one sample.
    """

    schedule: str
    pairs: float
    nbytes: float
    complete: bool
    work: float = 0.0
    flop: float = 0.0

    @property
    def seconds(self) -> float:
        """Time on this machine's threads."""
        return START + self.work / (PAIRS * thread_count()) + self.nbytes / BYTES if self.pairs or self.nbytes else 0.0

    @property
    def is_long(self) -> bool:
        """Whether it is more than what is done without being asked for: 20 seconds, or 4 GiB."""
        return not self.complete or self.seconds > LONG or self.nbytes > LARGE

    def __str__(self) -> str:
        if not self.complete and self.seconds <= LONG and self.nbytes <= LARGE:
            return "longer than can be estimated"
        memory = f" and {in_bytes(self.nbytes)}" if self.nbytes else ""
        return f"{'about' if self.complete else 'more than'} {duration(self.seconds)}{memory}"


def estimate_count(
    plan: Schedule, factors: Sequence[Pattern | Region], runs: int = 1, enough: float = math.inf
) -> CountEstimate:
    """Estimate what counting a schedule takes, as `jacsparse.count_flop` does.

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
    estimate = _estimate_once(plan, factors, enough / runs)
    return replace(estimate, pairs=runs * estimate.pairs, work=runs * estimate.work)


def check_memory(what: str, nbytes: float, remedy: str) -> None:
    """Raise MemoryError, before memory is taken, where the machine has less than so many bytes."""
    memory = machine_memory(torch.device("cpu"))
    if nbytes > memory:
        raise MemoryError(f"{what} {in_bytes(nbytes)} or more, and this machine has {in_bytes(memory)}; {remedy}")


def applied_once(plan: Schedule) -> set[int]:
    """The matrices that one vector alone is multiplied by, and nothing else."""
    users = Counter(value for step in plan.products for value in (step.left, step.right))
    return {step.left for step in plan.products if step.kind == "mv" and users[step.left] == 1}


def _estimate_once(plan: Schedule, factors: Sequence[Pattern | Region], enough: float) -> CountEstimate:
    """The pairs of entries and the bytes of a schedule's products of matrices."""
    if all(step.kind == "mv" for step in plan.products):
        return CountEstimate(plan.name, 0.0, 0.0, True)
    least, uncomputed = _at_least(plan, factors), applied_once(plan)
    if least.pairs > enough:
        return least
    #: The entries of each factor that estimates go through, and how many they still may.
    entries, left_to_look_at = [*map(_looked_at, factors)], _BUDGET
    memory = machine_memory(torch.device("cpu"))
    alike = all(factor is factors[0] for factor in factors)
    pairs, work, size, flop, complete = 0.0, 0.0, 0.0, 0.0, True
    #: The stages whose indices exist, and the matrices, by the stages that they span; whether each is full.
    made, full = set[int](), dict[tuple[int, int], bool]()
    for step in plan.products:
        if step.kind != "mm":
            continue
        # The stages that each factor spans, from 0.
        (first, middle), (start, last) = (
            [plan.n - place for place in reversed(plan.spans[value])] for value in (step.left, step.right)
        )
        if alike:
            # The steps of a sequence share one pattern.
            first, middle, start, last = 0, middle - first, middle - first + 1, middle - first + 1 + last - start
        if (first, last) in full:
            continue
        if pairs > enough or size > memory or left_to_look_at < 0:
            complete = False
            continue
        left, right = factors[first : middle + 1], factors[start : last + 1]
        left_to_look_at -= sum(entries[first : middle + 1]) + sum(entries[start : last + 1])
        for stage in {first, start} - made:
            made.add(stage)
            factor = factors[stage]
            if isinstance(factor, Region):
                pairs, work = pairs + factor.estimate, work + factor.estimate
                flop += 2.0 * step.live * factor.estimate
                size += _nbytes(_row_counts([factor]))
            size += _stored_nbytes(factor)
        full[first, last] = full.get((first, middle), _is_full(left)) or full.get((start, last), _is_full(right))
        if full[first, last]:
            continue
        if _is_counted(left, right):
            rows = _row_counts(right)
            met = float(_column_counts(left) @ rows)
            # Words in place of pairs, where rows of the right factor are merged word by word.
            share = float(rows.mean()) / factors[last].shape[1]
            words = PACKED * share > 1 and step.out not in uncomputed
            pairs, work = pairs + met, work + (met / (64 * share) if words else met)
            flop += 2.0 * step.live * met
        if step.out not in uncomputed:
            size += _nbytes(_row_counts([*left, *right]))
    if not complete:
        pairs, size, work, flop = map(
            max, zip((pairs, size, work, flop), (least.pairs, least.nbytes, least.work, least.flop), strict=True)
        )
    return CountEstimate(plan.name, pairs, size, complete, work, flop)


def _at_least(plan: Schedule, factors: Sequence[Pattern | Region]) -> CountEstimate:
    """What it takes to make the matrices of the stages alone that products read."""
    pairs, size, flop = 0.0, 0.0, 0.0
    read = {
        plan.n - value: step.live
        # Live steps come last, so that they decide.
        for step in sorted(plan.products, key=lambda step: step.live)
        if step.kind == "mm"
        for value in (step.left, step.right)
        if value <= plan.n
    }
    for stage, is_live in read.items():
        least = _least_pairs(factors[stage])
        pairs, size = pairs + least, size + _stored_nbytes(factors[stage])
        flop += 2.0 * is_live * least
    return CountEstimate(plan.name, pairs, size, False, pairs, flop)


def _stored_nbytes(factor: Pattern | Region) -> float:
    """Bytes of the indices of a factor's own patterns."""
    return sum(_nbytes(pattern.structure.row_counts()) for *_, pattern in _edges(factor)[0] if _is_stored(pattern))


def _nbytes(row_counts: np.ndarray) -> float:
    """Bytes of the indices of a matrix."""
    return _ENTRY * (len(row_counts) + float(row_counts.sum()))


def _is_stored(pattern: Pattern) -> bool:
    """Whether a product reads the indices of a factor."""
    return not isinstance(pattern.structure, (Csr, Diagonal, Full))


def _looked_at(factor: Pattern | Region) -> float:
    """The entries of a factor that estimates go through one by one."""
    return sum(
        pattern.nnz
        for *_, pattern in _edges(factor)[0]
        if isinstance(pattern.structure, Csr)
        or (isinstance(pattern.structure, Convolution) and pattern.structure.mask_bits is not None)
    )


def _least_pairs(factor: Pattern | Region) -> float:
    """A lower bound on the pairs of entries to make a region's matrix: where two of its edges meet."""
    if isinstance(factor, Pattern) or factor.coupling:
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


def _is_full(span: Sequence[Pattern | Region]) -> bool:
    return len(span) == 1 and isinstance(span[0], Pattern) and isinstance(span[0].structure, Full)


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
