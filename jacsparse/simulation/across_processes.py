"""Back-propagation across processes that hold consecutive stages, by the messages of `jacsparse.schedule.exchanges`."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..patterns import Pattern
from ..schedule import EXCHANGES, exchanges, taken_in
from .timetable import Job, Timetable
from .training_method import TrainingMethod, exchange, forward_through, sum_shared_gradients
from .workload import Workload

#: Bytes in which a rank tells the others what it was called with.
_FACTS = 64


@dataclass(frozen=True)
class AcrossRanks(TrainingMethod):
    """What ``process_group=`` does: each rank holds a block of stages, and gradients go across the ranks.

    A layer's weights get their gradients after the next rank has the gradient of its states; a chain's before, stage by
    stage. All ranks get the output, and no gradient of the input is sent. Blocks take about equally long.

    Parameters
    ----------
    exchanges : tuple of {"linear", "gather", "scan"}, optional
        The ways in which gradients may go across three ranks or more, as of `jacsparse.nn.Scan`: the fastest is taken.
        By default all of them for the steps of a sequence, and ``linear`` for other stages: products of their matrices
        fill in, so that they take long, and are long to count.
    """

    name = "ranks"
    exchanges: tuple[str, ...] | None = None

    def timetable(self, workload: Workload, workers: int) -> Timetable:
        return next(timetable for _, timetable in self.ways(workload, workers))

    def ways(self, workload: Workload, workers: int) -> Iterator[tuple[str, Timetable]]:
        exchanges = self.exchanges or (EXCHANGES if workload.recurrent else ("linear",))
        # The first and the last rank multiply vectors alone, and a stage that couples samples has no matrix.
        for way in exchanges if workers > 2 and not workload.couples else ("linear",):
            yield way, _Passes(workload, self.blocks(workload, workers)).timetable(way)

    def blocks(self, workload: Workload, workers: int) -> list[range]:
        """The stages of each rank."""
        return workload.blocks(workers)


class _Map(NamedTuple):
    """What blocks do to a gradient: multiply it by a matrix, or replace it where there is none; and the job of it."""

    matrix: Pattern | None
    shared: bool
    nbytes: float
    job: int


class _Passes:
    """The jobs of a forward pass and a backward pass through blocks of stages, a rank for each."""

    def __init__(self, workload: Workload, blocks: Sequence[range]) -> None:
        self._workload, self._blocks = workload, blocks
        self._jobs = jobs = Timetable([2 * workload.weights(block) for block in blocks])
        ranks = range(len(blocks))
        exchange(jobs, [jobs.add(Job(rank, 0.0)) for rank in ranks], lambda _: _FACTS)
        self._forward = forward_through(jobs, workload, [rank for rank in ranks for _ in blocks[rank]])
        for rank in ranks:
            jobs.add(Job(rank, 0.0, (self._forward[-1],)))

    def timetable(self, way: str) -> Timetable:
        """All jobs of an iteration."""
        last = len(self._blocks) - 1
        gradient = self._pull_back(last, self._forward[-1])
        if way == "linear":
            for rank in reversed(range(last)):
                gradient = self._pull_back(rank, gradient)
        else:
            for place, job in enumerate(self._scanned(gradient, way), 1):
                self._pull_back(last - place, job)
        sum_shared_gradients(self._jobs, self._workload)
        return self._jobs

    def _pull_back(self, rank: int, gradient: int) -> int:
        """Take a gradient through a rank's block; the job whose result the next rank reads."""
        recurrent = self._workload.recurrent
        for number in reversed(self._blocks[rank]):
            stage, before = self._workload.stages[number], self._workload.before(number)
            seconds = stage.errors + (0.0 if recurrent else stage.gradients)
            reads = (gradient, self._forward[number], self._forward[number + 1])
            gradient = self._jobs.add(Job(rank, seconds, reads, before, before))
        if recurrent:
            stages = [self._workload.stages[number] for number in self._blocks[rank]]
            self._jobs.add(Job(rank, math.fsum(stage.gradients for stage in stages), (gradient,)))
        return gradient

    def _scanned(self, gradient: int, way: str) -> list[int]:
        """The jobs of the gradients with which the blocks of all ranks but the last begin, from the last one on."""
        count, start = len(self._blocks), self._workload.before(self._blocks[-1][0])
        blocks = [_Map(None, False, start, gradient)]
        # Nobody asks for the product of the first rank's stages.
        blocks += [self._product(rank) for rank in reversed(range(1, count - 1))] + [blocks[0]] * (count > 1)
        before: list[_Map | None] = [None] * count
        target = operator.attrgetter("target")
        for messages in exchanges(count, way):
            sent = list(blocks)
            for place, incoming in itertools.groupby(sorted(messages, key=target), target):
                received, combine = list(incoming), functools.partial(self._combined, count - 1 - place)
                others = [sent[message.source] for message in received]
                before[place], blocks[place] = taken_in(received, others, before[place], blocks[place], combine)
        return [each.job for each in before if each is not None]

    def _product(self, rank: int) -> _Map:
        """The product of the transposed Jacobians of a rank's stages, from its output on."""
        maps = []
        for number in reversed(self._blocks[rank]):
            stage = self._workload.stages[number]
            nbytes = self._workload.nbytes(stage.factor.nnz, stage.shared)
            reads = (self._forward[number], self._forward[number + 1])
            job = self._jobs.add(Job(rank, stage.jacobian, reads, nbytes, nbytes))
            maps.append(_Map(stage.matrix, stage.shared, nbytes, job))
        return functools.reduce(functools.partial(self._combined, rank), maps)

    def _combined(self, rank: int, earlier: _Map, later: _Map) -> _Map:
        """What `earlier` does to a gradient and then `later`, computed on a rank."""
        load = self._workload
        if later.matrix is None:
            return later
        if earlier.matrix is None:
            product, shared, seconds = None, False, load.vector_seconds(later.nbytes)
            nbytes = load.nbytes(later.matrix.shape[0], shared)
        else:
            product, pairs = load.product(later.matrix, earlier.matrix)
            shared = earlier.shared and later.shared
            seconds, nbytes = load.product_seconds(pairs, shared), load.nbytes(product.nnz, shared)
        job = self._jobs.add(Job(rank, seconds, (earlier.job, later.job), nbytes, nbytes))
        return _Map(product, shared, nbytes, job)
