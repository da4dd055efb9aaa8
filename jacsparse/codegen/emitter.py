"""Vectors, arrays and loops in LLVM's instructions, written with Python's operators.

Numba's own loops keep no array in registers, and LLVM vectorises no loop whose operands may overlap. So kernels call
functions whose instructions are written here: `emitted` ones become part of the kernel that calls them, and those of a
`MachineModule` are called by their addresses.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.types.containers import BaseTuple
from numba.extending import intrinsic

from ..runtime import compiled_module
from .operand import RELATIONS, ArithmeticOperand

#: The dtypes that are computed in, and their types in memory and in registers.
FLOATS = {torch.float32: ir.FloatType(), torch.float64: ir.DoubleType()}
SINGLE, DOUBLE = FLOATS.values()
TRUTH, BYTE, INT32, INT64 = (ir.IntType(bits) for bits in (1, 8, 32, 64))
#: The memory of addresses.
TABLE = BYTE.as_pointer().as_pointer()
#: Flags of sums that may be vectorised.
_ANY_ORDER = ("reassoc", "contract")

_OF_FLOATS = {"add": "fadd", "sub": "fsub", "mul": "fmul", "div": "fdiv", "neg": "fneg"}
#: Quotients are those of unsigned integers.
_OF_INTEGERS = {"div": "udiv", "and": "and_", "or": "or_", "not": "not_"}
_INTRINSICS = ("copysign", "cos", "exp", "fabs", "fmuladd", "log", "pow", "sin", "sqrt")


class Register(ArithmeticOperand):
    """A number in registers, or a vector of them."""

    def __init__(self, emitter: Emitter, register: Any) -> None:
        self.emitter, self.register = emitter, register

    @property
    def type(self) -> Any:
        return self.register.type

    @property
    def element(self) -> Any:
        """The type of a lane."""
        return _element(self.type)

    @property
    def lanes(self) -> int:
        return self.type.count if isinstance(self.type, ir.VectorType) else 1

    def spread(self, lanes: int) -> Register:
        """A vector with this number in each lane."""
        if lanes == 1:
            return self
        builder, undefined = self.emitter.builder, ir.Constant(vector(self.type, lanes), ir.Undefined)
        first = Register(self.emitter, builder.insert_element(undefined, self.register, INT32(0)))
        return first.shuffled([0] * lanes)

    def shuffled(self, places: Sequence[int]) -> Register:
        """The lanes at some places; of several, a vector."""
        if self.lanes == 1:
            return self
        builder = self.emitter.builder
        if len(places) == 1:
            return Register(self.emitter, builder.extract_element(self.register, INT32(places[0])))
        order = ir.Constant(vector(INT32, len(places)), list(places))
        return Register(
            self.emitter, builder.shuffle_vector(self.register, ir.Constant(self.type, ir.Undefined), order)
        )

    def sum(self) -> Register:
        """The sum of all lanes, half by half."""
        total = self
        while total.lanes > 1:
            half = total.lanes // 2
            total = total.shuffled(range(half)) + total.shuffled(range(half, 2 * half))
        return total

    def any(self) -> Register:
        """Whether a truth value of any lane is so."""
        return self.bits_as(ir.IntType(self.lanes)).differs(0) if self.lanes > 1 else self  # type: ignore[no-any-return]

    def to(self, element: Any, *, signed: bool = False) -> Register:
        """Converted to another type of lanes."""
        kind, builder, before = vector(element, self.lanes), self.emitter.builder, self.element
        if element == before:
            return self
        if element == TRUTH:
            return self.differs(0.0)  # type: ignore[no-any-return]
        if isinstance(element, ir.IntType):
            widen = builder.sext if signed else builder.zext
            convert = widen if element.width > before.width else builder.trunc
        elif isinstance(before, ir.IntType):
            convert = builder.uitofp
        else:
            convert = builder.fpext if element == DOUBLE else builder.fptrunc
        return Register(self.emitter, convert(self.register, kind))

    def bits_as(self, kind: Any) -> Register:
        """The same bits as another type."""
        return Register(self.emitter, self.emitter.builder.bitcast(self.register, kind))


class Variable:
    """A value that changes: LLVM keeps it in registers."""

    def __init__(self, value: Register) -> None:
        self._emitter = value.emitter
        self._place = cgutils.alloca_once(self._emitter.builder, value.type)
        self.value = value

    @property
    def value(self) -> Register:
        return Register(self._emitter, self._emitter.builder.load(self._place))

    @value.setter
    def value(self, value: Register) -> None:
        self._emitter.builder.store(value.register, self._place)


class Array:
    """Elements of one type one after the other: ``memory[place]`` is one, and ``memory[place, lanes]`` a vector."""

    def __init__(
        self, emitter: Emitter, begin: Any, count: Register | None = None, stride: Any = None, *, signed: bool = True
    ) -> None:
        self.emitter, self._begin, self._stride, self._signed = emitter, begin, stride, signed
        self.element, self.count = begin.type.pointee, count

    def pointer(self, place: Any) -> Register:
        """The pointer to a place."""
        return Register(self.emitter, self._pointer(place, 1))

    def _pointer(self, place: Any, lanes: int) -> Any:
        builder, begin = self.emitter.builder, self._begin
        place = self.emitter.constant(place, INT64)
        if self._stride is not None:
            begin = builder.gep(builder.bitcast(begin, BYTE.as_pointer()), [builder.mul(place, self._stride)])
        else:
            begin = builder.gep(begin, [place], inbounds=True)
        return builder.bitcast(begin, vector(self.element, lanes).as_pointer())

    def __getitem__(self, where: Any) -> Register:
        place, lanes = where if isinstance(where, tuple) else (where, 1)
        return self.emitter.loaded(self._pointer(place, lanes))

    def __setitem__(self, where: Any, value: Register) -> None:
        place = where[0] if isinstance(where, tuple) else where
        self.emitter.store(value, self._pointer(place, value.lanes))

    def index(self, place: Any) -> Register:
        """An integer as one of 64 bits."""
        return self[place].to(INT64, signed=self._signed)


class Emitter:
    """Writes LLVM's instructions.

    Parameters
    ----------
    builder : IRBuilder
        Where they are written.
    type : Type, optional
        That of Python numbers where no operand has one.
    """

    def __init__(self, builder: Any, type: Any = None) -> None:
        self.builder, self.type = builder, type

    def constant(self, x: Any, type: Any) -> Any:
        """What holds an operand: a Python number becomes one of a type, in each lane."""
        if isinstance(x, Register):
            return x.register
        element = _element(type)
        if isinstance(element, ir.IntType):
            x = int(bool(x)) if element == TRUTH else int(x)
        else:
            x = torch.tensor(x, dtype=torch.float32, device="cpu").item() if element == SINGLE else float(x)
        return ir.Constant(type, [x] * type.count if isinstance(type, ir.VectorType) else x)

    def value(self, x: Any, type: Any = None) -> Register:
        """An operand in registers."""
        return x if isinstance(x, Register) else Register(self, self.constant(x, self.type if type is None else type))

    def apply(self, name: str, *operands: Any) -> Register:
        """The result of an instruction, or of a function of LLVM's or the C library's."""
        type = next((each.type for each in operands if isinstance(each, Register)), self.type)
        registers = [self.constant(each, type) for each in operands]
        is_float = not isinstance(_element(type), ir.IntType)
        if name in RELATIONS:
            # No NaN is anything but different.
            compare = self.builder.fcmp_unordered if name == "!=" else self.builder.fcmp_ordered
            return Register(self, (compare if is_float else self.builder.icmp_signed)(name, *registers))
        instruction = (_OF_FLOATS if is_float else _OF_INTEGERS).get(name, None if is_float else name)
        if instruction is not None:
            return Register(self, getattr(self.builder, instruction)(*registers))
        if name in _INTRINSICS:
            name = f"llvm.{name}.{_suffix(type)}"
        elif type == SINGLE:
            name += "f"
        return self._called(name, type, registers)

    def _called(self, name: str, type: Any, registers: Sequence[Any]) -> Register:
        kind = ir.FunctionType(type, [each.type for each in registers])
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return Register(self, self.builder.call(function, registers))

    def select(self, condition: Register, x: Any, y: Any) -> Register:
        type = next((each.type for each in (x, y) if isinstance(each, Register)), self.type)
        return Register(self, self.builder.select(condition.register, self.constant(x, type), self.constant(y, type)))

    def multiply_add(self, a: Any, b: Any, total: Register) -> Register:
        """``a * b + total``, rounded once where the processor does so."""
        return self.apply("fmuladd", a, b, total)

    def doubt(self, total: Register, value: Register) -> Register:
        """``total + 0 * value``, a term of a sum in any order, which is no number where a value is not finite."""
        product = self.builder.fmul(value.register, self.constant(0.0, value.type), flags=_ANY_ORDER)
        return Register(self, self.builder.fadd(total.register, product, flags=_ANY_ORDER))

    def loaded(self, pointer: Any) -> Register:
        loaded = self.builder.load(pointer)
        loaded.align = _alignment(loaded.type)
        return Register(self, loaded)

    def store(self, value: Register, pointer: Any) -> None:
        self.builder.store(value.register, pointer).align = _alignment(value.type)

    def lanes_of(self, numbers: Sequence[Any], element: Any) -> Register:
        """A vector of known numbers."""
        known = list(numbers) if len(numbers) > 1 else numbers[0]
        return Register(self, ir.Constant(vector(element, len(numbers)), known))

    def masked(self, pointer: Any, mask: Sequence[bool]) -> Register:
        """The lanes in memory where a mask is true, and zeros; no others are read."""
        kind = pointer.type.pointee
        zeros, alignment = self.constant(0.0, kind), INT32(_alignment(kind))
        arguments = pointer, alignment, self.lanes_of(mask, TRUTH).register, zeros
        return self._called(f"llvm.masked.load.{_suffix(kind)}.p0", kind, arguments)

    def allocated(self, nbytes: int, alignment: int) -> Register:
        """The address of memory on the stack of the thread."""
        memory = self.builder.alloca(BYTE, INT64(nbytes))
        memory.align = alignment
        return Register(self, memory)

    def call(self, function: Any, *arguments: Register) -> None:
        """Call a function of the same module, which takes addresses as pointers of any kind."""
        pairs = zip(arguments, function.args, strict=True)
        self.builder.call(function, [self.builder.bitcast(each.register, argument.type) for each, argument in pairs])

    @contextmanager
    def when(self, condition: Register, *, likely: bool | None = None) -> Iterator[None]:
        """The code's place where a condition is true."""
        with self.builder.if_then(condition.register, likely=likely):
            yield

    def at(self, address: Register, type: Any) -> Any:
        """The pointer to a type at an address."""
        return self.builder.inttoptr(address.register, type.as_pointer())

    @contextmanager
    def each(self, first: Any, last: Any, step: int = 1) -> Iterator[Register]:
        """The code's place for each number from `first` to before `last`."""
        first, last = (self.constant(each, INT64) for each in (first, last))
        with cgutils.for_range_slice(self.builder, first, last, INT64(step)) as (index, _):
            yield Register(self, index)

    def blocks(self, count: Any, widths: Sequence[int]) -> Iterator[tuple[Register, int]]:
        """The code's places for blocks of a row: where each begins, and its width.

        Widths are powers of two, the widest first, and `count` is a multiple of the last one.
        """
        begin: Any = self.value(0, INT64)
        for number, width in enumerate(widths):
            end = count & -width
            if number and widths[number - 1] == 2 * width:
                with self.when(begin < end):
                    yield begin, width
            else:
                with self.each(begin, end, width) as place:
                    yield place, width
            begin = end

    def either(self, condition: Register | bool) -> Iterator[bool]:
        """The code's places where a condition is true, and where not; one where that is known."""
        if isinstance(condition, bool):
            yield condition
            return
        with self.builder.if_else(condition.register) as (then, otherwise):
            with then:
                yield True
            with otherwise:
                yield False

    def cases(self, number: Register, values: Iterable[int]) -> Iterator[int]:
        """The code's places for each value that a number may have, and no other."""
        builder = self.builder
        end, never = (builder.append_basic_block(name) for name in ("end", "never"))
        switch = builder.switch(number.register, never)
        builder.position_at_end(never)
        builder.unreachable()
        for value in values:
            block = builder.append_basic_block(f"case{value}")
            switch.add_case(number.type(value), block)
            builder.position_at_end(block)
            yield value
            builder.branch(end)
        builder.position_at_end(end)


