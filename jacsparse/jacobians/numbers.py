"""Numbers that are the same: zeros have signs, and types differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def same_numbers(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether all of two tuples' numbers are equal, zeros with their signs: the inverses of 0.0 and -0.0 differ."""
    return some == others and (0 not in some or repr(some) == repr(others))
