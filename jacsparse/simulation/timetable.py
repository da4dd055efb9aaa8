"""Jobs on workers: when each ends, what every worker holds, and what workers send to each other."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..interconnect import Interconnect


class Job(NamedTuple):
    """What one worker does without interruption."""

    worker: int
    seconds: float
    #: The numbers of the jobs whose results it reads.
    reads: tuple[int, ...] = ()
    #: Bytes of the result where it is computed, from the beginning of the job to the end of its worker's last reader.
    stored: float = 0.0
    #: Bytes of the message to each other worker that reads it; that worker holds it to the end of its last reader.
    sent: float = 0.0
    #: Bytes that are needed while the job runs.
    scratch: float = 0.0


@dataclass
class Timetable:
    """The jobs of one or more iterations, each after those that it reads; each worker runs its own in this order."""

    #: Bytes of weights and their gradients, by worker.
    resident: Sequence[float]
    jobs: list[Job] = field(default_factory=list)
    #: The numbers of the jobs at whose ends iterations end, where iterations overlap.
    ends: list[int] = field(default_factory=list)

    def add(self, job: Job) -> int:
        """Add a job, and return its number."""
        self.jobs.append(job)
        return len(self.jobs) - 1


@dataclass(frozen=True)
class Outcome:
    """What comes of a timetable; of iterations that overlap, each in the long run.

    Attributes
    ----------
    seconds : float
        The time of an iteration.
    memory : float
        The most bytes that one worker holds at once.
    sent : float
        Bytes of an iteration's messages.
    """

    seconds: float
    memory: float
    sent: float


def run(timetable: Timetable, interconnect: Interconnect) -> Outcome:
    """Run all jobs, each as soon as its worker is free and what it reads has arrived."""
    ends, memory = _ends(timetable.jobs, interconnect), _memory(timetable)
    if not timetable.ends:
        return Outcome(max(ends, default=0.0), memory, _sent(timetable.jobs))
    # The first half of the iterations fills the workers.
    middle = (len(timetable.ends) - 1) // 2
    begin, end, count = timetable.ends[middle], timetable.ends[-1], len(timetable.ends) - 1 - middle
    sent = _sent(timetable.jobs, begin + 1, end + 1) / count
    return Outcome((ends[end] - ends[begin]) / count, memory, sent)


def _ends(jobs: Sequence[Job], interconnect: Interconnect) -> list[float]:
    """When each job ends."""
    ends, free = list[float](), dict[int, float]()
    for job in jobs:
        begin = free.get(job.worker, 0.0)
        for read in job.reads:
            source = jobs[read]
            delay = 0.0 if source.worker == job.worker else interconnect.seconds(source.sent)
            begin = max(begin, ends[read] + delay)
        free[job.worker] = begin + job.seconds
        ends.append(free[job.worker])
    return ends


def _sent(jobs: Sequence[Job], begin: int = 0, end: int | None = None) -> float:
    """Bytes of the messages to the jobs of these numbers; a worker gets each result once."""
    numbers = range(len(jobs))[begin:end]
    messages = {(jobs[number].worker, read) for number in numbers for read in jobs[number].reads}
    return math.fsum(jobs[read].sent for worker, read in messages if jobs[read].worker != worker)


def _memory(timetable: Timetable) -> float:
    """The most bytes that one worker holds at once."""
    jobs = timetable.jobs
    # A result without readers is gone when its job ends.
    last_readers = {(job.worker, number): number for number, job in enumerate(jobs)}
    for number, job in enumerate(jobs):
        last_readers |= {(job.worker, read): number for read in job.reads}
    freed: dict[int, list[int]] = defaultdict(list)
    for (_, result), reader in last_readers.items():
        freed[reader].append(result)

    def nbytes(worker: int, result: int) -> float:
        return jobs[result].stored if jobs[result].worker == worker else jobs[result].sent

    totals, most = list(timetable.resident), max(timetable.resident, default=0.0)
    present: set[tuple[int, int]] = set()
    for number, job in enumerate(jobs):
        for result in (number, *job.reads):
            if (job.worker, result) not in present:
                present.add((job.worker, result))
                totals[job.worker] += nbytes(job.worker, result)
        most = max(most, totals[job.worker] + job.scratch)
        totals[job.worker] -= sum(nbytes(job.worker, result) for result in freed[number])
    return most
