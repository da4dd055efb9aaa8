"""How the recurrences of a layer are solved: step after step, in chunks side by side, or by guessing and correcting.

A *sweep* takes runs of steps from the states that it is given. One sweep over whole samples is the sequential solution.
Over chunks, the states at their boundaries have to be found first:

- ``chunked`` (and ``blelloch``, whose chunks are single steps) composes what the chunks do to a state, which for the
  gradients' recurrence is affine: matrices, and a scan over them; ``planned`` does so for the sparse matrices of a
  pruned layer, whose products are planned once;
- ``relaxed`` guesses them and sweeps again from where the neighbours got to, Naumov's hybrid of a direct and an
  iterative method (section 3.4): in a contracting network a chunk forgets its start, and two sweeps are enough;
- ``newton`` corrects the guesses by the chunks' derivatives: multiple shooting.

After ``k`` sweeps the first ``k`` chunks are the sequential ones bit for bit. What has not settled when sweeps stop
helping is finished sequentially, sample by sample: the answer is the sequential one within the tolerance, always.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from ..patterns import state_jacobian_pattern, state_jacobian_values
from ..patterns._cuda import multiprocessors, on_device
from ..patterns._runtime import threads
from ..patterns._values import gathered
from ..schedule import Schedule, blelloch, chunked, linear
from . import _on_device
from ._cells import Cell, Kept, Weights
from ._chunks import Chunks
from ._cuda import tolerance
from ._planned import scan, times
from ._runs import OnDevice, Runs, Sequences, index

__all__ = [
    "FORWARD",
    "SCHEDULES",
    "Options",
    "Report",
    "Sweep",
    "parse",
    "solve_affine",
    "solve_backward",
    "solve_forward",
]

FORWARD = ("sequential", "parallel", "relaxed", "newton")
SCHEDULES = ("auto", "linear", "chunked", "blelloch", "planned", "relaxed")

#: Steps of a chunk where none are given.
CHUNK = 128
#: Sweeps after which guessing is given up.
MOST_SWEEPS = 20


def parse(schedule: object, names: Sequence[str] = SCHEDULES, chunk: int = CHUNK) -> tuple[str, int]:
    """A schedule's name, and the steps of a chunk: `chunk` where it does not say, as in ``chunked:64``.

    Raises
    ------
    ValueError
        Where it is none of `names`.

    Examples
    --------
    >>> parse("chunked:64")
    ('chunked', 64)
    """
    name, colon, argument = schedule.partition(":") if isinstance(schedule, str) else ("", "", "")
    numbered = name in ("chunked", "relaxed") and argument.isascii() and argument.isdecimal() and int(argument) > 0
    if name not in names or (colon and not numbered):
        raise ValueError(
            f"schedule is {schedule!r}; expected one of {', '.join(names)}; chunked and relaxed also with the steps of "
            "a chunk, as in chunked:64"
        )
    return name, int(argument) if colon else chunk


@dataclass
class Report:
    """How one recurrence was solved.

    Attributes
    ----------
    recurrence : {"forward", "backward"}
        Of states or of their gradients.
    layer : str
        Whose, as PyTorch ends the names of its weights: ``l0``, ``l0_reverse``; empty where there is but one.
    steps : int
        Of the longest sample.
    methods : list of str
        What was used, in order: ``linear``, ``chunked``, ``blelloch``, ``planned``, ``relaxed``, ``newton``; and
        ``sequential`` where samples, or their ends, were then gone through step after step. Or ``torch.nn``, its own.
    chunk : int
        Steps of a chunk.
    sweeps : int
        How often chunks were run, all or some.
    defects : list of float
        After each sweep how far the guess of a chunk's first state was from the next one, at most, as a share of the
        largest state: from where the chunk before it got to or, in Newton's method, from what that makes of it.
    fallback_samples, fallback_steps : int
        What was finished sequentially.
    reason : str
        Why ``auto`` chose as it did.
    pending : Pending or None
        Of a solution on a CUDA device, what `read` will read there of methods, sweeps, defects and fallbacks.
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
    pending: _on_device.Pending | None = field(default=None, repr=False, compare=False)

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
        """The products that a sample's states take, with their step and work complexity; None where states are guessed.

        Of the same kind as those of a chain: of the state that is given and a matrix each step. On top come what
        was finished sequentially and, where chunks are composed in the dtype of the states, a second pass over chunks
        and boundaries that corrects the first one's rounding.
        """
        places, method = self.steps + 1, self.methods[0]
        if method in ("relaxed", "newton"):
            return None
        if method == "chunked":
            return chunked(places, self.chunk)
        return blelloch(places) if method in ("blelloch", "planned") else linear(places)


