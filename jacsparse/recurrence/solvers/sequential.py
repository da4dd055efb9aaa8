"""Step after step, the samples side by side."""

from __future__ import annotations

import numpy as np
import torch

from ...runtime import on_device
from ..boundaries_cuda import unfinished
from ..reports import Pending
from ..sequences import Chunks, index
from .recurrence import Problem, Solver, check_warm


class Sequential(Solver):
    """Every sample from its first state on, step after step."""

    name = "sequential"
    solves = frozenset({"linear", "gradients", "states"})

    def solve(self, problem: Problem) -> torch.Tensor:
        report, sequences, first = problem.report, problem.sequences, problem.initial_state
        if problem.warm is not None:
            # Each sample is one chunk, whose first state is not guessed.
            check_warm(problem.warm, tuple(first.shape), first.dtype, first.device)
        report.methods.append(self.name)
        report.chunk, report.sweeps = sequences.time, 1
        return problem.recurrence.run(sequences.whole(problem.direction), first)


def run_chunks(problem: Problem, chunks: Chunks, starts: torch.Tensor) -> torch.Tensor:
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
    """
    recurrence, initial_state, report = problem.recurrence, problem.initial_state, problem.report
    ends = recurrence.run(chunks.runs, starts)
    report.sweeps += 2
    if on_device(initial_state):
        overflowing, rest = unfinished(chunks, starts, ends, initial_state)
        report.pending = Pending.of(report.methods, overflowing.steps, None)
        return recurrence.run(overflowing, rest)
    last = ends[index(chunks.last, initial_state)]
    lost = np.unique(chunks.runs.sample[~starts.isfinite().all(dim=1).numpy()])
    if len(lost):
        whole, place = problem.sequences.whole(problem.direction), index(lost, initial_state)
        last[place] = recurrence.run(whole.take(lost), initial_state[place])
        report.methods.append("sequential")
        report.fallback_samples, report.fallback_steps = len(lost), int(problem.sequences.lengths[lost].sum())
    return last
