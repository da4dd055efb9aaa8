"""Functions of machine code on vectors: a block's samples at one position each.

Kernels call them by their addresses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..codegen import BYTE, DOUBLE, INT32, INT64, SINGLE, Emitter, MachineModule, Register, vector
from .windows import PlaneTiles

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
    #: How many of its first columns a tile may share with the one before it, which alone is to write them: sums that
    #: run side by side are not added up alike in both, and who wrote last would be left to chance.
    shared: tuple[int, ...] = ()

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
        tile = cls(itemsize, lanes, tiles.rows, tiles.columns, tiles.step, tiles.rectangles, pool, along, winners)
        shared = tuple(sorted({*tiles.table[:, 4].tolist()} - {0}))
        return tile._replace(shared=shared) if tile.unrolled > 1 else tile


class TileWriter(Emitter):
    """Writes LLVM's instructions on vectors of a tile, whose addresses are in bytes."""

    def __init__(self, builder: Any, tile: Tile) -> None:
        super().__init__(builder)
        self.tile, self.element = tile, element_of(tile)
        self.vector, self.bytes = vector(self.element, tile.lanes), vector(BYTE, tile.lanes)
        #: Numbers of positions are as wide as elements: other widths would take masks of their own.
        self.integer = INT32 if tile.itemsize == 4 else INT64
        self.width = tile.lanes * tile.itemsize
        #: Bytes from one position to the next.
        self.spacing = tile.itemsize if tile.along else self.width
        self.zero = self.filled(0.0)

    def load(self, address: Register, type: Any = None) -> Register:
        return self.loaded(self.at(address, self.vector if type is None else type))

    def load_index(self, address: Register, place: Any) -> Register:
        """The int32 at ``address[place]``, as int64."""
        return self.load(address + place * 4, INT32).to(INT64, signed=True)

    def put(self, value: Register, address: Register) -> None:
        self.store(value, self.at(address, value.type))

    def put_without(self, count: int, value: Register, address: Register, spacing: int) -> None:
        """Put a position's value, or the columns of a vector, without the first few of these."""
        count = min(max(count, 0), self._span)
        if count < self._span:
            left = value.shuffled(range(count, self._span)) if count else value
            self.put(left, address + count * spacing)

    def filled(self, number: Any, element: Any = None) -> Register:
        """A number in each lane, of the tile's dtype or of another type."""
        element = self.element if element is None else element
        if isinstance(number, Register):
            return number.to(element).spread(self.tile.lanes)
        return self.value(number, vector(element, self.tile.lanes))

    def numbered(self, number: Any) -> Register:
        """The number of a position in each lane."""
        return self.filled(number, self.integer)

    def add_lanes(self, vectors: list[Register], address: Register, element: Any = None) -> None:
        """Add all lanes of some vectors to the number at an address, of the tile's dtype or of another one."""
        element = self.element if element is None else element
        self.put(self.load(address, element) + self.added(vectors).sum().to(element), address)

    def winner(self, values: list[Register], floor: Register) -> tuple[Register, Register]:
        """The maximum of some vectors and `floor`, and its number: the first of equals, or one that is no number."""
        best, number = values[0], self.numbered(0)
        for place, value in enumerate(values[1:], 1):
            best, number = self.larger(best, number, value, self.numbered(place))
        below = best <= floor
        number = self.select(below, self.numbered(len(values)), number).to(BYTE)
        return self.select(below, floor, best), number

    def larger(self, best: Register, number: Register, value: Register, place: Register) -> tuple[Register, Register]:
        """The larger of two vectors, and its number; a later value that is no number wins, as in PyTorch."""
        wins = (value > best) | value.differs(value)
        return self.select(wins, value, best), self.select(wins, place, number)

    def added(self, vectors: list[Register]) -> Register:
        """The sum of some vectors, two by two."""
        while len(vectors) > 1:
            odd = vectors[-1:] if len(vectors) % 2 else []
            pairs = zip(vectors[::2], vectors[1::2], strict=False)
            vectors = [left + right for left, right in pairs] + odd
        return vectors[0]

    def add_product(self, totals: list[Register], a: Register, b: Register) -> None:
        """Put ``a * b`` among some totals, whose number grows up to `_PRODUCT_CHAINS`."""
        full = len(totals) == _PRODUCT_CHAINS
        totals.append(self.multiply_add(a, b, totals.pop(0)) if full else a * b)

    def weights(
        self, groups: Register, count: Register, starts: Register
    ) -> Iterator[tuple[tuple[int, int, int, int], Register, Register]]:
        """For each rectangle, the code's place for the weights ``first`` to ``last`` of a group that has it."""
        with self.each(0, count) as number:
            group = groups + number * 12
            first, last = (self.load_index(starts, self.load_index(group, place)) for place in (0, 1))
            for rectangle in self.cases(self.load(group + 8, INT32), range(len(self.tile.rectangles))):
                yield self.tile.rectangles[rectangle], first, last

    def side_by_side(self, first: Register, last: Register) -> Iterator[tuple[Register, int]]:
        """The code's place for each weight, and the number of its sum among those that are under way at once."""
        count = self.tile.unrolled
        if count > 1:
            single = first + (last - first & -count)
            with self.each(first, single, count) as place:
                for side in range(count):
                    yield place + side, side
            first = single
        with self.each(first, last) as place:
            yield place, 0

    def inputs(
        self, rows: list[Register], offset: Register, bounds: tuple[int, int, int, int]
    ) -> Iterator[tuple[Any, Register]]:
        """Each position of a rectangle, and the input that a weight with that offset meets there."""
        top, bottom, left, right = bounds
        distance, span = offset * self.spacing, self._span
        for row, column in self.tile.positions:
            first, last = (min(max(edge - column, 0), span) for edge in (left, right))
            if not top <= row < bottom or first >= last:
                continue
            address = rows[row] + distance + column * self.tile.step * self.spacing
            yield (row, column), self.load(address) if last - first == span else self._part(address, first, last)

    @property
    def _span(self) -> int:
        """Columns of a vector."""
        return self.tile.lanes if self.tile.along else 1

    def _part(self, address: Register, first: int, last: int) -> Register:
        """The lanes from `first` to before `last` of a vector in memory, and zeros; no others are read."""
        mask = [first <= lane < last for lane in range(self.tile.lanes)]
        return self.masked(self.at(address, self.vector), mask)

    def split(self, both: Register) -> list[Register]:
        """Of a vector with twice the lanes, those with even numbers, and those with odd ones."""
        return [both.shuffled(range(first, both.lanes, 2)) for first in (0, 1)]

    def before(self, column: int, count: Register) -> Register:
        """Which lanes of the vector at a column belong to the first `count` columns."""
        numbers = [column + (lane if self.tile.along else 0) for lane in range(self.tile.lanes)]
        return self.lanes_of(numbers, INT64) < self.filled(count, INT64)

    def first_lanes(self, count: Register) -> Register:
        """Which lanes are the first ones."""
        return self.lanes_of(range(self.tile.lanes), INT64) < self.filled(count, INT64)


def element_of(tile: Tile) -> Any:
    """The type of a tile's elements."""
    return SINGLE if tile.itemsize == 4 else DOUBLE


def on_tile(integers: int, elements: int = 0) -> Callable[[Callable[..., None]], Callable[[Tile], int]]:
    """Decorator: the address of a function for a tile, compiled once, whose body is written by what is decorated.

    That is given a writer, and the function's arguments: as many of int64, addresses among them, and then numbers of
    the tile's dtype.
    """

    def decorated(write_body: Callable[..., None]) -> Callable[[Tile], int]:
        @functools.cache
        def compiled(tile: Tile) -> tuple[object, int]:
            module = MachineModule()
            kinds = [INT64] * integers + [element_of(tile)] * elements
            with module.function(write_body.__name__, kinds) as (function, emitter, arguments):
                write_body(TileWriter(emitter.builder, tile), *arguments)
            engine, addresses = module.compiled([function], vectorize=False)
            # As long as the engine is held, the code is.
            return engine, addresses[0]

        @functools.wraps(write_body)
        def address(tile: Tile) -> int:
            return compiled(tile)[1]

        return address

    return decorated
