"""Elementwise operations as instructions, with PyTorch's results at kinks, ties, infinities and NaN.

Those are of LLVM (`emitter`), of the kernel that interprets loops (`interpreter`), or of CUDA (`printer`): each has
`value`, `apply` and `select`. A function that an operation applies is one of LLVM's or the C library's, and is among
`INSTRUCTIONS` in `kernels`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .emitter import FLOATS, TRUTH
from .operand import is_number

#: Stands for the next operand among an operation's arguments.
OPERAND = object()
#: Costs relative to a sum; those of other names are 1.
COSTS = dict.fromkeys(("div", "sqrt", "rsqrt", "reciprocal"), 5) | dict.fromkeys(
    ("cos", "exp", "log", "pow", "sigmoid", "silu_backward", "sin", "tan", "tanh"), 40
)

#: An `ArithmeticOperand` of an emitter.
Value = Any


@dataclass(frozen=True)
class ElementOperation:
    """An elementwise operation.

    Attributes
    ----------
    name : str
        Its name in ATen, or ``sum``.
    dtype : dtype
        Of its result.
    reads : tuple of dtype
        The dtypes to which its operands are converted.
    arguments : tuple
        What `_EMITTERS` of that name takes: numbers, and `OPERAND` for each operand.
    """

    name: str
    dtype: torch.dtype
    reads: tuple[torch.dtype, ...]
    arguments: tuple[Any, ...]

    @property
    def cost(self) -> int:
        """Its cost relative to a sum of two numbers."""
        return 2 * len(self.reads) if self.name == "sum" else COSTS.get(self.name, 1)

    @property
    def computed_in(self) -> torch.dtype:
        """The dtype that it computes in: truth values where none is a float."""
        return next((dtype for dtype in (*self.reads, self.dtype) if dtype in FLOATS), torch.bool)

    @property
    def type(self) -> Any:
        """The same as a type of LLVM's."""
        return FLOATS.get(self.computed_in, TRUTH)

    def emit(self, emitter: Any, operands: Sequence[Value]) -> Value:
        """Its result by the instructions of an emitter, of operands of the dtypes that it reads."""
        rest = iter(operands if self.name in _OF_NUMBERS else map(emitter.value, operands))
        if self.name == "sum":
            return _sum(emitter, rest, *self.arguments)
        arguments = [next(rest) if each is OPERAND else each for each in self.arguments]
        return _EMITTERS[self.name](emitter, *arguments)


def _sum(b: Any, operands: Iterator[Value], start: Any, terms: Sequence[tuple[Any, int]]) -> Value:
    """A number plus weighted products: for each its weight and the number of its factors."""
    total = next(operands) if start is OPERAND else start
    for weight, factors in terms:
        if weight is OPERAND:
            weight = next(operands)
        product: Any = None if weight in (1.0, -1.0) else weight
        for _ in range(factors):
            factor = b.value(next(operands))
            product = factor if product is None else product * factor
        if is_number(total) and total == 0.0:
            total = -product if weight == -1.0 else product
        else:
            total = total - product if weight == -1.0 else total + product
    return b.value(total)


def _pow(b: Any, self: Any, exponent: Any) -> Value:
    if is_number(self) or not is_number(exponent):
        return b.apply("pow", self, exponent)
    if exponent in (0, 1, 2, 3, -1, -2):
        if not exponent:
            return b.value(1.0)
        power = self
        for _ in range(abs(int(exponent)) - 1):
            power = power * self
        return power if exponent > 0 else 1.0 / power
    if abs(exponent) == 0.5:
        # As PyTorch, unlike a power of minus infinity.
        root = b.apply("sqrt", self)
        return root if exponent > 0 else 1.0 / root
    return b.apply("pow", self, exponent)


def _larger(b: Any, relation: str, x: Any, y: Any) -> Value:
    """The larger, or by another relation the smaller, of two numbers; NaN where one of them is."""
    return b.select(b.apply(relation, x, y) | x.differs(x), x, y)


