"""Values that come from outside, checked where their names are still known."""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Integral, Real
from typing import Any

__all__ = ["check_count", "check_images", "check_number", "check_one_of"]


def check_one_of(name: str, value: Any, known: Collection[str]) -> None:
    """Raise ValueError where `value` is none of the names that are known."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(sorted(known))}")


def check_count(name: str, value: Any, least: int = 1) -> int:
    """`value` where it is an integer of at least `least`; else raise ValueError."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}; expected an integer of at least {least}")
    return int(value)


def check_number(name: str, value: Any, low: float, high: float = math.inf, *, open_low: bool = False) -> float:
    """`value` where it is a number in [low, high), or (low, high); else raise ValueError."""
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not low <= number < high or (open_low and number == low):
        raise ValueError(f"{name} is {value!r}; expected a number in {'(' if open_low else '['}{low:g}, {high:g})")
    return number


def check_images(num_classes: Any, in_channels: Any) -> dict[str, Any]:
    """What all networks for images are built with, by name, where each is an integer of at least 1."""
    return {
        "num_classes": check_count("num_classes", num_classes),
        "in_channels": check_count("in_channels", in_channels),
    }
