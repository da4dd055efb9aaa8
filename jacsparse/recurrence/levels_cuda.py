"""Schedules of products on CUDA devices: all products of a level in one launch of `levels.cu`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..runtime import (
    REAL,
    THREADS,
    Backend,
    KernelFile,
    active_backend,
    allocated,
    blocks,
    c_type,
    frozen,
    instances,
    uploaded,
)
from ..schedule import Schedule
from .recurrences_cuda import whole_warps
from .sequences import Chunks

_FILE = KernelFile(
    Path(__file__).parent / "kernels" / "levels.cu",
    (*instances("dense_level", REAL), *instances("diagonal_level", REAL), "widen<float>"),
)
#: Rows and columns of a product that a block computes, and elements of both factors that it reads together, at most.
_TILE, _DEPTH = 64, 32
#: Arrays that `widen` copies.
_ARRAYS = 5


class ProductLevel(NamedTuple):
    """Products that do not depend on each other: the number of the first one, and how many make matrices and states."""

    first: int
    matrices: int
    states: int


@dataclass(frozen=True, eq=False)
class Levels:
    """The products of a schedule by levels, as `levels.cu` takes them.

    Attributes
    ----------
    steps : ndarray of int64, (products, 5)
        The products, those of a level side by side.
    levels : tuple of ProductLevel
        The levels.
    matrices, states : int
        Matrices and states that all levels make.
    """

    steps: np.ndarray
    levels: tuple[ProductLevel, ...]
    matrices: int
    states: int


@functools.lru_cache(maxsize=16)
def levels_of(schedule: Schedule) -> Levels:
    """The live products of a schedule, each in the first level in which its factors are there.

    Examples
    --------
    >>> from jacsparse.schedule import blelloch, linear
    >>> [(level.matrices, level.states) for level in levels_of(blelloch(8)).levels]  # first the state 0 is copied
    [(3, 2), (1, 2), (0, 3), (0, 1)]
    >>> len(levels_of(linear(8)).levels)
    7
    """
    places = {value: place for place, value in enumerate(schedule.gradients)}
    # What the kernels call each value, and the level that makes it.
    names = {0: 0} | {value: -value for value in range(1, schedule.n + 1)}
    ready = dict.fromkeys(names, -1)
    counts = {"mm": 0, "mv": 0}
    rows = [(0, "mv", (-1, 0, 0, 0, place)) for value, place in places.items() if value == 0]
    for step in schedule.live_steps():
        number, level = counts[step.kind], 1 + max(ready[step.left], ready[step.right])
        counts[step.kind], ready[step.out] = number + 1, level
        names[step.out] = number if step.kind == "mm" else number + 1
        last, place = schedule.spans[step.out][1], places.get(step.out, -1)
        rows.append((level, step.kind, (number, names[step.left], names[step.right], last, place)))
    rows.sort(key=lambda row: row[:2])
    levels, first = [], 0
    for _, members in itertools.groupby(rows, lambda row: row[0]):
        kinds = [kind for _, kind, _ in members]
        levels.append(ProductLevel(first, kinds.count("mm"), kinds.count("mv")))
        first += len(kinds)
    steps = np.array([numbers for _, _, numbers in rows], dtype=np.int64).reshape(-1, 5)
    return Levels(frozen(steps), tuple(levels), counts["mm"], counts["mv"])


def scan_starts(
    schedule: Schedule, chunks: Chunks, maps: torch.Tensor, initial_state: torch.Tensor, most: int
) -> torch.Tensor:
    """The state before each step, ``(runs, state)``, by the products of a schedule, of a few samples at a time.

    Parameters
    ----------
    schedule : Schedule
        Of one stage more than there are steps, as `scan_states` takes it.
    chunks : Chunks
        Of one step each.
    maps : Tensor of float64, (runs, state + 1, state) or (runs, 2, state)
        The matrix of each, and below it what is added; or diagonals.
    initial_state : Tensor, (batch, state)
        The samples' first states.
    most : int
        Elements of `maps` whose products are computed at once, unless a single sample has more.
    """
    levels, device, (batch, size) = levels_of(schedule), initial_state.device, initial_state.shape
    samples = min(batch, max(1, most * batch // max(1, maps.numel())))
    products = allocated(
        "products of matrices", (levels.matrices, samples, *maps.shape[1:]), torch.float64, device, batch
    )
    states = maps.new_empty(levels.states, samples, size)
    start = initial_state.new_empty(len(maps), size)
    tables = tuple(uploaded(array, device) for array in (levels.steps, chunks.table, chunks.counts))
    backend: Any = active_backend()
    for begin in range(0, batch, samples):
        launches = _launches(
            levels, batch, min(samples, batch - begin), size, maps.shape[1] == 2, start.dtype, device, backend
        )  # fmt: skip
        for launch in launches:
            launch(begin, *tables, maps, products, states, initial_state, start)
    return start


@functools.lru_cache(maxsize=64)
def _launches(
    levels: Levels,
    batch: int,
    samples: int,
    size: int,
    diagonal: bool,
    dtype: torch.dtype,
    device: torch.device,
    backend: Backend,
) -> list[Callable[..., None]]:
    """A launch for each level of a schedule; they belong to a backend. Of one element all matrices are diagonal."""
    numbers: dict[str, Any] = {"batch": batch, "samples": samples, "size": size}
    kind, launches = c_type(dtype), list[Callable[..., None]]()
    rows, columns = (-(-extent // blocks(extent, _TILE) // 4) * 4 for extent in (size + 1, size))
    column_tiles, row_tiles, depth = blocks(size, columns), blocks(size + 1, rows), min(size, _DEPTH)
    threads = whole_warps(rows // 4 * (columns // 4))
    for level in levels.levels:
        if diagonal:
            elements = (level.matrices + level.states) * samples * size
            launch = _FILE.record(
                f"diagonal_level<{kind}>", [blocks(elements)], [THREADS], **numbers, elements=elements,
                matrices=level.matrices, first=level.first, device=device,
            )  # fmt: skip
        else:
            tiles = samples * column_tiles * (level.matrices * row_tiles + level.states)
            launch = _FILE.record(
                f"dense_level<{kind}>", [tiles], [threads], **numbers, rows=rows, columns=columns, depth=depth,
                matrices=level.matrices, first=level.first, device=device,
                shared=8 * max(threads, depth * (rows + 2 + columns)),
            )  # fmt: skip
        launches.append(launch)
    return launches


def widened(*tensors: torch.Tensor | None) -> list[Any]:
    """Copies in float64 of up to five contiguous tensors of float32, by one launch; None and empty ones as they are."""
    present = [each for each in tensors if each is not None and each.numel()]
    copies = [torch.empty_like(each, dtype=torch.float64) for each in present]
    counts, nothing = [each.numel() for each in present], [None] * (_ARRAYS - len(present))
    _FILE.launch(
        "widen<float>", [blocks(max(counts, default=0))], [THREADS], *counts, *(0 for _ in nothing),
        *present, *nothing, *copies, *nothing, device=present[0].device,
    )  # fmt: skip
    remaining = iter(copies)
    return [next(remaining) if each is not None and each.numel() else each for each in tensors]