def _not_nan(b: Any, relation: str, x: Any, y: Any) -> Value:
    """The larger, or the smaller, of two numbers; the other one where one of them is NaN."""
    return b.select(b.apply(relation, x, y) | y.differs(y), x, y)


def _clamp(b: Any, self: Any, min: Any = None, max: Any = None) -> Value:
    for relation, bound in (("<", min), (">", max)):
        if bound is not None:
            beyond = b.apply(relation, self, bound)
            # PyTorch's result is NaN where a bound is.
            if not is_number(bound) or math.isnan(bound):
                beyond = beyond | b.value(bound).differs(bound)
            self = b.select(beyond, bound, self)
    return self


def _sign(b: Any, self: Any) -> Value:
    return b.select(self > 0.0, 1.0, 0.0) - b.select(self < 0.0, 1.0, 0.0)


def _sigmoid(b: Any, self: Any) -> Value:
    return 1.0 / (1.0 + b.apply("exp", -self))


def _silu_backward(b: Any, grad_output: Any, self: Any) -> Value:
    sigmoid = _sigmoid(b, self)
    return grad_output * sigmoid * (1.0 + self * (1.0 - sigmoid))


def _comparison(relation: str) -> Callable[..., Value]:
    return lambda b, self, other: b.apply(relation, self, other)


def _scaled(b: Any, x: Any, alpha: Any) -> Any:
    return x if alpha == 1 else b.value(x) * alpha


#: By the names of operators without their overloads, with the arguments that they take of ATen's.
_EMITTERS: dict[str, Callable[..., Value]] = {
    "abs": lambda b, self: b.apply("fabs", self),
    "add": lambda b, self, other, alpha=1: self + _scaled(b, other, alpha),
    "bitwise_and": lambda b, self, other: b.value(self) & other,
    "bitwise_not": lambda b, self: ~self,
    "bitwise_or": lambda b, self, other: b.value(self) | other,
    "bitwise_xor": lambda b, self, other: b.value(self) ^ other,
    "clamp": _clamp,
    "clamp_max": lambda b, self, max: _clamp(b, self, max=max),
    "clamp_min": lambda b, self, min: _clamp(b, self, min=min),
    "cos": lambda b, self: b.apply("cos", self),
    "div": lambda b, self, other: self / other,
    "eq": _comparison("=="),
    "exp": lambda b, self: b.apply("exp", self),
    "fmax": lambda b, self, other: _not_nan(b, ">=", self, other),
    "fmin": lambda b, self, other: _not_nan(b, "<=", self, other),
    "ge": _comparison(">="),
    "gt": _comparison(">"),
    "isnan": lambda b, self: self.differs(self),
    "le": _comparison("<="),
    # Of the result, whose sign is the input's: no negative slope is taken there.
    "leaky_relu_backward": lambda b, grad_output, self, negative_slope, self_is_result: b.select(
        self > 0.0, grad_output, grad_output * negative_slope
    ),
    "log": lambda b, self: b.apply("log", self),
    "logical_and": lambda b, self, other: self & other,
    "logical_not": lambda b, self: ~self,
    "logical_or": lambda b, self, other: self | other,
    "logical_xor": lambda b, self, other: self ^ other,
    "lt": _comparison("<"),
    "masked_fill": lambda b, self, mask, value: b.select(mask, value, self),
    "maximum": lambda b, self, other: _larger(b, ">", self, other),
    "minimum": lambda b, self, other: _larger(b, "<", self, other),
    "mul": lambda b, self, other: self * other,
    "ne": _comparison("!="),
    "neg": lambda b, self: -self,
    "pow": _pow,
    "reciprocal": lambda b, self: 1.0 / self,
    "relu": lambda b, self: _larger(b, ">", self, 0.0),
    "rsqrt": lambda b, self: 1.0 / b.apply("sqrt", self),
    "rsub": lambda b, self, other, alpha=1: b.value(other) - _scaled(b, self, alpha),
    "sgn": _sign,
    "sigmoid": _sigmoid,
    "sigmoid_backward": lambda b, grad_output, output: grad_output * ((1.0 - output) * output),
    "sign": _sign,
    "silu_backward": _silu_backward,
    "sin": lambda b, self: b.apply("sin", self),
    "sqrt": lambda b, self: b.apply("sqrt", self),
    "square": lambda b, self: self * self,
    "sub": lambda b, self, other, alpha=1: self - _scaled(b, other, alpha),
    "tan": lambda b, self: b.apply("tan", self),
    "tanh": lambda b, self: b.apply("tanh", self),
    # Near 1, a rounded square would be most of the difference from 1.
    "tanh_backward": lambda b, grad_output, output: grad_output * ((1.0 - output) * (1.0 + output)),
    "threshold_backward": lambda b, grad_output, self, threshold: b.select(self <= threshold, 0.0, grad_output),
    "where": lambda b, condition, self, other: b.select(condition, self, other),
    "_to_copy": lambda b, self: self,
}
_COMPARISONS = ("eq", "ge", "gt", "isnan", "le", "lt", "ne")
#: Those to which some numbers are not as others.
_OF_NUMBERS = ("_to_copy", "pow", "sum")
_MASKS = ("condition", "mask")
#: Those whose results jump where an operand changes by a rounding.
_JUMPS = ("eq", "ge", "gt", "le", "leaky_relu_backward", "lt", "ne", "sgn", "sign", "threshold_backward")


