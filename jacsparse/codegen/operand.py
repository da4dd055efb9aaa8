"""Python's operators as instructions, whatever these are written in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

RELATIONS = ("<", "<=", ">", ">=", "==", "!=")


def _applied(name: str) -> Callable[..., Any]:
    return lambda *operands: operands[0].emitter.apply(name, *operands)


def _reflected(name: str) -> Callable[..., Any]:
    return lambda self, other: self.emitter.apply(name, other, self)


class ArithmeticOperand:
    """What instructions compute with: a Python operator on it is an instruction of its emitter.

    The other operand may be a Python number. Equality remains that of objects; see `equals`.
    """

    emitter: Any
    __add__, __radd__ = _applied("add"), _reflected("add")
    __sub__, __rsub__ = _applied("sub"), _reflected("sub")
    __mul__, __rmul__ = _applied("mul"), _reflected("mul")
    __truediv__, __rtruediv__ = _applied("div"), _reflected("div")
    __floordiv__, __neg__, __invert__ = _applied("div"), _applied("neg"), _applied("not")
    __and__, __or__, __xor__ = _applied("and"), _applied("or"), _applied("xor")
    __lt__, __le__, __gt__, __ge__ = (_applied(relation) for relation in ("<", "<=", ">", ">="))
    equals, differs = _applied("=="), _applied("!=")


def is_number(x: Any) -> bool:
    """Whether an operand is a Python number, and not in registers."""
    return isinstance(x, (bool, int, float))
