"""Kernels that threads call without Python.

A thread that calls a kernel from Python waits for Python's lock before and after each range of rows, which takes longer
than many a range. So the arguments of a call are written once into a table of words, and a few machine instructions
take a range and call the kernel's machine code, until no range is left. Any number of threads may run them at once.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.registry import CPUDispatcher
from numba.core.types.containers import BaseTuple
from numba.np.numpy_support import as_dtype

from .kernels import ALL, FLUSHING, changed_mode, compiled_module

_WORD, _BYTES = ir.IntType(64), ir.IntType(8).as_pointer()
#: A table begins with the next range, how many there are, their bounds, whether a call failed, and the kernel.
_NEXT, _COUNT, _BOUNDS, _FAILED, _KERNEL, _ARGUMENTS = range(6)
#: What a kernel of Numba's returns where it ends without an error.
_FINE = (0, -2)
#: The flags of an array that its type in Numba depends on: C and Fortran order, aligned, writable.
_FLAGS = 0x1 | 0x2 | 0x100 | 0x400
#: What an OpenMP thread runs.
Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@dataclass(frozen=True)
class NativeCall:
    """A kernel that threads call with arguments of some types."""

    name: str
    #: What takes ranges and calls the kernel, whose one argument is a table.
    _entry: Any
    _kernel: int
    _writers: tuple[Callable[[Any], tuple[int, ...]], ...]
    #: What holds the machine code.
    _alive: object

    def __call__(self, parallel: Callable[..., Any], workers: int, ends: np.ndarray, args: Sequence[Any]) -> None:
        """Call the kernel on all ranges between their ends; ``parallel(body, table, workers, 0)`` starts the threads.

        Raises
        ------
        MemoryError
            Where the kernel asks for memory that cannot be had.
        """
        table = array("q", self._words(ends, args))
        parallel(self._entry, table.buffer_info()[0], workers, 0)
        if table[_FAILED]:
            self._fail()

    def _words(self, ends: np.ndarray, args: Sequence[Any]) -> list[int]:
        words = [0, len(ends) - 1, _begin(ends), 0, self._kernel]
        for write, argument in zip(self._writers, args, strict=True):
            if type(argument) is int:
                words.append(argument)
            else:
                words.extend(write(argument))
        return words

    def _fail(self) -> None:
        raise MemoryError(f"{self.name}: there is no memory left for what a kernel computes in between; free some")


class NativeSequence:
    """Calls of kernels one after the other, for which threads are started once.

    Parameters
    ----------
    calls : sequence of (NativeCall, ndarray of int64, sequence)
        Each call with the ends of its ranges and its arguments, which are read now: memory stays where it is.
    barrier : int
        The address of what a thread waits by until all are there.
    """

    def __init__(self, calls: Sequence[tuple[NativeCall, np.ndarray, Sequence[Any]]], barrier: int) -> None:
        self._calls = [call for call, _, _ in calls]
        #: What the tables tell the addresses of.
        self._alive = [args for _, _, args in calls]
        self._ends = [ends for _, ends, _ in calls]
        tables = [call._words(ends, args) for (call, _, args), ends in zip(calls, self._ends, strict=True)]
        begins = np.cumsum([0, *map(len, tables)])[:-1]
        self._tables = np.array(list(itertools.chain(*tables)), dtype=np.int64)
        self._next, self._failed = begins + _NEXT, begins + _FAILED
        words = [len(calls), barrier]
        for call, begin in zip(self._calls, begins, strict=True):
            words += [ctypes.cast(call._entry, ctypes.c_void_p).value or 0, _begin(self._tables) + 8 * int(begin)]
        self._words = np.array(words, dtype=np.int64)
        self._engine, address = _entry_of_sequence()
        self._entry = Body(address)

    def __call__(self, parallel: Callable[..., Any], workers: int) -> None:
        """Run all calls, not from several threads at once.

        Raises
        ------
        MemoryError
            Where a kernel asks for memory that cannot be had; those after it have run all the same.
        """
        self._tables[self._next] = 0
        parallel(self._entry, _begin(self._words), workers, 0)
        if self._tables[self._failed].any():
            failed = self._tables[self._failed].argmax()
            self._tables[self._failed] = 0
            self._calls[failed]._fail()


#: By kernels and the kinds of their arguments.
_CALLS: dict[Any, NativeCall | None] = {}


def native_call(kernel: Any, args: Sequence[Any]) -> NativeCall | None:
    """How `kernel` is called with arguments like these; None where only Python can."""
    if isinstance(kernel, ctypes._CFuncPtr):  # type: ignore[attr-defined]
        return _of_pointer(kernel)
    dispatcher = getattr(kernel, "compiled", kernel)
    flushes = dispatcher is not kernel
    if not isinstance(dispatcher, CPUDispatcher):
        return None
    # Most arguments are integers, and each call of a function takes as long as all else that is done for one.
    key = (dispatcher, flushes, *[int if type(each) is int else _kind(each) for each in args])
    if key not in _CALLS:
        _CALLS[key] = _compiled(dispatcher, flushes, args)
    return _CALLS[key]


def _kind(argument: Any) -> Any:
    """What Numba's type of an argument depends on."""
    if isinstance(argument, np.ndarray):
        return argument.dtype, argument.ndim, argument.flags.num & _FLAGS
    return (type(argument), *map(_kind, argument)) if isinstance(argument, tuple) else type(argument)


