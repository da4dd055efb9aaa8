"""Numbers that are the same: zeros have signs, and types differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def same_number(one: Any, other: Any) -> bool:
    """Whether two numbers are equal, of one type, zeros with their signs: the inverses of 0.0 and -0.0 differ."""
    return type(one) is type(other) and one == other and (one != 0 or str(one) == str(other))


def same_numbers(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether all of two tuples' numbers are equal, zeros with their signs."""
    return some == others and (0 not in some or all(map(same_number, some, others)))
