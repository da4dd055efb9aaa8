"""Leapfrogging on workers that all hold the whole model."""

from __future__ import annotations

import itertools

from ..training import simulate_leapfrog
from .timetable import Job, Outcome, Timetable
from .training_method import Prediction, TrainingMethod, exchange
from .workload import Workload


class LeapfroggingWorkers(TrainingMethod):
    """Leapfrogging (Saraiya): every worker carries the errors back, and computes every k-th layer's gradients.

    Workers have no shared memory: each runs the whole forward pass by itself, and at the end of an iteration they
    exchange the gradients of the weights.
    """

    name = "leapfrog"

    def most(self, workload: Workload) -> int:
        return max(1, sum(stage.gradients > 0 for stage in workload.stages))

    def timetable(self, workload: Workload, workers: int) -> Timetable:
        stages = workload.stages
        backward = stages[::-1]
        timelines = simulate_leapfrog(
            [stage.errors for stage in backward], [stage.gradients for stage in backward], workers
        )
        count, weights = len(timelines.workers), workload.weights(range(len(stages)))
        timetable = Timetable([2 * weights] * count)
        stored = workload.input + sum(stage.stored for stage in stages)
        last = []
        for worker, events in enumerate(timelines.workers):
            job = forward = timetable.add(Job(worker, workload.forward, (), stored, steps=len(stages)))
            for _, group in itertools.groupby(events, key=lambda event: event.equation):
                members = list(group)
                seconds = sum(event.end - event.begin for event in members)
                job = timetable.add(Job(worker, seconds, (forward,), steps=len(members)))
            last.append(job)
        # Gradients of shared weights are added up, others are gathered.
        exchange(timetable, last, lambda number: weights if workload.recurrent else weights / count * 2**number)
        return timetable

    def predictions(self, workload: Workload, workers: int, outcome: Outcome) -> list[Prediction]:
        errors, gradients = (sum(getattr(stage, name) for stage in workload.stages) for name in ("errors", "gradients"))
        published = workload.forward + errors + gradients / workers
        return [Prediction(self.name, "Saraiya 9, 10", "seconds", workers, published, outcome.seconds)]
