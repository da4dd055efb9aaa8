"""Elementwise operations printed as C++, for kernels of CUDA."""

from __future__ import annotations

from typing import Any

from .operations import ElementOperation, is_number

#: Functions of CUDA's, or of `recurrence/kernels/runs.cuh` where those have fewer instructions.
_FUNCTIONS = {"sigmoid": "sigmoid", "tanh": "squash"}


class Printer:
    """An emitter of operations whose values are C++ expressions in a type ``T``."""

    def __init__(self) -> None:
        #: Connectives of truth values are those of its own, as LLVM's are of a builder.
        self.builder = self

    def expression(self, operation: ElementOperation, operands: list[str]) -> str:
        """What an operation computes of operands, each the name of a variable."""
        if operation.name in _FUNCTIONS:
            return f"{_FUNCTIONS[operation.name]}({operands[0]})"
        return self.value(operation.emit(self, operands))

    def value(self, x: Any) -> str:
        return constant(x) if is_number(x) else str(x)

    def add(self, x: Any, y: Any) -> str:
        return self._joined("+", x, y)

    def sub(self, x: Any, y: Any) -> str:
        return self._joined("-", x, y)

    def mul(self, x: Any, y: Any) -> str:
        return self._joined("*", x, y)

    def div(self, x: Any, y: Any) -> str:
        return self._joined("/", x, y)

    def neg(self, x: Any) -> str:
        return f"(-{self.value(x)})"

    def compare(self, relation: str, x: Any, y: Any) -> str:
        return self._joined(relation, x, y)

    def is_nan(self, x: Any) -> str:
        return self._joined("!=", x, x)

    def select(self, condition: str, x: Any, y: Any) -> str:
        return f"({condition} ? {self.value(x)} : {self.value(y)})"

    def call(self, name: str, *operands: Any) -> str:
        return f"{_FUNCTIONS.get(name, name)}({', '.join(map(self.value, operands))})"

    def from_truth(self, condition: str) -> str:
        return self.select(condition, 1.0, 0.0)

    def and_(self, x: Any, y: Any) -> str:
        return self._joined("&&", x, y)

    def or_(self, x: Any, y: Any) -> str:
        return self._joined("||", x, y)

    def xor(self, x: Any, y: Any) -> str:
        return self._joined("!=", x, y)

    def not_(self, x: Any) -> str:
        return f"(!{self.value(x)})"

    def _joined(self, symbol: str, x: Any, y: Any) -> str:
        return f"({self.value(x)} {symbol} {self.value(y)})"


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
