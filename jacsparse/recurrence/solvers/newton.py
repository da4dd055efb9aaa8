"""From guessed states, corrected by the chunks' derivatives: multiple shooting."""

from __future__ import annotations

import torch

from ..recurrences_cuda import Judged, judge, walk
from ..sequences import Chunks, index
from .chunked import inner_matrices, moves
from .recurrence import Problem, Solver
from .relaxed import Relaxed, settle


class Newton(Relaxed):
    """Newton's method on the states at the boundaries: exact at once where the recurrence is affine."""

    name = "newton"
    progress = 0.5
    device_sweeps = 8

    def following(
        self, problem: Problem, chunks: Chunks, start: torch.Tensor, ends: torch.Tensor, reached: torch.Tensor
    ) -> torch.Tensor:
        recurrence, edge = problem.recurrence, problem.edge
        matrices = inner_matrices(recurrence, chunks, edge)
        solved = (start + moves(chunks, matrices, reached.double() - start)).to(edge.dtype)
        solved = recurrence.limit(solved, edge[index(chunks.runs.sample, edge)])
        first = (index(chunks.place, edge) == 0)[:, None]
        return torch.where(solved.isfinite() & ~first, solved, reached)

    def settle_on_device(self, problem: Problem, chunks: Chunks, guess: torch.Tensor) -> tuple[Judged, torch.Tensor]:
        recurrence, edge = problem.recurrence, problem.edge
        runs, sample = chunks.runs.on(edge.device), index(chunks.runs.sample, edge)
        defects = edge.new_empty(self.device_sweeps + 1, len(edge))
        judged, state, again, previous = Judged.of(guess, edge), guess.clone(), runs.steps, None
        matrices: torch.Tensor | None = None
        for number, defect in enumerate(defects):
            ends, solved = recurrence.run(runs._replace(steps=again), state), None
            # In the last sweep, what is right is what follows from the run before, whatever Newton's method says.
            if number < self.device_sweeps:
                matrices = recurrence.matrices(chunks.runs, edge.dtype, again, matrices)
                offsets = ends - (guess.unsqueeze(1) @ matrices).squeeze(1)
                joint = torch.cat([matrices, offsets.unsqueeze(1)], dim=1)
                solved = walk(chunks, joint, edge, previous=previous)[0]
                solved = recurrence.limit(solved, edge[sample]).contiguous()
            judge(chunks, ends, solved, edge, recurrence.least, guess, previous, defect, judged)
            state, again, previous = judged.start, judged.again, defect
        return judged, defects


class Parallel(Solver):
    """Relaxed sweeps and, on the host, Newton's method once they stop helping."""

    name = "parallel"

    def solve(self, problem: Problem) -> torch.Tensor:
        return settle(problem, Relaxed(), instead=Newton())
