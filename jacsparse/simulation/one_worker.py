"""Back-propagation on one worker."""

from __future__ import annotations

from .timetable import Job, Timetable
from .training_method import TrainingMethod, forward_through
from .workload import Workload


class OneWorker(TrainingMethod):
    """Back-propagation as every framework does it, stage after stage on one worker: the measure of all others."""

    name = "bp"

    def most(self, workload: Workload) -> int:
        return 1

    def timetable(self, workload: Workload, workers: int) -> Timetable:
        timetable = Timetable([2 * workload.weights(range(len(workload)))])
        forward = forward_through(timetable, workload, [0] * len(workload))
        behind: tuple[int, ...] = ()
        for number in reversed(range(len(workload))):
            stage, before = workload.stages[number], workload.before(number)
            reads = (*behind, forward[number], forward[number + 1])
            seconds = stage.errors + stage.gradients
            behind = (timetable.add(Job(0, seconds, reads, before, before, steps=stage.steps)),)
        return timetable