def is_operation(name: str) -> bool:
    """Whether there is an operation for an elementwise operator of ATen, by its name."""
    return name in _EMITTERS


def has_jumps(name: str | None) -> bool:
    """Whether an operation's result jumps where an operand changes by a rounding."""
    return name in _JUMPS


def operation_of(
    overload: Any, arguments: Mapping[str, Any], dtype: torch.dtype
) -> tuple[ElementOperation, list[str]] | None:
    """The operation that an elementwise call is, and the names of its operands; None where there is none.

    Parameters
    ----------
    overload : OpOverload
        The operator.
    arguments : mapping
        By their names in its schema, the arguments that are not left out: numbers, and tensors for their dtypes.
    dtype : dtype
        Of its result.
    """
    name = overload.overloadpacket.__name__.removesuffix("_")
    emitter = _EMITTERS.get(name)
    if emitter is None or overload.namespace != "aten" or (dtype not in FLOATS and dtype != torch.bool):
        return None
    defaults = {argument.name: argument.default_value for argument in overload._schema.arguments}
    taken = list(inspect.signature(emitter).parameters)[1:]
    if name != "_to_copy" and any(n not in taken and value != defaults[n] for n, value in arguments.items()):
        return None
    read = dtype
    if name in _COMPARISONS:
        read = _promoted([arguments[n] for n in taken])
        if read not in FLOATS:
            return None
    elif dtype == torch.bool and not name.startswith(("bitwise", "logical", "_to_copy", "where")):
        return None
    operands, reads, others = list[str](), list[torch.dtype](), list[Any]()
    for argument in taken:
        value = arguments.get(argument, defaults.get(argument))
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor:
            operands.append(argument)
            mask = argument in _MASKS
            if mask and value.dtype != torch.bool:
                return None
            reads.append(torch.bool if mask else read)
        elif value is not None and not isinstance(value, (bool, int, float)):
            return None
        others.append(OPERAND if is_tensor else value)
    return ElementOperation(name, dtype, tuple(reads), tuple(others)), operands


def _promoted(arguments: Sequence[Any]) -> torch.dtype:
    if len(arguments) == 1:
        return arguments[0].dtype  # type: ignore[no-any-return]
    return torch.result_type(*arguments)
