"""Elements that computed masks select, as ``x[x > 0]``: how many there are is known only when the function runs.

Those that are only worked on one by one, and summed, or put back where the same mask is true, are values of the mask's
own shape in a graph, and the write is a ``where``. So the graph holds for every mask.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from ..patterns import is_pointwise
from .operators import Facts, Gather, facts_of
from .traces import DEPENDENT, CapturedCall, CapturedRun

aten = torch.ops.aten
#: Operators that work on each element by itself, besides those that ATen says this of.
_ELEMENTWISE = frozenset(
    f"aten.{name}" for name in ("_to_copy", "alias", "clone", "full_like", "ones_like", "zeros_like")
)
#: Operators that put elements where a mask is true.
PUTS = ("aten.index_put", "aten.masked_scatter")
_SUMS = ("aten.sum", "aten.mean")
#: What computes a call's result on tensors of a mask's shape, if not the call itself; and the mask that it takes too.
Parts = tuple[Callable[..., torch.Tensor] | None, int | None]
_ZEROS = ("aten.zeros", "aten.zeros_like", "aten.new_zeros")


class Selected(NamedTuple):
    """Elements that a mask selects."""

    #: The value of the mask, the first axis that it selects along, how many these are, and how many come after them.
    mask: int
    axis: int
    rank: int
    trailing: int
    #: The first of the elements that they are worked on together with.
    group: int = -1


@dataclass(eq=False)
class Masks:
    """The elements that the masks of a run have selected so far."""

    _run: CapturedRun
    #: By value.
    selected: dict[int, Selected] = field(default_factory=dict)
    #: By group, the one that it has become part of; and those that are worked on in another way.
    _joined: dict[int, int] = field(default_factory=dict)
    _others: set[int] = field(default_factory=set)
    #: Of the calls that work on groups, what goes into `CapturedRun.by_mask`.
    _parts: list[tuple[int, int, Parts]] = field(default_factory=list)
    #: By the first value of a group, why no other call repeats the selection, where that matters.
    _errors: dict[int, Exception] = field(default_factory=dict)

    def selection(self, overload: Any, args: Sequence[Any], operands: Sequence[int]) -> Selected | None:
        """What a call selects by one computed mask; None where it is no such call."""
        if overload not in (aten.index.Tensor, aten.masked_select.default) or len(operands) != 2:
            return None
        axis, mask = _mask_of(args[1])
        if not _is_computed(mask, operands[1], self._run):
            return None
        if overload is aten.masked_select.default and args[0].shape != mask.shape:
            return None
        return Selected(operands[1], axis, mask.ndim, args[0].ndim - axis - mask.ndim)

    def begin(self, call: CapturedCall, selection: Selected, error: Exception | None) -> None:
        """Note the elements that a call has selected."""
        value = call.first
        self.leave(call.operands)
        self.selected[value] = selection._replace(group=value)
        self._parts.append((value, value, (_spread, None)))
        if error is not None:
            self._errors[value] = error

    def leave(self, values: Iterable[int | None]) -> None:
        """Note that values are worked on in another way than element by element, if they have been selected."""
        self._others |= {self.selected[value].group for value in values if value in self.selected}

    def follow(self, call: CapturedCall, facts: Facts) -> bool:
        """Note what a call does by masks; return whether it puts as many elements as a mask selects, from elsewhere."""
        read = [self.selected[value] for value in call.operands if value in self.selected]
        into = _put_by_mask(call, facts, self._run)
        if into is not None and call.operands[2] not in self.selected:
            self.leave(call.operands)
            if facts.name == "aten.masked_scatter":
                return False
            is_zero = _is_zero(self._run, call.operands[2])
            if not is_zero and self._run.tensors[call.operands[2]].ndim > into.trailing:
                return True
            self._run.by_mask[call.first] = _clear if is_zero else _put, None
            return False
        if read and (not facts.of_shape or facts.name in _ELEMENTWISE):
            parts = self._parts_of(call, facts, read, into)
            if parts is None:
                self.leave(call.operands)
            else:
                self._parts.append((call.first, read[0].group, parts))
        return False

    def _parts_of(
        self, call: CapturedCall, facts: Facts, read: Sequence[Selected], into: Selected | None
    ) -> Parts | None:
        """What computes the result of a call of selected elements; None where it takes these alone."""
        first, tensors = read[0], self._run.tensors
        if not all(self._is_same(first, each) for each in read):
            return None
        shape, result = (tensors[v].shape for v in (next(v for v in call.operands if v in self.selected), call.first))
        others = [tensors[value].ndim for value in call.operands if value not in self.selected]
        if _is_itself(call) and tuple(itertools.dropwhile(lambda size: size == 1, shape)) == tuple(result):
            # PyTorch leaves leading axes out where it puts elements back, also where there is one element.
            self.selected[call.first] = first
            return _itself, None
        if facts.name in _ELEMENTWISE or (is_pointwise(facts.name) and not facts.random):
            if call.result_count > 1 or result != shape or max(others, default=0) > first.trailing:
                return None
            self.selected[call.first] = first
            groups = {self._group(each.group) for each in read} - {self._group(first.group)}
            self._joined |= dict.fromkeys(groups, self._group(first.group))
            return None, None
        if facts.name in _SUMS:
            dims, rank = call.args[1] if len(call.args) > 1 else (), first.axis + 1 + first.trailing
            if not dims or first.axis in [dim % rank for dim in dims]:
                return functools.partial(_sum, first.axis, facts.name == "aten.mean"), first.mask
        puts_back = into is not None and call.operands[0] not in self.selected and self._is_same(into, first)
        return (_put, None) if puts_back else None

    def _is_same(self, one: Selected, other: Selected) -> bool:
        return one[1:4] == other[1:4] and self._are_equal(one.mask, other.mask)

    def _are_equal(self, one: int, other: int) -> bool:
        """Whether two values are equal, for the same operators have computed them of the same ones."""
        waiting, seen = [(one, other)], set[tuple[int, int]]()
        while waiting:
            pair = waiting.pop()
            if pair[0] != pair[1] and pair not in seen:
                seen.add(pair)
                first, second = (_maker(self._run, value) for value in pair)
                if first is None or second is None or not _do_the_same(first, second):
                    return False
                if pair[0] - first.first != pair[1] - second.first:
                    return False
                waiting += zip(first.operands, second.operands, strict=True)
        return True

    def _group(self, group: int) -> int:
        while group in self._joined:
            group = self._joined[group]
        return group

    def finish(self, returned: Sequence[int]) -> tuple[list[Any], Exception | None]:
        """Tell the run which values have the shapes of masks; return their part of its key, and the error of others."""
        self.leave(returned)
        others, run = {self._group(group) for group in self._others}, self._run
        errors = [error for group, error in self._errors.items() if self._group(group) in others]
        run.spread = {value for value, each in self.selected.items() if self._group(each.group) not in others}
        run.by_mask |= {number: parts for number, group, parts in self._parts if self._group(group) not in others}
        key = [value if value in run.spread else tuple(run.tensors[value].shape) for value in self.selected]
        return key, errors[0] if errors else None


def _put_by_mask(call: CapturedCall, facts: Facts, run: CapturedRun) -> Selected | None:
    """Where a call puts elements by one computed mask; None where it is no such call."""
    if facts.name not in PUTS or len(call.operands) != 3:
        return None
    axis, mask = _mask_of(call.args[1])
    if not _is_computed(mask, call.operands[1], run):
        return None
    if facts.name == "aten.masked_scatter" and mask.shape != call.args[0].shape:
        return None
    return Selected(call.operands[1], axis, mask.ndim, call.args[0].ndim - axis - mask.ndim)


def _is_computed(mask: torch.Tensor, value: int, run: CapturedRun) -> bool:
    """Whether a mask depends on the input."""
    return mask.dtype == torch.bool and bool(mask.ndim and mask.numel() and run.flags[value] & DEPENDENT)


def _is_itself(call: CapturedCall) -> bool:
    """Whether a call's result has elements of its operand in their order."""
    if isinstance(call.overload, Gather):
        places = call.overload.places.flatten()
        return len(call.operands) == 1 and bool((places == np.arange(len(places))).all())
    return call.overload is aten.view.default


