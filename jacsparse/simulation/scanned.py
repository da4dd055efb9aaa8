"""Back-propagation as a scan over Jacobians: BPPSA, and cyclic reduction."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..schedule import Schedule, Step, blelloch, chunked, cyclic_reduction, linear, parse, resolve, run
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
    n, stages, cost = len(workload), workload.stages, workload.scan(schedule)
    assignment = schedule.assignment(cost.seconds, workers, cost.entries)
    homes = assignment.homes[::-1]
    coupling = {n - stage: homes[stage] for stage in workload.coupling}
    # A stage that couples samples has no matrix to send: its own worker takes gradients through it.
    coupling = {n - stage: homes[stage] for stage in workload.coupling}
    workers_of = {step.out: coupling.get(step.left, worker) for step, worker in assignment.steps}
    seconds = {step.out: time for step, time in zip(schedule.live_steps(), cost.seconds, strict=True)}

    def through_stage(step: Step) -> bool:
        """Whether a step takes a gradient through a stage by the operators' own backward pass."""
        return step.kind == "mv" and step.left <= n and homes[n - step.left] == workers_of[step.out]

    count = 1 + max((*homes, *workers_of.values()), default=0)
    blocks = [[stage for stage in range(n) if homes[stage] == worker] for worker in range(count)]
    timetable = Timetable([2 * workload.weights(block) for block in blocks])
    forward = forward_through(timetable, workload, homes)
    steps = [step for step, _ in assignment.steps]
    read = {factor for step in steps if not through_stage(step) for factor in (step.left, step.right)}
    #: By value of the schedule, the job that computes it.
    jobs = {0: forward[n]}
    for place in sorted(read.intersection(range(1, n + 1)), reverse=True):
        stage, nbytes = n - place, cost.nbytes[place]
        passes = (forward[stage], forward[stage + 1])
        jobs[place] = timetable.add(Job(homes[stage], stages[stage].jacobian, passes, nbytes, nbytes))

    def add(step: Step, time: float, reads: tuple[int, ...], nbytes: float) -> int:
        return timetable.add(Job(workers_of[step.out], time, reads, nbytes, nbytes))

    def multiply(step: Step, left: int, right: int) -> int:
        return add(step, seconds[step.out], (right, left), cost.nbytes[step.out])

    def apply(step: Step, left: int, right: int) -> int:
        stage = n - schedule.spans[step.left][1]
        if through_stage(step):
            reads = (right, forward[stage], forward[stage + 1])
            return add(step, seconds[step.out], reads, workload.before(stage))
        return add(step, workload.vector_seconds(cost.nbytes[step.left]), (right, left), workload.before(stage))

    # No job computes the matrix of a stage that gradients only go through.
    run(steps, multiply, apply, lambda _: None, values=jobs)
    for place, value in enumerate(schedule.gradients):
        stage = n - 1 - place
        if stages[stage].gradients:
            passes = (forward[stage], forward[stage + 1])
            timetable.add(Job(homes[stage], stages[stage].gradients, (jobs[value], *passes)))
    sum_shared_gradients(timetable, workload)
    return timetable
