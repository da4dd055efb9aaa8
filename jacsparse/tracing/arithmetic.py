"""Numbers whose arithmetic is followed: how the numbers that a function passes to PyTorch come from its arguments.

A function that is called with another number often passes that number on, or a factor of it. It runs once on numbers
that note each sum, product and power. Whatever else a function does with a number, as comparing it, rounding it or
calling ``math.sin`` of it, stops that run: its results for other numbers would be unknown.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_UNARY = ("neg", "pos", "abs")
#: What shows a number's value, by which a function may decide what it does.
_SHOWING = (
    *("bool", "int", "float", "complex", "index", "round", "trunc", "floor", "ceil", "hash", "str", "repr", "format"),
    *("eq", "ne", "lt", "le", "gt", "ge", "divmod", "rdivmod", "array", "reduce_ex", "copy", "deepcopy", "getattr"),
)


class NotFollowedError(BaseException):
    """A function does with a number what cannot be followed; no handler of the function's catches it."""

    def __init__(self) -> None:
        # Nobody sees it, unless the function has stored such a number where others use it.
        super().__init__(
            "this number is of one run of a prepared function, which stored it; store float(number) instead"
        )


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

    def call(self, function: Callable[..., Any], *operands: Any) -> FollowedNumber:
        """The result of a function of numbers; the call is noted."""
        value = function(*map(_value, operands))
        if not isinstance(value, float):
            raise NotFollowedError
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
    """A number of an `Arithmetic`: an argument, or a result."""

    __slots__ = ("arithmetic", "place", "value")

    def __init__(self, arithmetic: Arithmetic, place: int, value: float) -> None:
        self.arithmetic, self.place, self.value = arithmetic, place, value

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # A function that asks isinstance goes the way of numbers; one that asks type() may not.
        return float

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        numbers = [value for value in (*args, *kwargs.values()) if type(value) is cls]
        if len(numbers) != 1 or numbers[0].arithmetic.passed is not None:
            raise NotFollowedError
        (number,) = numbers
        number.arithmetic.passed = number
        try:
            return function(*[_value(part) for part in args], **{name: _value(part) for name, part in kwargs.items()})
        finally:
            number.arithmetic.passed = None

    def __array_ufunc__(self, function: Any, method: str, *operands: Any, **options: Any) -> Any:
        if method != "__call__" or options or not all(map(_is_number, operands)):
            return NotImplemented
        return self.arithmetic.call(function, *operands)


def _is_number(value: Any) -> bool:
    return type(value) in (FollowedNumber, int, float) or isinstance(value, (np.floating, np.integer))


def _value(part: Any) -> Any:
    return part.value if type(part) is FollowedNumber else part


def _binary(function: Callable[[Any, Any], Any], reflected: bool) -> Callable[[FollowedNumber, Any], Any]:
    def method(self: FollowedNumber, other: Any) -> Any:
        if not _is_number(other):
            return NotImplemented
        return self.arithmetic.call(function, *((other, self) if reflected else (self, other)))

    return method


def _unary(function: Callable[[Any], Any]) -> Callable[[FollowedNumber], FollowedNumber]:
    return lambda self: self.arithmetic.call(function, self)


def _stop(self: FollowedNumber, *args: Any) -> NoReturn:
    raise NotFollowedError


for _name in _BINARY:
    setattr(FollowedNumber, f"__{_name}__", _binary(getattr(operator, _name), reflected=False))
    setattr(FollowedNumber, f"__r{_name}__", _binary(getattr(operator, _name), reflected=True))
for _name in _UNARY:
    setattr(FollowedNumber, f"__{_name}__", _unary(getattr(operator, _name)))
for _name in _SHOWING:
    setattr(FollowedNumber, f"__{_name}__", _stop)
