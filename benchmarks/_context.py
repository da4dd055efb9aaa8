"""How functions are timed, and the best times that the machine allows."""

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
from torch.utils.benchmark import Timer

from jacsparse.runtime import cupy_for

from ._calls import block_times
from ._rows import reason


@dataclass(frozen=True)
class Timing:
    """The times of runs of one function, or why it was not timed."""

    #: Seconds of one run each; of short runs, the mean of a block of runs.
    seconds: list[float]
    #: Runs of the function in all blocks.
    runs: int
    #: Why there are no runs.
    problem: str = ""

    def plus(self, other: Timing) -> Timing:
        """The timing of the runs of both."""
        return Timing(self.seconds + other.seconds, self.runs + other.runs)

    def less(self, other: Timing) -> Timing:
        """The timing of these runs, each less the median of the other runs."""
        if self.problem or other.problem:
            return Timing([], 0, self.problem or other.problem)
        median = statistics.median(other.seconds)
        return Timing([time - median for time in self.seconds], self.runs)


@dataclass(frozen=True)
class Limits:
    """The machine's limits, measured on the threads that everything runs on."""

    #: Bytes read and written each second by a copy of 256 MiB, on CUDA of 1 GiB (``torch.Tensor.copy_``).
    copy_bandwidth: float
    #: Operations each second of a product of two dense float32 matrices of 1536 × 1536, on CUDA of 8192 × 8192
    #: (``torch.mm``).
    peak_flop: float

    def floor(self, nbytes: float, flop: float = 0) -> float:
        """The least seconds in which `nbytes` can be moved and `flop` operations be done."""
        return max(nbytes / self.copy_bandwidth, flop / self.peak_flop)


@dataclass
class Context:
    """The device, the time and the limits for the measurements of an experiment."""

    device: str = "cpu"
    #: Seconds to measure each function, in all rounds.
    seconds: float = 1.0
    #: The number of parts of that time. Functions that are compared take turns, so that a machine that is slow for a
    #: while slows all of them.
    rounds: int = 3
    #: Shows a line about the progress.
    say: Callable[[str], None] = lambda _: None
    #: The end of the experiment's time, by ``time.monotonic``: functions that have not run by then are not timed.
    until: float = math.inf

    def under(self, heading: str) -> Self:
        """The same context, with a heading before each line that it shows."""
        other = copy.copy(self)
        other.say = lambda line: self.say(f"{heading}: {line}")
        return other

    @property
    def place(self) -> str:
        """The device of tensors, as PyTorch names it."""
        return str(self.device)

    @property
    def threads(self) -> int:
        """The number of threads of everything that runs, including peers."""
        return torch.get_num_threads()

    def times(
        self, functions: Mapping[str, Callable[[], object]], *, seconds: float | None = None, pause: float = 0.0
    ) -> dict[str, Timing]:
        """The timings of functions that take turns, each for `seconds` or the context's; a failed one has a problem.

        The first run of each compiles and plans. ``torch.utils.benchmark`` measures on the CPU, events on CUDA. Each
        turn begins with a pause, as OpenMP's threads spin for up to 0.2 s after their work.
        """
        timings = {label: Timing([], 0) for label in functions}
        turn = (self.seconds if seconds is None else seconds) / self.rounds
        for number in range(self.rounds + 1):
            for label, function in functions.items():
                if timings[label].problem:
                    continue
                try:
                    if number == 0:
                        self.first_run(label, function)
                    else:
                        self.say(f"{label}: round {number} of {self.rounds}")
                        time.sleep(pause)
                        timings[label] = timings[label].plus(self._turn(function, turn))
                except Exception as error:
                    timings[label] = Timing([], 0, reason(error))
        return timings

    def first_run(self, label: str, function: Callable[[], object]) -> None:
        """Run a function once, and say how long that took; TimeoutError if the experiment's time is over.

        The first run compiles kernels.
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
        # A function may time its own runs, such as those in another process.
        if (turn := getattr(function, "turn", None)) is not None:
            timing: Timing = turn(seconds)
            return timing
        if self.device == "cuda":
            return Timing(*block_times(function, seconds))
        timer = Timer("function()", globals={"function": function}, num_threads=self.threads)
        measured = timer.blocked_autorange(min_run_time=seconds)
        return Timing(measured.times, measured.number_per_run * len(measured.times))

    @functools.cached_property
    def limits(self) -> Limits:
        """The machine's limits, from the fastest runs; RuntimeError if they cannot be measured."""
        elements, size = (2**28, 8192) if self.device == "cuda" else (2**26, 1536)
        source, target = torch.ones(elements, device=self.place), torch.empty(elements, device=self.place)
        left, right, product = torch.randn(3, size, size, device=self.place)
        copy, multiply = "copy", "dense product"
        timings = self.times({copy: lambda: target.copy_(source), multiply: lambda: torch.mm(left, right, out=product)})
        for timing in timings.values():
            if timing.problem:
                raise RuntimeError(timing.problem)
        return Limits(2 * source.nbytes / min(timings[copy].seconds), 2 * size**3 / min(timings[multiply].seconds))


def device_problem(device: str, devices: tuple[str, ...]) -> str | None:
    """Why nothing can be measured on a device, or None if it can."""
    if device == "cuda" and not torch.cuda.is_available():
        return "no CUDA device that PyTorch sees"
    if device not in devices:
        return f"this experiment runs on {', '.join(devices)} only"
    if device == "cuda":
        try:
            cupy_for(torch.device("cuda", 0))
        except (ImportError, RuntimeError) as error:
            return reason(error)
    return None
