"""How a recurrence was solved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..schedule import Schedule, chunked, linear
from .recurrences_cuda import tolerance


@dataclass(frozen=True)
class Pending:
    """What came of a solution, on the device.

    Attributes
    ----------
    methods : tuple of str
        That were used.
    left : Tensor, (batch,)
        Steps of each sample that were finished sequentially.
    defects : Tensor, (sweeps, batch), or None
        After each sweep, where states were guessed.
    ready : Event or None
        After which they can be read; None where `captured`.
    captured : bool
        Whether a graph writes them, anew at each replay.
    """

    methods: tuple[str, ...]
    left: torch.Tensor
    defects: torch.Tensor | None
    ready: torch.cuda.Event | None
    captured: bool

    @classmethod
    def of(cls, methods: Sequence[str], left: torch.Tensor, defects: torch.Tensor | None) -> Pending:
        """Of what is queued on the current stream so far."""
        captured = left.is_cuda and torch.cuda.is_current_stream_capturing()
        ready = torch.cuda.Event() if left.is_cuda and not captured else None
        if ready is not None:
            ready.record(torch.cuda.current_stream(left.device))
        return cls(tuple(methods), left, defects, ready, captured)

    def read(self) -> dict[str, Any]:
        """Fields of a `Report`; waits for the device."""
        if self.ready is not None:
            self.ready.synchronize()
        return outcome(self.methods, self.left.cpu(), None if self.defects is None else self.defects.cpu())


def outcome(methods: Sequence[str], left: torch.Tensor, defects: torch.Tensor | None) -> dict[str, Any]:
    """Fields of a `Report`, by steps of each sample that were finished sequentially and, of guesses, by defects."""
    late, sweeps = left > 0, {}
    if defects is not None:
        # A sample without numbers is not one that settles.
        largest = defects.masked_fill(~defects.isfinite(), 0).amax(dim=1).tolist() if len(left) else [0.0]
        settled = tolerance(defects.dtype)
        done = next((number for number, defect in enumerate(largest, 1) if defect <= settled), len(largest))
        sweeps = {"defects": largest[:done], "sweeps": done}
    return {
        **sweeps,
        "methods": [*methods, *(["sequential"] if late.any() else [])],
        "fallback_samples": int(late.sum()),
        "fallback_steps": int(left.sum()),
    }


@dataclass
class Report:
    """How one recurrence was solved: for each layer and direction of the states, and then of their gradients.

    `methods` and `reason` say what ran, and why. What guesses has a defect after each sweep, which falls until the
    guesses agree; what does not agree in time is finished step after step, and counted as a fallback.

    Attributes
    ----------
    recurrence : {"forward", "backward"}
        Of states or of their gradients.
    layer : str
        Whose, as PyTorch ends the names of its weights: ``l0``, ``l0_reverse``; empty where there is but one.
    steps : int
        Of the longest sample.
    methods : list of str
        What was used, in order: ``sequential``, ``chunked``, ``blelloch`` or another schedule's name, ``planned``,
        ``relaxed``, ``newton``; then ``sequential`` where samples, or their ends, were gone through step after step. Or
        ``torch.nn``, its own.
    chunk : int
        Steps of a chunk.
    sweeps : int
        How often chunks were run, all or some.
    defects : list of float
        After each sweep how far the guess of a chunk's first state was from the next one, at most: from where the chunk
        before it got to or, in Newton's method, from what that makes of it. As a share of the largest state there or,
        of gradients, of the sample's largest.
    fallback_samples, fallback_steps : int
        What was finished sequentially.
    reason : str
        Why: that it was asked for, or what ``auto`` chose by.
    tree : Schedule or None
        The schedule whose products were executed one by one.
    exchange : str
        How states got across ranks: ``linear``, ``gather`` or ``scan``; empty where they did not.
    pending : Pending or None
        Of a solution on a CUDA device, what `read` will read there of methods, sweeps, defects and fallbacks.

    Examples
    --------
    >>> import jacsparse
    >>> gru = jacsparse.nn.GRU(3, 20, forward="relaxed", schedule="chunked", chunk=50)
    >>> output, _ = gru(torch.randn(200, 2, 3))
    >>> output.sum().backward()
    >>> states, gradients = gru.reports
    >>> states.methods, states.chunk, len(states.defects) == states.sweeps, states.defects[-1] < 1e-5
    (['relaxed'], 50, True, True)
    >>> states.fallback_steps
    0
    >>> gradients.recurrence, gradients.methods, gradients.steps
    ('backward', ['chunked'], 200)
    """

    recurrence: str
    steps: int
    layer: str = ""
    methods: list[str] = field(default_factory=list)
    chunk: int = 0
    sweeps: int = 0
    defects: list[float] = field(default_factory=list)
    fallback_samples: int = 0
    fallback_steps: int = 0
    reason: str = ""
    tree: Schedule | None = field(default=None, repr=False)
    exchange: str = ""
    pending: Pending | None = field(default=None, repr=False, compare=False)

    def read(self) -> Report:
        """Itself, with what came of guessing on a device, for which this waits."""
        pending = self.pending
        if pending is not None:
            for name, value in pending.read().items():
                setattr(self, name, value)
            # What a graph computes is read after each replay.
            self.pending = pending if pending.captured else None
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.read().__dict__, "pending": None}

    @property
    def schedule(self) -> Schedule | None:
        """The products that a sample's states take, with their step and work complexity; None where there is none.

        Solvers that guess have none.
        It has one stage more than there are steps: value 0 is the first state, and each step is a matrix. What was
        finished sequentially comes on top and, where chunks are composed in the dtype of the states, a second pass
        over chunks and boundaries that corrects the first one's rounding.
        """
        if self.tree is not None:
            return self.tree
        if self.methods[0] == "chunked":
            return chunked(self.steps + 1, self.chunk)
        return linear(self.steps + 1) if self.methods[0] in ("sequential", "torch.nn") else None


class PassOfReports:
    """How a layer's last pass was computed; what a device has of it is read when it is asked for.

    Attributes
    ----------
    solutions : dict
        What gives the report of each solution, by its recurrence and layer as in `Report`: of several passes back over
        the same graph, of the last one.
    starts : list of Tensor, callable or None
        The first states of chunks, or what gives them, by layer and direction; None where there are none.
    """

    def __init__(self) -> None:
        self.solutions: dict[tuple[str, str], Callable[[], Report]] = {}
        self.starts: list[torch.Tensor | Callable[[], torch.Tensor | None] | None] = []

    def add(self, recurrence: str, layer: str, report: Callable[[], Report]) -> None:
        """Add what gives the report of a solution."""
        self.solutions.pop((recurrence, layer), None)
        self.solutions[recurrence, layer] = report

    @property
    def reports(self) -> list[Report]:
        """How each recurrence was solved; this waits for the device."""
        return [report() for report in self.solutions.values()]

    @property
    def boundaries(self) -> list[torch.Tensor | None]:
        """The first states of chunks, by layer and direction; None where there are none."""
        return [each if each is None or isinstance(each, torch.Tensor) else each() for each in self.starts]

    def __reduce__(self) -> tuple[Any, ...]:
        return _pass_of, (self.reports, self.boundaries)


def _pass_of(reports: Sequence[Report], boundaries: Sequence[torch.Tensor | None]) -> PassOfReports:
    this = PassOfReports()
    for report in reports:
        this.add(report.recurrence, report.layer, report.read)
    this.starts += boundaries
    return this
