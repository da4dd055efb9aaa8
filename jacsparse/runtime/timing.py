"""Times of calls that take turns, by their fastest runs, and whether the machine was quiet enough to tell.

Runs repeat until the fastest three of each call agree (the K-best scheme of Bryant and O'Hallaron, Computer Systems,
first edition, chapter 9). Three runs may agree because each was stalled for the same slice of the scheduler's time. So
no run counts in which threads of this process waited for a processor, as Linux tells.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

#: How many of the fastest runs have to agree, and within which share.
_AGREEING, _TOLERANCE = 3, 0.05
#: By which share calls have to differ, beyond what their fastest runs differ by, to say which is faster.
_MARGIN = 0.1
#: The share of a run for which threads may wait for a processor.
_MOST_WAITING = 0.05
#: Seconds for which calls are repeated at least, and at most once each has run three times; and the most turns.
_LEAST, _MOST, _TURNS = 0.05, 0.5, 100
#: Where Linux tells how long each thread of this process waited for a processor.
_THREADS = Path("/proc/self/task")


@dataclass(frozen=True)
class RunTime:
    """Seconds of a call: its fastest run, and the slowest of its fastest three."""

    fastest: float
    slowest: float
    #: Whether the fastest three agree, and no thread waited for a processor meanwhile.
    is_stable: bool

    @property
    def spread(self) -> float:
        """How much longer the slowest of the fastest three took, as a share of the fastest."""
        return self.slowest / self.fastest - 1 if self.fastest else 0.0

    def over(self, other: RunTime) -> float | None:
        """How many times as long this call takes as another; None where one of them is not stable."""
        return self.fastest / other.fastest if self.is_stable and other.is_stable else None

    def clearly_below(self, other: RunTime) -> bool:
        """Whether both are stable, and this one is shorter by a tenth or more."""
        return self.is_stable and other.is_stable and (1 + _MARGIN) * self.slowest < other.fastest

    def __str__(self) -> str:
        return f"{1000 * self.fastest:.3f} ms " + (f"± {100 * self.spread:.0f} %" if self.is_stable else "busy")


def run_times(*calls: Callable[[], object], most: float = _MOST) -> tuple[RunTime, ...]:
    """The time of each of some calls, which take turns until they are stable or seconds have passed.

    Parameters
    ----------
    *calls : callable
        Each runs once before the first run that counts.
    most : float
        Seconds of runs after which no further turn begins, once there were three.

    Examples
    --------
    >>> one, other = run_times(lambda: sum(range(99)), lambda: sum(range(999)), most=0.01)
    >>> 0 < one.fastest <= one.slowest
    True
    """
    for call in calls:
        call()
    runs: list[list[tuple[float, float]]] = [[] for _ in calls]
    passed = 0.0
    while True:
        for call, of_call in zip(calls, runs, strict=True):
            of_call.append(_timed(call))
            passed += of_call[-1][0]
        times, turns = tuple(map(_run_time, runs)), len(runs[0])
        settled = passed >= _LEAST and all(each.is_stable for each in times)
        if turns >= _AGREEING and (settled or passed >= most or turns >= _TURNS):
            return times


def _timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a run, and those for which threads waited meanwhile."""
    waited, begin = _waited(), time.perf_counter()
    call()
    seconds = time.perf_counter() - begin
    # A thread that ends takes its own seconds along.
    return seconds, abs(_waited() - waited)


def _run_time(runs: Sequence[tuple[float, float]]) -> RunTime:
    undisturbed = sorted(seconds for seconds, waited in runs if waited <= _MOST_WAITING * seconds)
    counted = undisturbed if len(undisturbed) >= _AGREEING else sorted(seconds for seconds, _ in runs)
    fastest, slowest = counted[0], counted[:_AGREEING][-1]
    return RunTime(fastest, slowest, counted is undisturbed and slowest <= (1 + _TOLERANCE) * fastest)


def _waited() -> float:
    """Seconds for which this process's threads were ready and had no processor; 0 where the system does not tell."""
    total = 0
    try:
        threads = list(_THREADS.iterdir())
    except OSError:
        return 0.0
    for thread in threads:
        try:
            total += int((thread / "schedstat").read_text().split()[1])
        except (OSError, IndexError, ValueError):
            # The thread has ended, or the kernel counts nothing.
            continue
    return 1e-9 * total
