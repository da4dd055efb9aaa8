"""How things are timed, and what the machine allows at best."""

from __future__ import annotations

import copy
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from jacsparse.patterns import _cuda as kernels
from torch.utils.benchmark import Timer

from ._calls import block_times

__all__ = ["Context", "Limits", "Timing", "device_problem", "reason"]


@dataclass(frozen=True)
class Timing:
    """How long runs of one function took, or why none was timed.

    Attributes
    ----------
    seconds : list of float
        Of one run; the mean of a block of runs where one is too short to time.
    runs : int
        Of the function, all blocks together.
    problem : str
        Why there are no runs.
    """

    seconds: list[float]
    runs: int
    problem: str = ""

    def plus(self, other: Timing) -> Timing:
        """The runs of both."""
        return Timing(self.seconds + other.seconds, self.runs + other.runs)

    def less(self, other: Timing) -> Timing:
        """Each run without the median of the other's."""
        if self.problem or other.problem:
            return Timing([], 0, self.problem or other.problem)
        median = statistics.median(other.seconds)
        return Timing([time - median for time in self.seconds], self.runs)


@dataclass(frozen=True)
class Limits:
    """What the machine allows at best, on as many threads as everything else runs on.

    Attributes
    ----------
    copy_bandwidth : float
        Bytes read and written each second by a copy of 256 MiB, on CUDA of 1 GiB (``torch.Tensor.copy_``).
    peak_flop : float
        Operations each second of a product of two dense float32 matrices of 1536 × 1536, on CUDA of 8192 × 8192
        (``torch.mm``).
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
    until : float
        When the experiment's time is over, by ``time.monotonic``: functions that have not run by then are not timed.
    """

    device: str = "cpu"
    seconds: float = 1.0
    rounds: int = 3
    say: Callable[[str], None] = lambda _: None
    until: float = math.inf

    def under(self, heading: str) -> Self:
        """The same, whose lines begin with a heading."""
        other = copy.copy(self)
        other.say = lambda line: self.say(f"{heading}: {line}")
        return other

    @property
    def place(self) -> str:
        """Where tensors are, as PyTorch calls it."""
        return str(self.device)

    @property
    def threads(self) -> int:
        """On how many threads everything runs, peers included."""
        return torch.get_num_threads()

    def times(
        self, functions: Mapping[str, Callable[[], object]], *, seconds: float | None = None, pause: float = 0.0
    ) -> dict[str, Timing]:
        """Time functions in turns, each once beforehand so that what is made once is there.

        On the CPU by ``torch.utils.benchmark``, on CUDA by events. A function that fails is not timed; its problem says
        why.

        Parameters
        ----------
        functions : mapping of str to callable
            By label.
        seconds : float, optional
            Instead of the context's, for each function.
        pause : float
            Seconds to wait before each turn. OpenMP's threads go on spinning when their work is done, for up to 0.2 s.
        """
        found = {label: Timing([], 0) for label in functions}
        turn = (self.seconds if seconds is None else seconds) / self.rounds
        for number in range(self.rounds + 1):
            for label, function in functions.items():
                if found[label].problem:
                    continue
                try:
                    if number == 0:
                        self.first_run(label, function)
                    else:
                        self.say(f"{label}: round {number} of {self.rounds}")
                        time.sleep(pause)
                        found[label] = found[label].plus(self._turn(function, turn))
                except Exception as error:
                    found[label] = Timing([], 0, reason(error))
        return found

    def first_run(self, label: str, function: Callable[[], object]) -> None:
        """Run a function once, and say how long that took: kernels are compiled when they are first used.

        Raises
        ------
        TimeoutError
            Where the experiment's time is over.
        """
        if time.monotonic() > self.until:
            raise TimeoutError("the experiment's time was over")
        self.say(f"{label}: first run")
        begin = time.perf_counter()
        function()
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.say(f"{label}: first run, with compiling, took {time.perf_counter() - begin:.3g} s")

    def _turn(self, function: Callable[[], object], seconds: float) -> Timing:
        if self.device == "cuda":
            return Timing(*block_times(function, seconds))
        timer = Timer("function()", globals={"function": function}, num_threads=self.threads)
        measured = timer.blocked_autorange(min_run_time=seconds)
        return Timing(measured.times, measured.number_per_run * len(measured.times))

    @functools.cached_property
    def limits(self) -> Limits:
        """Measured once for each context, by the fastest run.

        Raises
        ------
        RuntimeError
            Where that fails.
        """
        elements, size = (2**28, 8192) if self.device == "cuda" else (2**26, 1536)
        source, target = torch.ones(elements, device=self.place), torch.empty(elements, device=self.place)
        left, right, product = torch.randn(3, size, size, device=self.place)
        copy, multiply = "copy", "dense product"
        found = self.times({copy: lambda: target.copy_(source), multiply: lambda: torch.mm(left, right, out=product)})
        for timing in found.values():
            if timing.problem:
                raise RuntimeError(timing.problem)
        return Limits(2 * source.nbytes / min(found[copy].seconds), 2 * size**3 / min(found[multiply].seconds))


def reason(error: BaseException) -> str:
    """Why something was not measured: the first line of an error."""
    line = str(error).strip().partition("\n")[0]
    return line if isinstance(error, ImportError) else f"{type(error).__name__}: {line}"


def device_problem(device: str, devices: tuple[str, ...]) -> str | None:
    """Why nothing can be measured on a device; None where it can."""
    if device == "cuda" and not torch.cuda.is_available():
        return "no CUDA device that PyTorch sees"
    if device not in devices:
        return f"this experiment runs on {', '.join(devices)} only"
    if device == "cuda":
        try:
            kernels._cupy(torch.device("cuda", 0))
        except (ImportError, RuntimeError) as error:
            return reason(error)
    return None
