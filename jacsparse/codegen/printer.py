"""Elementwise operations printed as C++, for kernels of CUDA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .operand import RELATIONS, ArithmeticOperand, is_number
from .operations import ElementOperation

_PREFIXES = {"neg": "-", "not": "!"}
_INFIXES = {"add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&&", "or": "||", "xor": "!="}
_INFIXES |= {relation: relation for relation in RELATIONS}


@dataclass(frozen=True, eq=False)
class _Text(ArithmeticOperand):
    """A C++ expression."""

    emitter: Printer
    text: str


@dataclass(frozen=True, eq=False)
class Printer:
    """An emitter of operations whose values are C++ expressions.

    Attributes
    ----------
    type : str
        The type that they compute in.
    functions : mapping of str to str
        By the names of operations, functions other than CUDA's own.
    """

    type: str = "T"
    functions: Mapping[str, str] = field(default_factory=dict)

    def expression(self, operation: ElementOperation, operands: Sequence[str | float | bool]) -> str:
        """What an operation computes of operands, each the name of a variable, or a number."""
        if operation.name in self.functions:
            return f"{self.functions[operation.name]}({operands[0]})"
        texts = [_Text(self, each) if isinstance(each, str) else each for each in operands]
        return self.value(operation.emit(self, texts)).text

    def value(self, x: Any) -> _Text:
        return _Text(self, constant(x, self.type)) if is_number(x) else x

    def apply(self, name: str, *operands: Any) -> _Text:
        texts = [self.value(each).text for each in operands]
        if name in _PREFIXES:
            return _Text(self, f"({_PREFIXES[name]}{texts[0]})")
        if name in _INFIXES:
            return _Text(self, f"({texts[0]} {_INFIXES[name]} {texts[1]})")
        return _Text(self, f"{self.functions.get(name, name)}({', '.join(texts)})")

    def select(self, condition: Any, x: Any, y: Any) -> _Text:
        condition, x, y = (self.value(each).text for each in (condition, x, y))
        return _Text(self, f"({condition} ? {x} : {y})")


def constant(value: float | bool, type: str = "T") -> str:
    """A number of a type, as C++ spells it.

    Examples
    --------
    >>> constant(2), constant(float("-inf")), constant(True)
    ('T(2.0)', 'T(-INFINITY)', 'true')
    """
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(float(value)).replace("inf", "INFINITY").replace("nan", "NAN")
    return f"{type}({text})"
