"""How recurrences are solved on a device: as in `_sweeps`, without a word from the host in between.

Kernels are queued, not waited for, so what is to be done next is decided on the device: after each of a fixed number
of sweeps every run is told how many steps it is to be taken again, which are none where its state fits, and at the end
each sample how many are left to go through one after the other. What came of it is read when a report is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ._cuda import Judged, judge, left, tolerance, walk
from ._runs import OnDevice, index

if TYPE_CHECKING:
    from ._chunks import Chunks
    from ._sweeps import Report, Sweep

__all__ = ["Pending", "choose", "chunked", "guessed"]

#: Sweeps from guessed states, and iterations of Newton's method; to a sample that has settled, one does nothing.
SWEEPS, ITERATIONS = 4, 8


def guessed(
    sweep: Sweep, chunks: Chunks, edge: torch.Tensor, guess: torch.Tensor, report: Report, *, newton: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples' last states, and the runs' first ones, by sweeps from guessed first states; changes `guess`."""
    report.methods.append("newton" if newton else "relaxed")
    runs, count = chunks.runs.on(edge.device), (ITERATIONS if newton else SWEEPS)
    defects, judged = edge.new_empty(count + newton, len(edge)), Judged.of(guess, edge)
    state, again, previous = guess.clone(), runs.steps, None
    matrices: torch.Tensor | None = None
    for number in range(count + newton):
        ends, following = sweep.run(runs._replace(steps=again), state), None
        # What is right is, at last, what follows from the run before, whatever Newton's method makes of it.
        if newton and number < count:
            matrices = sweep.matrices(chunks.runs, edge.dtype, again, matrices)
            following = _newton(sweep, chunks, matrices, ends, guess, edge, previous)
        judge(chunks, ends, following, edge, sweep.least, guess, previous, defects[number], judged)
        state, again, previous = judged.start, judged.again, defects[number]
    report.pending = Pending.of(report.methods, judged.steps, defects)
    return sweep.run(left(chunks, edge.device, judged.begin, judged.steps), judged.rest), guess


def _newton(
    sweep: Sweep,
    chunks: Chunks,
    matrices: torch.Tensor,
    ends: torch.Tensor,
    guess: torch.Tensor,
    edge: torch.Tensor,
    previous: torch.Tensor | None,
) -> torch.Tensor:
    """The first states at which the chunks, were they affine, would fit together."""
    offsets = ends - (guess.unsqueeze(1) @ matrices).squeeze(1)
    solved, _ = walk(chunks, torch.cat([matrices, offsets.unsqueeze(1)], dim=1), edge, previous=previous)
    return sweep.limit(solved, edge[index(chunks.runs.sample, edge)]).contiguous()


def chunked(sweep: Sweep, chunks: Chunks, edge: torch.Tensor, schedule: str, report: Report) -> torch.Tensor:
    """The last states of an affine recurrence, by what chunks do to a state."""
    report.methods.append(schedule)
    if schedule == "chunked":
        start, lost = _walked(sweep, chunks, edge)
    else:
        start = sweep.starts(chunks, edge, schedule)
        lost = _overflowing(chunks, start, edge)
    last = sweep.run(chunks.runs, start)[index(chunks.last, edge)]
    report.pending, report.sweeps = Pending.of(report.methods, lost.steps, None), 2
    # A product of many matrices may overflow where no state does.
    return sweep.run(lost, torch.where((lost.steps > 0)[:, None], edge, last))


def _walked(sweep: Sweep, chunks: Chunks, edge: torch.Tensor) -> tuple[torch.Tensor, OnDevice]:
    """As `Sweep.starts`, and the runs of the samples in which a state overflows."""
    wide = edge.double()
    if sweep.diagonal:
        offsets = sweep.run(chunks.runs, wide.new_zeros(len(chunks.runs), edge.shape[1]), record=False)
        start, lost = walk(chunks, sweep.matrices(chunks.runs, torch.float64), wide, offsets=offsets)
        return start.to(edge.dtype), lost
    matrices = sweep.transfer(chunks.runs, edge)
    start = walk(chunks, matrices, edge)[0].double()
    gaps = chunks.starts(sweep.run(chunks.runs, start, record=False), wide) - start
    # A run adds the gap behind it.
    matrices[:, -1] = gaps[index(chunks.after, gaps)]
    moves, lost = walk(chunks, matrices, torch.zeros_like(edge))
    return (start + moves).to(edge.dtype), lost


def _overflowing(chunks: Chunks, start: torch.Tensor, edge: torch.Tensor) -> OnDevice:
    """The samples in which a state is no number, whole; the others without steps."""
    finite = start.isfinite().all(dim=1)
    sample = index(chunks.runs.sample, edge)
    kept = finite.new_ones(len(edge)).long().scatter_reduce(0, sample, finite.long(), "amin")
    whole = chunks.sequences.whole(chunks.runs.direction).on(edge.device)
    return left(chunks, edge.device, whole.begin, torch.where(kept > 0, 0, whole.steps))


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
        steps = self.left.cpu()
        late, found = steps > 0, {}
        if self.defects is not None:
            # A sample without numbers is not one that settles.
            defects = self.defects.masked_fill(~self.defects.isfinite(), 0).cpu()
            largest = defects.amax(dim=1).tolist() if len(steps) else [0.0]
            settled = tolerance(defects.dtype)
            done = next((number for number, defect in enumerate(largest, 1) if defect <= settled), len(largest))
            found = {"defects": largest[:done], "sweeps": done}
        methods = [*self.methods, *(["sequential"] if late.any() else [])]
        return {
            **found,
            "methods": methods,
            "fallback_samples": int(late.sum()),
            "fallback_steps": int(steps.sum()),
        }


#: Runs that one multiprocessor has under way at once, of up to 32 elements each: fewer leave it idle, more wait.
RUNS = 16
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
    ('relaxed', 256)
    >>> choose(200, 16, 20, 132)[0]
    'linear'
    """
    together = max(1, multiprocessors * RUNS // -(-size // 32))
    chunk = max(SHORTEST, min(LONGEST, 1 << (-(-time * batch // together) - 1).bit_length()))
    places = -(-time // chunk)
    if schedule == "relaxed":
        sweeps, launches = 2.0, 2 * SWEEPS + 1
    else:
        # All rows of a step's matrix, n (n + 1) n multiply-adds, take as long as so many steps of one; what these leave
        # over takes another sweep, and another walk from chunk to chunk.
        sweeps, launches = (3.0, 4 + places // LAUNCH) if diagonal else (3 + size**3 / 2000, 16 + 2 * places // LAUNCH)
    linear = time * -(-batch // together)
    chosen = sweeps * chunk * -(-batch * places // together) + launches * LAUNCH
    told = f"{batch} samples of {time} steps and {size} elements on {multiprocessors} multiprocessors"
    return (schedule if chosen < linear else "linear"), chunk, told
