"""Functions of machine code on vectors: a block's samples at one position each.

Kernels call them by their addresses. Whoever writes one writes LLVM's instructions, since Numba's own loops keep no
array in registers; they are compiled in a tenth of the time that a kernel of Numba's takes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from ..runtime import compiled_module
from .windows import PlaneTiles

INT32, INT64 = ir.IntType(32), ir.IntType(64)
#: Sums that run side by side, so that none waits for the one before.
CHAINS = 4
#: Those of one weight's products; the next weight's run beside them, and more would take registers of the tile's sums.
_PRODUCT_CHAINS = 2


class Tile(NamedTuple):
    """What a function is compiled for."""

    itemsize: int
    lanes: int
    rows: int = 1
    columns: int = 1
    step: int = 1
    rectangles: tuple[tuple[int, int, int, int], ...] = ()
    #: Rows and columns of the windows whose maximum is what is left, or one of each.
    pool: tuple[int, int] = (1, 1)
    #: Whether a vector holds columns of one sample, and not one position of several.
    along: bool = False
    #: Whether the winners of windows are kept, which gradients need.
    winners: bool = True
    #: Whether another tensor is added to the sums.
    adds: bool = False

    @property
    def positions(self) -> list[tuple[int, int]]:
        columns = range(0, self.columns, self.lanes if self.along else 1)
        return [(row, column) for row in range(self.rows) for column in columns]

    @property
    def unrolled(self) -> int:
        """How many weights run side by side, so that as many sums are under way as an addition takes cycles."""
        return -(-CHAINS // len(self.positions))

    @classmethod
    def of(
        cls,
        itemsize: int,
        lanes: int,
        tiles: PlaneTiles,
        pool: tuple[int, int] = (1, 1),
        along: bool = False,
        winners: bool = True,
    ) -> Tile:
        """The tile of all of `tiles`."""
        return cls(itemsize, lanes, tiles.rows, tiles.columns, tiles.step, tiles.rectangles, pool, along, winners)


class VectorWriter:
    """Writes LLVM's instructions on vectors of a tile."""

    def __init__(self, builder: Any, tile: Tile) -> None:
        self.builder, self.tile = builder, tile
        self.element = ir.FloatType() if tile.itemsize == 4 else ir.DoubleType()
        self.vector = ir.VectorType(self.element, tile.lanes)
        self.bytes = ir.VectorType(ir.IntType(8), tile.lanes)
        self.width = tile.lanes * tile.itemsize
        #: Bytes from one position to the next.
        self.spacing = tile.itemsize if tile.along else self.width
        self.zero = ir.Constant(self.vector, [0.0] * tile.lanes)
        self._multiply_add = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(self.vector, [self.vector] * 3),
            f"llvm.fmuladd.v{tile.lanes}f{8 * tile.itemsize}",
        )

    def shifted(self, address: Any, step: Any, count: Any) -> Any:
        """``address + step * count``; each is a number here or one of the kernel's."""
        step, count = (ir.Constant(INT64, each) if isinstance(each, int) else each for each in (step, count))
        return self.builder.add(address, self.builder.mul(step, count))

    def load(self, address: Any, kind: Any = None) -> Any:
        kind = self.vector if kind is None else kind
        loaded = self.builder.load(self.builder.inttoptr(address, kind.as_pointer()))
        loaded.align = {INT32: 4, self.bytes: 1}.get(kind, self.tile.itemsize)
        return loaded

    def load_index(self, address: Any, place: Any) -> Any:
        """The int32 at ``address[place]``, as int64."""
        return self.builder.sext(self.load(self.shifted(address, 4, place), INT32), INT64)

    def store(self, vector: Any, address: Any) -> None:
        stored = self.builder.store(vector, self.builder.inttoptr(address, vector.type.as_pointer()))
        stored.align = 1 if vector.type == self.bytes else self.tile.itemsize

    def filled(self, number: Any) -> Any:
        """A number in each lane."""
        return self.repeated(number, self.vector)

    def repeated(self, number: Any, vector: Any) -> Any:
        """A number in each lane of another kind of vector."""
        undefined = ir.Constant(vector, ir.Undefined)
        one = self.builder.insert_element(undefined, number, ir.Constant(INT32, 0))
        return self.builder.shuffle_vector(one, undefined, self._lanes([0] * self.tile.lanes))

    def multiply_add(self, a: Any, b: Any, total: Any) -> Any:
        """``a * b + total``, rounded once where the processor does so."""
        return self.builder.call(self._multiply_add, [a, b, total])

    def add_lanes(self, vectors: list[Any], address: Any, number: Any = None) -> None:
        """Add all lanes of some vectors to the number at an address, of the tile's dtype or of another one."""
        number = self.element if number is None else number
        total, lanes = self.added(vectors), self.tile.lanes
        while lanes > 1:
            lanes //= 2
            low, high = (
                self.builder.shuffle_vector(total, total, self._lanes(list(range(first, first + lanes))))
                for first in (0, lanes)
            )
            total = self.builder.fadd(low, high)
        result = self.builder.extract_element(total, ir.Constant(INT32, 0))
        if number != self.element:
            result = self.builder.fpext(result, number)
        self.store(self.builder.fadd(self.load(address, number), result), address)

    def integer(self, number: int) -> Any:
        """A number in each lane, as wide as an element: other widths would take masks of their own."""
        return ir.Constant(self._integers, [number] * self.tile.lanes)

    def integers(self, number: Any) -> Any:
        """An int64 in each lane, as wide as an element."""
        narrow = number if self.tile.itemsize == 8 else self.builder.trunc(number, INT32)
        return self.repeated(narrow, self._integers)

    def widened(self, numbers: Any) -> Any:
        """Bytes as integers as wide as elements."""
        return self.builder.zext(numbers, self._integers)

    @property
    def _integers(self) -> Any:
        return ir.VectorType(ir.IntType(8 * self.tile.itemsize), self.tile.lanes)

    def winner(self, values: list[Any], floor: Any) -> tuple[Any, Any]:
        """The maximum of some vectors and `floor`, and its number: the first of equals, or one that is no number."""
        numbers = [self.integer(number) for number in range(len(values) + 1)]
        best, number = values[0], numbers[0]
        for value, place in zip(values[1:], numbers[1:], strict=False):
            best, number = self.larger(best, number, value, place)
        below = self.builder.fcmp_ordered("<=", best, floor)
        number = self.builder.trunc(self.builder.select(below, numbers[-1], number), self.bytes)
        return self.builder.select(below, floor, best), number

    def larger(self, best: Any, number: Any, value: Any, place: Any) -> tuple[Any, Any]:
        """The larger of two vectors, and its number; a later value that is no number wins, as in PyTorch."""
        builder = self.builder
        wins = builder.or_(builder.fcmp_ordered(">", value, best), builder.fcmp_unordered("uno", value, value))
        return builder.select(wins, value, best), builder.select(wins, place, number)

    def added(self, vectors: list[Any]) -> Any:
        """The sum of some vectors, two by two."""
        while len(vectors) > 1:
            odd = vectors[-1:] if len(vectors) % 2 else []
            pairs = zip(vectors[::2], vectors[1::2], strict=False)
            vectors = [self.builder.fadd(*pair) for pair in pairs] + odd
        return vectors[0]

    def add_product(self, totals: list[Any], a: Any, b: Any) -> None:
        """Put ``a * b`` among some totals, whose number grows up to `_PRODUCT_CHAINS`."""
        if len(totals) < _PRODUCT_CHAINS:
            totals.append(self.builder.fmul(a, b))
        else:
            totals.append(self.multiply_add(a, b, totals.pop(0)))

    def weights(self, groups: Any, count: Any, starts: Any) -> Iterator[tuple[tuple[int, int, int, int], Any, Any]]:
        """For each rectangle, the code's place for the weights ``first`` to ``last`` of a group that has it."""
        builder = self.builder
        with cgutils.for_range(builder, count) as loop:
            group = self.shifted(groups, 12, loop.index)
            first, last = (self.load_index(starts, self.load_index(group, place)) for place in (0, 1))
            rectangle = self.load(self.shifted(group, 4, 2), INT32)
            end, never = (builder.append_basic_block(name) for name in ("end", "never"))
            switch = builder.switch(rectangle, never)
            builder.position_at_end(never)
            builder.unreachable()
            for number, bounds in enumerate(self.tile.rectangles):
                block = builder.append_basic_block(f"rectangle{number}")
                switch.add_case(ir.Constant(INT32, number), block)
                builder.position_at_end(block)
                yield bounds, first, last
                builder.branch(end)
            builder.position_at_end(end)

    def side_by_side(self, first: Any, last: Any) -> Iterator[tuple[Any, int]]:
        """The code's place for each weight, and the number of its sum among those that are under way at once."""
        count = self.tile.unrolled
        if count > 1:
            whole = self.builder.and_(self.builder.sub(last, first), ir.Constant(INT64, -count))
            single = self.builder.add(first, whole)
            with self.each(first, single, count) as place:
                for side in range(count):
                    yield self.shifted(place, side, 1), side
            first = single
        with self.each(first, last) as place:
            yield place, 0

    @contextmanager
    def each(self, first: Any, last: Any, step: int = 1) -> Iterator[Any]:
        with cgutils.for_range_slice(self.builder, first, last, ir.Constant(INT64, step)) as (place, _):
            yield place

    def inputs(self, rows: list[Any], offset: Any, bounds: tuple[int, int, int, int]) -> Iterator[tuple[Any, Any]]:
        """Each position of a rectangle, and the input that a weight with that offset meets there."""
        top, bottom, left, right = bounds
        distance = self.builder.mul(offset, ir.Constant(INT64, self.spacing))
        for row, column in self.tile.positions:
            first, last = (min(max(edge - column, 0), self._span) for edge in (left, right))
            if not top <= row < bottom or first >= last:
                continue
            start = self.builder.add(rows[row], distance)
            address = self.shifted(start, column * self.tile.step * self.spacing, 1)
            yield (row, column), self.load(address) if last - first == self._span else self._part(address, first, last)

    @property
    def _span(self) -> int:
        """Columns of a vector."""
        return self.tile.lanes if self.tile.along else 1

    def _part(self, address: Any, first: int, last: int) -> Any:
        """The lanes from `first` to before `last` of a vector in memory, and zeros; no others are read."""
        flags = ir.VectorType(ir.IntType(1), self.tile.lanes)
        pointer = self.vector.as_pointer()
        name = f"llvm.masked.load.v{self.tile.lanes}f{8 * self.tile.itemsize}.p0"
        kind = ir.FunctionType(self.vector, [pointer, INT32, flags, self.vector])
        load = cgutils.get_or_insert_function(self.builder.module, kind, name)
        mask = ir.Constant(flags, [int(first <= lane < last) for lane in range(self.tile.lanes)])
        alignment = ir.Constant(INT32, self.tile.itemsize)
        return self.builder.call(load, [self.builder.inttoptr(address, pointer), alignment, mask, self.zero])

    def split(self, vector: Any) -> list[Any]:
        """Of a vector with twice the lanes, those with even numbers, and those with odd ones."""
        undefined = ir.Constant(vector.type, ir.Undefined)
        places = [[2 * lane + first for lane in range(self.tile.lanes)] for first in (0, 1)]
        return [self.builder.shuffle_vector(vector, undefined, self._lanes(each)) for each in places]

    def first_lanes(self, count: Any) -> Any:
        """Which lanes are the first ones."""
        kind = ir.VectorType(INT64, self.tile.lanes)
        lanes = ir.Constant(kind, list(range(self.tile.lanes)))
        return self.builder.icmp_signed("<", lanes, self.repeated(count, kind))

    def before(self, column: int, shared: Any) -> Any:
        """Which lanes of the vector at a column belong to the first `shared` columns."""
        numbers = [column + (lane if self.tile.along else 0) for lane in range(self.tile.lanes)]
        kind = ir.VectorType(INT64, self.tile.lanes)
        return self.builder.icmp_signed("<", ir.Constant(kind, numbers), self.repeated(shared, kind))

    def _lanes(self, places: list[int]) -> Any:
        return ir.Constant(ir.VectorType(INT32, len(places)), places)


