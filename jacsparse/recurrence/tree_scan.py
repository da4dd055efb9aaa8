"""Affine recurrences ``s_i = A_i s_{i-1} + b_i`` by the products of a schedule, all products of a level at once.

The maps of the steps are the matrices of a chain, and composing two of them is the product ``A ⋄ B = B A`` of the
thesis (section 3.1): the schedules that order the products of a chain order these too.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import numpy as np
import torch

from ..affine import AffineMaps
from ..runtime import frozen
from ..schedule import Schedule, run
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
    (groups, final), axes = _grouped(schedule), (slice(None),) * maps.axis
    states = torch.cat([state.unsqueeze(maps.axis), torch.empty_like(maps.offsets)], maps.axis)

    def multiply(group: _LevelProducts, left: AffineMaps, right: AffineMaps) -> AffineMaps:
        return left.take(_on(group.lefts, state)).after(right.take(_on(group.rights, state)))

    def apply(group: _LevelProducts, left: AffineMaps, right: torch.Tensor) -> torch.Tensor:
        before = right[(*axes, _on(group.rights, state))]
        right[(*axes, group.outs)] = left.take(_on(group.lefts, state)).apply(before)
        return right

    run(groups, multiply, apply, values={0: states, 1: maps})
    return states[(*axes, _on(final, state))]


class _LevelProducts(NamedTuple):
    """Products of one level whose factors are each in one bank: a step over banks, by places in these.

    Bank 0 has all states, bank 1 the maps of the steps, and each other one the maps that a group has made, in order.
    """

    out: int
    left: int
    right: int
    kind: str
    outs: slice
    lefts: slice | np.ndarray
    rights: slice | np.ndarray


@functools.lru_cache(maxsize=16)
def _grouped(schedule: Schedule) -> tuple[list[_LevelProducts], slice | np.ndarray]:
    """The groups of a schedule's products, and where the states of its result are."""
    #: The bank of each value, and its place there; and how many values a bank has.
    at = {0: (0, 0)} | {value: (1, value - 1) for value in range(1, schedule.n + 1)}
    filled, groups = {0: 1}, list[_LevelProducts]()

    def banks(product: tuple[int, int, int]) -> tuple[int, int]:
        return at[product[1]][0], at[product[2]][0]

    for kind, *numbers in schedule.batches:
        for (left, right), members in itertools.groupby(sorted(zip(*numbers, strict=True), key=banks), banks):
            outs, *factors = zip(*members, strict=True)
            out = 0 if kind == "mv" else 2 + len(groups)
            begin = filled.get(out, 0)
            end = filled[out] = begin + len(outs)
            places = (_places(np.array([at[value][1] for value in values])) for values in factors)
            groups.append(_LevelProducts(out, left, right, kind, slice(begin, end), *places))
            at |= {value: (out, place) for place, value in enumerate(outs, begin)}
    return groups, _places(np.array([at[value][1] for value in schedule.gradients]))


def _places(numbers: np.ndarray) -> slice | np.ndarray:
    """Places along an axis: a slice where they are equally far apart, for a slice copies nothing."""
    step = int(numbers[1] - numbers[0]) if len(numbers) > 1 else 1
    if step > 0 and (np.diff(numbers) == step).all():
        return slice(int(numbers[0]), int(numbers[-1]) + 1, step)
    return frozen(numbers)


def _on(places: slice | np.ndarray, like: torch.Tensor) -> slice | torch.Tensor:
    return places if isinstance(places, slice) else index(places, like)
