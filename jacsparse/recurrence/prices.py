"""What work costs on a GPU: the prices by which ``auto`` predicts how long a recurrence takes there."""

from __future__ import annotations

from typing import NamedTuple


class Prices(NamedTuple):
    """Microseconds of work on a device; ``python -m benchmarks prices`` fits them to measured rows.

    Attributes
    ----------
    node : float
        A node of a captured graph.
    launch : float
        A node that is called eagerly, of the host's time.
    step, gate : float
        A step that waits for the one before it, of 32 elements: as such, and for each gate.
    place : float
        A chunk of a sample whose start is guessed, and compared after each sweep.
    place_in_block : float
        As `place`, where one block takes and compares a sample's chunks.
    walk : float
        A state that goes on by a chunk, by a small matrix.
    compose : float
        A small matrix that goes on by a step or, in a walk of two levels, by a chunk.
    """

    node: float
    launch: float
    step: float
    gate: float
    place: float
    place_in_block: float
    walk: float
    compose: float


#: Of an H200. Those of a launch and of a place in a block are estimates, which no row has measured.
PRICES = Prices(
    node=2.74, launch=5.0, step=0.0744, gate=0.0434, place=1.26, place_in_block=0.25, walk=0.686, compose=1.45
)  # fmt: skip


class Nodes(NamedTuple):
    """What a pass consists of by each method: launches, of ours and of PyTorch's kernels.

    Attributes
    ----------
    sequential, relaxed, chunked : int
        Launches.
    walk_levels : int
        Levels of a walk from chunk to chunk, at most.
    """

    sequential: int
    relaxed: int
    chunked: int
    walk_levels: int = 2


#: Of layers whose states are not small; a pass of small ones is a launch or two.
NODES = Nodes(sequential=9, relaxed=24, chunked=14)
