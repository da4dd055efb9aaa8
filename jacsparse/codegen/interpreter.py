"""Loops of fused operations as a program that one kernel interprets: nothing is compiled for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..runtime import SIMD, row_starts, run_rows, within_rows
from . import kernels
from .loops import OUT, Loop, Place
from .operations import is_number

_RELATIONS = {"<": kernels.LESS, "<=": kernels.LESS_EQUAL, "==": kernels.EQUAL, "!=": kernels.NOT_EQUAL}


class MixedDtypesError(Exception):
    """Loops compute in several dtypes of floating-point numbers, and programs in one."""


class Interpreted:
    """As `MachineCode`, by a kernel that interprets the loops block by block."""

    def __init__(self, loops: Sequence[Loop], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.memories: list[Any] = []
        self.runs: dict[str, np.ndarray] = {}
        self.work = sum(loop.work * loop.points for loop in loops)
        self._constants: dict[str, int] = {}
        numbers: list[float] = []
        program, blocks, counts, starts = [], [], [], []
        self._registers, instructions = 1, 0
        self._works: list[np.ndarray] = []
        size_of_counts = size_of_starts = 0
        for loop in loops:
            for place in [*(each for each in loop.expressions if isinstance(each, Place)), *(p for _, p in loop.stores)]:
                if place.dtype not in (dtype, torch.bool):
                    raise MixedDtypesError
                if place.memory not in self.memories:
                    self.memories.append(place.memory)
            code = _Code(self.memories, loop, dtype, numbers)
            rows, registers = code.rows()
            program.append(rows)
            self._registers = max(self._registers, registers)
            length, places = _pieces(loop)
            begins = _blocks(length, loop.strides is None)
            pieces = np.diff(begins)
            points = np.add.reduceat(length, begins[:-1])
            blocks.append(np.stack(np.broadcast_arrays(
                instructions, instructions + len(rows), pieces, size_of_counts + begins[:-1],
                size_of_starts + begins[:-1], len(length), int(loop.strides is None), points,
            ), 1))
            self._works.append(row_starts(points * loop.work // SIMD, np.int64))
            counts.append(length)
            starts.append(places.reshape(-1))
            instructions += len(rows)
            size_of_counts += len(length)
            size_of_starts += places.size
        self._arguments = (
            *(np.ascontiguousarray(np.concatenate(each), np.int64) for each in (blocks, counts, starts, program)),
            np.array(numbers or [0.0], torch.empty(0, dtype=dtype).numpy().dtype),
            self._registers,
        )
        self._truth = np.zeros(1, np.uint8)

    def run(self, table: Any) -> None:
        """Run the loops with a table of addresses."""
        addresses = np.frombuffer(table, np.uint64)
        kernels.interpret(0, len(self._arguments[0]), 0, *self._arguments, addresses, self._truth)

    def run_on_threads(self, table: Any) -> None:
        """As `run`, on as many threads as a loop pays for."""
        addresses, begin = np.frombuffer(table, np.uint64), 0
        for work in self._works:
            run_rows(kernels.interpret, work, begin, *self._arguments, addresses, self._truth)
            begin += len(work) - 1


def _pieces(loop: Loop) -> tuple[np.ndarray, np.ndarray]:
    """The lengths of a loop's runs, cut where they are longer than a block, and their places by sequences."""
    length, places = loop.runs[:, 0], loop.runs[:, 1:]
    if loop.strides is None:
        return length, places.T
    number = -(-length // kernels.BLOCK)
    run, piece = np.repeat(np.arange(len(length)), number), within_rows(number)
    places = places[run] + piece[:, None] * kernels.BLOCK * np.array(loop.strides, np.int64)
    return np.minimum(kernels.BLOCK, length[run] - piece * kernels.BLOCK), places.T


def _blocks(length: np.ndarray, single: bool) -> np.ndarray:
    """Where blocks of pieces begin, and the end of the last one."""
    if single:
        return np.append(np.arange(0, len(length), kernels.BLOCK), len(length))
    begins, points = [0], 0
    for place, count in enumerate(length.tolist()):
        if points + count > kernels.BLOCK:
            begins.append(place)
            points = 0
        points += count
    return np.array([*begins, len(length)])


@dataclass(frozen=True, eq=False)
class _Instruction:
    op: int
    operands: tuple[Any, ...]
    #: Of what moves between registers and memories: a memory, a sequence, a distance and a stride; or a constant.
    fields: tuple[int, ...] = ()


class _Code:
    """The instructions of a loop, as an emitter of operations; truth is 0 or 1."""

    def __init__(self, memories: Sequence[Any], loop: Loop, dtype: torch.dtype, numbers: list[float]) -> None:
        self.builder, self._numbers, self._itemsize = self, numbers, dtype.itemsize
        self._instructions: list[_Instruction] = []
        self._known: dict[Any, _Instruction] = {}
        strides = loop.strides or [0] * loop.runs.shape[1]

        def fields(place: Place) -> tuple[int, ...]:
            return memories.index(place.memory), place.sequence, place.distance, strides[place.sequence]

        values = list[Any]()
        for each in loop.expressions:
            if isinstance(each, Place):
                op = kernels.LOAD_TRUTH if each.dtype == torch.bool else kernels.LOAD
                values.append(self._added(op, fields=fields(each)))
            elif isinstance(each, tuple):
                operation, operands = each
                if {*operation.reads, operation.dtype} - {dtype, torch.bool}:
                    raise MixedDtypesError
                read = [
                    self._converted(values[n], to, self._dtypes(loop, n)) for n, to in zip(operands, operation.reads, strict=True)
                ]
                values.append(operation.emit(self, read))
            else:
                values.append(each)
        for number, place in loop.stores:
            value = self.value(self._converted(values[number], place.dtype, self._dtypes(loop, number)))
            op = kernels.STORE_CHECKED if place.memory == OUT else kernels.STORE
            op = kernels.STORE_TRUTH if place.dtype == torch.bool else op
            self._instructions.append(_Instruction(op, (value,), fields(place)))

    @staticmethod
    def _dtypes(loop: Loop, number: int) -> Any:
        each = loop.expressions[number]
        return each.dtype if isinstance(each, Place) else each[0].dtype if isinstance(each, tuple) else None

    def _converted(self, value: Any, dtype: torch.dtype, before: Any) -> Any:
        if dtype != torch.bool or before == torch.bool:
            return value
        return bool(value) if is_number(value) else self._added(kernels.NOT_EQUAL, value, 0.0)

    def _added(self, op: int, *operands: Any, fields: tuple[int, ...] = ()) -> _Instruction:
        operands = tuple(self.value(each) for each in operands)
        key = op, operands, fields
        if key not in self._known:
            self._known[key] = _Instruction(op, operands, fields)
            self._instructions.append(self._known[key])
        return self._known[key]

    def rows(self) -> tuple[np.ndarray, int]:
        """The instructions with their registers, and the number of registers."""
        last = {operand: place for place, each in enumerate(self._instructions) for operand in each.operands}
        registers: dict[_Instruction, int] = {}
        free, count, rows, size = list[int](), 0, [], kernels.BLOCK * self._itemsize
        for place, each in enumerate(self._instructions):
            operands = [registers[operand] for operand in each.operands]
            if each.op in (kernels.STORE, kernels.STORE_TRUTH, kernels.STORE_CHECKED):
                to = operands.pop()
            else:
                # A register of its own: loops over equal ones are not vectorised.
                if not free:
                    free.append(count)
                    count += 1
                to = registers[each] = free.pop()
            row = [each.op, to * size, *([n * size for n in operands] or each.fields)]
            rows.append(row + [0] * (6 - len(row)))
            free += [registers[operand] for operand in dict.fromkeys(each.operands) if last[operand] == place]
        return np.array(rows, np.int64), count

    # What follows is what operations are made of.

    def value(self, x: Any) -> _Instruction:
        if not is_number(x):
            return x  # type: ignore[no-any-return]
        text = repr(float(x))
        key = kernels.FILL, text
        if key not in self._known:
            self._known[key] = _Instruction(kernels.FILL, (), (len(self._numbers),))
            self._numbers.append(float(x))
            self._instructions.append(self._known[key])
        return self._known[key]

    def add(self, x: Any, y: Any) -> Any:
        return self._added(kernels.ADD, x, y)

    def sub(self, x: Any, y: Any) -> Any:
        return self._added(kernels.SUB, x, y)

    def mul(self, x: Any, y: Any) -> Any:
        return self._added(kernels.MUL, x, y)

    def div(self, x: Any, y: Any) -> Any:
        return self._added(kernels.DIV, x, y)

    def neg(self, x: Any) -> Any:
        return self._added(kernels.NEG, x)

    def compare(self, relation: str, x: Any, y: Any) -> Any:
        if relation in (">", ">="):
            relation, x, y = relation.replace(">", "<"), y, x
        return self._added(_RELATIONS[relation], x, y)

    def is_nan(self, x: Any) -> Any:
        return self._added(kernels.NOT_EQUAL, x, x)

    def select(self, condition: Any, x: Any, y: Any) -> Any:
        return self._added(kernels.SELECT, condition, x, y)

    def from_truth(self, condition: Any) -> Any:
        return condition

    def call(self, name: str, *operands: Any) -> Any:
        return self._added(getattr(kernels, name.upper()), *operands)

    def and_(self, x: Any, y: Any) -> Any:
        return self._added(kernels.AND, x, y)

    def or_(self, x: Any, y: Any) -> Any:
        return self._added(kernels.OR, x, y)

    def xor(self, x: Any, y: Any) -> Any:
        return self._added(kernels.XOR, x, y)

    def not_(self, x: Any) -> Any:
        return self._added(kernels.NOT, x)
