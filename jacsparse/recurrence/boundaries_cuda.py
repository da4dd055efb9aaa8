"""The states between chunks on CUDA devices: what launches the kernels of `boundaries.cu`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..runtime import REAL, THREADS, KernelFile, c_type, instances, uploaded
from .prices import PRICES, Prices
from .recurrences_cuda import LARGEST, WIDEST, launch_transfer, tolerance, whole_warps
from .sequences import Chunks, DeviceRuns

_BOUNDARIES = KernelFile(
    Path(__file__).parent / "kernels" / "boundaries.cu",
    (
        *instances("judge", REAL),
        *(f"walk<{types}>" for types in ("float, float", "float, double", "double, double")),
        *(f"compose_chunks<{shape}>" for shape in ("float, 4", "float, 8", "double, 4")),
        *instances("compose_offsets", REAL),
        *instances("walk_diagonals", REAL),
        *instances("unfinished", REAL),
    ),
)
#: How many times faster a walk in two levels has to be: what it composes is estimated.
_CLEARLY = 1.25


class Convergence(NamedTuple):
    """What `judge` finds of the runs and of the samples; memory that all sweeps share.

    Attributes
    ----------
    start : Tensor, (runs, state)
        Where runs are to start, or what they came to.
    again : Tensor of int64, (runs,)
        Steps that they are to be taken through again.
    begin, steps : Tensor of int64, (batch,)
        The time of the first step that is left of each sample, and how many are.
    rest : Tensor, (batch, state)
        Where these start; the last state where there are none.
    """

    start: torch.Tensor
    again: torch.Tensor
    begin: torch.Tensor
    steps: torch.Tensor
    rest: torch.Tensor

    @classmethod
    def of(cls, guess: torch.Tensor, initial_state: torch.Tensor) -> Convergence:
        """Room for runs that start at `guess`, of samples that start at `initial_state`."""
        again, begin, steps = (
            torch.empty(len(like), dtype=torch.int64, device=initial_state.device)
            for like in (guess, initial_state, initial_state)
        )
        return cls(torch.empty_like(guess), again, begin, steps, torch.empty_like(initial_state))


def judge(
    chunks: Chunks,
    ends: torch.Tensor,
    following: torch.Tensor | None,
    initial_state: torch.Tensor,
    local: int,
    guess: torch.Tensor,
    previous: torch.Tensor | None,
    defect: torch.Tensor,
    judged: Convergence,
) -> None:
    """Compare first states with those that follow from the runs' last ones, or with `following`.

    `local` is as of `Recurrence`. Writes `guess`, `defect` and `judged`; for samples that were already within the
    tolerance it writes only `defect`.
    """
    states, following_states = (ends, following, initial_state, previous), (guess, judged.start, judged.again, defect)
    limits = (tolerance(initial_state.dtype), torch.finfo(initial_state.dtype).tiny, local)
    arguments = (chunks.backward, *states, *limits, *following_states, judged.begin, judged.steps, judged.rest)
    runs = chunks.runs.on(initial_state.device)
    _launch_for_samples("judge", 1024, chunks, initial_state, (runs.begin, runs.steps), arguments)


class Boundaries:
    """First states of runs, by what these do to a state.

    Parameters
    ----------
    chunks : Chunks
        The runs.
    matrices : Tensor, (runs, state + 1, state)
        What runs do to a row vector, and what they add.
    """

    def __init__(self, chunks: Chunks, matrices: torch.Tensor) -> None:
        self._matrices, self._size, self._device = matrices, matrices.shape[2], matrices.device
        places, self._batch = chunks.table.shape
        groups = chunks.groups(group_length(places, self._size))
        self._length, self._count = groups.length, len(groups.sample)
        self._table, self._chunks = _tables(chunks, self._device)
        self._groups = tuple(uploaded(array, self._device) for array in groups[:3])
        table = (*self._groups, self._table, self._chunks, self._batch)
        self._composed = (
            launch_transfer(_BOUNDARIES, "compose_chunks", table, matrices, self._size, 1, (matrices,))
            if groups.length < places
            else None
        )

    def reached(
        self, initial_state: torch.Tensor, dtype: torch.dtype, previous: torch.Tensor | None = None
    ) -> torch.Tensor:
        """First states, ``(runs, state)``, in a dtype, from the samples' first states ``(batch, state)``.

        Those of samples whose defect in `previous`, ``(batch,)``, is within the tolerance are not written.
        """
        return self._walk(dtype, initial_state, previous, None, None)

    def corrected(self, start: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """First states, in the dtype of the matrices, at which no gaps are left.

        Parameters
        ----------
        start, ends : Tensor of float64, (runs, state)
            First states of the runs, which are right for the samples' first runs, and last states.
        """
        if self._composed is not None:
            self._launch(
                "compose_offsets", c_type(self._matrices.dtype), self._chunks, self._batch, self._size, self._matrices,
                ends, start, self._composed,
            )  # fmt: skip
        return self._walk(self._matrices.dtype, None, None, ends, start)

    def _walk(
        self,
        dtype: torch.dtype,
        edge: torch.Tensor | None,
        previous: torch.Tensor | None,
        ends: torch.Tensor | None,
        base: torch.Tensor | None,
    ) -> torch.Tensor:
        start = self._matrices.new_empty(len(self._matrices), self._size, dtype=dtype)
        types = f"{c_type(self._matrices.dtype)}, {c_type(dtype)}"
        numbers = (self._batch, self._size, self._length)
        maps = (self._matrices, self._composed)
        compared = (previous, tolerance(self._matrices.dtype))
        self._launch("walk", types, *numbers, *maps, edge, *compared, ends, base, start)
        return start

    def _launch(self, kernel: str, types: str, *arguments: Any) -> None:
        """Run a kernel that takes a block for each group."""
        lanes, table = whole_warps(self._size), (*self._groups, self._table)
        block = [max(1, min(8, WIDEST // lanes)) * lanes]
        _BOUNDARIES.launch(f"{kernel}<{types}>", [self._count], block, *table, *arguments, device=self._device)


def diagonal_boundaries(chunks: Chunks, maps: torch.Tensor, initial_state: torch.Tensor) -> torch.Tensor:
    """First states of the runs, as of `Boundaries.reached`, where these have diagonals.

    Parameters
    ----------
    chunks : Chunks
        The runs.
    maps : Tensor of float64, (runs, 2, state)
        Diagonals of what runs do, and what they add.
    initial_state : Tensor, (batch, state)
        The samples' first states.
    """
    start = initial_state.new_empty(len(maps), initial_state.shape[1])
    _launch_for_samples("walk_diagonals", THREADS, chunks, initial_state, (), (maps, initial_state, start))
    return start


def unfinished(
    chunks: Chunks, start: torch.Tensor, ends: torch.Tensor, initial_state: torch.Tensor
) -> tuple[DeviceRuns, torch.Tensor]:
    """A run for each sample of all its steps, or of none if the runs' first states are finite; and where it starts.

    Parameters
    ----------
    chunks : Chunks
        The runs.
    start, ends : Tensor, (runs, state)
        Their first and last states.
    initial_state : Tensor, (batch, state)
        The samples' first states.
    """
    whole = chunks.sequences.whole(chunks.runs.direction).on(initial_state.device)
    begin, steps, rest = torch.empty_like(whole.begin), torch.empty_like(whole.steps), torch.empty_like(initial_state)
    arguments = (start, ends, initial_state, begin, steps, rest)
    _launch_for_samples("unfinished", 1024, chunks, initial_state, (whole.begin, whole.steps), arguments)
    return whole._replace(begin=begin, steps=steps), rest


class StepTimes(NamedTuple):
    """Microseconds of a state that goes on by a chunk, of a matrix that does by a step, and of a node.

    The prices are those of 20 elements. What grows with the elements is estimated: in a nanosecond a multiprocessor
    reads 30 elements of a matrix, or takes 280 multiply-adds.
    """

    walk: float
    compose: float
    node: float

    @classmethod
    def of(cls, size: int, prices: Prices = PRICES) -> StepTimes:
        """For states of `size` elements."""
        return cls(prices.walk + size**2 / 30e3, prices.compose + size**3 / 280e3, prices.node)

    def walks(self, places: int, length: int) -> float:
        """Both walks over `places` chunks in groups of `length`, of which one takes them in one level."""
        if length >= places:
            return 2 * self.walk * places
        # Groups are composed, their offsets made anew; twice a block goes over all groups, and through one.
        groups = -(-places // length)
        return (self.compose + 3 * self.walk) * length + 2 * self.walk * groups + 2 * self.node


def group_length(places: int, size: int, prices: Prices = PRICES) -> int:
    """Chunks of a group for the fastest walk over `places` chunks; all of them where one level is about as fast.

    Examples
    --------
    >>> group_length(20, 20), group_length(300, 20), group_length(300, 256)
    (20, 11, 300)
    """
    # Blocks have no room for products of larger matrices.
    if size > LARGEST:
        return places
    times = StepTimes.of(size, prices)
    best = max(2, round((2 * times.walk * places / (times.compose + 3 * times.walk)) ** 0.5))
    return best if _CLEARLY * times.walks(places, best) < times.walks(places, places) else places


def _launch_for_samples(
    kernel: str,
    threads: int,
    chunks: Chunks,
    initial_state: torch.Tensor,
    runs: tuple[Any, ...],
    others: tuple[Any, ...],
) -> None:
    """Run a kernel that takes a block for each sample: what it is given before and after the sizes, beside tables."""
    device, (batch, size) = initial_state.device, initial_state.shape
    arguments = (*_tables(chunks, device), *runs, batch, size, *others)
    _BOUNDARIES.launch(f"{kernel}<{c_type(initial_state.dtype)}>", [batch], [threads], *arguments, device=device)


def _tables(chunks: Chunks, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return uploaded(chunks.table, device), uploaded(chunks.counts, device)
