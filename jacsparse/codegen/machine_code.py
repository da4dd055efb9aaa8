"""Loops of fused operations as machine code, by the compiler that Numba brings."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from llvmlite import ir

from ..runtime import SIMD, compiled_module, run_rows
from .loops import OUT, FusedLoop, Place
from .operations import FLOATS, TRUTH, Emitter, constant, converted
from .tiles import Scratch

_INDEX, _BYTE = ir.IntType(64), ir.IntType(8)
_NUMBERS = itertools.count()
#: Work of each expression from which vectorised loops are worth the time of their compilation.
MUCH = 500
_FAST = ("reassoc", "contract")
#: The memory of where the runs of each tile begin, of each loop that has tiles.
BOUNDS = "bounds of tiles"


class MachineCode:
    """Machine code of loops.

    A call takes a table of addresses: those of `memories` in their order, and then a place for the answer, which is set
    where a result is not finite. The memory of a tile is on the stack of the thread that computes it.
    """

    def __init__(self, loops: Sequence[FusedLoop], scratch: Mapping[Scratch, int], dtype: torch.dtype) -> None:
        self._dtype, self._scratch = dtype, scratch
        self.memories: list[Any] = []
        #: The tables of runs, which are memories too.
        self.runs: dict[str, np.ndarray] = {}
        module, prefix = ir.Module("jacsparse"), f"jacsparse_{next(_NUMBERS)}_"
        places = [self._places(number, loop) for number, loop in enumerate(loops)]
        bodies = [
            self._body(module, f"{prefix}body_{number}", loop, memories)
            for number, (loop, memories) in enumerate(zip(loops, places, strict=True))
        ]
        calls = list(zip(loops, bodies, places, strict=True))
        #: What runs by itself: a loop, or all loops of a tile; the work of what it counts.
        parts = [[call] for call in calls if call[0].tiles is None]
        tiled = [call for call in calls if call[0].tiles is not None]
        if tiled:
            self.runs[BOUNDS] = np.stack([loop.tiles for loop, *_ in tiled])  # type: ignore[misc]
            self.memories.append(BOUNDS)
            parts.append(tiled)
        functions = [self._part(module, f"{prefix}part_{number}", part) for number, part in enumerate(parts)]
        self._works = [np.sum([_work(loop) for loop, *_ in part], 0) for part in parts]
        table = ir.PointerType(_BYTE.as_pointer())
        run = ir.Function(module, ir.FunctionType(ir.VoidType(), [table]), f"{prefix}run")
        builder = ir.IRBuilder(run.append_basic_block())
        for function, work in zip(functions, self._works, strict=True):
            builder.call(function, [_INDEX(0), _INDEX(len(work) - 1), run.args[0]])
        builder.ret_void()
        self.work = sum(loop.work * loop.points for loop in loops)
        vectorize = self.work > MUCH * sum(len(loop.expressions) for loop in loops)
        self._engine, addresses = compiled_module(
            module, [*(each.name for each in functions), run.name], vectorize=vectorize
        )
        each = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
        self._parts = [each(address) for address in addresses[:-1]]
        self.run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(addresses[-1])

    def run_on_threads(self, table: Any) -> None:
        """As `run`, on as many threads as a loop pays for, or all tiles."""
        for part, work in zip(self._parts, self._works, strict=True):
            run_rows(part, work, table)

    def _places(self, number: int, loop: FusedLoop) -> list[Any]:
        """The memories of a loop, which are added to all."""
        loads = [each.memory for each in loop.expressions if isinstance(each, Place)]
        memories = list(dict.fromkeys([*loads, *(place.memory for _, place in loop.stores)]))
        if not _is_static(loop):
            memories.append(f"runs of loop {number}")
            runs = loop.runs if loop.strides is not None else loop.runs[:, 1:].T
            self.runs[memories[-1]] = np.ascontiguousarray(runs)
        self.memories += [each for each in memories if each not in self.memories and not _is_of_tile(each)]
        return memories

    def _part(
        self, module: ir.Module, name: str, calls: Sequence[tuple[FusedLoop, ir.Function, list[Any]]]
    ) -> ir.Function:
        """A function that runs some rows of one loop, or some tiles of all loops that have tiles."""
        kind = ir.FunctionType(ir.VoidType(), [_INDEX, _INDEX, ir.PointerType(_BYTE.as_pointer())])
        function = ir.Function(module, kind, name)
        builder = ir.IRBuilder(function.append_basic_block())
        first, last, table = function.args
        known = dict[Any, ir.Value]()

        def address(memory: Any) -> ir.Value:
            if _is_of_tile(memory):
                memory = replace(memory, writes=False)
            if memory not in known:
                if _is_of_tile(memory):
                    known[memory] = builder.alloca(_BYTE, _INDEX(self._scratch[memory] * memory.dtype.itemsize))
                    known[memory].align = 64
                else:
                    known[memory] = builder.load(builder.gep(table, [_INDEX(self.memories.index(memory))]))
            return known[memory]

        answer = builder.bitcast(builder.gep(table, [_INDEX(len(self.memories))]), _INDEX.as_pointer())
        pointers = [
            [
                *(builder.bitcast(address(each), kind) for each, kind in zip(memories, _kinds(body), strict=True)),
                answer,
            ]
            for _, body, memories in calls
        ]
        tiles = calls[0][0].tiles
        if tiles is None:
            builder.call(calls[0][1], [first, last, *pointers[0]])
        else:
            bounds = builder.bitcast(address(BOUNDS), _INDEX.as_pointer())

            def run(tile: ir.Value, value: ir.Value) -> ir.Value:
                for number, (_, body, _) in enumerate(calls):
                    at = builder.add(tile, _INDEX(number * len(tiles)))
                    ends = [builder.load(builder.gep(bounds, [builder.add(at, _INDEX(k))])) for k in (0, 1)]
                    builder.call(body, [*ends, *pointers[number]])
                return value

            _loop(builder, first, last, _INDEX(0), run)
        builder.ret_void()
        return function

    def _body(self, module: ir.Module, name: str, loop: FusedLoop, memories: Sequence[Any]) -> ir.Function:
        """The function of a loop: its runs, or points, from a first one to before a last one."""
        types = {place.memory: _in_memory(place.dtype) for _, place in loop.stores}
        types |= {each.memory: _in_memory(each.dtype) for each in loop.expressions if isinstance(each, Place)}
        kinds = [types.get(memory, _INDEX).as_pointer() for memory in memories]
        kind = ir.FunctionType(ir.VoidType(), [_INDEX, _INDEX, *kinds, _INDEX.as_pointer()])
        function = ir.Function(module, kind, name)
        function.linkage = "internal"
        function.attributes.add("noinline")
        for argument in function.args[2:]:
            argument.add_attribute("noalias")
        first, last, *pointers, answer = function.args
        named = dict(zip(memories, pointers, strict=True))
        table = None if _is_static(loop) else pointers[-1]
        builder = ir.IRBuilder(function.append_basic_block())
        checks = any(place.memory == OUT for _, place in loop.stores)
        zero = constant(0.0, FLOATS[self._dtype])
        single, width = loop.strides is None, loop.runs.shape[1]

        def point(outer: ir.Value, inner: ir.Value | None, starts: Sequence[ir.Value], doubt: ir.Value) -> ir.Value:
            step = outer if inner is None else inner
            bases = dict[int, ir.Value]()

            def base(sequence: int) -> ir.Value:
                if single and table is not None:
                    at = builder.add(outer, _INDEX(sequence * len(loop.runs)))
                    return builder.load(builder.gep(table, [at], inbounds=True))
                stride = 0 if single else loop.strides[sequence]  # type: ignore[index]
                if not stride:
                    return starts[sequence]
                return builder.add(starts[sequence], step if stride == 1 else builder.mul(step, _INDEX(stride)))

            def pointer(place: Place) -> ir.Value:
                if place.sequence not in bases:
                    bases[place.sequence] = base(place.sequence)
                at = bases[place.sequence]
                if place.distance:
                    at = builder.add(at, _INDEX(place.distance))
                return builder.gep(named[place.memory], [at], inbounds=True)

            values = list[Any]()
            for each in loop.expressions:
                if isinstance(each, Place):
                    value = builder.load(pointer(each))
                    values.append(builder.trunc(value, TRUTH) if each.dtype == torch.bool else value)
                elif isinstance(each, tuple):
                    operation, operands = each
                    pairs = zip(operands, operation.reads, strict=True)
                    read = [converted(builder, values[n], dtype) for n, dtype in pairs]
                    values.append(operation.emit(Emitter(builder, operation.type), read))
                else:
                    values.append(each)
            for number, place in loop.stores:
                value = values[number]
                if isinstance(value, ir.Value):
                    value = converted(builder, value, place.dtype)
                    if place.memory == OUT:
                        doubt = builder.fadd(doubt, builder.fmul(value, zero, flags=_FAST), flags=_FAST)
                else:
                    value = constant(value, TRUTH if place.dtype == torch.bool else FLOATS[place.dtype])
                if place.dtype == torch.bool:
                    value = builder.zext(value, _BYTE)
                builder.store(value, pointer(place))
            return doubt

        if _is_static(loop):
            starts = [_INDEX(start) for start in loop.runs[0, 1:].tolist()]
            doubt = _loop(builder, first, last, zero, lambda k, doubt: point(k, None, starts, doubt))
        elif single:
            doubt = _loop(builder, first, last, zero, lambda k, doubt: point(k, None, (), doubt))
        else:

            def run(number: ir.Value, doubt: ir.Value) -> ir.Value:
                row = builder.mul(number, _INDEX(width))
                count, *starts = (
                    builder.load(builder.gep(table, [builder.add(row, _INDEX(n))], inbounds=True)) for n in range(width)
                )
                return _loop(builder, _INDEX(0), count, doubt, lambda k, doubt: point(number, k, starts, doubt))

            doubt = _loop(builder, first, last, zero, run)
        if checks:
            with builder.if_then(builder.fcmp_unordered("uno", doubt, zero), likely=False):
                builder.store(_INDEX(1), answer)
        builder.ret_void()
        return function


def _loop(builder: ir.IRBuilder, first: ir.Value, last: ir.Value, start: ir.Value, body: Any) -> ir.Value:
    """A loop that passes a value on, ``body(number, value) -> value``."""
    before = builder.block
    begin, end = builder.append_basic_block(), builder.append_basic_block()
    builder.cbranch(builder.icmp_signed("<", first, last), begin, end)
    builder.position_at_end(begin)
    number, value = builder.phi(_INDEX), builder.phi(start.type)
    number.add_incoming(first, before)
    value.add_incoming(start, before)
    result = body(number, value)
    following = builder.add(number, _INDEX(1), flags=("nsw",))
    number.add_incoming(following, builder.block)
    value.add_incoming(result, builder.block)
    after = builder.block
    builder.cbranch(builder.icmp_signed("<", following, last), begin, end)
    builder.position_at_end(end)
    final = builder.phi(start.type)
    final.add_incoming(start, before)
    final.add_incoming(result, after)
    return final


def _kinds(body: ir.Function) -> list[ir.Type]:
    """The types of the memories that a body takes."""
    return [argument.type for argument in body.args[2:-1]]


def _is_of_tile(memory: Any) -> bool:
    return isinstance(memory, Scratch) and memory.of_tile


def _in_memory(dtype: torch.dtype) -> ir.Type:
    return _BYTE if dtype == torch.bool else FLOATS[dtype]


def _is_static(loop: FusedLoop) -> bool:
    """Whether all points are one run."""
    return loop.strides is not None and len(loop.runs) == 1 and loop.tiles is None


def _work(loop: FusedLoop) -> np.ndarray:
    """Running total of the work of what a loop counts: points, runs or tiles."""
    counts = np.ones(loop.points, np.int64) if _is_static(loop) else loop.runs[:, 0]
    works = np.append(0, np.cumsum(counts)) * loop.work // SIMD
    return works if loop.tiles is None else works[loop.tiles]
