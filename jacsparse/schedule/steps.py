"""What schedules are made of: products of two values, and moves of one."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import Literal

#: The number of the identity, which is never stored.
IDENTITY = -1

Kind = Literal["mm", "mv", "move"]
Phase = Literal["up", "middle", "down"]


@dataclass(frozen=True)
class Step:
    """One product, or one move of a value.

    Attributes
    ----------
    out : int
        The value that the step computes.
    left, right : int
        The factors; for a ``move``, `right` is the value that moves and `left` is the identity, -1.
    kind : {"mm", "mv", "move"}
        Matrix times matrix, matrix times vector, or no product at all.
    level : int
        Steps of one level do not depend on each other, except in the linear middle, which is one level.
    phase : {"up", "middle", "down"}
        The phase of the scan.
    live : bool
        Whether any gradient depends on the result.
    """

    out: int
    left: int
    right: int
    kind: Kind
    level: int
    phase: Phase
    live: bool = True

    def __str__(self) -> str:
        value = f"{self.right}" if self.kind == "move" else f"{self.left}·{self.right}"
        return f"{self.out} = {value}" if self.live else f"({self.out} = {value})"


def natural(name: str, value: int, least: int) -> int:
    """`value` as an int; ValueError if it is no integer of at least `least`."""
    try:
        number = index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; expected an integer of at least {least}")
    return number
