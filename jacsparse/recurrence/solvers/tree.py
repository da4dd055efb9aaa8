"""By the products of a schedule over single steps, as back-propagation through a chain is scanned."""

from __future__ import annotations

import functools
from typing import ClassVar

import torch

from ...runtime import on_device
from ...schedule import Number, Schedule, blelloch
from ..levels_cuda import scan_starts
from ..sequences import index
from ..tree_scan import scan_states
from .recurrence import Problem, Solver
from .sequential import run_chunks

#: Elements of matrices, in float64, that are composed at once.
_ELEMENTS = 2**25


class Tree(Solver):
    """A schedule's products of full matrices, of single steps; those of a Blelloch scan by default."""

    name = "blelloch"
    solves = frozenset({"linear", "gradients"})
    number: ClassVar[Number | None] = Number("LEVELS", 0)
    sparse: ClassVar[bool] = False

    def solve(self, problem: Problem) -> torch.Tensor:
        chunks, initial_state, choice = problem.chunks, problem.initial_state, problem.choice
        schedule = choice.schedule or _blelloch(problem.sequences.time + 1, choice.levels)
        # A schedule that was passed is known by its own name.
        problem.report.methods.append(self.name if choice.schedule is None else choice.schedule.name.partition(":")[0])
        problem.report.tree = schedule
        if on_device(initial_state) and not (self.sparse or problem.recurrence.sparse):
            maps = problem.recurrence.transfer(chunks.runs, initial_state, torch.float64)
            starts = scan_starts(schedule, chunks, maps, initial_state, _ELEMENTS)
        else:
            starts = self._starts(problem, schedule)
        return run_chunks(problem, chunks, starts)

    def _starts(self, problem: Problem, schedule: Schedule) -> torch.Tensor:
        """The state before each step, by place and sample."""
        chunks, initial_state = problem.chunks, problem.initial_state
        maps = problem.recurrence.maps(chunks, initial_state, sparse=self.sparse)
        state, batch_axis = (
            initial_state.double() if maps.axis == 0 else initial_state.T.double().contiguous(),
            maps.axis + 1,
        )
        samples = max(1, _ELEMENTS * len(initial_state) // max(1, maps.tensors[0].numel()))
        states = torch.cat(
            [
                scan_states(schedule, part, first)
                for part, first in zip(maps.split(samples), state.split(samples, batch_axis - 1), strict=True)
            ],
            batch_axis,
        )
        place, sample = index(chunks.place, initial_state), index(chunks.runs.sample, initial_state)
        # What a scan holds beyond a shorter sample's end is not read.
        starts = states[place, sample] if maps.axis == 0 else states[:, place, sample].T
        return starts.to(initial_state.dtype).contiguous()


class Planned(Tree):
    """A Blelloch scan of products of sparse matrices, planned once for all steps."""

    name = "planned"
    solves = frozenset({"gradients"})
    number = None
    sparse = True


_blelloch = functools.lru_cache(maxsize=16)(blelloch)
