"""The CPU kernel that interprets programs: instructions on registers, each of which holds the points of a block.

Beside it are those for elements, and for the tiles of these programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic

from ..runtime import inlined_with_arrays, kernel
from .emitter import BYTE, INT64, TRUTH, Array, Emitter, Register, Variable, emitted

#: The most points of a block: their registers shall stay in the caches next to the processor.
BLOCK = 256
#: In place of the tile of elements that several tiles read, or that none reads.
SHARED, UNREAD = -1, -2
#: What an instruction does to a memory, or to a register by a constant; those of registers follow.
LOAD, LOAD_TRUTH, STORE, STORE_TRUTH, STORE_CHECKED, FILL = range(6)
INSTRUCTIONS = (
    "add", "sub", "mul", "div", "pow", "or", "<", "<=", "==", "!=", "select",
    "neg", "fabs", "sqrt", "cos", "exp", "log", "sin", "tan", "tanh",
)  # fmt: skip
OPCODES = {name: opcode for opcode, name in enumerate(INSTRUCTIONS, FILL + 1)}


@intrinsic
def _pointer(typing_context: Any, address: Any, like: Any) -> Any:
    """The pointer to elements of an array's dtype at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(address, like), generate  # type: ignore[attr-defined]


@emitted()
def _compute(e: Emitter, op: Register, out: Array, x: Array, y: Array, z: Array) -> None:
    """What an instruction on registers does to the points of a block."""
    for opcode in e.cases(op, OPCODES.values()):
        name = INSTRUCTIONS[opcode - FILL - 1]
        with e.each(0, out.count) as k:
            if name == "select":
                # Both are read, so that the loop is vectorised.
                result = e.select(x[k].differs(0.0), y[k], z[k])
            elif name == "or":
                result = e.select(x[k] > y[k], x[k], y[k])
            else:
                result = e.apply(name, *(each[k] for each in ((x,) if opcode >= OPCODES["neg"] else (x, y))))
            out[k] = result.to(out.element)


@inlined_with_arrays
def _at(address, like, count):
    return numba.carray(_pointer(address, like), count)


def _points(
    e: Emitter, n: Register, pieces: Register, counts: Array, at_counts: Register, starts: Array, at_starts: Register,
    single: Register, stride: Register, distance: Register,
) -> Iterator[tuple[Register, Register, int]]:  # fmt: skip
    """The code's places for the points of a block's pieces: their numbers, their places in a memory, and how many."""
    for is_single in e.either(single.differs(0)):
        if is_single:
            with e.each(0, n) as k:
                yield k, starts.index(at_starts + k) + distance, 1
            continue
        begin = Variable(e.value(0, INT64))
        with e.each(0, pieces) as piece:
            first, start = begin.value, starts.index(at_starts + piece) + distance
            count = counts.index(at_counts + piece)
            for is_row in e.either(stride.equals(1)):
                # Pieces are mostly short.
                for k, lanes in e.blocks(count, (32, 8, 1) if is_row else (1,)):
                    yield first + k, start + (k if is_row else k * stride), lanes
            begin.value = first + count


@emitted()
def _load(e, out, memory, pieces, counts, at_counts, starts, at_starts, single, stride, distance):
    arguments = pieces, counts, at_counts, starts, at_starts, single, stride, distance
    for k, place, lanes in _points(e, out.count, *arguments):
        out[k] = memory[place, lanes].to(out.element)


@emitted()
def _store(e, memory, values, pieces, counts, at_counts, starts, at_starts, single, stride, distance):
    arguments = pieces, counts, at_counts, starts, at_starts, single, stride, distance
    kind = TRUTH if memory.element == BYTE else memory.element
    for k, place, lanes in _points(e, values.count, *arguments):
        memory[place] = values[k, lanes].to(kind).to(memory.element)


# A row of `blocks` has the first and the last of its loop's instructions, its number of pieces, where their lengths
# begin in `counts`, the address of their places of the first sequence, how far behind those of the next sequence begin,
# whether each piece is one point, and the number of points. An instruction has its operator, its result's register, and
# the registers of its operands, or a constant; or it has a register, a memory, a sequence of places, a distance from
# these and a stride. Registers are offsets in bytes. A negative memory is one of a tile, which lies before the
# registers: the complement of its offset in bytes. Ranges are of blocks of a loop, or of tiles: `ends` has the first
# block of each, and the end of the last one.


