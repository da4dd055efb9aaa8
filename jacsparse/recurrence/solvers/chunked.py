"""In chunks: the propagator of each chunk, then the states at the boundaries, then every chunk by itself.

The recurrence is affine, so that the boundaries would follow at once, were the chunks' matrices not rounded. Where all
steps are alike, all chunks round alike: over T steps this adds up to a fraction ρ of a state, of at most T n ε κ, for κ
the largest norm of a product of steps. A loop has the same bound, but rounds other numbers at each step, and much of it
cancels.

Diagonals cost little in float64, for which ρ is nothing. Full matrices would take twice the time there. They stay as
they are, and a step of iterative refinement, from gaps measured in float64, leaves ρ².
"""

from __future__ import annotations

from itertools import pairwise

import torch

from ...runtime import on_device
from ..boundaries_cuda import Boundaries, StepTimes, diagonal_boundaries, group_length
from ..prices import PRICES, Prices
from ..sequences import Chunks, index
from .recurrence import ChunkSolver, Problem, Recurrence
from .sequential import run_chunks


class Chunked(ChunkSolver):
    """Chunks of steps, composed one after the other (thesis, section 3.6; Naumov, section 3.3)."""

    name = "chunked"
    solves = frozenset({"linear", "gradients"})

    def solve(self, problem: Problem) -> torch.Tensor:
        chunks, initial_state = problem.chunks, problem.initial_state
        problem.report.methods.append(self.name)
        starts = _starts_on_device if on_device(initial_state) else _starts
        return run_chunks(problem, chunks, starts(problem.recurrence, chunks, initial_state))


#: Steps of a chunk on a device, at least: a transfer writes as much as it reads where it has fewer.
_SHORTEST = 16


def device_chunk(time: int, size: int, prices: Prices = PRICES) -> int:
    """The number of steps of a chunk for which sequences of `time` steps take a device least time.

    All steps of a chunk are composed one after the other, and states then go over all chunks, in one level or in two:
    the sum of both is least.

    Parameters
    ----------
    time : int
        Steps of the longest sample.
    size : int
        Elements of a state, whose matrices are full.
    prices : Prices
        Of the device.

    Examples
    --------
    >>> [device_chunk(time, 20) for time in (1000, 10_000, 30_000)]
    [16, 28, 41]
    >>> device_chunk(300, 20), device_chunk(1000, 128)
    (16, 16)
    """
    times = StepTimes.of(size, prices)

    def duration(chunk: int) -> float:
        places = -(-time // chunk)
        return times.compose * chunk + times.walks(places, group_length(places, size, prices))

    one_level = (2 * times.walk * time / times.compose) ** 0.5
    # The best walk in two levels takes 2 (2 w (c + 3 w) places)^0.5.
    two_levels = (2 * times.walk * (times.compose + 3 * times.walk) * time / times.compose**2) ** (1 / 3)
    return min((max(_SHORTEST, round(chunk)) for chunk in (one_level, two_levels)), key=duration)


def _starts(recurrence: Recurrence, chunks: Chunks, initial_state: torch.Tensor) -> torch.Tensor:
    """The chunks' first states, ``(chunks, state)``."""
    wide = recurrence.diagonal
    matrices = (
        recurrence.matrices(chunks.runs, torch.float64) if wide else inner_matrices(recurrence, chunks, initial_state)
    )
    start = chunks.guess(initial_state)
    for dtype in (torch.float64,) if wide else (initial_state.dtype, torch.float64):
        start = start.to(dtype)
        ends = recurrence.run(chunks.runs, start, record=False)
        start += boundary_corrections(chunks, matrices, chunks.starts(ends, initial_state.to(dtype)) - start)
    return start.to(initial_state.dtype)


def _starts_on_device(recurrence: Recurrence, chunks: Chunks, initial_state: torch.Tensor) -> torch.Tensor:
    """As `_starts`."""
    if recurrence.diagonal:
        maps = recurrence.transfer(chunks.runs, initial_state, torch.float64)
        return diagonal_boundaries(chunks, maps, initial_state)
    boundaries = Boundaries(chunks, recurrence.transfer(chunks.runs, initial_state, initial_state.dtype))
    start = boundaries.reached(initial_state, torch.float64)
    return boundaries.corrected(start, recurrence.run(chunks.runs, start, record=False))


def inner_matrices(recurrence: Recurrence, chunks: Chunks, initial_state: torch.Tensor) -> torch.Tensor:
    """`Recurrence.matrices` of the chunks, as `boundary_corrections` takes them: zeros of those that are not used."""
    inner = recurrence.matrices(chunks.inner_runs, initial_state.dtype)
    matrices = inner.new_zeros(len(chunks.runs), *inner.shape[1:])
    matrices[index(chunks.inner, matrices)] = inner
    return matrices


def boundary_corrections(chunks: Chunks, matrices: torch.Tensor, gaps: torch.Tensor) -> torch.Tensor:
    """How far each run's first state has to move for all gaps to close, in the dtype of `gaps`.

    Parameters
    ----------
    chunks : Chunks
        The runs.
    matrices : Tensor, (runs, state, state) or (runs, state)
        A move ``s`` of a run's first state moves its last one by ``s @ matrices[run]``; or the diagonals. Those of the
        samples' first and last runs are not used, but have to be finite.
    gaps : Tensor, (runs, state)
        From each run's first state to the last one of the run before, 0 where there is none.
    """
    table = index(chunks.table, gaps).clamp(min=0)
    state = gaps[table[0]].double()
    states = [state]
    for runs, following in pairwise(table):
        matrix = matrices[runs].double()
        state = state * matrix if matrix.ndim == 2 else (state.unsqueeze(1) @ matrix).squeeze(1)
        state = state + gaps[following].double()
        states.append(state)
    return torch.stack(states)[index(chunks.place, gaps), index(chunks.runs.sample, gaps)].to(gaps.dtype)
