"""What a schedule costs on workers: when its last step is done, and the most that a worker holds at once."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from .steps import Step, natural


@dataclass(frozen=True)
class Complexity:
    """The cost of a schedule in steps of unit time (thesis, section 3.6).

    Attributes
    ----------
    workers : int
        The number of workers, each of which runs one step at a time.
    steps : int
        Step complexity: units of time until the last step is done.
    work : int
        Work complexity: the number of steps.
    space : int
        The most matrices that one worker holds at once, or their entries if sizes were passed.
    """

    workers: int
    steps: int
    work: int
    space: int


def simulate(
    steps: Sequence[Step], n: int, durations: Sequence[float], workers: int, sizes: Mapping[int, int] | None = None
) -> tuple[float, int]:
    """The time at which the last step is done, and the most that a worker holds at once."""
    # Further workers would have nothing to do.
    free = set(range(min(natural("workers", workers, 1), max(n, len(steps), 1))))
    memory = WorkerMemory(steps, n, len(free), sizes)
    results = {step.out for step in steps}
    users: dict[int, list[int]] = defaultdict(list)
    missing = []
    for number, step in enumerate(steps):
        factors = [factor for factor in (step.left, step.right) if factor in results]
        missing.append(len(factors))
        for factor in factors:
            users[factor].append(number)
    ready = [number for number, count in enumerate(missing) if count == 0]
    running: list[tuple[float, int, int]] = []
    time = 0.0
    while ready or running:
        while ready and free:
            number = heapq.heappop(ready)
            worker = memory.start(steps[number], free)
            free.remove(worker)
            heapq.heappush(running, (time + durations[number], number, worker))
        time = running[0][0]
        while running and running[0][0] == time:
            _, number, worker = heapq.heappop(running)
            memory.finish(steps[number])
            free.add(worker)
            for user in users[steps[number].out]:
                missing[user] -= 1
                if missing[user] == 0:
                    heapq.heappush(ready, user)
    return time, memory.most


class WorkerMemory:
    """Which worker holds which matrix while a schedule runs; `most` is the most that one of them has held at once."""

    def __init__(self, steps: Sequence[Step], n: int, workers: int, sizes: Mapping[int, int] | None) -> None:
        self.most = 0
        self._sizes = sizes and {value: natural(f"sizes[{value}]", size, 0) for value, size in sizes.items()}
        self._uses = Counter(factor for step in steps for factor in (step.left, step.right))
        self._worker_of: dict[int, int] = {}
        self._totals = [0] * workers
        chain = [value for value in range(1, n + 1) if value in self._uses]
        total, before = sum(map(self._size, chain)), 0
        for value in chain:
            size = self._size(value)
            # A matrix lies in the worker's share that contains the matrix' middle.
            self._store(value, min((2 * before + size) * workers // max(2 * total, 1), workers - 1))
            before += size

    def start(self, step: Step, free: Collection[int]) -> int:
        """Choose a free worker for a step, and store the step's product there."""
        factors = [factor for factor in (step.left, step.right) if self._worker_of.get(factor, -1) in free]
        if factors:
            worker = self._worker_of[max(factors, key=self._size)]
        else:
            worker = min(free, key=lambda worker: (self._totals[worker], worker))
        if step.kind == "mm":
            self._store(step.out, worker)
        return worker

    def finish(self, step: Step) -> None:
        """Remove the step's factors that no later step uses."""
        for factor in (step.left, step.right):
            self._uses[factor] -= 1
            if self._uses[factor] == 0 and factor in self._worker_of:
                self._totals[self._worker_of.pop(factor)] -= self._size(factor)

    def _store(self, value: int, worker: int) -> None:
        self._worker_of[value] = worker
        self._totals[worker] += self._size(value)
        self.most = max(self.most, self._totals[worker])

    def _size(self, value: int) -> int:
        if self._sizes is None:
            return 1
        if value not in self._sizes:
            raise ValueError(
                f"sizes has no entry for matrix {value}; expected one for each that a live step reads or makes"
            )
        return self._sizes[value]
