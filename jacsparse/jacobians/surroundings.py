"""What a function reads besides its arguments: attributes and tensors of modules, closures, defaults, globals."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from ..tracing import is_users

#: Values that are compared by equality; all others by identity.
_PLAIN = (bool, int, float, str, type(None))

#: The most places that are watched.
MOST = 10_000


class Surroundings:
    """The places that a function reads, and what they held at the last look.

    The attributes, parameters and buffers of modules, the attributes of other objects of the user's classes, elements
    of lists and dicts, closures, defaults and those globals that the code names: followed from the function through the
    user's code. What a library's own code reads is not among them.

    Examples
    --------
    >>> scale = [2.0]
    >>> surroundings = Surroundings(lambda x: x * scale[0])
    >>> surroundings.changed()
    False
    >>> scale[0] = 3.0
    >>> surroundings.changed()
    True
    """

    def __init__(self, f: Callable[..., Any]) -> None:
        self._f = f
        self._look()

    def _look(self) -> None:
        self._places: list[tuple[Any, Any, Any]] = []
        seen: set[int] = set()
        waiting = [self._f]
        while waiting and len(self._places) < MOST:
            value = waiting.pop()
            if id(value) in seen or isinstance(value, (torch.Tensor, *_PLAIN)):
                continue
            seen.add(id(value))
            for container, key, part in _places_in(value):
                self._places.append((container, key, part))
                waiting.append(part)

    def changed(self) -> bool:
        """Whether any place holds another tensor, object or number than at the last look; looks again if so."""
        for container, key, before in self._places:
            now = _read(container, key)
            if now is not before and not (type(now) is type(before) and isinstance(now, _PLAIN) and now == before):
                self._look()
                return True
        return False


_MISSING = object()


def _read(container: Any, key: Any) -> Any:
    try:
        return container.cell_contents if key is None else container[key]
    except (KeyError, IndexError, ValueError):
        return _MISSING


def _places_in(value: Any) -> Iterator[tuple[Any, Any, Any]]:
    """The places within a value: container, key and content; the key of a closure's cell is None."""
    if isinstance(value, FunctionType):
        yield from _places_of_function(value)
    elif isinstance(value, MethodType):
        yield {0: value.__self__}, 0, value.__self__
        yield {0: value.__func__}, 0, value.__func__
    elif isinstance(value, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
        yield from ((parts, place, part) for place, part in enumerate(parts))
    elif isinstance(value, nn.Module):
        for container in (value.__dict__, value._parameters, value._buffers, value._modules):
            yield from ((container, name, part) for name, part in list(container.items()) if not name.startswith("_"))
        yield from _places_of_class(value)
    elif isinstance(value, dict):
        yield from ((value, key, part) for key, part in list(value.items()))
    elif isinstance(value, (list, tuple)):
        yield from ((value, place, part) for place, part in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, type) and _is_users_class(type(value)):
        yield from ((value.__dict__, name, part) for name, part in list(value.__dict__.items()))
        yield from _places_of_class(value)


def _places_of_function(function: FunctionType) -> Iterator[tuple[Any, Any, Any]]:
    for cell in function.__closure__ or ():
        yield cell, None, _read(cell, None)
    if not is_users(function.__code__.co_filename):
        return
    for place, default in enumerate(function.__defaults__ or ()):
        yield function.__defaults__, place, default
    for name in _names(function.__code__):
        if name in function.__globals__:
            yield function.__globals__, name, function.__globals__[name]


def _places_of_class(value: Any) -> Iterator[tuple[Any, Any, Any]]:
    """The functions of an object's class that may run when it is called."""
    for name in ("forward", "__call__"):
        function = getattr(type(value), name, None)
        if isinstance(function, FunctionType) and is_users(function.__code__.co_filename):
            yield {0: function}, 0, function


def _is_users_class(kind: type) -> bool:
    functions = (part for part in vars(kind).values() if isinstance(part, FunctionType))
    return any(is_users(function.__code__.co_filename) for function in functions)


def _names(code: CodeType) -> Iterator[str]:
    """The names of globals and attributes in a function's code, and in the functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