@kernel
def interpret(first, last, begin, ends, blocks, counts, program, constants, registers, stored, truth, table):
    memory = np.empty(stored + registers * BLOCK, constants.dtype)
    of_tile = memory.ctypes.data
    base = of_tile + stored * constants.itemsize
    largest = np.finfo(constants.dtype).max
    for block in range(ends[begin + first], ends[begin + last]):
        first_instruction, last_instruction, pieces, of_counts, places, across, single, n = blocks[block]
        starts = _at(places, counts, 1)
        for place in range(first_instruction, last_instruction):
            op, to, p, q, r, stride = program[place]
            if op <= STORE_CHECKED:
                register = _at(base + to, constants, n)
                address = table[p] if p >= 0 else of_tile + ~p
                at = q * across
                if op == LOAD:
                    _load(
                        register, _at(address, constants, 1), pieces, counts, of_counts, starts, at, single, stride, r
                    )
                elif op == LOAD_TRUTH:
                    _load(register, _at(address, truth, 1), pieces, counts, of_counts, starts, at, single, stride, r)
                elif op == STORE_TRUTH:
                    _store(_at(address, truth, 1), register, pieces, counts, of_counts, starts, at, single, stride, r)
                else:
                    _store(
                        _at(address, constants, 1), register, pieces, counts, of_counts, starts, at, single, stride, r
                    )
                    if op == STORE_CHECKED:
                        others = 0
                        for k in range(n):
                            others += not abs(register[k]) <= largest
                        if others:
                            table[-1] = 1
                continue
            out, x = _at(base + to, constants, n), _at(base + p, constants, n)
            y, z = _at(base + q, constants, n), _at(base + r, constants, n)
            if op == FILL:
                value = constants[p]
                for k in range(n):
                    out[k] = value
            else:
                _compute(op, out, x, y, z)


@kernel
def begin_blocks(first, last, length, tiles, begins):
    """Mark the pieces with which blocks begin: each holds consecutive pieces of one tile."""
    points = 0
    for piece in range(first, last):
        if piece == first or points + length[piece] > BLOCK or tiles[piece] != tiles[piece - 1]:
            begins[piece], points = True, 0
        points += length[piece]


@kernel
def widen_ranges(first, last, numbers, low, high, lowest, highest):
    """Make each range of some numbers hold another one: NumPy's `minimum.at` takes many times as long."""
    for k in range(first, last):
        number = numbers[k]
        lowest[number] = min(lowest[number], low[k])
        highest[number] = max(highest[number], high[k])


@kernel
def place_elements(first, last, tiles, places, counts, changes):
    """Place elements behind those of their tiles, `UNREAD` and `SHARED`, and count neighbours of other tiles."""
    before = UNREAD
    count = counts[before]
    for k in range(first, last):
        tile = tiles[k]
        if tile != before:
            counts[before], count, before = count, counts[tile], tile
            changes[0] += k > first
        places[k] = count
        count += 1
    counts[before] = count


@kernel
def mark_makers(first, last, numbers, places, makers):
    """Mark the places of the nodes of some elements."""
    before = -1
    for k in range(first, last):
        place = places[numbers[k]]
        if place != before:
            makers[place], before = True, place


@kernel
def find_runs(first, last, places, most, strides, breaks):
    """Find the distance between most neighbours in each sequence of places, and mark the points after other distances.

    Where more points are marked than that, the strides of further sequences are left.
    """
    for sequence in range(first, last):
        stride = votes = 0
        for point in range(1, len(breaks)):
            step = places[sequence, point] - places[sequence, point - 1]
            if not votes:
                stride = step
            votes += 1 if step == stride else -1
        strides[sequence], marked = stride, 0
        for point in range(len(breaks)):
            if point and places[sequence, point] - places[sequence, point - 1] != stride:
                breaks[point] = True
            marked += breaks[point]
        if marked > most:
            break


@kernel
def number_kinds(first, last, values, kinds, firsts):
    """Number the pairs of a kind and a value anew, in the order in which they come.

    The first place of each is noted, and their number in the last place of these; beyond so many, the rest is left.
    """
    pairs, count, kind, of_kind, value = np.empty((len(firsts) - 1, 2), np.int64), 0, 0, np.int64(-1), np.int64(0)
    for place in range(first, last):
        # Neighbours are mostly alike.
        if of_kind != kinds[place] or value != values[place]:
            of_kind, value, kind = np.int64(kinds[place]), np.int64(values[place]), 0
            while kind < count and (pairs[kind, 0] != of_kind or pairs[kind, 1] != value):
                kind += 1
            if kind == count:
                count += 1
                if count == len(firsts):
                    break
                firsts[kind], pairs[kind, 0], pairs[kind, 1] = place, of_kind, value
        kinds[place] = kind
    firsts[-1] = count


@kernel
def sort_columns(first, last, keys, rows):
    """Sort the elements of columns by keys."""
    for column in range(first, last):
        for n in range(1, len(keys)):
            key, element = keys[n, column], rows[n, column]
            while n > 0 and keys[n - 1, column] > key:
                keys[n, column], rows[n, column] = keys[n - 1, column], rows[n - 1, column]
                n -= 1
            keys[n, column], rows[n, column] = key, element


@kernel
def sort_sums(first, last, left, right, places, nodes, of_weights, kinds, terms, keys):
    """Sort the terms of each sum by the nodes of their factors, then by their weights."""
    for row in range(first, last):
        for n in range(len(terms)):
            term = terms[n, row]
            key = np.int64(0)
            if len(left):
                key = np.int64(places[left[term]])
            if len(right):
                key = key * nodes + places[right[term]]
            key = key * kinds + of_weights[term]
            while n > 0 and keys[n - 1, row] > key:
                keys[n, row], terms[n, row] = keys[n - 1, row], terms[n - 1, row]
                n -= 1
            keys[n, row], terms[n, row] = key, term
