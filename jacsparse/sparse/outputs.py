"""What a model returns, looked into: tensors in containers and in objects of any class."""

from __future__ import annotations

import functools
import gc
from collections import deque
from collections.abc import Callable, Iterable, MutableMapping
from types import CodeType, FrameType, FunctionType, MemberDescriptorType, ModuleType, TracebackType
from typing import Any, cast
from weakref import ReferenceType

import torch

from ..runtime import a_type
from .blocks import BlockTensor
from .layouts import leave

#: What is compared by its value.
CONSTANTS = (str, bytes, int, float, complex, type(None))
#: What holds no activations, or is the model's own.
_LEAVES = (
    *CONSTANTS,
    *(torch.Tensor, torch.nn.Module, torch.autograd.graph.Node),
    *(type, ModuleType, CodeType, FrameType, TracebackType, ReferenceType),
)


def plain(value: Any) -> Any:
    """A value with tensors in PyTorch's layout for blocks, those in containers and in objects' attributes too."""
    if type(value) is torch.Tensor:
        return value
    return look_into(value, lambda leaf: leave(leaf) if type(leaf) is BlockTensor else leaf)


def look_into(value: Any, change: Callable[[Any], Any]) -> Any:
    """A value whose leaves are what `change` makes of them; lists, mappings and objects remain the same ones.

    Leaves are tensors, constants, modules and classes. Tuples with another leaf are made anew.

    Raises
    ------
    TypeError
        Where something holds a leaf that is to be another one, and cannot be written to; the error names its class.

    Examples
    --------
    >>> look_into({"x": [1, (2, "y")]}, lambda leaf: 10 * leaf if isinstance(leaf, int) else leaf)
    {'x': [10, (20, 'y')]}
    """
    return _changed(value, change, {})


def leaves_of(value: Any) -> list[Any]:
    """The leaves of a value, as `look_into` finds them."""
    leaves = list[Any]()
    look_into(value, lambda leaf: (leaves.append(leaf), leaf)[1])  # type: ignore[func-returns-value]
    return leaves


def _changed(value: Any, change: Callable[[Any], Any], done: dict[int, tuple[Any, Any]]) -> Any:
    if id(value) in done:
        return done[id(value)][1]
    if isinstance(value, _LEAVES):
        result = change(value)
        if not isinstance(value, CONSTANTS):
            # With the value, so that no other one gets its number.
            done[id(value)] = value, result
        return result
    if isinstance(value, (tuple, frozenset)):
        items = [_changed(each, change, done) for each in value]
        if any(new is not each for new, each in zip(items, value, strict=True)):
            result = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
            done[id(value)] = value, result
            return result
    done[id(value)] = value, value
    if isinstance(value, (list, deque)):
        for place, each in enumerate(value):
            if (new := _changed(each, change, done)) is not each:
                value[place] = new
    elif isinstance(value, set):
        for each in list(value):
            if (new := _changed(each, change, done)) is not each:
                value.remove(each)
                value.add(new)
    elif isinstance(value, MutableMapping):
        for name, each in list(value.items()):
            if (new := _changed(each, change, done)) is not each:
                value[name] = new
    attributes, kind = getattr(value, "__dict__", {}), cast(Any, type(value))
    for name in [*attributes, *_slots(kind)]:
        each = attributes[name] if name in attributes else getattr(value, name, None)
        if (new := _changed(each, change, done)) is not each:
            try:
                # Frozen ones too.
                object.__setattr__(value, name, new)
            except (AttributeError, TypeError):
                raise _not_writable(value) from None
    for each in _others(value, attributes):
        if not isinstance(each, CONSTANTS) and _changed(each, change, done) is not each:
            raise _not_writable(value)
    return value


@functools.cache
def _slots(kind: type) -> list[str]:
    """The names of the attributes that objects of a class have beside those in their ``__dict__``."""
    return [
        name
        for each in kind.__mro__
        for name, member in vars(each).items()
        if isinstance(member, MemberDescriptorType) and not name.startswith("__")
    ]


def _others(value: Any, attributes: Any) -> Iterable[Any]:
    """What an object refers to, but by its attributes: a closure's variables, what a generator goes on with."""
    if type(value) in (list, tuple, dict):
        return []
    if isinstance(value, FunctionType):
        filled = [cell for cell in value.__closure__ or () if gc.get_referents(cell)]
        return [*(cell.cell_contents for cell in filled), *(value.__defaults__ or ())]
    return [each for each in gc.get_referents(value) if each is not attributes]


def _not_writable(value: Any) -> TypeError:
    words = (
        f"the model returns {a_type(value)} with activations inside, which cannot be replaced there by plain tensors"
    )
    is_cache = "cache" in type(value).__name__.lower()
    remedy = "call the model with use_cache=False" if is_cache else "return them in a list, a dict or a dataclass"
    return TypeError(f"{words}: {remedy}")
