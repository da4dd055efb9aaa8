"""From guessed states: every chunk again from where the chunk before it got to, until they fit.

Naumov's hybrid of a direct and an iterative method (section 3.4): in a contracting network a chunk forgets its first
state, and two sweeps are enough. After k sweeps the first k chunks are the sequential ones bit for bit. What has not
settled when sweeps stop helping is finished step after step: the result is the sequential one within the tolerance.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch

from ...runtime import on_device
from ..boundaries_cuda import Convergence, judge
from ..recurrences_cuda import tolerance
from ..reports import Pending
from ..sequences import Chunks, index
from .recurrence import ChunkSolver, Problem, check_warm

#: Sweeps after which guessing is given up on the host.
MOST_SWEEPS = 20


class Relaxed(ChunkSolver):
    """Fixed-point iteration on the states at the chunks' boundaries: block Jacobi, from guessed states.

    Attributes
    ----------
    progress : float
        Sweeps go on while each leaves at most this share of the largest move.
    device_sweeps : int
        Sweeps on a device, where all are queued and none is waited for. The last one compares each first state with the
        previous chunk's last one, not with the method's guess.
    """

    name = "relaxed"
    solves = frozenset({"linear", "gradients", "states"})
    progress: ClassVar[float] = 0.1
    device_sweeps: ClassVar[int] = 4

    def solve(self, problem: Problem) -> torch.Tensor:
        return settle(problem, self)

    def following(
        self, problem: Problem, chunks: Chunks, start: torch.Tensor, ends: torch.Tensor, reached: torch.Tensor
    ) -> torch.Tensor:
        """The next guess of the chunks' first states.

        Parameters
        ----------
        problem : Problem
            The recurrence.
        chunks : Chunks
            Its chunks.
        start, ends : Tensor, (chunks, state)
            The first states of this sweep, and where it got to.
        reached : Tensor, (chunks, state)
            The last state of the chunk before each, or the sample's own first state.
        """
        return reached

    def following_on_device(
        self,
        problem: Problem,
        chunks: Chunks,
        start: torch.Tensor,
        ends: torch.Tensor,
        again: torch.Tensor,
        previous: torch.Tensor | None,
        matrices: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """As `following`, on a device, None for the states reached; and the chunks' matrices, for the next sweep."""
        return None, None


def settle(problem: Problem, method: Relaxed, instead: Relaxed | None = None) -> torch.Tensor:
    """Sweep over all chunks until their first states fit, and finish step after step what does not; the last states.

    Parameters
    ----------
    problem : Problem
        Gets its `boundaries`.
    method : Relaxed
        Makes each next guess.
    instead : Relaxed, optional
        Makes them on the host once the first method stops helping.
    """
    chunks, initial_state, report = problem.chunks, problem.initial_state, problem.report
    guess = _first_guess(problem, chunks)
    report.methods.append(method.name)
    if on_device(initial_state):
        judged, defects = _sweeps_on_device(problem, chunks, guess, method)
        report.pending, problem.boundaries = Pending.of(report.methods, judged.steps, defects), guess
        whole = chunks.sequences.whole(problem.direction).on(initial_state.device)
        return problem.recurrence.run(whole._replace(begin=judged.begin, steps=judged.steps), judged.rest)
    ends, reached, late = _sweeps(problem, chunks, guess, method, instead)
    if late.any() and problem.fallback is not None:
        return problem.fallback.solve(problem)
    problem.boundaries = reached
    last = ends[index(chunks.last, ends)]
    if late.any():
        rest, first = chunks.rest(np.flatnonzero(late.cpu().numpy()))
        last[index(rest.sample, last)] = problem.recurrence.run(rest, reached[index(first, last)])
        report.methods.append("sequential")
        report.fallback_samples, report.fallback_steps = len(rest), int(rest.count.sum())
    return last


def _first_guess(problem: Problem, chunks: Chunks) -> torch.Tensor:
    """First states to begin with: those of an earlier pass where there are any and they are numbers, else zeros."""
    warm, initial_state = problem.warm, problem.initial_state
    guess = chunks.guess(initial_state)
    if warm is None:
        return guess
    check_warm(warm, tuple(guess.shape), guess.dtype, guess.device)
    return torch.where((index(chunks.place, initial_state) > 0)[:, None] & warm.isfinite(), warm, guess)