def _mask_of(indices: Any) -> tuple[int, torch.Tensor]:
    """A mask, or the only one of several indices, and its axis."""
    if isinstance(indices, torch.Tensor):
        return 0, indices
    ((axis, mask),) = ((axis, index) for axis, index in enumerate(indices) if index is not None)
    return axis, mask


def _do_the_same(one: CapturedCall, other: CapturedCall) -> bool:
    """Whether two calls return the same of the same operands."""
    if one.overload is not other.overload or facts_of(one.overload).keeps or len(one.operands) != len(other.operands):
        return False
    return _literals(one.args, one.kwargs) == _literals(other.args, other.kwargs)


def _literals(*values: Any) -> list[Any]:
    """What a call got besides tensors, as text: numbers that are equal may be of several types."""
    literals: list[Any] = []
    for value in values:
        if isinstance(value, dict):
            literals += [*value, *_literals(*value.values())]
        elif isinstance(value, (list, tuple)):
            literals.append(_literals(*value))
        else:
            literals.append(torch.Tensor if isinstance(value, torch.Tensor) else repr(value))
    return literals


def with_mask(call: CapturedCall, run: CapturedRun) -> CapturedCall:
    """A call with the mask among its arguments that what computes it in a graph takes, if any."""
    mask = run.by_mask.get(call.first, (None, None))[1]
    if mask is None:
        return call
    kwargs, operands = {**call.kwargs, "mask": run.tensors[mask]}, [*call.operands, mask]
    return call._replace(kwargs=kwargs, operands=operands, kinds=(*call.kinds, None))


