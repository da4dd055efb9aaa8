"""A recurrence and a way of solving it: what each knows of the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from ...affine import AffineMaps, DenseMaps, DiagonalMaps
from ...schedule import Number, Schedule
from ..reports import Report
from ..sequences import Chunks, DeviceRuns, Runs, Sequences, index

#: Steps of a chunk, by default.
CHUNK = 128
#: Why a way was taken that was named.
ASKED = "asked for"


class Choice(NamedTuple):
    """How a recurrence is to be solved.

    Attributes
    ----------
    name : str
        A solver's name, or ``auto``.
    chunk : int
        Steps of a chunk.
    levels : int or None
        Levels of a Blelloch scan; None for all of them.
    schedule : Schedule or None
        The products to execute.
    reason : str
        Why: as ``auto`` chose, or because it was asked for.
    asked : bool
        Whether this number of steps was asked for.
    swept : bool
        Of small states on a device, whether chunks are swept by all multiprocessors, in a launch of its own, before a
        block looks after each sample.
    """

    name: str
    chunk: int = CHUNK
    levels: int | None = None
    schedule: Schedule | None = None
    reason: str = ""
    asked: bool = True
    swept: bool = False


class Kept(NamedTuple):
    """Matrices of runs that an earlier sweep made on a device.

    Attributes
    ----------
    steps : Tensor of int64, (runs,)
        Steps of the runs whose matrices are to be made again; 0 of those that keep theirs.
    matrices : Tensor or None, (runs, state, state)
        The matrices; None before the first sweep.
    """

    steps: torch.Tensor
    matrices: torch.Tensor | None


class Recurrence(ABC):
    """One recurrence over a batch of sequences: runs of steps, from states to states.

    Attributes
    ----------
    local : int
        How moves of first states are measured: with 0, as shares of the sample's largest element at all boundaries;
        else as shares of the element itself, or of the largest of so many elements beside it, whichever is larger.
    """

    local: int = 0

    @property
    def diagonal(self) -> bool:
        """Whether the matrices are diagonal."""
        return False

    @property
    def sparse(self) -> bool:
        """Whether the maps of steps are sparse, whatever is asked for."""
        return False

    @abstractmethod
    def run(self, runs: Runs | DeviceRuns, start: torch.Tensor, *, record: bool = True) -> torch.Tensor:
        """Take runs from their first to their last states, and record the states between unless told not to.

        All is computed in the dtype of `start`, which may be wider than that of the recurrence.
        """

    @abstractmethod
    def matrices(self, runs: Runs, dtype: torch.dtype, kept: Kept | None = None) -> torch.Tensor:
        """For each run ``M`` with ``d(last state) = d(first state) @ M``, ``(runs, state, state)``; or its diagonal.

        On a device, runs may keep their matrix of an earlier sweep.
        """

    def maps(self, chunks: Chunks, initial_state: torch.Tensor, *, sparse: bool) -> AffineMaps:
        """The affine maps of single steps, in float64, by place and sample: ``(places, batch, ...)``.

        Sparse ones where asked for and where there are such; maps beyond the end of a shorter sample are arbitrary.
        """
        zeros = initial_state.new_zeros(len(chunks.runs), initial_state.shape[1], dtype=torch.float64)
        offsets = self.run(chunks.runs, zeros, record=False)
        table = index(chunks.table, initial_state).clamp(min=0)
        form = DiagonalMaps if self.diagonal else DenseMaps
        return form(self.matrices(chunks.runs, torch.float64)[table], offsets[table])

    def whole(self, chunks: Chunks, initial_state: torch.Tensor) -> AffineMaps:
        """What all steps of each sample do to a state, in float64: one map, for `chunks` of all steps."""
        return self.maps(chunks, initial_state, sparse=False)

    def constant(self, state: torch.Tensor) -> AffineMaps:
        """As `whole`, of steps that lead to a state from any other one; `state` has shape ``(batch, state)``."""
        return (DiagonalMaps if self.diagonal else DenseMaps)(None, state.double()[None])

    def state(self, constant: AffineMaps) -> torch.Tensor:
        """The state of a `constant` map."""
        assert constant.offsets is not None
        return constant.offsets[0]

    def transfer(self, runs: Runs, initial_state: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """On a device: `matrices` and, below each, what the run makes of zeros, ``(runs, state + 1, state)``.

        Where matrices are diagonal their diagonals, ``(runs, 2, state)``, in float64 alone.
        """
        zeros = initial_state.new_zeros(len(runs), initial_state.shape[1], dtype=dtype)
        offsets = self.run(runs, zeros, record=False)
        return torch.cat([self.matrices(runs, dtype), offsets.unsqueeze(1)], dim=1)

    def limit(self, states: torch.Tensor, initial_state: torch.Tensor) -> torch.Tensor:
        """The nearest states that the recurrence can reach from `initial_state`."""
        return states


@dataclass
class Problem:
    """A recurrence to be solved.

    Attributes
    ----------
    recurrence : Recurrence
        The recurrence.
    sequences : Sequences
        The steps.
    direction : int
        1, or -1 for a layer that runs from each sample's end.
    initial_state : Tensor, (batch, state)
        The samples' first states.
    choice : Choice
        How.
    report : Report
        Is told how it was solved.
    backward : bool
        Whether the recurrence goes against `direction`, as that of gradients does.
    warm : Tensor or None, (chunks, state)
        First states of the chunks to begin guessing with; zeros where None.
    fallback : Solver or None
        Solves on the host what does not settle; None for step after step, from where it fits.
    boundaries : Tensor or None, (chunks, state)
        The first states of the chunks that guessing came to.
    """

    recurrence: Recurrence
    sequences: Sequences
    direction: int
    initial_state: torch.Tensor
    choice: Choice
    report: Report
    backward: bool = False
    warm: torch.Tensor | None = None
    fallback: Solver | None = None
    boundaries: torch.Tensor | None = None

    @property
    def chunks(self) -> Chunks:
        """The sequences in chunks."""
        return self.sequences.cut(self.direction, self.choice.chunk, backward=self.backward)


class Solver(ABC):
    """A way of solving recurrences.

    Attributes
    ----------
    name : str
        Its name in ``schedule=`` or ``forward=``, and in reports.
    solves : frozenset of str
        Where its name is taken. ``linear``: in ``schedule=`` of `linear_recurrence`; ``gradients``: in ``schedule=`` of
        layers; ``states``: in ``forward=`` of layers.
    number : Number or None
        What may follow its name, as in ``blelloch:2``; None for nothing.
    """

    name: ClassVar[str]
    solves: ClassVar[frozenset[str]]
    number: ClassVar[Number | None] = None

    def choice(self, number: int | None, chunk: int) -> Choice:
        """The Choice for its name alone, or for ``name:number``, where `number` is the number of levels."""
        # Chunks of 1: a sequence of a single step is left to `Sequential`, and all others are run.
        return Choice(self.name, chunk=1, levels=number)

    @abstractmethod
    def solve(self, problem: Problem) -> torch.Tensor:
        """Solve a problem, on the device of its first states: the last states, ``(batch, state)``.

        A solver appends what it ran to ``problem.report.methods``, its own name or that of the solver that it called.
        """


class ChunkSolver(Solver):
    """A solver that cuts sequences into chunks; those of one chunk are solved step after step."""

    number = Number("STEPS")

    def choice(self, number: int | None, chunk: int) -> Choice:
        """The Choice for its name alone, with `chunk` steps in a chunk, or for ``name:steps``."""
        asked = number is not None or chunk != CHUNK
        return Choice(self.name, chunk=chunk if number is None else number, asked=asked)


def check_warm(warm: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """ValueError where states to begin guessing with are not those of these sequences' chunks."""
    if (warm.shape, warm.dtype, warm.device) != (shape, dtype, device):
        raise ValueError(
            f"the warm start holds states {tuple(warm.shape)} of {warm.dtype} on {warm.device}; these sequences have "
            f"{shape} of {dtype} on {device}: pass what a pass over as many steps gave there"
        )