@dataclass
class Options:
    """How a layer's recurrences are solved, and how they were.

    Attributes
    ----------
    forward : str
        One of `FORWARD`.
    schedule : str
        Of the gradients' recurrence: one of `SCHEDULES`.
    chunk : int
        Steps of a chunk.
    warm : Tensor or None
        First states of the chunks, ``(chunks of all samples, states · size)``, to begin guessing with.
    layer : str
        Whose recurrences these are.
    reports : list of Report
        Added to by each solution.
    boundaries : Tensor or None
        The chunks' first states that were found, for a later `warm`.
    """

    forward: str = "sequential"
    schedule: str = "auto"
    chunk: int = CHUNK
    warm: torch.Tensor | None = None
    layer: str = ""
    reports: list[Report] = field(default_factory=list)
    boundaries: torch.Tensor | None = None

    def report(self, recurrence: str, steps: int, **rest: Any) -> Report:
        """A new report, in the place of what an earlier pass over the same graph gave."""
        report = Report(recurrence, steps, self.layer, **rest)
        kept = [other for other in self.reports if (other.recurrence, other.layer) != (recurrence, self.layer)]
        self.reports[:] = [*kept, report]
        return report


class Sweep(ABC):
    """One recurrence: runs of steps, from states to states.

    Attributes
    ----------
    least : float
        The states' own order of size, with which steps at boundaries are compared where all states are smaller.
    """

    least: ClassVar[float] = 0.0

    @property
    def diagonal(self) -> bool:
        """Whether matrices are diagonals."""
        return False

    @abstractmethod
    def run(self, runs: Runs | OnDevice, start: torch.Tensor, *, record: bool = True) -> torch.Tensor:
        """Take runs from first to last states; what happens on the way is recorded, unless it is not wanted.

        All is computed in the dtype of `start`, which may be wider than that of the recurrence.
        """

    @abstractmethod
    def matrices(
        self,
        runs: Runs,
        dtype: torch.dtype,
        again: torch.Tensor | None = None,
        before: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """For each run ``M`` with ``d(last state) = d(first state) @ M``, ``(runs, state, state)``; or its diagonal.

        On a device of so many steps `again`; runs without steps may keep the matrix that they had `before`.
        """

    def between(self, chunks: Chunks, dtype: torch.dtype) -> torch.Tensor:
        """`matrices` of the chunks, as `Chunks.solve` takes them: zeros of those that are not used."""
        matrices = self.matrices(chunks.inner_runs, dtype)
        found = matrices.new_zeros(len(chunks.runs), *matrices.shape[1:])
        found[index(chunks.inner, found)] = matrices
        return found

    def starts(self, chunks: Chunks, edge: torch.Tensor, schedule: str) -> torch.Tensor:
        """The chunks' first states, ``(runs, state)``, where the recurrence is affine, by Newton's method.

        Notes
        -----
        One step of it would be enough, were the chunks' matrices not rounded. Where all steps are alike, all chunks
        round alike: over T steps this adds up to a share ρ of a state, of at most T n ε κ, where κ is the largest norm
        of a product of steps. A loop has the same bound, but rounds other numbers at each step, and much of it cancels.

        Diagonals, and matrices of single steps, cost little: in float64, for which ρ is nothing. Others would take
        twice the time there. They stay as they are, and a second step, from gaps measured in float64, leaves ρ².
        """
        tree = schedule == "blelloch"
        wide = tree or self.diagonal
        matrices = self.matrices(chunks.runs, torch.float64) if wide else self.between(chunks, edge.dtype)
        start = chunks.guess(edge)
        for dtype in (torch.float64,) if wide else (edge.dtype, torch.float64):
            start = start.to(dtype)
            ends = self.run(chunks.runs, start, record=False)
            start += chunks.solve(matrices, chunks.starts(ends, edge.to(dtype)) - start, tree=tree)
        return start.to(edge.dtype)

    def transfer(self, runs: Runs, edge: torch.Tensor) -> torch.Tensor:
        """On a device: `matrices` and, below each, what the run makes of zeros, ``(runs, state + 1, state)``."""
        zeros = edge.new_zeros(len(runs), edge.shape[1])
        offsets = self.run(runs, zeros, record=False)
        return torch.cat([self.matrices(runs, edge.dtype), offsets.unsqueeze(1)], dim=1)

    def limit(self, states: torch.Tensor, edge: torch.Tensor) -> torch.Tensor:
        """The nearest states that the recurrence can reach from `edge`."""
        return states


@dataclass
class _Forward(Sweep):
    cell: Cell
    weights: Weights
    entered: torch.Tensor
    kept: Kept
    # What enters the gates is of the order of one, however small the states are.
    least = 1.0

    def run(self, runs: Runs | OnDevice, start: torch.Tensor, *, record: bool = True) -> torch.Tensor:
        return self.cell.forward(runs, self.entered, self.weights, start, self.kept)

    def matrices(
        self,
        runs: Runs,
        dtype: torch.dtype,
        again: torch.Tensor | None = None,
        before: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # Row j is the gradient of element j of the last state.
        rows = None if before is None else before.transpose(1, 2)
        return _units(self.cell, self.weights, self.kept, runs, dtype, again, rows).transpose(1, 2)

    def limit(self, states: torch.Tensor, edge: torch.Tensor) -> torch.Tensor:
        return self.cell.limit(states, edge)


@dataclass
class _Backward(Sweep):
    cell: Cell
    weights: Weights
    kept: Kept
    grad_output: torch.Tensor | None
    grad_gates: torch.Tensor
    #: Those of `grad_gates` that were written: others count as zeros, whatever is in them.
    rows: slice

    def run(self, runs: Runs | OnDevice, start: torch.Tensor, *, record: bool = True) -> torch.Tensor:
        inputs, gates = (self.weights, self.kept, self.grad_output, start), self.grad_gates if record else None
        if gates is None or not isinstance(runs, Runs) or not runs.is_whole or on_device(gates):
            return self.cell.backward(runs, *inputs, gates)
        reach = np.empty(len(runs), np.int64)
        grad_start = self.cell.backward(runs, *inputs, gates, reach)
        self.rows, others = runs.live_rows(reach)
        if len(others):
            gates[index(others, gates)] = 0
        return grad_start

    def matrices(
        self,
        runs: Runs,
        dtype: torch.dtype,
        again: torch.Tensor | None = None,
        before: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return _units(self.cell, self.weights, self.kept, runs, dtype, again, before)

    def transfer(self, runs: Runs, edge: torch.Tensor) -> torch.Tensor:
        if not self.cell.transfers:
            return super().transfer(runs, edge)
        return self.cell.transfer(runs, self.weights, self.kept, self.grad_output)

    def starts(self, chunks: Chunks, edge: torch.Tensor, schedule: str) -> torch.Tensor:
        return _planned(self, chunks, edge) if schedule == "planned" else super().starts(chunks, edge, schedule)


def _units(
    cell: Cell,
    weights: Weights,
    kept: Kept,
    runs: Runs,
    dtype: torch.dtype,
    again: torch.Tensor | None = None,
    before: torch.Tensor | None = None,
) -> torch.Tensor:
    """What each unit vector at a run's end is at its start, as rows, ``(runs, state, state)``; as `Sweep.matrices`."""
    size = cell.states * weights.size
    if cell.transfers and on_device(weights.hidden) and dtype == weights.hidden.dtype:
        there = runs.on(weights.hidden.device)
        there = there if again is None else there._replace(steps=again)
        # The rows before are those of a matrix with another one below.
        out = None if before is None else before.as_strided((len(runs), size + 1, size), before.stride())
        return cell.transfer(there, weights, kept, None, out)[:, :size]
    units = torch.eye(size, dtype=dtype, device=weights.hidden.device).repeat(len(runs), 1)
    return cell.backward(runs.repeat(size), weights, kept, None, units, None).reshape(len(runs), size, size)


def solve_forward(
    cell: Cell,
    sequences: Sequences,
    direction: int,
    entered: torch.Tensor,
    weights: Weights,
    kept: Kept,
    options: Options,
) -> torch.Tensor:
    """Fill what the forward pass keeps; returns the last states."""
    sweep = _Forward(cell, weights, entered, kept)
    if options.forward == "sequential" or sequences.time <= options.chunk:
        options.report("forward", sequences.time, methods=["sequential"], chunk=sequences.time, sweeps=1)
        return sweep.run(sequences.whole(direction), kept.initial)
    chunks = sequences.cut(direction, options.chunk)
    report = options.report("forward", sequences.time, chunk=options.chunk)
    guess = _warm(options.warm, chunks, kept.initial)
    if on_device(kept.initial):
        newton = options.forward == "newton"
        last, options.boundaries = _on_device.guessed(sweep, chunks, kept.initial, guess, report, newton=newton)
        return last
    found = _relax(sweep, chunks, kept.initial, guess, options.forward, report)
    options.boundaries = found.wanted
    if found.late.any():
        return _finish(sweep, chunks, found, report)
    return found.ends[index(chunks.last, found.ends)]


def solve_backward(
    cell: Cell,
    sequences: Sequences,
    direction: int,
    weights: Weights,
    kept: Kept,
    grad_output: torch.Tensor | None,
    grad_end: torch.Tensor,
    options: Options,
) -> tuple[torch.Tensor, slice, torch.Tensor]:
    """The gradients of the gates, ``(rows, columns)``, which of them are written, and those of the first states.

    Rows that are not written count as zeros, whatever is in them.
    """
    grad_gates = grad_end.new_empty(sequences.steps, cell.grad_width * weights.size)
    sweep = _Backward(cell, weights, kept, grad_output, grad_gates, slice(0, sequences.steps))
    schedule, chunk = parse(options.schedule, chunk=options.chunk)
    automatic, reason = schedule == "auto", ""
    if automatic:
        schedule, chunk, reason = _choose(sequences, chunk, weights)
    report = options.report("backward", sequences.time, reason=reason)
    grad_start = solve_affine(
        sweep, sequences, direction, grad_end, schedule, chunk, report, backward=True, sequential=automatic
    )
    return grad_gates, sweep.rows, grad_start


def solve_affine(
    sweep: Sweep,
    sequences: Sequences,
    direction: int,
    edge: torch.Tensor,
    schedule: str,
    length: int,
    report: Report,
    *,
    backward: bool,
    sequential: bool = False,
) -> torch.Tensor:
    """Solve an affine recurrence from the samples' states `edge`, by a schedule of `SCHEDULES`; the last states.

    What does not settle when relaxed is then chunked, or finished sequentially.
    """
    report.chunk = 1 if schedule in ("blelloch", "planned") else length
    if schedule == "linear" or sequences.time <= report.chunk:
        report.methods, report.chunk, report.sweeps = ["linear"], sequences.time, 1
        return sweep.run(sequences.whole(direction), edge)
    chunks = sequences.cut(direction, report.chunk, backward=backward)
    if on_device(edge):
        if schedule == "relaxed":
            return _on_device.guessed(sweep, chunks, edge, chunks.guess(edge), report, newton=False)[0]
        return _on_device.chunked(sweep, chunks, edge, schedule, report)
    if schedule == "relaxed":
        found = _relax(sweep, chunks, edge, chunks.guess(edge), "relaxed", report)
        if not found.late.any():
            return found.ends[index(chunks.last, edge)]
        if sequential:
            return _finish(sweep, chunks, found, report)
        schedule = "chunked"
    report.methods.append(schedule)
    report.sweeps += 2
    starts = sweep.starts(chunks, edge, schedule)
    last = sweep.run(chunks.runs, starts)[index(chunks.last, edge)]
    # A product of many matrices may overflow where no state does.
    lost = np.unique(chunks.runs.sample[~starts.isfinite().all(dim=1).cpu().numpy()])
    if len(lost):
        place = index(lost, edge)
        last[place] = sweep.run(sequences.whole(direction).take(lost), edge[place])
        report.methods.append("sequential")
        report.fallback_samples, report.fallback_steps = len(lost), int(sequences.lengths[lost].sum())
    return last


def _planned(sweep: _Backward, chunks: Chunks, edge: torch.Tensor) -> torch.Tensor:
    """The gradients at the ends of single steps, by a scan over sparse Jacobians."""
    cell, weights, sequences = sweep.cell, sweep.weights, chunks.sequences
    pattern = state_jacobian_pattern(cell.mode, weights.hidden.cpu().numpy() != 0)
    state = cell.state(sweep.kept, sequences.before(chunks.runs.direction), index(sequences.sample, edge))
    # In float64, as `Sweep.starts` has single steps.
    state = {name: tensor.double() for name, tensor in state.items()}
    values = state_jacobian_values(cell.mode, weights.hidden.double(), pattern, state)
    values = gathered(values, pattern.transposition)
    # In the order in which gradients get to them; what comes after a sample's last step reaches nothing.
    rows = torch.zeros(chunks.table.shape, dtype=torch.int64, device=edge.device)
    place, sample = index(chunks.place, edge), index(chunks.runs.sample, edge)
    rows[place, sample] = index(sequences.offset[chunks.runs.begin] + chunks.runs.sample, edge)
    values = values[:, rows]
    added = edge.new_zeros(sequences.steps, edge.shape[1])
    if sweep.grad_output is not None:
        added[:, : weights.size] = sweep.grad_output
    offsets = times(pattern.T, values, added[rows].permute(2, 0, 1).double().contiguous())
    states = scan(pattern.T, values, offsets, edge.T.double().contiguous())[:, :-1].to(edge.dtype)
    return states[:, place, sample].T.contiguous()


def _choose(sequences: Sequences, chunk: int, weights: Weights) -> tuple[str, int, str]:
    """What ``auto`` means for these sequences on this machine, a chunk's steps, and why."""
    if on_device(weights.hidden):
        return _on_device.choose(sequences.time, sequences.batch, weights.size, multiprocessors(weights.hidden.device))
    blocks, workers = sequences.whole(1).blocks, threads()
    # Two sweeps over chunks that fill all workers, against one over samples that may not.
    if 2.5 * blocks < workers * math.ceil(blocks / workers) and sequences.time >= 4 * chunk:
        return "relaxed", chunk, f"{sequences.batch} samples alone leave some of {workers} workers idle"
    return "linear", chunk, f"{sequences.batch} samples of {sequences.time} steps on {workers} workers"


def _warm(warm: torch.Tensor | None, chunks: Chunks, edge: torch.Tensor) -> torch.Tensor:
    """First states to begin with: those of an earlier pass where they fit, else zeros."""
    guess, shape = chunks.guess(edge), (len(chunks.runs), edge.shape[1])
    if warm is None:
        return guess
    if (warm.shape, warm.dtype, warm.device) != (shape, edge.dtype, edge.device):
        raise ValueError(
            f"the warm start holds states {tuple(warm.shape)} of {warm.dtype} on {warm.device}; these sequences have "
            f"{shape} of {edge.dtype} on {edge.device}: pass what a pass over as many steps gave there"
        )
    return torch.where((index(chunks.place, edge) > 0)[:, None] & warm.isfinite(), warm, guess)


@dataclass
class _Found:
    """Where guessing got to.

    Attributes
    ----------
    ends, wanted : Tensor, (runs, state)
        The runs' last states, and the first ones that follow from them.
    late : Tensor of bool, (runs,)
        Of the samples that did not settle, the runs that were taken from another first state than that.
    """

    ends: torch.Tensor
    wanted: torch.Tensor
    late: torch.Tensor


def _relax(
    sweep: Sweep, chunks: Chunks, edge: torch.Tensor, start: torch.Tensor, method: str, report: Report
) -> _Found:
    """Sweeps from guessed first states until they fit, or sweeps stop helping."""
    runs, sample = chunks.runs, index(chunks.runs.sample, edge)
    own = (index(chunks.place, edge) == 0)[:, None]
    enough, least = tolerance(edge.dtype), max(sweep.least, torch.finfo(edge.dtype).tiny)
    newton, before = method == "newton", math.inf
    ends = sweep.run(runs, start)
    report.sweeps = 1
    report.methods.append("newton" if newton else "relaxed")
    # Samples that sweeps may still help: a NaN would go on by a chunk a sweep.
    hopeful = edge.new_ones(len(edge), dtype=torch.bool)
    while True:
        wanted = chunks.starts(ends, edge)
        following = wanted
        if newton:
            moves = chunks.solve(sweep.between(chunks, edge.dtype), wanted.double() - start, tree=False)
            solved = sweep.limit((start + moves).to(edge.dtype), edge[sample])
            following = torch.where(solved.isfinite() & ~own, solved, wanted)
        # How far the guesses still are to move: for Newton's method, with all that boundaries do to later ones.
        scale = _largest(wanted, sample, len(edge)).clamp(min=least)
        move = (following - start).abs().amax(dim=1) / scale[sample]
        hopeful &= _largest(move[:, None], sample, len(edge)).isfinite()
        defect = float(move[hopeful[sample]].amax()) if hopeful.any() else 0.0
        stuck = defect > (0.5 if newton else 0.1) * before and defect > enough
        before = defect
        if stuck and method == "parallel" and not newton:
            newton, before = True, math.inf
            report.methods.append("newton")
            continue
        report.defects.append(defect)
        if defect <= enough or stuck or report.sweeps >= MOST_SWEEPS:
            settled = _largest(move[:, None], sample, len(edge)) <= enough
            # Where it did not settle, only what is the sequential solution bit for bit is kept.
            return _Found(ends, wanted, (wanted != start).any(dim=1) & ~settled[sample])
        # A run whose first state is right already need not be taken again.
        again = torch.nonzero((following != start).any(dim=1) & hopeful[sample]).flatten()
        start[again] = following[again]
        ends[again] = sweep.run(runs.take(again.cpu().numpy()), following[again])
        report.sweeps += 1


def _largest(values: torch.Tensor, sample: torch.Tensor, batch: int) -> torch.Tensor:
    """The largest of each sample's values, in size; infinity where one is NaN."""
    largest = values.abs().amax(dim=1).nan_to_num(nan=math.inf)
    return largest.new_zeros(batch).scatter_reduce_(0, sample, largest, "amax")


def _finish(sweep: Sweep, chunks: Chunks, found: _Found, report: Report) -> torch.Tensor:
    """Take each sample that has not settled sequentially, from its first chunk that does not fit; the last states."""
    rest, late = chunks.rest(np.flatnonzero(found.late.cpu().numpy()))
    last = found.ends[index(chunks.last, found.ends)]
    last[index(rest.sample, last)] = sweep.run(rest, found.wanted[index(late, last)])
    report.methods.append("sequential")
    report.fallback_samples, report.fallback_steps = len(rest), int(rest.count.sum())
    return last
