"""Writes in a run, and the values that tensors on written storages hold."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from operator import or_
from typing import TYPE_CHECKING, Any

import torch

from .autograd_nodes import is_of_function, node_of
from .callers import place, source_of
from .operators import BackwardPass, Gather, Rewrite, facts_of
from .storages import OUTSIDE, Contents, Pieces, base_of, extent_of, memory_of, numbered, overlaps
from .traces import ACTIVE, DIFFERENTIABLE, OF_ELEMENTS, CapturedCall, OutsideWrite

if TYPE_CHECKING:
    from .capture import Recorder


def append_call(
    recorder: Recorder,
    operator: Any,
    operands: Sequence[int],
    result: torch.Tensor,
    passes: Sequence[bool] | None = None,
) -> int:
    """Record a call that the run did not make; derivatives pass through all operands, or those that `passes` says.

    It returns the value of its result.
    """
    flags_of = [recorder.flags[value] for value in operands]
    through = [each if passes is None or passes[place] else each & OF_ELEMENTS for place, each in enumerate(flags_of)]
    number, path = recorder.bind(result, functools.reduce(or_, through, 0)), recorder.callers.path
    kinds = tuple([type(recorder) if each & DIFFERENTIABLE else None for each in through])
    args = [result] * len(operands)
    call = CapturedCall(operator, args, {}, operands, kinds, (), True, number, 1, False, -1, path, place())
    recorder.run.calls.append(call)
    if recorder.masks.selected:
        recorder.masks.follow(call, facts_of(operator))
    kind = operator if isinstance(operator, BackwardPass) else id(type(operator))
    recorder.key += (kind, tuple(operands), kinds, path, extent_of(result))
    return number


def current(recorder: Recorder, tensor: torch.Tensor, number: int | None) -> int:
    """The value that a tensor holds now, of which it may have had another one."""
    storage = recorder.storages.get(tensor)
    if storage is None:
        return recorder.from_elsewhere(tensor) if number is None else number
    if tensor._base is not None and is_of_function(tensor._base):
        recorder.value_of(tensor._base)
    if number is not None and recorder.storages.is_noted(tensor, storage):
        return number
    if not storage.has_elements_of(tensor):
        raise recorder.callers.unsupported("a tensor is written to as numbers of another kind", "compute new ones")
    number, derivatives = _held(recorder, tensor, storage.contents), storage.derivatives(tensor)
    if tensor.requires_grad and derivatives is not storage.contents:
        _check_last_write(recorder, node_of(base_of(tensor)))
    edge = recorder.run.gradient_edges.get(number)
    # What autograd saved is another tensor with the same node.
    if tensor.requires_grad and derivatives is not storage.contents and edge != (node_of(tensor), tensor.output_nr):
        derivative = _held(recorder, tensor, derivatives)
        if derivative != number:
            number = append_call(recorder, Rewrite(), (number, derivative), tensor, (False, True))
    recorder.numbers[id(tensor)] = number
    recorder.storages.note(tensor)
    recorder.alive.append(tensor)
    return number


def _check_last_write(recorder: Recorder, node: Any) -> None:
    """Refuse a Function's write to a part of a tensor: autograd does not tell what node the part has of it."""
    if node is not None and node.name().endswith("CopySlices"):
        number = node._sequence_nr()
        if not next(call for call in reversed(recorder.run.calls) if 0 <= call.sequence < number).seen:
            recorder.refuse("a torch.autograd.Function writes to a part of a tensor", "give it a clone of the part")


def _held(recorder: Recorder, tensor: torch.Tensor, contents: Contents) -> int:
    """The value that has a tensor's elements, by what its storage holds."""
    pieces = contents.read(extent_of(tensor))
    if isinstance(pieces, int):
        return pieces
    if len(pieces.values) == 1 and _is_whole(recorder, pieces, tensor.shape):
        return pieces.values[0]
    values = list(pieces.values)
    if OUTSIDE in values:
        # What no value had is as it was before the run.
        place = values.index(OUTSIDE)
        values[place] = recorder.captured(tensor.detach().clone())
        pieces.places[pieces.which == place] = numbered(tensor.shape)[pieces.which == place]
    return append_call(recorder, Gather(pieces.which, pieces.places), values, tensor)


