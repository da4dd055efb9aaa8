"""From guessed states, corrected by the chunks' derivatives: multiple shooting."""

from __future__ import annotations

import torch

from ..boundaries_cuda import Boundaries
from ..sequences import Chunks, index
from .chunked import boundary_corrections, inner_matrices
from .recurrence import ChunkSolver, Kept, Problem
from .relaxed import Relaxed, settle


class Newton(Relaxed):
    """Newton's method on the states at the boundaries: exact at once where the recurrence is affine."""

    name = "newton"
    solves = frozenset({"states"})
    progress = 0.5
    device_sweeps = 9

    def following(
        self, problem: Problem, chunks: Chunks, start: torch.Tensor, ends: torch.Tensor, reached: torch.Tensor
    ) -> torch.Tensor:
        recurrence, initial_state = problem.recurrence, problem.initial_state
        matrices = inner_matrices(recurrence, chunks, initial_state)
        solved = (start + boundary_corrections(chunks, matrices, reached.double() - start)).to(initial_state.dtype)
        solved = recurrence.limit(solved, initial_state[index(chunks.runs.sample, initial_state)])
        first = (index(chunks.place, initial_state) == 0)[:, None]
        return torch.where(solved.isfinite() & ~first, solved, reached)

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
        recurrence, initial_state = problem.recurrence, problem.initial_state
        matrices = recurrence.matrices(chunks.runs, initial_state.dtype, Kept(again, matrices))
        offsets = ends - (start.unsqueeze(1) @ matrices).squeeze(1)
        joint = torch.cat([matrices, offsets.unsqueeze(1)], dim=1)
        solved = Boundaries(chunks, joint).reached(initial_state, initial_state.dtype, previous)
        return recurrence.limit(solved, initial_state[index(chunks.runs.sample, initial_state)]).contiguous(), matrices


class Parallel(ChunkSolver):
    """Relaxed sweeps and, on the host, Newton's method once they stop helping."""

    name = "parallel"
    solves = frozenset({"states"})

    def solve(self, problem: Problem) -> torch.Tensor:
        return settle(problem, Relaxed(), instead=Newton())
