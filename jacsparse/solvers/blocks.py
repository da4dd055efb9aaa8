"""Matrices of sparse blocks and vectors of parts, and the work that products of them take.

A block is a pattern with values for each sample, a part of a vector is ``(elements, batch)``. Where values are on the
meta device, the same code counts without computing.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..patterns import Diagonal, Identity, Pattern
from ..spgemm import matvec, multiply_adds, plan_product, plan_sum, product_pattern, sum_pattern

#: The parts of a vector, by node: each ``(elements, batch)``.
Vector = dict[int, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Block:
    """A matrix between two parts of a vector: a pattern, and values ``(nnz, batch)``, or ``(nnz, 1)`` where shared."""

    pattern: Pattern
    values: torch.Tensor

    @property
    def entries(self) -> int:
        """Entries of all samples."""
        return self.values.numel()

    def on_meta(self) -> Block:
        """The block without numbers."""
        return Block(self.pattern, self.values.to("meta"))

    def sample(self, at: slice) -> Block:
        """The block of a sample, as a batch of one."""
        return self if self.values.shape[1] == 1 else Block(self.pattern, self.values[:, at].contiguous())


@dataclass
class Level:
    """Tasks that do not wait for each other.

    Attributes
    ----------
    tasks : list of int
        Multiply-adds of each product with a block, over all samples.
    longest : float
        Multiply-adds of an element of a result, summed over the products that go into it: the largest mean of all
        results, because workers share no element.
    scaling : int
        Multiplications by diagonals: they go along with the tasks, and make no level of their own.
    entries : int
        Entries of the computed blocks that later levels read, for any solver: the system's own blocks do not count,
        scaled ones do.
    """

    tasks: list[int] = field(default_factory=list)
    longest: float = 0.0
    scaling: int = 0
    entries: int = 0

    def store(self, blocks: Iterable[Block], system: Iterable[Block]) -> None:
        """Count the blocks that later levels read, without those of the system."""
        computed = {id(block): block for block in blocks}
        for block in system:
            computed.pop(id(block), None)
        self.entries = sum(block.entries for block in computed.values())


class Work:
    """The levels of tasks that a solver ran."""

    def __init__(self) -> None:
        self.levels: list[Level] = []

    @contextlib.contextmanager
    def level(self) -> Iterator[Level]:
        """A context whose products are tasks of one level; scaling that has come before goes along with them."""
        if not self.levels or self.levels[-1].tasks:
            self.levels.append(Level())
        yield self.levels[-1]

    def add_side_by_side(self, others: Iterable[Work]) -> None:
        """Add the levels of works that do not wait for each other: their first levels are one, and so on."""
        for levels in itertools.zip_longest(*(other.levels for other in others), fillvalue=Level()):
            self.levels.append(
                Level(
                    [task for level in levels for task in level.tasks],
                    max(level.longest for level in levels),
                    sum(level.scaling for level in levels),
                    sum(level.entries for level in levels),
                )
            )

    @property
    def steps(self) -> int:
        """The number of levels with products."""
        return sum(bool(level.tasks) for level in self.levels)

    @property
    def multiply_adds(self) -> int:
        """Of all tasks, and the multiplications by diagonals."""
        return sum(sum(level.tasks) + level.scaling for level in self.levels)

    @property
    def entries(self) -> int:
        """The most entries of computed blocks that are stored at once, as `Level` counts them."""
        return max((level.entries for level in self.levels), default=0)

    def time(self, workers: int) -> float:
        """Multiply-adds until the last level is done, by workers that share the elements of its results evenly."""
        return math.fsum(max(level.longest, (sum(level.tasks) + level.scaling) / workers) for level in self.levels)

    def _count(self, products: Iterable[tuple[Pattern, int]], batch: int, elements: int) -> None:
        """Count products by their left factors and multiply-adds for each sample; their sum has so many elements."""
        level, each = self.levels[-1], 0
        for pattern, count in products:
            if isinstance(pattern.structure, Identity):
                continue
            if isinstance(pattern.structure, Diagonal):
                level.scaling += count * batch
            else:
                level.tasks.append(count * batch)
                each += count
        level.longest = max(level.longest, each / max(1, elements))

    def product(self, *factors: tuple[Block, Block]) -> Block:
        """``Σ A B``, for pairs of blocks."""
        result = sum_of([_product(a, b) for a, b in factors])
        products = ((a.pattern, multiply_adds(a.pattern, b.pattern)) for a, b in factors)
        self._count(products, result.values.shape[1], result.pattern.nnz)
        return result

    def apply(self, *factors: tuple[Block, torch.Tensor]) -> torch.Tensor:
        """``Σ A x``, for pairs of a block and a part of a vector."""
        result = functools.reduce(torch.add, (_applied(a, x) for a, x in factors))
        self._count(((a.pattern, a.pattern.nnz) for a, _ in factors), result.shape[1], result.shape[0])
        return result


def _product(a: Block, b: Block) -> Block:
    if isinstance(a.pattern.structure, Identity):
        return b
    if a.values.is_meta:
        pattern = product_pattern(a.pattern, b.pattern)
        return Block(pattern, a.values.new_empty(pattern.nnz, max(a.values.shape[1], b.values.shape[1])))
    plan = plan_product(a.pattern, b.pattern)
    return Block(plan.pattern, plan.multiply(a.values, b.values))


def _applied(a: Block, x: torch.Tensor) -> torch.Tensor:
    if isinstance(a.pattern.structure, Identity):
        return x
    if a.values.is_meta:
        return x.new_empty(a.pattern.shape[0], max(a.values.shape[1], x.shape[1]))
    y: torch.Tensor = matvec(a.pattern, a.values, x)
    return y


def sum_of(terms: Sequence[Block]) -> Block:
    """The sum of blocks of one shape."""
    if len(terms) == 1:
        return terms[0]
    patterns = [term.pattern for term in terms]
    if terms[0].values.is_meta:
        pattern = sum_pattern(patterns)
        return Block(pattern, terms[0].values.new_empty(pattern.nnz, max(term.values.shape[1] for term in terms)))
    plan = plan_sum(patterns)
    return Block(plan.pattern, plan.add([term.values for term in terms]))


class BlockMatrix:
    """A matrix of blocks: `blocks` has those that are not zero, by the nodes of their rows and columns."""

    def __init__(self, blocks: Mapping[tuple[int, int], Block]) -> None:
        self.blocks = dict(blocks)

    @property
    def entries(self) -> int:
        """Entries of all blocks and samples."""
        return sum(block.entries for block in self.blocks.values())

    def times(self, other: BlockMatrix, work: Work) -> BlockMatrix:
        """The product with another matrix."""
        rows: dict[int, list[tuple[int, Block]]] = {}
        for (row, column), block in other.blocks.items():
            rows.setdefault(row, []).append((column, block))
        factors: dict[tuple[int, int], list[tuple[Block, Block]]] = {}
        for (row, middle), block in self.blocks.items():
            for column, factor in rows.get(middle, ()):
                factors.setdefault((row, column), []).append((block, factor))
        return BlockMatrix({place: work.product(*pairs) for place, pairs in factors.items()})

    def apply(self, x: Vector, work: Work) -> Vector:
        """The product with a vector; parts that are zero are left out."""
        factors: dict[int, list[tuple[Block, torch.Tensor]]] = {}
        for (row, column), block in self.blocks.items():
            if column in x:
                factors.setdefault(row, []).append((block, x[column]))
        return {row: work.apply(*pairs) for row, pairs in factors.items()}

    def plus(self, other: BlockMatrix) -> BlockMatrix:
        """The sum with another matrix."""
        places = dict.fromkeys((*self.blocks, *other.blocks))
        terms = {place: [m.blocks[place] for m in (self, other) if place in m.blocks] for place in places}
        return BlockMatrix({place: sum_of(blocks) for place, blocks in terms.items()})

    def changed(self, change: Callable[[Block], Block]) -> BlockMatrix:
        """The matrix of other blocks at the same places."""
        return BlockMatrix({place: change(block) for place, block in self.blocks.items()})


def add(x: Vector, y: Vector) -> Vector:
    """The sum of two vectors."""
    return {node: x[node] + y[node] if node in x and node in y else x.get(node, y.get(node)) for node in {**x, **y}}  # type: ignore[misc]


def diagonal_block(values: torch.Tensor) -> Block:
    """A diagonal matrix with these values, ``(n, batch)``."""
    return Block(Pattern.of(Diagonal(len(values))), values)


def identity_block(size: int, like: torch.Tensor) -> Block:
    """The identity matrix."""
    return Block(Pattern.of(Identity(size)), like.new_ones(size, 1))


def identity_like(x: Vector) -> BlockMatrix:
    """The identity matrix for vectors of these parts."""
    return BlockMatrix({(node, node): identity_block(len(part), part) for node, part in x.items()})
