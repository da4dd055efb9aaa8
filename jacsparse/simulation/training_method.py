"""What all ways of training in parallel share: a workload and workers go in, a timetable comes out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..interconnect import Interconnect
from ..schedule import Schedule
from .timetable import Job, Outcome, Timetable, run
from .workload import Workload


@dataclass(frozen=True)
class Prediction:
    """What a paper's formula says, beside what is simulated.

    Attributes
    ----------
    method : str
        The method.
    equation : str
        Where the formula is.
    quantity : str
        What it predicts, with its unit.
    workers : int
        The number of workers.
    published, simulated : float
        The formula without its constants, and what the simulation gives.
    """

    method: str
    equation: str
    quantity: str
    workers: int
    published: float
    simulated: float


class TrainingMethod(ABC):
    """A way of training on several workers.

    Attributes
    ----------
    name : str
        Its name in ``methods=`` and ``--method``.
    exact : bool
        Whether its gradients are those of back-propagation, at the weights that it then updates.
    multiplies : bool
        Whether all of its ways take products of matrices.
    """

    name: ClassVar[str]
    exact: ClassVar[bool] = True
    multiplies: ClassVar[bool] = False

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
        """Timetables of which the fastest is taken, by what the method chooses for each, such as a schedule."""
        yield "", self.timetable(workload, workers)

    def scans(self, workload: Workload, workers: int) -> Sequence[Schedule]:
        """The schedules whose products of matrices it may need; none where it needs no such product."""
        return ()

    def plan(self, workload: Workload, interconnect: Interconnect, workers: int) -> tuple[Outcome, str]:
        """What an iteration takes, and what the method has chosen for that."""
        outcomes = [(run(timetable, interconnect), choice) for choice, timetable in self.ways(workload, workers)]
        return min(outcomes, key=lambda outcome: outcome[0].seconds)

    def predictions(self, workload: Workload, workers: int, outcome: Outcome) -> list[Prediction]:
        """What papers predict for an outcome."""
        return []


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
    jobs = [timetable.add(Job(timetable.jobs[job].worker, 0.0, (job,), sent=sent(0), steps=0)) for job in last]
    for number in range((len(jobs) - 1).bit_length()):
        jobs = [
            timetable.add(
                Job(timetable.jobs[job].worker, 0.0, (job, jobs[place - 2**number]), sent=sent(number + 1), steps=0)
            )
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
            jobs.append(timetable.add(Job(worker, 0.0, stored=workload.input, sent=workload.input, steps=0)))
        jobs.append(timetable.add(Job(worker, stage.forward, (jobs[-1],), stage.stored, stage.output)))
    return jobs
