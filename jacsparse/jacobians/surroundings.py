"""What a function reads besides its arguments: attributes and tensors of modules, closures, defaults, globals."""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from operator import getitem
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from ..tracing import is_users, same_number

#: Values that are compared by equality; all others by identity.
_PLAIN = (bool, int, float, str, type(None))

#: The most places that are watched; where there are more, something may always have changed.
MOST = 10_000


class Surroundings:
    """The places that a function reads, and what they held when this was made.

    The attributes, parameters, buffers and hooks of modules, the attributes of other objects, of Python modules and of
    classes, elements of lists and dicts, closures, defaults and globals: followed from the function through the user's
    code. What a library's own code reads is not among them, nor are the elements of arrays.

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
        # The names in code tell which attributes of classes and Python modules it reads, where there is more code.
        names, known = {"forward", "__call__"}, 0
        while known < len(names):
            known = len(names)
            self._places = list(islice(_places_from(f, names), MOST + 1))
        #: The names of globals and attributes in the user's code.
        self.names = frozenset(names)

    def changed(self) -> bool:
        """Whether any place holds another tensor, object or number, or may do so without being watched."""
        if len(self._places) > MOST:
            return True
        try:
            for read, before in self._places:
                now = read()
                if now is not before and not (isinstance(now, _PLAIN) and same_number(now, before)):
                    return True
        except _GONE:
            return True
        return False


#: How a place says that there is nothing.
_GONE = (LookupError, ValueError, AttributeError)

#: What returns the content of a place.
Read = Callable[[], Any]


def _places_from(f: Any, names: set[str]) -> Iterator[tuple[Read, Any]]:
    """The places behind a function and what they hold; the names in its code are added to `names`."""
    seen: set[int] = set()
    waiting = [f]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, (torch.Tensor, *_PLAIN)):
            continue
        seen.add(id(value))
        for read in _places_in(value, names):
            with suppress(*_GONE):
                part = read()
                yield read, part
                waiting.append(part)


def _places_in(value: Any, names: set[str]) -> Iterator[Read]:
    """The places within a value."""
    if isinstance(value, FunctionType):
        yield from _places_of_function(value, names)
    elif isinstance(value, (MethodType, functools.partial, property, staticmethod, classmethod)):
        yield from _attributes(value, _PARTS)
    elif isinstance(value, nn.Module):
        hooks = value._forward_hooks, value._forward_pre_hooks, value._backward_hooks, value._backward_pre_hooks
        for container in (value._parameters, value._buffers, value._modules, *hooks):
            yield from _elements(container, container)
        yield from _elements(value.__dict__, value.__dict__.keys() - _INTERNALS)
        yield functools.partial(type, value)
    elif isinstance(value, (ModuleType, type)):
        yield from _places_of_names(value, names)
    elif isinstance(value, dict):
        yield from _elements(value, value)
    elif isinstance(value, (list, tuple, deque)):
        yield from _elements(value, range(len(value)))
    elif _is_users_class(type(value)):
        if hasattr(value, "__dict__"):
            yield from _elements(value.__dict__, value.__dict__)
        yield from _attributes(
            value, (name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ()))
        )
        yield functools.partial(type, value)


#: What methods, partial functions and descriptors are made of.
_PARTS = ("__self__", "__func__", "func", "args", "keywords", "fget")

#: What a module has of PyTorch's own, besides its mode.
_INTERNALS = vars(nn.Module()).keys() - {"training"}


def _elements(container: Any, keys: Iterable[Any]) -> Iterator[Read]:
    yield functools.partial(len, container)
    yield from [functools.partial(getitem, container, key) for key in keys]


def _attributes(value: Any, names: Iterable[str]) -> Iterator[Read]:
    yield from [functools.partial(getattr, value, name) for name in names]


def _places_of_function(function: FunctionType, names: set[str]) -> Iterator[Read]:
    yield from (functools.partial(getattr, cell, "cell_contents") for cell in function.__closure__ or ())
    if not is_users(function.__code__.co_filename):
        return
    yield from _attributes(function, ("__code__", "__defaults__", "__kwdefaults__", "__dict__"))
    of_code = set(_names(function.__code__))
    names |= of_code
    yield from (functools.partial(getitem, function.__globals__, name) for name in of_code)


def _places_of_names(value: ModuleType | type, names: set[str]) -> Iterator[Read]:
    """The attributes of a Python module or a class that code names, and the bases of a class."""
    if isinstance(value, type):
        if not _is_users_class(value):
            return
        yield functools.partial(getattr, value, "__bases__")
    yield from (functools.partial(getitem, vars(value), name) for name in names & vars(value).keys())


def _is_users_class(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    return kind.__module__ != "builtins" and is_users(getattr(module, "__file__", None) or "")


def _names(code: CodeType) -> Iterator[str]:
    """The names of globals and attributes in a function's code, and in the functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