def vector(element: Any, lanes: int) -> Any:
    """The type of a vector, or of its element where it has one lane."""
    return element if lanes == 1 else ir.VectorType(element, lanes)


def _element(type: Any) -> Any:
    return type.element if isinstance(type, ir.VectorType) else type


def _suffix(type: Any) -> str:
    """What LLVM's functions of a type of floats are told apart by."""
    count = f"v{type.count}" if isinstance(type, ir.VectorType) else ""
    return f"{count}f{64 if _element(type) == DOUBLE else 32}"


def _alignment(type: Any) -> int:
    """The bytes of an element, at a multiple of which a vector begins at least."""
    element = _element(type)
    if isinstance(element, ir.IntType):
        return max(1, element.width // 8)
    return 4 if element == SINGLE else 8


def emitted(returns: Any = types.void) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: a function for kernels, whose instructions the decorated function writes wherever it is called.

    That is given an emitter, and the arguments: vectors as `Array`, numbers as `Register`, and tuples of these.

    Parameters
    ----------
    returns : str or type of Numba's
        What it returns: the dtype of the argument of that name, or that type.
    """

    def decorated(function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def typed(typing_context: Any, *arguments: Any) -> Any:
            kinds = [_as_argument(each) for each in arguments]
            result = returns
            if isinstance(returns, str):
                names = function.__code__.co_varnames[1 : 1 + len(kinds)]
                result = dict(zip(names, kinds, strict=True))[returns]
                result = getattr(result, "dtype", result)

            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                emitter = Emitter(builder)
                pairs = zip(kinds, args, strict=True)
                written = function(emitter, *(_argument(emitter, context, kind, each) for kind, each in pairs))
                return context.get_dummy_value() if written is None else written.register

            return result(*kinds), generate

        return intrinsic(prefer_literal=True)(typed)

    return decorated


def _as_argument(kind: Any) -> Any:
    """The type that an argument of one of Numba's types is converted to."""
    if isinstance(kind, types.Boolean | types.BooleanLiteral):
        return types.boolean
    return types.intp if isinstance(kind, types.Integer) else kind


def _argument(emitter: Emitter, context: Any, kind: Any, argument: Any) -> Any:
    if isinstance(kind, BaseTuple):
        values = cgutils.unpack_tuple(emitter.builder, argument)
        return tuple(_argument(emitter, context, *each) for each in zip(kind.types, values, strict=True))
    if not isinstance(kind, types.Array):
        return Register(emitter, argument)
    array = context.make_array(kind)(context, emitter.builder, argument)
    # Equal elements may be one with a stride of 0.
    stride = None if kind.layout == "C" else emitter.builder.extract_value(array.strides, 0)
    signed = getattr(kind.dtype, "signed", False)
    return Array(emitter, array.data, Register(emitter, array.nitems), stride, signed=signed)


@intrinsic
def call(typing_context: Any, address: Any, arguments: Any) -> Any:
    """Call the function at an address with a tuple of numbers; integers become int64."""
    kinds = [types.int64 if isinstance(kind, types.Integer) else kind for kind in arguments.types]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = [
            context.cast(builder, value, given, kind)
            for value, given, kind in zip(cgutils.unpack_tuple(builder, args[1]), arguments.types, kinds, strict=True)
        ]
        function = ir.FunctionType(ir.VoidType(), [value.type for value in values])
        builder.call(builder.inttoptr(args[0], function.as_pointer()), values)
        return context.get_dummy_value()

    return types.void(types.int64, arguments), generate


_NUMBERS = itertools.count()


class MachineModule:
    """Functions of machine code that are compiled together, in a tenth of the time that a kernel of Numba's takes."""

    def __init__(self) -> None:
        self._module, self._prefix = ir.Module("jacsparse"), f"jacsparse_{next(_NUMBERS)}_"

    @contextmanager
    def function(
        self, name: str, kinds: Sequence[Any], *, internal: bool = False
    ) -> Iterator[tuple[Any, Emitter, list[Register]]]:
        """The code's place of a function: the function, what writes it, and its arguments.

        The memories that an internal one takes lie apart.
        """
        function = ir.Function(self._module, ir.FunctionType(ir.VoidType(), kinds), self._prefix + name)
        if internal:
            function.linkage = "internal"
            function.attributes.add("noinline")
            for argument in function.args:
                if isinstance(argument.type, ir.PointerType):
                    argument.add_attribute("noalias")
        emitter = Emitter(ir.IRBuilder(function.append_basic_block()))
        yield function, emitter, [Register(emitter, argument) for argument in function.args]
        emitter.builder.ret_void()

    def compiled(self, functions: Sequence[Any], *, vectorize: bool) -> tuple[object, list[int]]:
        """What holds the machine code, and the addresses of some functions."""
        return compiled_module(self._module, [each.name for each in functions], vectorize=vectorize)
