"""Affine recurrences ``s_i = A_i s_{i-1} + b_i`` by the products of a schedule, all products of a level at once.

The maps of the steps are the matrices of a chain, and composing two of them is the product ``A ⋄ B = B A`` of the
thesis (section 3.1): the schedules that order the products of a chain order these too.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import numpy as np
import torch

from ..affine import AffineMaps
from ..runtime import frozen
from ..schedule import Algebra, Schedule, Step, by_level, run
from .sequences import index


def scan_states(schedule: Schedule, maps: AffineMaps, state: torch.Tensor) -> torch.Tensor:
    """The states before, between and after some maps, by a schedule of one stage more than there are maps.

    Parameters
    ----------
    schedule : Schedule
        Of ``maps + 1`` stages: value 0 is the first state, value i the i-th map; no live step reads the last value.
    maps : AffineMaps
        The maps, in order.
    state : Tensor
        The state before the first map: the shape of an offset of one map.

    Returns
    -------
    Tensor
        Of the shape of the offsets, but for one state more along ``maps.axis``.

    Examples
    --------
    >>> from jacsparse.affine import DiagonalMaps
    >>> from jacsparse.schedule import blelloch
    >>> maps = DiagonalMaps(torch.full((3, 1, 1), 2.0), torch.ones(3, 1, 1))
    >>> scan_states(blelloch(4), maps, torch.ones(1, 1)).flatten().tolist()
    [1.0, 3.0, 7.0, 15.0]
    """
    assert maps.offsets is not None
    groups, final = _grouped(schedule)
    states = torch.cat([state.unsqueeze(maps.axis), torch.empty_like(maps.offsets)], maps.axis)
    run(groups, _Banks(), {0: states, 1: maps}, kept=())
    return _take(states, final, maps.axis)


@dataclass(frozen=True, kw_only=True)
class _Group(Step):
    """Products of one level whose factors are each in one bank: a step over banks, by places in these.

    Bank 0 has the states, bank 1 the maps of the steps, and each other one the maps that a group has made, in order.
    """

    lefts: slice | np.ndarray
    rights: slice | np.ndarray
    outs: slice


class _Banks(Algebra):
    """Values are banks; states that a group makes go into the bank that those before them are in."""

    def multiply(self, step: Step, left: AffineMaps, right: AffineMaps) -> AffineMaps:
        assert isinstance(step, _Group)
        like = left.tensors[0]
        return left.take(_on(step.lefts, like)).after(right.take(_on(step.rights, like)))

    def apply(self, step: Step, left: AffineMaps, right: torch.Tensor) -> torch.Tensor:
        assert isinstance(step, _Group)
        before = _take(right, step.rights, left.axis)
        right[(*_everything(left.axis), step.outs)] = left.take(_on(step.lefts, right)).apply(before)
        return right


@functools.lru_cache(maxsize=16)
def _grouped(schedule: Schedule) -> tuple[list[_Group], slice | np.ndarray]:
    """The groups of a schedule's products, and where the states of its result are."""
    bank, place, filled = {0: 0}, {0: 0}, {0: 1}
    for value in range(1, schedule.n + 1):
        bank[value], place[value] = 1, value - 1

    def banks(step: Step) -> tuple[int, int]:
        return bank[step.left], bank[step.right]

    groups = list[_Group]()
    for steps in by_level(schedule.live_steps()):
        for (left, right), group in itertools.groupby(sorted(steps, key=banks), banks):
            members = list(group)
            first, out = members[0], 2 + len(groups) if right else 0
            begin = filled.get(out, 0)
            filled[out] = begin + len(members)
            lefts, rights = (_places(np.array([place[each] for each in values])) for values in
                             zip(*((step.left, step.right) for step in members), strict=True))  # fmt: skip
            groups.append(
                _Group(out, left, right, first.kind, first.level, first.phase,
                       lefts=lefts, rights=rights, outs=slice(begin, filled[out]))
            )  # fmt: skip
            for number, step in enumerate(members, begin):
                bank[step.out], place[step.out] = out, number
    return groups, _places(np.array([place[value] for value in schedule.gradients]))


def _places(numbers: np.ndarray) -> slice | np.ndarray:
    """Places along an axis: a slice where they are equally far apart, for a slice copies nothing."""
    step = int(numbers[1] - numbers[0]) if len(numbers) > 1 else 1
    if step > 0 and (np.diff(numbers) == step).all():
        return slice(int(numbers[0]), int(numbers[-1]) + 1, step)
    return frozen(numbers)


def _on(places: slice | np.ndarray, like: torch.Tensor) -> slice | torch.Tensor:
    return places if isinstance(places, slice) else index(places, like)


def _take(tensor: torch.Tensor, places: slice | np.ndarray, axis: int) -> torch.Tensor:
    return tensor[(*_everything(axis), _on(places, tensor))]


def _everything(axes: int) -> tuple[slice, ...]:
    return (slice(None),) * axes
