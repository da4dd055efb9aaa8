"""How recurrences are solved on a device: as in `_sweeps`, without a word from the host in between.

Kernels are queued, not waited for, so what is to be done next is decided on the device: after each of a fixed number
of sweeps every run is told how many steps it is to be taken again, which are none where its state fits, and at the end
each sample how many are left to go through one after the other. What came of it is read when a report is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ._cuda import Judged, judge, walk
from ._runs import OnDevice, index

if TYPE_CHECKING:
    from ._chunks import Chunks
    from ._sweeps import Report, Sweep

__all__ = ["choose", "chunked", "guessed"]

#: Sweeps from guessed states, and iterations of Newton's method. One that is not needed takes two empty launches.
SWEEPS, ITERATIONS = 4, 8


def guessed(
    sweep: Sweep, chunks: Chunks, edge: torch.Tensor, guess: torch.Tensor, report: Report, *, newton: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples' last states, and the runs' first ones, by sweeps from guessed first states; changes `guess`."""
    report.methods.append("newton" if newton else "relaxed")
    runs, count = chunks.runs.on(edge.device), (ITERATIONS if newton else SWEEPS)
    defects = edge.new_empty(count + newton, len(edge))
    least = sweep.least
    state, again = guess.clone(), runs.steps
    for number in range(count):
        ends = sweep.run(runs._replace(steps=again), state)
        following = _newton(sweep, chunks, ends, guess, edge) if newton else None
        judged = judge(chunks, ends, following, edge, least, guess, defects[number])
        state, again = judged.start, judged.again
    if newton:
        # What is right is what follows from the run before, whatever Newton's method makes of it.
        ends = sweep.run(runs._replace(steps=again), state)
        judged = judge(chunks, ends, None, edge, least, guess, defects[count])
    _tell(report, judged.steps, defects)
    return sweep.run(_left(chunks, judged), judged.rest), guess


def _newton(sweep: Sweep, chunks: Chunks, ends: torch.Tensor, guess: torch.Tensor, edge: torch.Tensor) -> torch.Tensor:
    """The first states at which the chunks, were they affine, would fit together."""
    matrices = sweep.matrices(chunks.runs)
    offsets = ends - (guess.unsqueeze(1) @ matrices).squeeze(1)
    solved, _ = walk(chunks, torch.cat([matrices, offsets.unsqueeze(1)], dim=1), edge)
    return sweep.limit(solved, edge[index(chunks.runs.sample, edge)]).contiguous()


def chunked(sweep: Sweep, chunks: Chunks, edge: torch.Tensor, schedule: str, report: Report) -> torch.Tensor:
    """The last states of an affine recurrence, by what chunks do to a state."""
    report.methods.append(schedule)
    if schedule == "chunked":
        start, lost = sweep.walk(chunks, edge)
    else:
        start = sweep.starts(chunks, edge, schedule)
        lost = _overflowing(chunks, start, edge)
    last = sweep.run(chunks.runs, start)[index(chunks.last, edge)]
    _tell(report, lost.steps, None)
    # A product of many matrices may overflow where no state does.
    return sweep.run(lost, torch.where((lost.steps > 0)[:, None], edge, last))


def _overflowing(chunks: Chunks, start: torch.Tensor, edge: torch.Tensor) -> OnDevice:
    """The samples in which a state is no number, whole; the others without steps."""
    finite = start.isfinite().all(dim=1)
    sample = index(chunks.runs.sample, edge)
    kept = finite.new_ones(len(edge)).long().scatter_reduce(0, sample, finite.long(), "amin")
    whole = chunks.sequences.whole(chunks.runs.direction).on(edge.device)
    return whole._replace(steps=torch.where(kept > 0, 0, whole.steps))


def _left(chunks: Chunks, judged: Judged) -> OnDevice:
    whole = chunks.sequences.whole(chunks.runs.direction).on(judged.rest.device)
    return whole._replace(begin=judged.begin, steps=judged.steps)


def _tell(report: Report, left: torch.Tensor, defects: torch.Tensor | None) -> None:
    """Have a report read what came of it when it is asked."""

    def read() -> None:
        if defects is not None:
            found = defects.masked_fill(~defects.isfinite(), 0).amax(dim=1).tolist()
            done = next((number for number, defect in enumerate(found, 1) if defect <= _tolerance(defects)), len(found))
            report.defects, report.sweeps = found[:done], done
        else:
            report.sweeps += 2
        steps = left.cpu()
        report.fallback_samples, report.fallback_steps = int((steps > 0).sum()), int(steps.sum())
        if report.fallback_samples:
            report.methods.append("sequential")

    report.later(read)


def _tolerance(like: torch.Tensor) -> float:
    return 8 * torch.finfo(like.dtype).eps


#: Runs that one multiprocessor has under way at once, of up to 32 elements each: fewer leave it idle, more wait.
RUNS = 8
#: What a launch takes, in steps.
LAUNCH = 30
#: The steps of a chunk that `choose` asks for: in fewer a state is not forgotten, more leave less to do side by side.
SHORTEST, LONGEST = 64, 512


def choose(
    time: int, batch: int, size: int, multiprocessors: int, *, schedule: str = "relaxed", diagonal: bool = False
) -> tuple[str, int, str]:
    """Whether to solve a recurrence step after step, or by the other schedule: a name, a chunk's steps, and why.

    Examples
    --------
    >>> choose(30000, 16, 20, 132)[:2]
    ('relaxed', 512)
    >>> choose(200, 16, 20, 132)[0]
    'linear'
    """
    together = max(1, multiprocessors * RUNS // -(-size // 32))
    chunk = max(SHORTEST, min(LONGEST, 1 << (-(-time * batch // together) - 1).bit_length()))
    places = -(-time // chunk)
    if schedule == "relaxed":
        sweeps, launches = 2.0, 2 * SWEEPS + 1
    else:
        # All rows of a step's matrix, n (n + 1) n multiply-adds, take as long as so many steps of one.
        sweeps, launches = (2.0 if diagonal else 2 + size**3 / 2000), 4 + places // LAUNCH
    linear = time * -(-batch // together)
    chosen = sweeps * chunk * -(-batch * places // together) + launches * LAUNCH
    told = f"{batch} samples of {time} steps and {size} elements on {multiprocessors} multiprocessors"
    return (schedule if chosen < linear else "linear"), chunk, told
