"""A cache of prepared Jacobians, which each call of `jacobian` follows: a result is of what the function computes now.

The key is the code that runs. It only finds candidates: each of them is followed, which compares the calls of this very
run with those that it was prepared for, and takes all tensors and numbers from the run.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from ..patterns import UnsupportedOperatorError
from ..spgemm import SparseJacobian
from .arguments import Arguments, FlatFunction
from .linearised import linearised
from .prepared import PreparedJacobian, tape_of
from .products import NotFoldableError, Products


class RecentPrepared:
    """The prepared Jacobians of one code, by the form of the arguments; None where none can be prepared."""

    #: The most prepared Jacobians, and the most failed preparations of one form of arguments.
    most = 8

    def __init__(self) -> None:
        self._prepared: list[PreparedJacobian] = []
        self._failures: OrderedDict[Hashable, int] = OrderedDict()
        self._lock = threading.RLock()

    def jacobian(self, f: Callable[..., Any], arguments: Arguments) -> SparseJacobian | None:
        """The Jacobian by a prepared one that is of this run's calls; None where there is none."""
        with self._lock:
            for place, prepared in enumerate(self._prepared):
                values = prepared.followed_values(f, arguments)
                if values is not None:
                    self._prepared.insert(0, self._prepared.pop(place))
                    return SparseJacobian(prepared.pattern, values)
        return None

    def add(self, f: Callable[..., Any], arguments: Arguments) -> None:
        """Prepare the Jacobian for later calls, where folding its products applies."""
        form = repr(arguments.form())
        with self._lock:
            if self._failures.get(form, 0) >= 2:
                return
            try:
                self._prepared.insert(0, _folded(f, arguments))
                del self._prepared[self.most :]
            except (UnsupportedOperatorError, NotFoldableError):
                self._failures[form] = self._failures.get(form, 0) + 1
                while len(self._failures) > self.most:
                    self._failures.popitem(last=False)


def _folded(f: Callable[..., Any], arguments: Arguments) -> PreparedJacobian:
    x, function = arguments.flat(), FlatFunction(f, arguments)
    tape = tape_of(function, x)
    if tape.output is None or any("writes" in effect or "draws" in effect for effect in tape.effects.values()):
        raise NotFoldableError(f"its calls have effects: {tape.effects}")
    return PreparedJacobian(f, arguments, tape, Products(linearised(tape, x)))


#: The caches by code, for the codes that were used last.
_RECENT: OrderedDict[Hashable, RecentPrepared] = OrderedDict()
_MOST = 32


def recent_prepared(f: Callable[..., Any]) -> RecentPrepared:
    """The cache of the code that a function runs."""
    key = _code_of(f)
    entry = _RECENT.setdefault(key, RecentPrepared())
    _RECENT.move_to_end(key)
    while len(_RECENT) > _MOST:
        _RECENT.popitem(last=False)
    return entry


def _code_of(f: Any) -> Hashable:
    """What tells functions apart that probably make other calls."""
    if isinstance(f, functools.partial):
        return _code_of(f.func)
    if isinstance(f, MethodType):
        return _code_of(f.__func__)
    if isinstance(f, FunctionType):
        return f.__code__
    if isinstance(f, nn.Module):
        return type(f), tuple(map(type, f.modules()))
    return type(f)
