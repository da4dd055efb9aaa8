"""How things are timed, and what the machine allows at best."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch.utils.benchmark import Timer

__all__ = ["Context", "Limits", "Timing", "device_problem"]


@dataclass(frozen=True)
class Timing:
    """How long runs of one function took.

    Attributes
    ----------
    seconds : list of float
        Of one run; the mean of a block of runs where one is too short to time.
    runs : int
        Of the function, all blocks together.
    """

    seconds: list[float]
    runs: int

    def less(self, seconds: float) -> Timing:
        """Each of them without that many seconds."""
        return Timing([time - seconds for time in self.seconds], self.runs)


@dataclass(frozen=True)
class Limits:
    """What the machine allows at best, on as many threads as everything else runs on.

    Attributes
    ----------
    copy_bandwidth : float
        Bytes read and written each second by a copy of 256 MiB (``torch.Tensor.copy_``).
    peak_flop : float
        Operations each second of a product of two dense float32 matrices of 1536 × 1536 (``torch.mm``).
    """

    copy_bandwidth: float
    peak_flop: float

    def floor(self, nbytes: float, flop: float = 0) -> float:
        """Seconds that it takes at least to move `nbytes` and to do `flop` operations."""
        return max(nbytes / self.copy_bandwidth, flop / self.peak_flop)


@dataclass
class Context:
    """What an experiment measures with.

    Attributes
    ----------
    device : str
        Where to run.
    seconds : float
        How long to measure each function, all rounds together.
    rounds : int
        Into how many turns that time is cut: functions that are compared take turns, so that what slows the machine
        down for a while slows all of them.
    say : callable
        Takes a line about what is going on.
    """

    device: str = "cpu"
    seconds: float = 1.0
    rounds: int = 3
    say: Callable[[str], None] = lambda _: None

    def under(self, heading: str) -> Self:
        """The same, whose lines begin with a heading."""
        other = copy.copy(self)
        other.say = lambda line: self.say(f"{heading}: {line}")
        return other

    @property
    def threads(self) -> int:
        """On how many threads everything runs, peers included."""
        return torch.get_num_threads()

    def times(
        self, functions: Mapping[str, Callable[[], object]], *, seconds: float | None = None, pause: float = 0.0
    ) -> dict[str, Timing]:
        """Time functions in turns, each once beforehand so that what is made once is there.

        Parameters
        ----------
        functions : mapping of str to callable
            By label.
        seconds : float, optional
            Instead of the context's, for each function.
        pause : float
            Seconds to wait before each turn. OpenMP's threads go on spinning when their work is done, for up to 0.2 s.
        """
        timers = {
            label: Timer("function()", globals={"function": function}, num_threads=self.threads)
            for label, function in functions.items()
        }
        for label, function in functions.items():
            self.say(f"{label}: first run")
            function()
        found = {label: Timing([], 0) for label in functions}
        turn = (self.seconds if seconds is None else seconds) / self.rounds
        for number in range(self.rounds):
            for label, timer in timers.items():
                self.say(f"{label}: round {number + 1} of {self.rounds}")
                time.sleep(pause)
                measured = timer.blocked_autorange(min_run_time=turn)
                before = found[label]
                runs = measured.number_per_run * len(measured.times)
                found[label] = Timing(before.seconds + measured.times, before.runs + runs)
        return found

    @functools.cached_property
    def limits(self) -> Limits:
        """Measured once for each context, by the fastest run."""
        source, target = torch.ones(2**26), torch.empty(2**26)
        left, right, product = torch.ones(1536, 1536), torch.ones(1536, 1536), torch.empty(1536, 1536)
        copy, multiply = "copy of 256 MiB", "dense product"
        found = self.times({copy: lambda: target.copy_(source), multiply: lambda: torch.mm(left, right, out=product)})
        return Limits(2 * 4 * 2**26 / min(found[copy].seconds), 2 * 1536**3 / min(found[multiply].seconds))


def device_problem(device: str, devices: tuple[str, ...]) -> str | None:
    """Why nothing can be measured on a device; None where it can."""
    if device == "cuda" and not torch.cuda.is_available():
        return "no CUDA device that PyTorch sees"
    if device not in devices:
        return f"this experiment runs on {', '.join(devices)} only"
    return None
