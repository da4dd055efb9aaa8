"""Affine recurrences ``s_i = A_i s_{i-1} + b_i`` by the products of a schedule, all products of a level at once.

The maps of the steps are the matrices of a chain, and composing two of them is the product ``A ⋄ B = B A`` of the
thesis (section 3.1): the schedules that order the products of a chain order these too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ..affine import AffineMaps
from ..runtime import frozen
from ..schedule import Schedule
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
    axis = maps.axis
    assert maps.offsets is not None
    groups, final = _compiled(schedule)
    banks = [maps]
    states, filled = torch.cat([state.unsqueeze(axis), torch.empty_like(maps.offsets)], axis), 1
    for group in groups:
        later = banks[group.left_bank].take(_on(group.left, state))
        if group.right_bank is not None:
            banks.append(later.after(banks[group.right_bank].take(_on(group.right, state))))
        else:
            after = slice(filled, filled := filled + group.size)
            before = _take(states, _on(group.right, state), axis)
            states[(*_everything(axis), after)] = later.apply(before)
    return _take(states, _on(final, state), axis)


class _Group(NamedTuple):
    """Products of one level whose factors are each in one bank: the maps that an earlier group has made, in order.

    Vectors are in one bank of their own, and `right_bank` is None.
    """

    size: int
    left_bank: int
    left: slice | np.ndarray
    right_bank: int | None
    right: slice | np.ndarray


def _compiled(schedule: Schedule) -> tuple[list[_Group], slice | np.ndarray]:
    """The groups of a schedule's products, and where the vectors of its result are; made once."""
    if "_scan_groups" not in schedule.__dict__:
        schedule.__dict__["_scan_groups"] = _grouped(schedule)
    groups: tuple[list[_Group], slice | np.ndarray] = schedule.__dict__["_scan_groups"]
    return groups


def _grouped(schedule: Schedule) -> tuple[list[_Group], slice | np.ndarray]:
    values = schedule.n + 1 + len(schedule.products)
    bank, place = np.zeros(values, dtype=np.int64), np.arange(values) - 1
    place[0], vectors, banks, groups = 0, 1, 1, []
    for kind, *numbers in schedule.batches:
        out, left, right = (np.array(each) for each in numbers)
        keys = np.stack([bank[left], bank[right] if kind == "mm" else 0 * right])
        order = np.lexsort(keys)
        cuts = np.flatnonzero((np.diff(keys[:, order]) != 0).any(axis=0)) + 1
        for members in np.split(order, cuts):
            left_bank, right_bank = (int(key) for key in keys[:, members[0]])
            factors = (_places(place[left[members]]), _places(place[right[members]]))
            groups.append(_Group(len(members), left_bank, factors[0], right_bank if kind == "mm" else None, factors[1]))
            place[out[members]] = np.arange(len(members))
            if kind == "mm":
                bank[out[members]], banks = banks, banks + 1
            else:
                place[out[members]] += vectors
                vectors += len(members)
    return groups, _places(place[list(schedule.gradients)])


def _places(numbers: np.ndarray) -> slice | np.ndarray:
    """Places along an axis: a slice where they are equally far apart, for a slice copies nothing."""
    step = int(numbers[1] - numbers[0]) if len(numbers) > 1 else 1
    if step > 0 and (np.diff(numbers) == step).all():
        return slice(int(numbers[0]), int(numbers[-1]) + 1, step)
    return frozen(numbers)


def _on(places: slice | np.ndarray, like: torch.Tensor) -> slice | torch.Tensor:
    return places if isinstance(places, slice) else index(places, like)


def _take(tensor: torch.Tensor, places: slice | torch.Tensor, axis: int) -> torch.Tensor:
    return tensor[(*_everything(axis), places)]


def _everything(axes: int) -> tuple[slice, ...]:
    return (slice(None),) * axes
