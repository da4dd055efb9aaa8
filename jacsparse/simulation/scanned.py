"""Back-propagation as a scan over Jacobians: BPPSA, and cyclic reduction."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..schedule import Algebra, Schedule, Step, blelloch, chunked, cyclic_reduction, linear, parse, resolve, run
from .timetable import Job, Outcome, Timetable
from .training_method import Prediction, TrainingMethod, forward_through, sum_shared_gradients
from .workload import Workload


class ScannedBackward(TrainingMethod):
    """Backward passes by the steps of a schedule, on workers that hold consecutive stages.

    Each worker runs its stages forward, and computes those of their Jacobians that the schedule multiplies by other
    matrices. The schedule's steps run where `Schedule.assignment` places them, by entries of the matrices and as if
    messages were free; what a step reads from another worker is a message. A step that takes a gradient through one
    stage uses the operators' own backward pass where the stage's worker runs it. Last, each worker computes the
    gradients of its own weights.
    """

    @abstractmethod
    def scans(self, workload: Workload, workers: int) -> Sequence[Schedule]:
        """The schedules that are tried."""

    def timetable(self, workload: Workload, workers: int) -> Timetable:
        return next(timetable for _, timetable in self.ways(workload, workers))

    def ways(self, workload: Workload, workers: int) -> Iterator[tuple[str, Timetable]]:
        for schedule in self.scans(workload, workers):
            yield schedule.name, scanned(workload, schedule, workers)


@dataclass(frozen=True)
class Bppsa(ScannedBackward):
    """Back-propagation by parallel scan (BPPSA, the thesis' Algorithm 1).

    Parameters
    ----------
    schedule : Schedule or str
        A schedule as `jacsparse.schedule.resolve` takes it, but for ``balanced``. ``auto`` is, for each number of
        workers, the fastest of ``linear``, ``chunked`` with a block for each worker and ``blelloch`` of any number of
        levels, as far as their products have no more than `workload.MOST` multiply-adds for a sample.
    """

    name = "bppsa"
    schedule: Schedule | str = "auto"

    def __post_init__(self) -> None:
        if parse(self.schedule)[0] == "balanced":
            raise ValueError(f"schedule is {self.schedule!r}, which is for one number of workers; pass another name")

    def scans(self, workload: Workload, workers: int) -> Sequence[Schedule]:
        n = len(workload)
        if self.schedule != "auto" or not workload.multiplies:
            return [resolve(self.schedule if workload.multiplies else "linear", n, workload)]
        blocks = [workload.scheduled(lambda part: chunked(part, -(-n // workers)))] if workers > 1 else []
        levels = range(1, max(1, n).bit_length())
        scans = [workload.scheduled(functools.partial(blelloch, levels=number)) for number in levels]
        return [linear(n), *blocks, *dict.fromkeys(scans)]

    def ways(self, workload: Workload, workers: int) -> Iterator[tuple[str, Timetable]]:
        for schedule in self.scans(workload, workers):
            if self.schedule != "auto" or not workload.scan(schedule).bounded:
                yield schedule.name, scanned(workload, schedule, workers)
            elif schedule.name.startswith("blelloch"):
                # More levels have more multiply-adds.
                return

    def predictions(self, workload: Workload, workers: int, outcome: Outcome) -> list[Prediction]:
        if self.schedule == "linear" or not workload.multiplies:
            return []
        n, p = len(workload), min(workers, len(workload))
        schedule = resolve("blelloch" if self.schedule == "auto" else self.schedule, n, workload)
        steps = n / p + math.log2(p) if workers <= n else math.log2(n)
        counted = schedule.complexity(workers)
        matrices = max(n / p, 1)
        entries = schedule.complexity(workers, workload.scan(schedule).entries).space
        return [
            Prediction(self.name, "thesis 3.3", "steps of a scan", workers, steps, counted.steps),
            Prediction(self.name, "thesis 3.4", "its work", workers, n, counted.work),
            Prediction(self.name, "thesis 3.6", "matrices", workers, matrices, counted.space),
            Prediction(self.name, "thesis 3.6", "entries", workers, matrices * workload.largest_factor, entries),
        ]


class ReducedBackward(ScannedBackward):
    """Parallel cyclic reduction of the system that back-propagation is (Naumov, equations 30 and 31).

    It needs half of the levels of a Blelloch scan and more work, Θ(n log n) instead of equation 3.4's Θ(n). So does a
    scan across p ranks that each hold the product of their block and that of all before it, `schedule.exchanges`, at
    Θ(p log p).
    """

    name = "cyclic_reduction"
    multiplies = True

    def scans(self, workload: Workload, workers: int) -> Sequence[Schedule]:
        return [workload.scheduled(cyclic_reduction)]

    def predictions(self, workload: Workload, workers: int, outcome: Outcome) -> list[Prediction]:
        if workload.coupling:
            # The formula is of one system.
            return []
        n = len(workload)
        counted = cyclic_reduction(n).complexity(workers)
        # The paper has a worker for each row; fewer share the rows of a level.
        rows = sum(-(-(n - 2**level) // workers) for level in range((n - 1).bit_length()))
        return [Prediction(self.name, "Naumov 31", "levels", workers, rows, counted.steps)]


def scanned(workload: Workload, schedule: Schedule, workers: int) -> Timetable:
    """The timetable of a backward pass by a schedule."""
    n, jobs = len(workload), _Jobs(workload, schedule, workers)
    timetable, forward = jobs.timetable, jobs.forward
    values = run(jobs.steps, jobs, {0: forward[n], **jobs.of_matrices()})
    for place, value in enumerate(schedule.gradients):
        stage = n - 1 - place
        if workload.stages[stage].gradients:
            passes = (forward[stage], forward[stage + 1])
            timetable.add(Job(jobs.homes[stage], workload.stages[stage].gradients, (values[value], *passes)))
    sum_shared_gradients(timetable, workload)
    return timetable


class _Jobs(Algebra):
    """Products as jobs of the workers to which `Schedule.assignment` gives them; values are the numbers of jobs."""

    def __init__(self, workload: Workload, schedule: Schedule, workers: int) -> None:
        n, cost = len(workload), workload.scan(schedule)
        assignment = schedule.assignment(cost.seconds, workers, cost.entries)
        self._workload, self._nbytes, self._spans = workload, cost.nbytes, schedule.spans
        self._seconds = {step.out: time for step, time in zip(schedule.live_steps(), cost.seconds, strict=True)}
        self.steps, self.homes = [step for step, _ in assignment.steps], assignment.homes[::-1]
        # A stage that couples samples has no matrix to send: its own worker takes gradients through it.
        coupling = {n - stage: self.homes[stage] for stage in workload.coupling}
        self._worker_of = {step.out: coupling.get(step.left, worker) for step, worker in assignment.steps}
        count = 1 + max((*self.homes, *self._worker_of.values()), default=0)
        blocks = [[stage for stage in range(n) if self.homes[stage] == worker] for worker in range(count)]
        self.timetable = Timetable([2 * workload.weights(block) for block in blocks])
        self.forward = forward_through(self.timetable, workload, self.homes)

    def of_matrices(self) -> dict[int, int]:
        """The jobs of the stages' matrices that products read, by place."""
        n, stages = len(self._workload), self._workload.stages
        factors = {factor for step in self.steps if not self._goes_through(step) for factor in (step.left, step.right)}
        jobs = {}
        for place in sorted(factors.intersection(range(1, n + 1)), reverse=True):
            stage, nbytes = n - place, self._nbytes[place]
            passes = (self.forward[stage], self.forward[stage + 1])
            jobs[place] = self.timetable.add(Job(self.homes[stage], stages[stage].jacobian, passes, nbytes, nbytes))
        return jobs

    def element(self, value: int) -> None:
        """No job computes the matrix of a stage that gradients only go through."""

    def multiply(self, step: Step, left: int, right: int) -> int:
        return self._add(step, self._seconds[step.out], (right, left), self._nbytes[step.out])

    def apply(self, step: Step, left: int, right: int) -> int:
        stage = len(self._workload) - self._spans[step.left][1]
        nbytes = self._workload.before(stage)
        if self._goes_through(step):
            reads = (right, self.forward[stage], self.forward[stage + 1])
            return self._add(step, self._seconds[step.out], reads, nbytes)
        return self._add(step, self._workload.vector_seconds(self._nbytes[step.left]), (right, left), nbytes)

    def _goes_through(self, step: Step) -> bool:
        """Whether a step takes a gradient through a stage by the operators' own backward pass."""
        n = len(self._workload)
        return step.kind == "mv" and step.left <= n and self.homes[n - step.left] == self._worker_of[step.out]

    def _add(self, step: Step, seconds: float, reads: tuple[int, ...], nbytes: float) -> int:
        return self.timetable.add(Job(self._worker_of[step.out], seconds, reads, nbytes, nbytes))
