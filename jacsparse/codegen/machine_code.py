"""Loops of fused operations as machine code, by the compiler that Numba brings."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..runtime import SIMD, run_rows
from .emitter import BYTE, FLOATS, INT64, TABLE, TRUTH, Array, Emitter, MachineModule, Register, Variable
from .loops import OUT, FusedLoop, Place
from .tiles import Scratch

#: Work of each expression from which vectorised loops are worth the time of their compilation.
MUCH = 500
#: Bytes at multiples of which the memories of a tile begin.
_ALIGNMENT = 64
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
        module = MachineModule()
        places = [self._places(number, loop) for number, loop in enumerate(loops)]
        bodies = [
            self._body(module, f"body_{number}", loop, memories)
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
        functions = [self._part(module, f"part_{number}", part) for number, part in enumerate(parts)]
        self._works = [np.sum([_work(loop) for loop, *_ in part], 0) for part in parts]
        with module.function("run", [TABLE]) as (run, e, (table,)):
            for function, work in zip(functions, self._works, strict=True):
                e.call(function, e.value(0, INT64), e.value(len(work) - 1, INT64), table)
        self.work = sum(loop.work * loop.points for loop in loops)
        vectorize = self.work > MUCH * sum(len(loop.expressions) for loop in loops)
        self._engine, addresses = module.compiled([*functions, run], vectorize=vectorize)
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
            runs = loop.runs.T if loop.strides is not None else loop.runs[1:]
            self.runs[memories[-1]] = np.ascontiguousarray(runs, np.int64)
        self.memories += [each for each in memories if each not in self.memories and not _is_of_tile(each)]
        return memories

    def _part(self, module: MachineModule, name: str, calls: Sequence[tuple[FusedLoop, Any, list[Any]]]) -> Any:
        """A function that runs some rows of one loop, or some tiles of all loops that have tiles."""
        with module.function(name, [INT64, INT64, TABLE]) as (function, e, (first, last, table)):
            known, addresses = dict[Any, Register](), Array(e, table.register)

            def address(memory: Any) -> Register:
                if _is_of_tile(memory):
                    memory = replace(memory, writes=False)
                if memory not in known:
                    known[memory] = (
                        e.allocated(self._scratch[memory] * memory.dtype.itemsize, _ALIGNMENT)
                        if _is_of_tile(memory)
                        else addresses[self.memories.index(memory)]
                    )
                return known[memory]

            answer = addresses.pointer(len(self.memories))
            pointers = [[*map(address, memories), answer] for _, _, memories in calls]
            tiles = calls[0][0].tiles
            if tiles is None:
                e.call(calls[0][1], first, last, *pointers[0])
            else:
                bounds = Array(e, address(BOUNDS).bits_as(INT64.as_pointer()).register)
                with e.each(first, last) as tile:
                    for number, (_, body, _) in enumerate(calls):
                        at = tile + number * len(tiles)
                        e.call(body, bounds[at], bounds[at + 1], *pointers[number])
        return function

    def _body(self, module: MachineModule, name: str, loop: FusedLoop, memories: Sequence[Any]) -> Any:
        """The function of a loop: its runs, or points, from a first one to before a last one."""
        types = {place.memory: _in_memory(place.dtype) for _, place in loop.stores}
        types |= {each.memory: _in_memory(each.dtype) for each in loop.expressions if isinstance(each, Place)}
        kinds = [types.get(memory, INT64).as_pointer() for memory in memories]
        arguments = [INT64, INT64, *kinds, INT64.as_pointer()]
        with module.function(name, arguments, internal=True) as (function, e, (first, last, *pointers, answer)):
            named = {memory: Array(e, each.register) for memory, each in zip(memories, pointers, strict=True)}
            table = named[memories[-1]]
            doubt = Variable(e.value(0.0, FLOATS[self._dtype]))
            single, strides, width = loop.strides is None, loop.strides or [], len(loop.runs)

            def point(number: Register, starts: Sequence[Any], step: Register | None = None) -> None:
                """Compute a point: of its own places, or so many steps from those of a run."""
                places = dict[int, Any]()

                def at(place: Place) -> tuple[Array, Any]:
                    n = place.sequence
                    if n not in places:
                        if step is None:
                            places[n] = table[number + n * loop.runs.shape[1]]
                        else:
                            places[n] = starts[n] + step * strides[n] if strides[n] else starts[n]
                    return named[place.memory], places[n] + place.distance

                values = list[Any]()
                for each in loop.expressions:
                    value: Any = each
                    if isinstance(each, Place):
                        memory, where = at(each)
                        value = memory[where]
                        value = value.to(TRUTH) if each.dtype == torch.bool else value
                    elif isinstance(each, tuple):
                        operation, operands = each
                        pairs = zip(operands, operation.reads, strict=True)
                        read = [_converted(e, values[n], dtype) for n, dtype in pairs]
                        value = operation.emit(Emitter(e.builder, operation.type), read)
                    values.append(value)
                for n, place in loop.stores:
                    value = _converted(e, values[n], place.dtype)
                    if place.memory == OUT and isinstance(value, Register):
                        doubt.value = e.doubt(doubt.value, value)
                    memory, where = at(place)
                    memory[where] = e.value(value, _in_memory(place.dtype)).to(memory.element)

            if single:
                with e.each(first, last) as number:
                    point(number, ())
            elif _is_static(loop):
                with e.each(first, last) as step:
                    point(step, loop.runs[1:, 0].tolist(), step)
            else:
                with e.each(first, last) as number:
                    count, *starts = (table[number * width + n] for n in range(width))
                    with e.each(0, count) as step:
                        point(number, starts, step)
            if any(place.memory == OUT for _, place in loop.stores):
                with e.when(doubt.value.differs(doubt.value), likely=False):
                    Array(e, answer.register)[0] = e.value(1, INT64)
        return function


def _converted(e: Emitter, value: Any, dtype: torch.dtype) -> Any:
    """A value in registers in another dtype; a number as it is."""
    if isinstance(value, Register):
        return value.to(TRUTH if dtype == torch.bool else FLOATS[dtype])
    return e.value(value, TRUTH) if dtype == torch.bool else value


def _is_of_tile(memory: Any) -> bool:
    return isinstance(memory, Scratch) and memory.of_tile


def _in_memory(dtype: torch.dtype) -> Any:
    return BYTE if dtype == torch.bool else FLOATS[dtype]


def _is_static(loop: FusedLoop) -> bool:
    """Whether all points are one run."""
    return loop.strides is not None and loop.runs.shape[1] == 1 and loop.tiles is None


def _work(loop: FusedLoop) -> np.ndarray:
    """Running total of the work of what a loop counts: points, runs or tiles."""
    counts = np.ones(loop.points, np.int64) if _is_static(loop) else loop.runs[0]
    works = np.append(0, np.cumsum(counts)) * loop.work // SIMD
    return works if loop.tiles is None else works[loop.tiles]
