"""Elementwise operations as instructions, with PyTorch's results at kinks, ties, infinities and NaN.

Those are of LLVM (`machine_code`), or of the kernel that interprets loops (`interpreter`). A function that an operation
calls is one of LLVM's or the C library's, and has an opcode in `kernels`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from llvmlite import ir

#: The dtypes that operations compute in, and their types in memory and in registers.
FLOATS = {torch.float32: ir.FloatType(), torch.float64: ir.DoubleType()}
TRUTH = ir.IntType(1)
#: Stands for the next operand among an operation's arguments.
OPERAND = object()
#: Costs relative to a sum; those of other names are 1.
COSTS = dict.fromkeys(("div", "sqrt", "rsqrt", "reciprocal"), 5) | dict.fromkeys(
    ("cos", "exp", "log", "pow", "sigmoid", "silu_backward", "sin", "tan", "tanh"), 40
)

#: A value in registers: an `ir.Value`, or what another emitter makes of instructions.
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
    def type(self) -> ir.Type:
        """The type that it computes in."""
        floats = [dtype for dtype in (*self.reads, self.dtype) if dtype in FLOATS]
        return FLOATS[floats[0]] if floats else TRUTH

    def emit(self, emitter: Any, operands: Sequence[Value]) -> Value:
        """Its result by the instructions of an emitter, of operands of the dtypes that it reads."""
        rest = iter(operands)
        if self.name == "sum":
            return _sum(emitter, rest, *self.arguments)
        arguments = [next(rest) if each is OPERAND else each for each in self.arguments]
        return _EMITTERS[self.name](emitter, *arguments)


class Emitter:
    """Instructions of LLVM on numbers of one type, of which any may be a Python number."""

    def __init__(self, builder: ir.IRBuilder, type: ir.Type) -> None:
        self.builder, self.type = builder, type

    def value(self, x: Any) -> Value:
        return constant(x, self.type) if is_number(x) else x

    def add(self, x: Any, y: Any) -> Value:
        return self.builder.fadd(self.value(x), self.value(y))

    def sub(self, x: Any, y: Any) -> Value:
        return self.builder.fsub(self.value(x), self.value(y))

    def mul(self, x: Any, y: Any) -> Value:
        return self.builder.fmul(self.value(x), self.value(y))

    def div(self, x: Any, y: Any) -> Value:
        return self.builder.fdiv(self.value(x), self.value(y))

    def neg(self, x: Any) -> Value:
        return self.builder.fneg(self.value(x))

    def compare(self, relation: str, x: Any, y: Any) -> Value:
        """Whether two numbers are so; no NaN is anything but different."""
        compare = self.builder.fcmp_unordered if relation == "!=" else self.builder.fcmp_ordered
        return compare(relation, self.value(x), self.value(y))

    def is_nan(self, x: Any) -> Value:
        return self.builder.fcmp_unordered("uno", self.value(x), self.value(x))

    def select(self, condition: Value, x: Any, y: Any) -> Value:
        return self.builder.select(condition, self.value(x), self.value(y))

    def call(self, name: str, *operands: Any) -> Value:
        """A function of LLVM's, or of the C library's."""
        operands = tuple(self.value(each) for each in operands)
        kind = ir.FunctionType(self.type, [self.type] * len(operands))
        if name in _INTRINSICS:
            name = f"llvm.{name}.{'f64' if self.type == FLOATS[torch.float64] else 'f32'}"
        elif self.type != FLOATS[torch.float64]:
            name += "f"
        module = self.builder.module
        function = module.globals.get(name) or ir.Function(module, kind, name)
        return self.builder.call(function, operands)

    def from_truth(self, condition: Value) -> Value:
        return self.select(condition, 1.0, 0.0)


_INTRINSICS = ("cos", "exp", "fabs", "log", "pow", "sin", "sqrt")


def is_number(x: Any) -> bool:
    """Whether an operand is a Python number, and not in registers."""
    return isinstance(x, (bool, int, float))


def constant(value: Any, type: ir.Type) -> Value:
    """A number of a type in registers."""
    if type == TRUTH:
        return ir.Constant(TRUTH, int(bool(value)))
    if type == FLOATS[torch.float32]:
        value = torch.tensor(value, dtype=torch.float32, device="cpu").item()
    return ir.Constant(type, float(value))


def converted(builder: ir.IRBuilder, value: Any, dtype: torch.dtype) -> Any:
    """A value in registers in another dtype; a number as it is."""
    if not isinstance(value, ir.Value):
        return constant(value, TRUTH) if dtype == torch.bool else value
    if dtype == torch.bool:
        return value if value.type == TRUTH else builder.fcmp_unordered("!=", value, ir.Constant(value.type, 0.0))
    type = FLOATS[dtype]
    if value.type == TRUTH:
        return builder.uitofp(value, type)
    if value.type == type:
        return value
    return builder.fpext(value, type) if type == FLOATS[torch.float64] else builder.fptrunc(value, type)


def _sum(b: Emitter, operands: Iterator[Value], start: Any, terms: Sequence[tuple[Any, int]]) -> Value:
    """A number plus weighted products: for each its weight and the number of its factors."""
    total = next(operands) if start is OPERAND else start
    for weight, factors in terms:
        if weight is OPERAND:
            weight = next(operands)
        product = None if weight in (1.0, -1.0) else weight
        for _ in range(factors):
            factor = next(operands)
            product = factor if product is None else b.mul(product, factor)
        if total == 0.0:
            total = b.neg(product) if weight == -1.0 else product
        else:
            total = b.sub(total, product) if weight == -1.0 else b.add(total, product)
    return b.value(total)


def _pow(b: Emitter, self: Any, exponent: Any) -> Value:
    if is_number(self) or not is_number(exponent):
        return b.call("pow", self, exponent)
    if exponent in (0, 1, 2, 3, -1, -2):
        if not exponent:
            return b.value(1.0)
        power = self
        for _ in range(abs(int(exponent)) - 1):
            power = b.mul(power, self)
        return power if exponent > 0 else b.div(1.0, power)
    if abs(exponent) == 0.5:
        # As PyTorch, unlike a power of minus infinity.
        root = b.call("sqrt", self)
        return root if exponent > 0 else b.div(1.0, root)
    return b.call("pow", self, exponent)


def _larger(b: Emitter, relation: str, x: Any, y: Any) -> Value:
    """The larger, or by another relation the smaller, of two numbers; NaN where one of them is."""
    return b.select(b.builder.or_(b.compare(relation, x, y), b.is_nan(x)), x, y)


def _not_nan(b: Emitter, relation: str, x: Any, y: Any) -> Value:
    """The larger, or the smaller, of two numbers; the other one where one of them is NaN."""
    return b.select(b.builder.or_(b.compare(relation, x, y), b.is_nan(y)), x, y)


def _clamp(b: Emitter, self: Any, min: Any = None, max: Any = None) -> Value:
    for relation, bound in (("<", min), (">", max)):
        if bound is not None:
            beyond = b.compare(relation, self, bound)
            # PyTorch's result is NaN where a bound is.
            if not isinstance(bound, (int, float)) or math.isnan(bound):
                beyond = b.builder.or_(beyond, b.is_nan(bound))
            self = b.select(beyond, bound, self)
    return self


def _sign(b: Emitter, self: Any) -> Value:
    return b.sub(b.from_truth(b.compare(">", self, 0.0)), b.from_truth(b.compare("<", self, 0.0)))


def _sigmoid(b: Emitter, self: Any) -> Value:
    return b.div(1.0, b.add(1.0, b.call("exp", b.neg(self))))


def _silu_backward(b: Emitter, grad_output: Any, self: Any) -> Value:
    sigmoid = _sigmoid(b, self)
    return b.mul(b.mul(grad_output, sigmoid), b.add(1.0, b.mul(self, b.sub(1.0, sigmoid))))


def _comparison(relation: str) -> Callable[..., Value]:
    return lambda b, self, other: b.compare(relation, self, other)


def _scaled(b: Emitter, x: Any, alpha: Any) -> Any:
    return x if alpha == 1 else b.mul(x, alpha)


#: By the names of operators without their overloads, with the arguments that they take of ATen's.
_EMITTERS: dict[str, Callable[..., Value]] = {
    "abs": lambda b, self: b.call("fabs", self),
    "add": lambda b, self, other, alpha=1: b.add(self, _scaled(b, other, alpha)),
    "bitwise_and": lambda b, self, other: b.builder.and_(b.value(self), b.value(other)),
    "bitwise_not": lambda b, self: b.builder.not_(self),
    "bitwise_or": lambda b, self, other: b.builder.or_(b.value(self), b.value(other)),
    "bitwise_xor": lambda b, self, other: b.builder.xor(b.value(self), b.value(other)),
    "clamp": _clamp,
    "clamp_max": lambda b, self, max: _clamp(b, self, max=max),
    "clamp_min": lambda b, self, min: _clamp(b, self, min=min),
    "cos": lambda b, self: b.call("cos", self),
    "div": lambda b, self, other: b.div(self, other),
    "eq": _comparison("=="),
    "exp": lambda b, self: b.call("exp", self),
    "fmax": lambda b, self, other: _not_nan(b, ">=", self, other),
    "fmin": lambda b, self, other: _not_nan(b, "<=", self, other),
    "ge": _comparison(">="),
    "gt": _comparison(">"),
    "isnan": lambda b, self: b.is_nan(self),
    "le": _comparison("<="),
    # Of the result, whose sign is the input's: no negative slope is taken there.
    "leaky_relu_backward": lambda b, grad_output, self, negative_slope, self_is_result: b.select(
        b.compare(">", self, 0.0), grad_output, b.mul(grad_output, negative_slope)
    ),
    "log": lambda b, self: b.call("log", self),
    "logical_and": lambda b, self, other: b.builder.and_(self, other),
    "logical_not": lambda b, self: b.builder.not_(self),
    "logical_or": lambda b, self, other: b.builder.or_(self, other),
    "logical_xor": lambda b, self, other: b.builder.xor(self, other),
    "lt": _comparison("<"),
    "masked_fill": lambda b, self, mask, value: b.select(mask, value, self),
    "maximum": lambda b, self, other: _larger(b, ">", self, other),
    "minimum": lambda b, self, other: _larger(b, "<", self, other),
    "mul": lambda b, self, other: b.mul(self, other),
    "ne": _comparison("!="),
    "neg": lambda b, self: b.neg(self),
    "pow": _pow,
    "reciprocal": lambda b, self: b.div(1.0, self),
    "relu": lambda b, self: _larger(b, ">", self, 0.0),
    "rsqrt": lambda b, self: b.div(1.0, b.call("sqrt", self)),
    "rsub": lambda b, self, other, alpha=1: b.sub(other, _scaled(b, self, alpha)),
    "sgn": _sign,
    "sigmoid": _sigmoid,
    "sigmoid_backward": lambda b, grad_output, output: b.mul(grad_output, b.mul(b.sub(1.0, output), output)),
    "sign": _sign,
    "silu_backward": _silu_backward,
    "sin": lambda b, self: b.call("sin", self),
    "sqrt": lambda b, self: b.call("sqrt", self),
    "square": lambda b, self: b.mul(self, self),
    "sub": lambda b, self, other, alpha=1: b.sub(self, _scaled(b, other, alpha)),
    "tan": lambda b, self: b.call("tan", self),
    "tanh": lambda b, self: b.call("tanh", self),
    # Near 1, a rounded square would be most of the difference from 1.
    "tanh_backward": lambda b, grad_output, output: b.mul(grad_output, b.mul(b.sub(1.0, output), b.add(1.0, output))),
    "threshold_backward": lambda b, grad_output, self, threshold: b.select(
        b.compare("<=", self, threshold), 0.0, grad_output
    ),
    "where": lambda b, condition, self, other: b.select(condition, self, other),
    "_to_copy": lambda b, self: self,
}
_COMPARISONS = ("eq", "ge", "gt", "isnan", "le", "lt", "ne")
_MASKS = ("condition", "mask")


def is_operation(name: str) -> bool:
    """Whether there is an operation for an elementwise operator of ATen, by its name."""
    return name in _EMITTERS


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