def _is_zero(run: CapturedRun, value: int) -> bool:
    maker = _maker(run, value)
    return maker is not None and facts_of(maker.overload).name in _ZEROS


def _maker(run: CapturedRun, value: int) -> CapturedCall | None:
    """The call that computes a value."""
    place = bisect.bisect_right(run.calls, value, key=attrgetter("first")) - 1
    return run.calls[place] if place >= 0 and value in run.calls[place].results else None


def _itself(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x


def _clear(x: torch.Tensor, indices: Any, values: torch.Tensor, accumulate: bool = False, *_: Any) -> torch.Tensor:
    return _put(x, indices, x.new_zeros(()), accumulate)


def _spread(x: torch.Tensor, indices: Any) -> torch.Tensor:
    """A tensor with its first selected element wherever a mask is false, for what follows is defined there."""
    axis, mask = _mask_of(indices)
    first = mask.flatten().to(torch.uint8).argmax().reshape(1)
    chosen = x.detach().flatten(axis, axis + mask.ndim - 1).index_select(axis, first)
    return torch.where(_before(mask, x, axis), x, chosen.unflatten(axis, [1] * mask.ndim))


def _put(x: torch.Tensor, indices: Any, values: torch.Tensor, accumulate: bool = False, *_: Any) -> torch.Tensor:
    """A tensor with the elements of another one where a mask is true, or with these added."""
    axis, mask = _mask_of(indices)
    mask = _before(mask, x, axis)
    return x + torch.where(mask, values, values.new_zeros(())) if accumulate else torch.where(mask, values, x)


def _sum(
    axis: int,
    is_mean: bool,
    x: torch.Tensor,
    dims: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    mask: torch.Tensor,
    **dtype: Any,
) -> torch.Tensor:
    """The sum, or mean, of what a mask selects; `dims` are those of what it selects."""
    rank = x.ndim - mask.ndim + 1
    every = [dim % rank for dim in dims] if dims else list(range(rank))
    #: By axis of what is selected, that of the tensor; of the mask's, the first.
    places = [dim if dim <= axis else dim + mask.ndim - 1 for dim in range(rank)]
    others = [places[dim] for dim in every if dim != axis]
    selected = torch.where(_before(mask, x, axis), x, x.new_zeros(()))
    total = selected.sum([*others, *range(axis, axis + mask.ndim)], **dtype)
    if keepdim:
        total = total.reshape([1 if dim in every else x.shape[place] for dim, place in enumerate(places)])
    return total / (mask.sum() * math.prod(x.shape[place] for place in others)) if is_mean else total


def _before(mask: torch.Tensor, x: torch.Tensor, axis: int) -> torch.Tensor:
    """A mask with axes of size 1 behind its own, for those of a tensor."""
    return mask.reshape([*mask.shape, *[1] * (x.ndim - axis - mask.ndim)])
