"""Chunks of sequences, and the states at their boundaries."""

from __future__ import annotations

import functools

import numpy as np
import torch

from ..patterns._structure import frozen
from ._runs import Runs, Sequences, index

__all__ = ["Chunks", "compose"]

#: Of the matrices, in float64, that are composed at once.
_ELEMENTS = 2**25


class Chunks:
    """Each sample's steps as runs of a length, in the order in which a recurrence gets to them.

    Those of sequences that are kept are best made once: `Sequences.cut`.

    Parameters
    ----------
    sequences : Sequences
        Whose steps.
    direction : int
        Of the layer: 1, or -1 for one that runs from each sample's end.
    length : int
        Steps of a chunk; a sample's last one may be shorter.
    backward : bool
        Whether the recurrence is that of gradients, which gets to the last steps first.

    Attributes
    ----------
    runs : Runs
        The chunks, the longest first.
    place : ndarray of int64, (runs,)
        How many chunks of the same sample come before each.
    """

    def __init__(self, sequences: Sequences, direction: int, length: int, *, backward: bool = False) -> None:
        self.sequences, self.backward = sequences, backward
        self.runs = sequences.chunks(direction, length)
        self.counts = frozen(-(-sequences.lengths // length))
        chunk = self.runs.first // length
        self.place = frozen(self.counts[self.runs.sample] - 1 - chunk if backward else chunk)

    def rest(self, late: np.ndarray) -> tuple[Runs, np.ndarray]:
        """For each sample with runs among `late`: its steps from the first of these on, and which run that is."""
        # Of each sample the first that the recurrence gets to.
        late = late[np.argsort(self.place[late], kind="stable")]
        late = late[np.unique(self.runs.sample[late], return_index=True)[1]]
        first, sample = self.runs.first[late], self.runs.sample[late]
        begin, end = (
            (0 * first, first + self.runs.count[late]) if self.backward else (first, self.sequences.lengths[sample])
        )
        order = np.argsort(begin - end, kind="stable")
        rest = Runs(self.sequences, self.runs.direction, sample[order], begin[order], (end - begin)[order])
        return rest, late[order]

    @functools.cached_property
    def table(self) -> np.ndarray:
        """The run at each place of each sample, -1 for none; ``(places, batch)``."""
        table = np.full((int(self.counts.max(initial=0)), self.sequences.batch), -1)
        table[self.place, self.runs.sample] = np.arange(len(self.runs))
        return frozen(table)

    @functools.cached_property
    def before(self) -> np.ndarray:
        """The run from which each one's first state comes, -1 where it is the sample's."""
        return frozen(np.where(self.place > 0, self.table[self.place - 1, self.runs.sample], -1))

    @functools.cached_property
    def after(self) -> np.ndarray:
        """The run to which each one's last state goes; itself where it is the sample's last one."""
        counts = self.counts[self.runs.sample]
        return frozen(self.table[np.minimum(self.place + 1, counts - 1), self.runs.sample])

    @functools.cached_property
    def inner(self) -> np.ndarray:
        """Which runs are neither the first nor the last of their sample."""
        return frozen(np.flatnonzero((self.place > 0) & (self.place < self.counts[self.runs.sample] - 1)))

    @functools.cached_property
    def inner_runs(self) -> Runs:
        """The runs of `inner`."""
        return self.runs.take(self.inner)

    @functools.cached_property
    def last(self) -> np.ndarray:
        """The run at each sample's last place."""
        return frozen(self.table[self.counts - 1, np.arange(self.sequences.batch)])

    def starts(self, ends: torch.Tensor, edge: torch.Tensor) -> torch.Tensor:
        """Each run's first state: the last one of the run before it, or the sample's own in `edge`."""
        own = edge[index(self.runs.sample, edge)]
        before = index(self.before, edge)
        return torch.where((before < 0)[:, None], own, ends[before.clamp(min=0)])

    def guess(self, edge: torch.Tensor) -> torch.Tensor:
        """First states to begin with: zeros, and the samples' own where they are known."""
        return self.starts(edge.new_zeros(len(self.runs), edge.shape[1]), edge)

    def solve(self, matrices: torch.Tensor, gaps: torch.Tensor, *, tree: bool) -> torch.Tensor:
        """How far each run's first state has to move for all gaps to close.

        Parameters
        ----------
        matrices : Tensor, (runs, state, state) or (runs, state)
            What a move ``s`` of a run's first state makes of its last one, ``s @ matrices[run]``; or their diagonals.
            Those of the samples' first and last runs are not used, but have to be finite.
        gaps : Tensor, (runs, state)
            From each run's first state to the last one of the run before, 0 where there is none.
        tree : bool
            Whether pairs are composed side by side, as in the thesis' scan, or the states go from run to run.

        Returns
        -------
        Tensor, (runs, state)
            As `gaps`; worked out in float64, for a power of a matrix doubles its error at each level.
        """
        table, batch, begin = index(self.table, gaps), self.sequences.batch, 0
        found = gaps.new_empty(*table.shape, gaps.shape[1])
        while begin < batch:
            # The longest come first: none of these is longer than the first one. Nobody reads what stands in the places
            # beyond a shorter one's end.
            count = int(self.counts[begin])
            end = min(batch, begin + max(1, _ELEMENTS // max(1, count * matrices[0].numel())))
            places = table[:count, begin:end].clamp(min=0)
            steps, moves = matrices[places[:-1]].double(), gaps[places].double()
            found[:count, begin:end] = compose(steps, moves[1:], moves[0], tree=tree)
            begin = end
        return found[index(self.place, gaps), index(self.runs.sample, gaps)]


def compose(matrices: torch.Tensor, offsets: torch.Tensor, state: torch.Tensor, *, tree: bool) -> torch.Tensor:
    """The states before, between and after some affine steps, ``s ← s @ matrices[i] + offsets[i]``, from `state` on.

    Parameters
    ----------
    matrices : Tensor, (steps, batch, size, size) or (steps, batch, size)
        Of the steps; or their diagonals.
    offsets : Tensor, (steps, batch, size)
        Of the steps.
    state : Tensor, (batch, size)
        Before the first one.
    tree : bool
        Whether steps are composed in pairs, pairs of pairs and so on (a Blelloch scan: 2 log n levels, all products
        of a level at once), or taken one after the other.

    Returns
    -------
    Tensor, (steps + 1, batch, size)

    Examples
    --------
    >>> compose(torch.full((3, 1, 1, 1), 2.0), torch.ones(3, 1, 1), torch.ones(1, 1), tree=True).flatten().tolist()
    [1.0, 3.0, 7.0, 15.0]
    """
    if not tree or len(matrices) < 2:
        found = [state]
        for matrix, offset in zip(matrices, offsets, strict=True):
            found.append(_applied(matrix, offset, found[-1]))
        return torch.stack(found)
    early, late = slice(0, len(matrices) - 1, 2), slice(1, None, 2)
    joint = _applied(matrices[late], offsets[late], offsets[early])
    pairs = matrices[early] @ matrices[late] if matrices.ndim == 4 else matrices[early] * matrices[late]
    even = compose(pairs, joint, state, tree=True)
    states = even.new_empty((len(matrices) + 1, *state.shape))
    states[0 : 2 * len(even) : 2] = even
    states[1::2] = _applied(matrices[0::2], offsets[0::2], states[0 : len(matrices) : 2])
    return states


def _applied(matrix: torch.Tensor, offset: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    if matrix.ndim == state.ndim:
        return state * matrix + offset
    return (state.unsqueeze(-2) @ matrix).squeeze(-2) + offset
