"""What ``auto`` means for a recurrence on this machine."""

from __future__ import annotations

import math

import torch

from ...runtime import multiprocessors, on_device, thread_count
from ..sequences import Sequences
from .recurrence import Choice
from .relaxed import Relaxed

#: Runs of up to 32 elements that one multiprocessor has under way at once: fewer leave it idle, more wait.
RUNS = 16
#: Duration of one kernel launch, in units of one step.
LAUNCH = 30
#: The steps of a chunk on a device: in fewer a state is not forgotten, more leave less to do side by side.
SHORTEST, LONGEST = 64, 512


def choose(
    sequences: Sequences, size: int, like: torch.Tensor, chunk: int, *, guesses: bool, diagonal: bool = False
) -> Choice:
    """The solver for sequences of states of `size` elements, where `like` is.

    Parameters
    ----------
    sequences : Sequences
        The steps.
    size : int
        Elements of a state.
    like : Tensor
        A tensor on the device on which the recurrence runs.
    chunk : int
        Steps of a chunk on the host.
    guesses : bool
        Whether to choose between sequential and relaxed, because states are forgotten and can be guessed; if not,
        between sequential and chunked.
    diagonal : bool
        Whether matrices are diagonal.
    """
    time, batch = sequences.time, sequences.batch
    if on_device(like):
        processors = multiprocessors(like.device)
        return choose_on_device(time, batch, size, processors, guesses=guesses, diagonal=diagonal)
    workers = thread_count()
    if guesses:
        blocks = sequences.whole(1).blocks
        # Two sweeps over chunks that fill all workers, against one over samples that may not.
        if 2.5 * blocks < workers * math.ceil(blocks / workers) and time >= 4 * chunk:
            return Choice("relaxed", chunk, reason=f"{batch} samples alone leave some of {workers} workers idle")
        return Choice("sequential", chunk, reason=f"{batch} samples of {time} steps on {workers} workers")
    # Of each chunk, n unit vectors, a zero vector and finally one state are propagated. Handing this to several workers
    # has a cost, which a clear gain has to cover.
    rows = 1 if diagonal else size
    linearly, in_chunks = math.ceil(batch / workers), batch * (rows + 2) / workers
    reason = f"{batch} samples of {time} steps and {size} elements on {workers} workers"
    name = "chunked" if 2 * in_chunks < linearly and time >= 4 * workers * chunk else "sequential"
    return Choice(name, chunk, reason=reason)


def choose_on_device(
    time: int, batch: int, size: int, processors: int, *, guesses: bool = True, diagonal: bool = False
) -> Choice:
    """As `choose`, for a device of so many multiprocessors.

    Examples
    --------
    >>> choose_on_device(30000, 16, 20, 132)[:2]
    ('relaxed', 256)
    >>> choose_on_device(200, 16, 20, 132).name
    'sequential'
    """
    together = max(1, processors * RUNS // -(-size // 32))
    chunk = max(SHORTEST, min(LONGEST, 1 << (-(-time * batch // together) - 1).bit_length()))
    places = -(-time // chunk)
    if guesses:
        sweeps, launches = 2.0, 2 * Relaxed.device_sweeps + 1
    else:
        # All rows of a step's matrix, n (n + 1) n multiply-adds, take as long as so many steps of one; what these leave
        # over takes another sweep, and another walk from chunk to chunk.
        sweeps, launches = (3.0, 4 + places // LAUNCH) if diagonal else (3 + size**3 / 2000, 16 + 2 * places // LAUNCH)
    linear = time * -(-batch // together)
    in_chunks = sweeps * chunk * -(-batch * places // together) + launches * LAUNCH
    reason = f"{batch} samples of {time} steps and {size} elements on {processors} multiprocessors"
    name = "relaxed" if guesses else "chunked"
    return Choice(name if in_chunks < linear else "sequential", chunk, reason=reason)