def _compiled(dispatcher: Any, flushes: bool, args: Sequence[Any]) -> NativeCall | None:
    kinds = [numba.typeof(argument) for argument in args]
    writers = _writers(kinds)
    if writers is None:
        return None
    dispatcher.compile((types.int64, types.int64, *kinds))
    compiled = dispatcher.overloads[(types.int64, types.int64, *kinds)]
    function, library = compiled.fndesc, compiled.library
    kernel = dispatcher.targetctx.call_conv.get_function_type(function.restype, function.argtypes)
    engine, entry = _entry(kernel, tuple(kinds), flushes)
    address = library.get_pointer_to_function(function.llvm_func_name)
    return NativeCall(dispatcher.__name__, Body(entry), address, writers, (engine, library))


def _writer(kind: Any) -> Callable[[Any], tuple[int, ...]] | None:
    """What gives the words of an argument of that type of Numba's; None where it has none."""
    if isinstance(kind, types.Array):
        if kind.layout == "C":
            return lambda array: (_begin(array), *array.shape)
        return lambda array: (_begin(array), *array.shape, *array.strides)
    if isinstance(kind, (types.Integer, types.Boolean)):
        return lambda number: (int(number),)
    if kind == types.float64:
        return lambda number: struct.unpack("q", struct.pack("d", number))
    if kind == types.float32:
        return lambda number: struct.unpack("i", struct.pack("f", number))
    if isinstance(kind, BaseTuple) and (writers := _writers(kind.types)) is not None:
        return lambda values: sum((write(value) for write, value in zip(writers, values, strict=True)), ())
    return None


def _writers(kinds: Sequence[Any]) -> tuple[Callable[[Any], tuple[int, ...]], ...] | None:
    writers = tuple([write for kind in kinds if (write := _writer(kind)) is not None])
    return writers if len(writers) == len(kinds) else None


def _begin(array: np.ndarray) -> int:
    """The address of an array's elements, in half the time of ``array.ctypes.data``."""
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]


def _of_pointer(kernel: Any) -> NativeCall:
    """How machine code ``(first, last, memory)`` is called; the memory is an object of ctypes."""
    engine, entry = _entry(ir.FunctionType(ir.VoidType(), [_WORD, _WORD, _WORD]), (types.int64,), False)
    address = ctypes.cast(kernel, ctypes.c_void_p).value
    assert address is not None
    return NativeCall("compiled", Body(entry), address, (lambda memory: (ctypes.addressof(memory),),), engine)


