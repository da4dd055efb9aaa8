"""Loops of fused operations as a program that one kernel interprets: nothing is compiled for a function.

Each register holds the points of a block, so that what an instruction takes beside its arithmetic is little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..runtime import SIMD, row_starts, run_rows, within_rows
from . import kernels
from .elements import in_own_order
from .loops import OUT, FusedLoop, Place
from .operand import ArithmeticOperand, is_number
from .tiles import Scratch

#: Instructions that compute connectives of truth values.
_OF_TRUTH = {"and": "mul", "xor": "!="}
_STORES = (kernels.STORE, kernels.STORE_TRUTH, kernels.STORE_CHECKED)
#: Bytes at multiples of which the memories of a tile begin.
_ALIGNMENT = 64
#: The fields of an instruction; see `kernels.interpret`.
_FIELDS = 6


class MixedDtypesError(Exception):
    """Loops compute in several dtypes of floating-point numbers, and programs in one."""


class Interpreted:
    """Loops as `MachineCode` runs them, by the kernel that interprets programs.

    Raises
    ------
    MixedDtypesError
        Where loops compute in other floating-point numbers than those of `dtype`.
    """

    def __init__(self, loops: Sequence[FusedLoop], scratch: Mapping[Scratch, int], dtype: torch.dtype) -> None:
        memories = dict[Any, int]()
        #: Where the memories of a tile begin, behind each other, and their bytes.
        offsets, nbytes = dict[Scratch, int](), 0
        for memory, count in scratch.items():
            if memory.of_tile:
                offsets[memory] = nbytes
                nbytes += -(-count * memory.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        #: Tables of places are no memories here.
        self.runs: dict[str, np.ndarray] = {}
        self.work = sum(loop.work * loop.points for loop in loops)
        constants, registers = list[float](), 1
        blocks, tiles, counts, program = (list[np.ndarray]() for _ in range(4))
        #: The places of the points of each loop, whose addresses the blocks have.
        self._places = list[np.ndarray]()
        index = np.result_type(*(loop.runs for loop in loops))
        first = of_counts = 0
        for loop in loops:
            code = _Code(loop, dtype, memories, offsets, constants)
            instructions, count = code.program()
            length, places, of_tiles = _pieces(loop)
            begins, places = _blocks(length, of_tiles), np.ascontiguousarray(places, index)
            columns = np.broadcast_arrays(
                *(first, first + len(instructions), np.diff(begins), of_counts + begins[:-1]),
                *(places.ctypes.data + places.itemsize * begins[:-1], len(length), loop.strides is None),
                np.add.reduceat(length, begins[:-1], dtype=np.int64),
            )
            blocks.append(np.stack(columns, 1))
            tiles.append(of_tiles[begins[:-1]])
            # Of single points there are no lengths.
            length = length[:0] if loop.strides is None else length
            for arrays, array in ((counts, length), (self._places, places), (program, instructions)):
                arrays.append(array)
            first, of_counts, registers = first + len(instructions), of_counts + len(length), max(registers, count)
        self.memories = list(memories)
        works = [rows[:, -1] * loop.work // SIMD for rows, loop in zip(blocks, loops, strict=True)]
        whole = sum(loop.tiles is None for loop in loops)
        #: Running totals of the work of each loop's blocks.
        self._works = [row_starts(each, np.int64) for each in works[:whole]]
        ends = np.arange(1 + sum(map(len, works[:whole])))
        if whole < len(loops):
            # The blocks of one tile after those of the one before, and the work of tiles.
            of_tiles = np.concatenate(tiles[whole:])
            order = np.argsort(of_tiles, kind="stable")
            bounds = np.searchsorted(of_tiles[order], np.arange(of_tiles.max() + 2))
            blocks[whole:] = [np.concatenate(blocks[whole:])[order]]
            self._works.append(row_starts(np.concatenate(works[whole:])[order], np.int64)[bounds])
            ends = np.append(ends, ends[-1] + bounds[1:])
        with np.errstate(over="ignore"):
            numbers = np.array([*constants, 0.0]).astype(torch.empty(0, dtype=dtype, device="cpu").numpy().dtype)
        tables = np.concatenate(blocks), np.concatenate(counts).astype(index), np.concatenate(program)
        sizes = registers, nbytes // dtype.itemsize
        self._arguments: tuple[Any, ...] = (ends, *tables, numbers, *sizes, np.zeros(1, np.uint8))

    def run(self, table: Any) -> None:
        """Run the loops with a table of addresses."""
        addresses = np.frombuffer(table, np.int64)
        kernels.interpret(0, len(self._arguments[0]) - 1, 0, *self._arguments, addresses)

    def run_on_threads(self, table: Any) -> None:
        """As `run`, on as many threads as a loop pays for."""
        addresses, begin = np.frombuffer(table, np.int64), 0
        for work in self._works:
            run_rows(kernels.interpret, work, begin, *self._arguments, addresses)
            begin += len(work) - 1


def _pieces(loop: FusedLoop) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The lengths of a loop's runs, cut where they are longer than a block, their places by sequence, and tiles."""
    length, places = loop.runs[0], loop.runs[1:]
    bounds = np.array([0, len(length)]) if loop.tiles is None else loop.tiles
    tiles = np.repeat(np.arange(len(bounds) - 1, dtype=np.int32), np.diff(bounds))
    if loop.strides is None:
        return length, places, tiles
    number = -(-length // kernels.BLOCK)
    run, before = np.repeat(np.arange(len(length)), number), within_rows(number) * kernels.BLOCK
    starts = places[:, run] + before * np.array(loop.strides, np.int64)[:, None]
    return np.minimum(kernels.BLOCK, length[run] - before), starts.astype(places.dtype), tiles[run]


def _blocks(length: np.ndarray, tiles: np.ndarray) -> np.ndarray:
    """Where blocks of pieces begin, and the end of the last one."""
    begins = np.zeros(len(length), np.bool_)
    kernels.begin_blocks(0, len(length), in_own_order(length), tiles, begins)
    return np.append(np.flatnonzero(begins), len(length))


@dataclass(frozen=True, eq=False)
class _Instruction(ArithmeticOperand):
    """What it does, the instructions whose results it reads, and numbers, as where it finds a memory."""

    emitter: _Code
    op: int
    operands: tuple[_Instruction, ...] = ()
    fields: tuple[int, ...] = ()


class _Code:
    """The instructions of a loop, as an emitter of operations makes them; a truth value is 0 or 1."""

    def __init__(
        self,
        loop: FusedLoop,
        dtype: torch.dtype,
        memories: dict[Any, int],
        offsets: Mapping[Scratch, int],
        constants: list[float],
    ) -> None:
        self._dtype, self._memories, self._constants = dtype, memories, constants
        self._offsets = offsets
        self._strides = loop.strides or [0] * len(loop.runs)
        #: Each instruction once, in order.
        self._instructions: dict[Any, _Instruction] = {}
        values = list[Any]()
        for each in loop.expressions:
            value: Any = each
            if isinstance(each, Place):
                load = kernels.LOAD_TRUTH if each.dtype == torch.bool else kernels.LOAD
                value = self._added(load, fields=self._fields(each))
            elif isinstance(each, tuple):
                operation, operands = each
                pairs = zip(operands, operation.reads, strict=True)
                self._check(operation.dtype)
                value = operation.emit(self, [self._converted(values[n], read) for n, read in pairs])
            values.append(value)
        for number, place in loop.stores:
            store = kernels.STORE_CHECKED if place.memory == OUT else kernels.STORE
            store = kernels.STORE_TRUTH if place.dtype == torch.bool else store
            self._added(store, self._converted(values[number], place.dtype), fields=self._fields(place))

    def _check(self, dtype: torch.dtype) -> None:
        if dtype not in (self._dtype, torch.bool):
            raise MixedDtypesError

    def _fields(self, place: Place) -> tuple[int, ...]:
        self._check(place.dtype)
        memory, where = place.memory, (place.sequence, place.distance, self._strides[place.sequence])
        if isinstance(memory, Scratch) and memory.of_tile:
            # Negative: it is no memory of the table.
            return ~self._offsets[replace(memory, writes=False)], *where
        return self._memories.setdefault(memory, len(self._memories)), *where

    def _converted(self, value: Any, dtype: torch.dtype) -> Any:
        self._check(dtype)
        if dtype != torch.bool:
            return value
        return bool(value) if is_number(value) else self.apply("!=", value, 0.0)

    def _added(self, op: int, *operands: Any, fields: tuple[int, ...] = ()) -> _Instruction:
        key = op, tuple([self.value(each) for each in operands]), fields
        if key not in self._instructions:
            self._instructions[key] = _Instruction(self, *key)
        return self._instructions[key]

    def program(self) -> tuple[np.ndarray, int]:
        """The instructions with the places of their registers in bytes, and the number of registers."""
        instructions = list(self._instructions.values())
        last = {operand: place for place, each in enumerate(instructions) for operand in each.operands}
        registers = dict[_Instruction, int]()
        free, count, size = list[int](), 0, kernels.BLOCK * self._dtype.itemsize
        rows = np.zeros((len(instructions), _FIELDS), np.int64)
        for place, each in enumerate(instructions):
            operands = [registers[operand] for operand in each.operands]
            if each.op not in _STORES:
                # No operand's register: loops that write what they read are not vectorised.
                if not free:
                    free.append(count * size)
                    count += 1
                registers[each] = free.pop()
                operands.insert(0, registers[each])
            row = [each.op, *operands, *each.fields]
            rows[place, : len(row)] = row
            free += [registers[operand] for operand in dict.fromkeys(each.operands) if last[operand] == place]
        return rows, count

    def value(self, x: Any) -> _Instruction:
        if not is_number(x):
            return x  # type: ignore[no-any-return]
        # By its text: zeros have signs.
        key = kernels.FILL, repr(float(x))
        if key not in self._instructions:
            self._instructions[key] = _Instruction(self, kernels.FILL, (), (len(self._constants),))
            self._constants.append(float(x))
        return self._instructions[key]

    def apply(self, name: str, *operands: Any) -> _Instruction:
        if name == "not":
            name, operands = "==", (*operands, 0.0)
        if name in (">", ">="):
            name, operands = name.replace(">", "<"), operands[::-1]
        return self._added(kernels.OPCODES[_OF_TRUTH.get(name, name)], *operands)

    def select(self, condition: Any, x: Any, y: Any) -> _Instruction:
        # A truth value is that number.
        return condition if (x, y) == (1.0, 0.0) else self.apply("select", condition, x, y)  # type: ignore[no-any-return]
