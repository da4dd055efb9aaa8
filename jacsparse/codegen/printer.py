"""Elementwise operations printed as C++, for kernels of CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .operand import RELATIONS, Operand, is_number
from .operations import ElementOperation

#: Functions of CUDA's, or of `recurrence/kernels/runs.cuh` where those have fewer instructions.
_FUNCTIONS = {"sigmoid": "sigmoid", "tanh": "squash"}
_PREFIXES = {"neg": "-", "not": "!"}
_INFIXES = {"add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&&", "or": "||", "xor": "!="}
_INFIXES |= {relation: relation for relation in RELATIONS}


@dataclass(frozen=True, eq=False)
class _Text(Operand):
    """A C++ expression."""

    emitter: Printer
    text: str


class Printer:
    """An emitter of operations whose values are C++ expressions in a type ``T``."""

    def expression(self, operation: ElementOperation, operands: list[str]) -> str:
        """What an operation computes of operands, each the name of a variable."""
        if operation.name in _FUNCTIONS:
            return f"{_FUNCTIONS[operation.name]}({operands[0]})"
        result: _Text = operation.emit(self, [_Text(self, each) for each in operands])
        return result.text

    def value(self, x: Any) -> _Text:
        return _Text(self, constant(x)) if is_number(x) else x

    def apply(self, name: str, *operands: Any) -> _Text:
        texts = [self.value(each).text for each in operands]
        if name in _PREFIXES:
            return _Text(self, f"({_PREFIXES[name]}{texts[0]})")
        if name in _INFIXES:
            return _Text(self, f"({texts[0]} {_INFIXES[name]} {texts[1]})")
        return _Text(self, f"{_FUNCTIONS.get(name, name)}({', '.join(texts)})")

    def select(self, condition: Any, x: Any, y: Any) -> _Text:
        condition, x, y = (self.value(each).text for each in (condition, x, y))
        return _Text(self, f"({condition} ? {x} : {y})")


def constant(value: float | bool) -> str:
    """A number as C++ spells it, of type ``T``.

    Examples
    --------
    >>> constant(2), constant(float("-inf")), constant(True)
    ('T(2.0)', 'T(-INFINITY)', 'true')
    """
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(float(value)).replace("inf", "INFINITY").replace("nan", "NAN")
    return f"T({text})"
