"""Pipelines: workers that each run a block of stages, on several mini-batches or parts of one at a time."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .timetable import Job, Timetable
from .training_method import TrainingMethod, sum_shared_gradients
from .workload import Workload


@dataclass(frozen=True)
class GPipe(TrainingMethod):
    """GPipe: micro-batches go forward through all blocks of stages, then back, in which each block runs forward anew.

    Workers hold the inputs of their block for all micro-batches, and the results within the block for one.

    Parameters
    ----------
    microbatches : int, optional
        Parts of the mini-batch: by default as many as workers, which fills the pipeline, or as samples.
    """

    name = "gpipe"
    microbatches: int | None = None

    def __post_init__(self) -> None:
        if self.microbatches is not None and (type(self.microbatches) is not int or self.microbatches < 1):
            raise ValueError(f"microbatches is {self.microbatches!r}; expected an integer of at least 1")

    def obstacle(self, workload: Workload) -> str | None:
        if self.microbatches is not None and self.microbatches > workload.samples:
            return f"{self.microbatches} micro-batches are more than the {workload.samples} samples of the mini-batch"
        if workload.couples and self.microbatches != 1:
            return "it takes the mini-batch apart, whose samples depend on each other, as by batch normalisation"
        return None

    def timetable(self, workload: Workload, workers: int) -> Timetable:
        blocks = workload.blocks(workers)
        parts = self.microbatches or min(len(blocks), workload.samples)
        pipeline = _Pipeline(
            Timetable([2 * workload.weights(block) for block in blocks]),
            [_BlockCost.of(workload, block, parts) for block in blocks],
        )
        for part in range(parts):
            for worker in range(len(blocks)):
                pipeline.forward(worker, part)
        for part in reversed(range(parts)):
            behind: tuple[int, ...] = ()
            for worker in reversed(range(len(blocks))):
                behind = (pipeline.forward_and_backward(worker, part, behind),)
        sum_shared_gradients(pipeline.timetable, workload)
        return pipeline.timetable


class _Asynchronous(TrainingMethod):
    """A pipeline over whole mini-batches that never waits for the end of an iteration.

    Each block's backward pass uses the weights of its forward pass, which are stored until then.
    """

    exact = False

    def obstacle(self, workload: Workload) -> str | None:
        if workload.recurrent:
            return "its stages share their weights, which blocks would update at different times"
        return None

    def timetable(self, workload: Workload, workers: int) -> Timetable:
        costs = [_BlockCost.of(workload, block) for block in workload.blocks(workers)]
        # Weights are stored with each forward pass, and their gradients once.
        pipeline = _Pipeline(
            Timetable([cost.weights for cost in costs]),
            [replace(cost, stashed=cost.stored + cost.weights) for cost in costs],
        )
        pipeline.timetable.ends += self._fill(pipeline, len(costs))
        return pipeline.timetable

    @abstractmethod
    def _fill(self, pipeline: _Pipeline, count: int) -> Iterator[int]:
        """Add the jobs of as many iterations as fill the blocks, and as many again; those at which iterations end."""


class PipeDream(_Asynchronous):
    """PipeDream: worker k of K runs K - k - 1 passes forward, and then one forward and one backward in turn (1F1B).

    Worker k holds the results and the weights of K - k mini-batches.
    """

    name = "1f1b"

    def _fill(self, pipeline: _Pipeline, count: int) -> Iterator[int]:
        for iteration in range(1 - count, 2 * count + 2):
            for worker in range(count):
                batch = iteration + count - 1 - worker
                if batch >= 0:
                    pipeline.forward(worker, batch)
            behind: tuple[int, ...] = ()
            for worker in reversed(range(count if iteration >= 0 else 0)):
                behind = (pipeline.backward(worker, iteration, behind),)
            yield from behind


class DelayedPipeline(_Asynchronous):
    """Delayed gradients (DDG, Huo et al.): each block goes back with the gradient that came an iteration before.

    Block k of K holds the results and the weights of K - k mini-batches. Blocks do not wait for each other at the end
    of an iteration.
    """

    name = "ddg"

    def _fill(self, pipeline: _Pipeline, count: int) -> Iterator[int]:
        backward: dict[int, int] = {}
        for iteration in range(2 * count + 2):
            for worker in range(count):
                pipeline.forward(worker, iteration)
            for worker in range(count):
                # The block behind has not gone back in this iteration yet. The first gradients are zero.
                behind = (backward[worker + 1],) if worker + 1 in backward else ()
                backward[worker] = pipeline.backward(worker, iteration - (count - 1 - worker), behind)
            yield backward[count - 1]


@dataclass(frozen=True)
class _BlockCost:
    """What a block of stages costs, for one part of the mini-batch."""

    forward: float
    backward: float
    stored: float
    input: float
    output: float
    weights: int
    #: Bytes that a forward pass leaves for the backward pass.
    stashed: float = 0.0

    @classmethod
    def of(cls, workload: Workload, block: range, parts: int = 1) -> _BlockCost:
        """The cost of a block for one of `parts` equal parts of the mini-batch."""
        stages = [workload.stages[number] for number in block]
        return cls(
            math.fsum(stage.forward for stage in stages) / parts,
            math.fsum(stage.errors + stage.gradients for stage in stages) / parts,
            sum(stage.stored for stage in stages) / parts,
            workload.before(block[0]) / parts,
            stages[-1].output / parts,
            workload.weights(block),
        )


class _Pipeline:
    """The passes of blocks of stages, a worker for each, on several batches: jobs of a timetable."""

    def __init__(self, timetable: Timetable, costs: Sequence[_BlockCost]) -> None:
        self.timetable, self._costs = timetable, costs
        #: The jobs of forward passes, by worker and batch; worker -1 has the input.
        self._forward: dict[tuple[int, int], int] = {}

    def forward(self, worker: int, batch: int) -> None:
        """Add a block's forward pass."""
        cost, add = self._costs[worker], self.timetable.add
        if not worker:
            self._forward[-1, batch] = add(Job(0, 0.0, (), cost.input, cost.input))
        reads = (self._forward[worker - 1, batch],)
        job = Job(worker, cost.forward, reads, cost.stashed, cost.output)
        self._forward[worker, batch] = add(job)

    def backward(self, worker: int, batch: int, behind: tuple[int, ...]) -> int:
        """Add a block's backward pass, after that of the block behind."""
        cost = self._costs[worker]
        reads = (*behind, *(self._forward[block, batch] for block in (worker - 1, worker) if batch >= 0))
        return self.timetable.add(Job(worker, cost.backward, reads, cost.input, cost.input))

    def forward_and_backward(self, worker: int, batch: int, behind: tuple[int, ...]) -> int:
        """Add a block's backward pass, before which it goes forward once more."""
        cost = self._costs[worker]
        seconds, reads = cost.forward + cost.backward, (*behind, self._forward[worker - 1, batch])
        return self.timetable.add(Job(worker, seconds, reads, cost.input, cost.input, cost.stored))