@functools.cache
def _entry(kernel: ir.FunctionType, kinds: tuple[Any, ...], flushes: bool) -> tuple[object, int]:
    """Machine code that takes ranges from a table, and calls a kernel of that type on each; and its address."""
    module = ir.Module("jacsparse")
    entry = ir.Function(module, ir.FunctionType(ir.VoidType(), [_WORD.as_pointer()]), "entry")
    begin, take, call, end = (entry.append_basic_block(name) for name in ("begin", "take", "call", "end"))
    builder, (table,) = ir.IRBuilder(begin), entry.args

    def word(place: int) -> Any:
        return builder.gep(table, [_WORD(place)], inbounds=True)

    def pointer(place: int, kind: Any) -> Any:
        return builder.inttoptr(builder.load(word(place)), kind)

    count, bounds, function = (
        builder.load(word(_COUNT)),
        pointer(_BOUNDS, _WORD.as_pointer()),
        pointer(_KERNEL, kernel.as_pointer()),
    )
    status = isinstance(kernel.return_type, ir.IntType)
    # Numba's kernels begin with a place for a result and one for an exception.
    places = [builder.alloca(kind.pointee) for kind in kernel.args[:2]] if status else []
    for each in places:
        builder.store(ir.Constant(each.type.pointee, None), each)
    words = (builder.load(word(place)) for place in itertools.count(_ARGUMENTS))
    read = [value for kind in kinds for value in _argument(builder, kind, words)]
    of_range = len(places) + 2
    arguments = [_as(builder, value, kind) for value, kind in zip(read, kernel.args[of_range:], strict=True)]
    word32 = ir.IntType(32)
    mode = changed_mode(builder, word32(ALL), word32(FLUSHING)) if flushes else None
    builder.branch(take)
    builder.position_at_end(take)
    number = builder.atomic_rmw("add", word(_NEXT), _WORD(1), "monotonic")
    builder.cbranch(builder.icmp_signed("<", number, count), call, end)
    builder.position_at_end(call)
    first, last = (builder.load(builder.gep(bounds, [builder.add(number, _WORD(n))], inbounds=True)) for n in (0, 1))
    returned = builder.call(function, [*places, first, last, *arguments])
    if status:
        fine = [builder.icmp_signed("==", returned, returned.type(value)) for value in _FINE]
        with builder.if_then(builder.not_(builder.or_(*fine)), likely=False):
            builder.store(_WORD(1), word(_FAILED))
    builder.branch(take)
    builder.position_at_end(end)
    if mode is not None:
        changed_mode(builder, word32(0), mode)
    builder.ret_void()
    engine, (address,) = compiled_module(module, [entry.name], optimize=False)
    return engine, address


@functools.cache
def _entry_of_sequence() -> tuple[object, int]:
    """Machine code that a thread runs a sequence by: a count, the barrier, and for each call its code and its table."""
    module, pointer = ir.Module("jacsparse"), _WORD.as_pointer()
    entry = ir.Function(module, ir.FunctionType(ir.VoidType(), [pointer]), "sequence")
    builder, (words,) = ir.IRBuilder(entry.append_basic_block()), entry.args

    def word(place: Any) -> Any:
        return builder.load(builder.gep(words, [place], inbounds=True))

    barrier = builder.inttoptr(word(_WORD(1)), ir.FunctionType(ir.VoidType(), []).as_pointer())
    with cgutils.for_range(builder, word(_WORD(0))) as loop:
        place = builder.add(builder.mul(loop.index, _WORD(2)), _WORD(2))
        function = builder.inttoptr(word(place), ir.FunctionType(ir.VoidType(), [pointer]).as_pointer())
        builder.call(function, [builder.inttoptr(word(builder.add(place, _WORD(1))), pointer)])
        builder.call(barrier, [])
    builder.ret_void()
    engine, (address,) = compiled_module(module, [entry.name], optimize=False)
    return engine, address


def _argument(builder: ir.IRBuilder, kind: Any, words: Iterator[Any]) -> list[Any]:
    """The next argument as Numba's kernels take it, from what `_writer` gives: an array is seven values or more."""
    if isinstance(kind, BaseTuple):
        return [value for each in kind.types for value in _argument(builder, each, words)]
    if not isinstance(kind, types.Array):
        return [next(words)]
    data, *shape = itertools.islice(words, 1 + kind.ndim)
    strides = list(itertools.islice(words, 0 if kind.layout == "C" else kind.ndim))
    count = itemsize = _WORD(as_dtype(kind.dtype).itemsize)
    for size in reversed(shape):
        if kind.layout == "C":
            strides.insert(0, count)
        count = builder.mul(count, size)
    # Nothing owns the array while the kernel runs.
    nothing = ir.Constant(_BYTES, None)
    return [nothing, nothing, builder.sdiv(count, itemsize), itemsize, data, *shape, *strides]


def _as(builder: ir.IRBuilder, value: Any, kind: Any) -> Any:
    """A word as a value of a type of LLVM's."""
    if value.type == kind:
        return value
    if isinstance(kind, ir.PointerType):
        return builder.inttoptr(value, kind)
    if isinstance(kind, ir.FloatType):
        return builder.bitcast(builder.trunc(value, ir.IntType(32)), kind)
    return builder.bitcast(value, kind) if isinstance(kind, ir.DoubleType) else builder.trunc(value, kind)
