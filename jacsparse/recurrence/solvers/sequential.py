"""Step after step, the samples side by side."""

from __future__ import annotations

import numpy as np
import torch

from ...runtime import on_device
from ..recurrences_cuda import remaining_runs
from ..reports import Pending
from ..sequences import Chunks, DeviceRuns, index
from .recurrence import Problem, Solver


class Sequential(Solver):
    """Every sample from its first state on, step after step."""

    name = "sequential"
    solves = frozenset({"linear", "gradients", "states"})

    def solve(self, problem: Problem) -> torch.Tensor:
        report, sequences = problem.report, problem.sequences
        report.methods.append(self.name)
        report.chunk, report.sweeps = sequences.time, 1
        return problem.recurrence.run(sequences.whole(problem.direction), problem.initial_state)


def run_chunks(
    problem: Problem, chunks: Chunks, starts: torch.Tensor, overflowing: DeviceRuns | None = None
) -> torch.Tensor:
    """Take all chunks from their first states, and samples in which one overflows step after step; the last states.

    A product of many matrices may overflow where no state does.

    Parameters
    ----------
    problem : Problem
        The recurrence.
    chunks : Chunks
        Its chunks.
    starts : Tensor, (chunks, state)
        Their first states.
    overflowing : DeviceRuns, optional
        On a device, the samples in which one overflows, where that is known.
    """
    recurrence, initial_state, report = problem.recurrence, problem.initial_state, problem.report
    last = recurrence.run(chunks.runs, starts)[index(chunks.last, initial_state)]
    report.sweeps += 2
    whole = problem.sequences.whole(problem.direction)
    if on_device(initial_state):
        if overflowing is None:
            sample, there = index(chunks.runs.sample, initial_state), whole.on(initial_state.device)
            finite = starts.isfinite().all(dim=1).long()
            right = finite.new_ones(len(initial_state)).scatter_reduce(0, sample, finite, "amin") > 0
            overflowing = remaining_runs(chunks, initial_state.device, there.begin, torch.where(right, 0, there.steps))
        report.pending = Pending.of(report.methods, overflowing.steps, None)
        return recurrence.run(overflowing, torch.where((overflowing.steps > 0)[:, None], initial_state, last))
    lost = np.unique(chunks.runs.sample[~starts.isfinite().all(dim=1).numpy()])
    if len(lost):
        place = index(lost, initial_state)
        last[place] = recurrence.run(whole.take(lost), initial_state[place])
        report.methods.append("sequential")
        report.fallback_samples, report.fallback_steps = len(lost), int(problem.sequences.lengths[lost].sum())
    return last