_NUMBERS = itertools.count()


def on_tile(integers: int, elements: int = 0) -> Callable[[Callable[..., None]], Callable[[Tile], int]]:
    """Decorator: the address of a function for a tile, compiled once, whose body is written by what is decorated.

    That is given a writer, and the function's arguments: as many of int64, addresses among them, and then numbers of
    the tile's dtype.
    """

    def decorated(write_body: Callable[..., None]) -> Callable[[Tile], int]:
        @functools.cache
        def compiled(tile: Tile) -> tuple[object, int]:
            name = f"jacsparse{write_body.__name__}_{next(_NUMBERS)}"
            module = ir.Module(name)
            element = ir.FloatType() if tile.itemsize == 4 else ir.DoubleType()
            kind = ir.FunctionType(ir.VoidType(), [INT64] * integers + [element] * elements)
            function = ir.Function(module, kind, name)
            builder = ir.IRBuilder(function.append_basic_block())
            write_body(VectorWriter(builder, tile), *function.args)
            builder.ret_void()
            engine, addresses = compiled_module(module, [name], vectorize=False)
            # As long as the engine is held, the code is.
            return engine, addresses[0]

        @functools.wraps(write_body)
        def address(tile: Tile) -> int:
            return compiled(tile)[1]

        return address

    return decorated


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