def _is_whole(recorder: Recorder, pieces: Pieces, shape: torch.Size) -> bool:
    """Whether a tensor of a shape has all elements of one value in their order."""
    (value,) = pieces.values
    known = recorder.run.tensors[value] if value != OUTSIDE else None
    return known is not None and known.shape == shape and bool((pieces.places == numbered(shape)).all())


def begin_write(recorder: Recorder, tensor: torch.Tensor, operator: str, seen: bool) -> None:
    """Refuse a write that cannot be recorded, and copy what it is about to change and no call computes again."""
    base = base_of(tensor)
    if seen and any(recorder.kinds) and (tensor.dtype != base.dtype or tensor.is_conj()):
        # Autograd makes the view again under a lock, which a look at its node within that call waits for.
        what = "it writes to a part, or a conjugate, of a complex tensor"
        raise recorder.callers.unsupported(what, "compute new parts, and take torch.complex of these")
    if overlaps(tensor):
        # PyTorch leaves open what such a write does.
        recorder.refuse("it writes to a view with several elements in one place", "write to a clone of it")
    if base.requires_grad and base.is_leaf and id(base) not in recorder.numbers:
        recorder.captured(base)
    if seen and recorder.run.captures.get(recorder.numbers.get(id(base), -1), (None, False))[1]:
        recorder.refuse("a tensor that has a gradient from before the call is written to", "write to a clone of it")
    storage = recorder.storages.look_at(tensor)
    if storage is not None and not storage.writes:
        first = next(iter(recorder.storages.values_on(tensor)), None)
        if first is None or first in recorder.run.captures:
            write = OutsideWrite(memory_of(tensor), operator, recorder.callers.path, source_of(place()))
            recorder.run.writes_outside.append(write)
    for value in recorder.storages.overwrite(tensor):
        recorder.run.overwritten.add(value)
        if value in recorder.irreplaceable and value not in recorder.run.copies:
            recorder.run.copies[value] = recorder.run.tensors[value].detach().clone()


def end_write(recorder: Recorder, tensor: torch.Tensor, value: int, *, seen: bool, sized: bool = True) -> None:
    """Take a value for what a tensor was overwritten with; its size may be that of another run's, or not."""
    storage = recorder.storages.get(tensor)
    if storage is None:
        return
    storage.write(tensor, value, seen=seen)
    recorder.numbers[id(tensor)] = value
    if seen:
        recorder.storages.note(tensor)
    # Views of a written storage are no calls, and a value may lie at several places.
    extent = extent_of(tensor) if sized else None
    recorder.key.append((storage.number, value, extent, seen, storage.family(tensor)))


def replaced(recorder: Recorder, tensor: torch.Tensor, other: torch.Tensor, *_: Any) -> torch.Tensor:
    """Copy a tensor onto another one, which then is the same value."""
    seen = recorder.in_parts or torch.is_grad_enabled()
    (value,), (kind,) = recorder.values_of([other]), recorder.kinds
    flags = recorder.flags[value]
    if seen and (flags & ACTIVE if kind is type(None) else kind is None and flags & DIFFERENTIABLE):
        # It has the elements alone.
        value = append_call(recorder, torch.ops.aten.alias.default, (value,), other, (False,))
    begin_write(recorder, tensor, "aten.copy", seen)
    torch.ops.aten.copy_.default(tensor, other)
    end_write(recorder, tensor, value, seen=seen)
    recorder.alive.append(tensor)
    return tensor


def reshaped(recorder: Recorder, overload: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Change the shape of a tensor in place: values that it had have its shape of now."""
    if is_of_function(tensor):
        recorder.value_of(tensor)
    recorder.storages.look_at(tensor)
    recorder.numbers.pop(id(tensor), None)
    tensors = recorder.run.tensors
    tensors[:] = [each.detach() if each is tensor else each for each in tensors]
    recorder.storages.forget(tensor)
    return overload(tensor, *args, **kwargs)  # type: ignore[no-any-return]
