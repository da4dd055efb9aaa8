"""Numbers whose arithmetic is followed: how the numbers that a function passes to PyTorch come from its arguments.

A function that is called with another number often passes that number on, or a factor of it. It runs once on numbers
that note each sum, product and power. Each of them is a little off: a number that comes of them in another way, as in
PyTorch's backward passes, then differs from that of a plain run. Whatever else a function does with a number, as
comparing it, rounding it or calling ``math.sin`` of it, stops that run: what comes of it could not be told for other
numbers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_UNARY = ("neg", "pos", "abs")
#: What tells a number's value, by which a function may decide what it does.
_TELLING = (
    *("bool", "int", "float", "round", "trunc", "divmod", "rdivmod", "eq", "ne", "lt", "le", "gt", "ge"),
    *("hash", "str", "repr", "format", "reduce_ex"),
)


class NotFollowedError(BaseException):
    """A function does with a number what cannot be followed; handlers of exceptions do not catch it."""


class Arithmetic:
    """The arithmetic that a function does with its numbers, which can be done again with others.

    Parameters
    ----------
    values : sequence of float
        The numbers to begin with.

    Examples
    --------
    >>> arithmetic = Arithmetic([2.0, 3.0])
    >>> a, b = arithmetic.numbers
    >>> c = 1 / (a * b + 2)
    >>> arithmetic.evaluate([1.0, 2.0])[c.place]
    0.25
    """

    def __init__(self, values: Sequence[float]) -> None:
        self._count = len(values)
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.numbers = [FollowedNumber(self, place, value) for place, value in enumerate(values)]
        #: The number that a PyTorch function was called with, while it runs.
        self.passed: FollowedNumber | None = None
        #: Where the numbers that a tape reads come from, by their places on the tape.
        self.sources: dict[int, int] = {}
        #: Whether the function runs; what it has stored of the numbers is as good as plain numbers afterwards.
        self.running = True
        #: Whether it did what cannot be followed, which a bare ``except`` may hide.
        self.refused = False

    def refuse(self) -> NoReturn:
        """Stop the run."""
        self.refused = True
        raise NotFollowedError

    def take(self, place: int, value: float) -> bool:
        """Note that the number at a place of a tape is the one that was passed; False where it is another."""
        if self.passed is None or value != _value(self.passed):
            return False
        self.sources[place] = self.passed.place
        return True

    def call(self, function: Callable[..., Any], *operands: Any) -> Any:
        """The result of a function of numbers; the call is noted."""
        value = function(*map(_value, operands))
        if not self.running:
            return value
        if not isinstance(value, float):
            self.refuse()
        number = FollowedNumber(self, self._count + len(self._calls), value)
        self._calls.append((function, operands))
        return number

    def evaluate(self, values: Sequence[float]) -> list[float]:
        """The numbers to begin with, and the results of all calls, in order; a power may be complex."""
        results = list(values)
        for function, operands in self._calls:
            results.append(function(*[results[o.place] if type(o) is FollowedNumber else o for o in operands]))
        return results


class FollowedNumber:
    """A number of an `Arithmetic`, an argument or a result, with a value near by."""

    # Many functions look whether an argument has a `value`.
    __slots__ = ("_value", "arithmetic", "place")

    def __init__(self, arithmetic: Arithmetic, place: int, value: float) -> None:
        self.arithmetic, self.place, self._value = arithmetic, place, _near(value)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # For isinstance: a function may take another way where it gets no number.
        return float

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        number, *others = [value for value in (*args, *kwargs.values()) if type(value) is cls]
        arithmetic = number.arithmetic
        if arithmetic.running and (others or arithmetic.passed is not None):
            arithmetic.refuse()
        arithmetic.passed = number
        try:
            return function(*map(_value, args), **{name: _value(part) for name, part in kwargs.items()})
        finally:
            arithmetic.passed = None

    def __array_ufunc__(self, function: Any, method: str, *operands: Any, **options: Any) -> Any:
        if not self.arithmetic.running:
            return getattr(function, method)(*map(_value, operands), **options)
        if method != "__call__" or options or not all(map(_is_number, operands)):
            self.arithmetic.refuse()
        return self.arithmetic.call(function, *operands)

    def __array__(self, *args: Any, **options: Any) -> np.ndarray:
        return np.array(_told(self), *args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(_told(self), name)


def _near(value: float) -> float:
    return value * (1 - 2**-10) or 2**-10 if math.isfinite(value) else 1.0


def _is_number(value: Any) -> bool:
    return type(value) in (FollowedNumber, int, float) or isinstance(value, (np.floating, np.integer))


def _value(part: Any) -> Any:
    return part._value if type(part) is FollowedNumber else part


def _told(number: FollowedNumber) -> float:
    """The value, once the function does not run any more."""
    if number.arithmetic.running:
        number.arithmetic.refuse()
    return number._value


def _binary(function: Callable[[Any, Any], Any], reflected: bool) -> Callable[[FollowedNumber, Any], Any]:
    def method(self: FollowedNumber, other: Any) -> Any:
        if not _is_number(other):
            return NotImplemented
        return self.arithmetic.call(function, *((other, self) if reflected else (self, other)))

    return method


def _unary(function: Callable[[Any], Any]) -> Callable[[FollowedNumber], FollowedNumber]:
    return lambda self: self.arithmetic.call(function, self)


def _telling(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(_told(self), name)(*args)


for _name in _BINARY:
    setattr(FollowedNumber, f"__{_name}__", _binary(getattr(operator, _name), reflected=False))
    setattr(FollowedNumber, f"__r{_name}__", _binary(getattr(operator, _name), reflected=True))
for _name in _UNARY:
    setattr(FollowedNumber, f"__{_name}__", _unary(getattr(operator, _name)))
for _name in _TELLING:
    setattr(FollowedNumber, f"__{_name}__", _telling(f"__{_name}__"))