def _sweeps_on_device(
    problem: Problem, chunks: Chunks, guess: torch.Tensor, method: Relaxed
) -> tuple[Convergence, torch.Tensor]:
    """Sweep a fixed number of times; after each sweep the device decides which chunks are taken again."""
    recurrence, initial_state = problem.recurrence, problem.initial_state
    runs = chunks.runs.on(initial_state.device)
    defects = initial_state.new_empty(method.device_sweeps, len(initial_state))
    judged, state, again, previous = Convergence.of(guess, initial_state), guess.clone(), runs.steps, None
    matrices: torch.Tensor | None = None
    for sweep, defect in enumerate(defects, 1):
        ends, following = recurrence.run(runs._replace(steps=again), state), None
        if sweep < method.device_sweeps:
            following, matrices = method.following_on_device(problem, chunks, guess, ends, again, previous, matrices)
        judge(chunks, ends, following, initial_state, recurrence.local, guess, previous, defect, judged)
        state, again, previous = judged.start, judged.again, defect
    return judged, defects


def _sweeps(
    problem: Problem, chunks: Chunks, start: torch.Tensor, method: Relaxed, instead: Relaxed | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The chunks' last states, the first ones that follow from them, and which chunks of samples did not settle."""
    recurrence, initial_state, report = problem.recurrence, problem.initial_state, problem.report
    runs, sample = chunks.runs, index(chunks.runs.sample, initial_state)
    enough = tolerance(initial_state.dtype)
    before = math.inf
    ends = recurrence.run(runs, start)
    report.sweeps += 1
    # Samples that sweeps may still help: a NaN would go on by a chunk a sweep.
    hopeful = initial_state.new_ones(len(initial_state), dtype=torch.bool)
    while True:
        reached = chunks.starts(ends, initial_state)
        following = method.following(problem, chunks, start, ends, reached)
        # How far the guesses still are to move: for Newton's method, with all that boundaries do to later ones.
        move = ((following - start).abs() / _scale(reached, sample, len(initial_state), recurrence.local)).amax(dim=1)
        hopeful &= _largest(move[:, None], sample, len(initial_state)).isfinite()
        defect = float(move[hopeful[sample]].amax()) if hopeful.any() else 0.0
        stuck = defect > method.progress * before and defect > enough
        before = defect
        if stuck and instead is not None:
            method, instead, before = instead, None, math.inf
            report.methods.append(method.name)
            continue
        report.defects.append(defect)
        if defect <= enough or stuck or report.sweeps >= MOST_SWEEPS:
            settled = _largest(move[:, None], sample, len(initial_state)) <= enough
            # Of a sample that did not settle, only the chunks that are the sequential ones bit for bit are right.
            return ends, reached, (reached != start).any(dim=1) & ~settled[sample]
        # A run whose first state is right already need not be taken again.
        again = torch.nonzero((following != start).any(dim=1) & hopeful[sample]).flatten()
        start[again] = following[again]
        ends[again] = recurrence.run(runs.take(again.cpu().numpy()), following[again])
        report.sweeps += 1


def _scale(reached: torch.Tensor, sample: torch.Tensor, batch: int, local: int) -> torch.Tensor:
    """What moves of first states are shares of, as `Recurrence.local` says."""
    if local:
        scale = torch.maximum(reached.abs(), reached[:, :local].abs().amax(dim=1, keepdim=True))
    else:
        scale = _largest(reached, sample, batch)[sample, None]
    return scale.clamp(min=torch.finfo(reached.dtype).tiny)


def _largest(values: torch.Tensor, sample: torch.Tensor, batch: int) -> torch.Tensor:
    """The largest absolute value of each sample; infinity where one is NaN."""
    largest = values.abs().amax(dim=1).nan_to_num(nan=math.inf)
    return largest.new_zeros(batch).scatter_reduce_(0, sample, largest, "amax")
