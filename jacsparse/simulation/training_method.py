"""What all ways of training in parallel share: a workload and workers go in, a timetable comes out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar

from ..interconnect import Interconnect
from .timetable import Job, Outcome, Timetable, run
from .workload import Workload


class TrainingMethod(ABC):
    """A way of training on several workers.

    Attributes
    ----------
    name : str
        Its name in ``methods=`` and ``--method``.
    exact : bool
        Whether its gradients are those of back-propagation, at the weights that it then updates.
    """

    name: ClassVar[str]
    exact: ClassVar[bool] = True

    @abstractmethod
    def timetable(self, workload: Workload, workers: int) -> Timetable:
        """The jobs of an iteration on at most `workers` workers."""

    def obstacle(self, workload: Workload) -> str | None:
        """Why it cannot train a workload; None where it can."""
        return None

    def most(self, workload: Workload) -> int:
        """The workers that it can use; all others are idle."""
        return len(workload)

    def ways(self, workload: Workload, workers: int) -> Iterator[tuple[str, Timetable]]:
        """Timetables of which the fastest is taken, by what the method chooses for each, such as an exchange."""
        yield "", self.timetable(workload, workers)

    def plan(self, workload: Workload, interconnect: Interconnect, workers: int) -> tuple[Outcome, str]:
        """What an iteration takes, and what the method has chosen for that."""
        outcomes = [(run(timetable, interconnect), choice) for choice, timetable in self.ways(workload, workers)]
        return min(outcomes, key=lambda outcome: outcome[0].seconds)


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
            behind = (timetable.add(Job(0, seconds, reads, before, before)),)
        return timetable


def exchange(timetable: Timetable, last: Sequence[int], sent: Callable[[int], float]) -> None:
    """Add rounds of messages after which each worker has something of every other, in ⌈log2 p⌉ rounds.

    Parameters
    ----------
    timetable : Timetable
        Where the messages are added.
    last : sequence of int
        The last job of each worker.
    sent : callable
        Bytes of a message, by the number of the round.
    """
    jobs = [timetable.add(Job(timetable.jobs[job].worker, 0.0, (job,), sent=sent(0))) for job in last]
    for number in range((len(jobs) - 1).bit_length()):
        jobs = [
            timetable.add(Job(timetable.jobs[job].worker, 0.0, (job, jobs[place - 2**number]), sent=sent(number + 1)))
            for place, job in enumerate(jobs)
        ]


def sum_shared_gradients(timetable: Timetable, workload: Workload) -> None:
    """Add the messages after which all workers have the sum of the gradients of weights that stages share."""
    if workload.recurrent:
        last = {job.worker: number for number, job in enumerate(timetable.jobs)}
        nbytes = workload.weights(range(len(workload)))
        exchange(timetable, list(last.values()), lambda _: nbytes)


def forward_through(timetable: Timetable, workload: Workload, workers: Iterable[int]) -> list[int]:
    """Add the input and the forward pass of each stage on its worker; the numbers of these jobs."""
    jobs: list[int] = []
    for worker, stage in zip(workers, workload.stages, strict=True):
        if not jobs:
            jobs.append(timetable.add(Job(worker, 0.0, stored=workload.input, sent=workload.input)))
        jobs.append(timetable.add(Job(worker, stage.forward, (jobs[-1],), stage.stored, stage.output)))
    return jobs
