"""Checks of arguments, with errors that name them."""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Integral, Real
from typing import Any


def check_one_of(name: str, value: Any, choices: Collection[str]) -> None:
    """Raise ValueError where `value` is none of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(sorted(choices))}")


def check_count(name: str, value: Any, least: int = 1) -> int:
    """Return an integer of at least `least`; raise ValueError for any other value."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}; expected an integer of at least {least}")
    return int(value)


def check_number(name: str, value: Any, low: float, high: float = math.inf, *, open_low: bool = False) -> float:
    """Return a number in [low, high), or (low, high); raise ValueError for any other value."""
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not low <= number < high or (open_low and number == low):
        raise ValueError(f"{name} is {value!r}; expected a number in {'(' if open_low else '['}{low:g}, {high:g})")
    return number


def check_counts(**values: Any) -> dict[str, Any]:
    """Return integers of at least 1, by name; raise ValueError for any other value."""
    return {name: check_count(name, value) for name, value in values.items()}
