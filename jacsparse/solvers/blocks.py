"""Matrices of sparse blocks and vectors of parts, and the work that products of them take.

A block is a pattern with values for each sample, a part of a vector is ``(elements, batch)``. Where values are on the
meta device, the same code counts without computing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
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


@dataclass
class Level:
    """Tasks that do not wait for each other.

    Attributes
    ----------
    tasks : list of int
        Multiply-adds of each product with a block, over all samples.
    longest : float
        Multiply-adds of an element of a result, the largest mean of all tasks: workers share no element.
    scaling : int
        Multiplications by diagonals, which go along.
    entries : int
        Entries of the blocks that are stored after it, beside those of the system.
    """

    tasks: list[int] = field(default_factory=list)
    longest: float = 0.0
    scaling: int = 0
    entries: int = 0


class Work:
    """The levels of tasks that a solver ran."""

    def __init__(self) -> None:
        self.levels: list[Level] = []

    @contextlib.contextmanager
    def level(self) -> Iterator[Level]:
        """A context whose products are tasks of one level."""
        self.start_level()
        yield self.levels[-1]

    def start_level(self) -> None:
        """Make the products that follow tasks of a new level."""
        self.levels.append(Level())

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
        """The most entries of blocks that are stored at once, beside those of the system."""
        return max((level.entries for level in self.levels), default=0)

    def time(self, workers: int) -> float:
        """Multiply-adds until the last level is done, by workers that share the elements of its results evenly."""
        return math.fsum(max(level.longest, (sum(level.tasks) + level.scaling) / workers) for level in self.levels)

    def _add(self, a: Pattern, multiply_adds: int, batch: int, elements: int) -> None:
        """A task of so many multiply-adds for each sample, whose result has so many elements."""
        level = self.levels[-1]
        if isinstance(a.structure, Identity):
            return
        if isinstance(a.structure, Diagonal):
            level.scaling += multiply_adds * batch
        else:
            level.tasks.append(multiply_adds * batch)
            level.longest = max(level.longest, multiply_adds / max(1, elements))

    def product(self, a: Block, b: Block) -> Block:
        """``A B``."""
        if isinstance(a.pattern.structure, Identity):
            return b
        batch = max(a.values.shape[1], b.values.shape[1])
        if a.values.is_meta:
            pattern = product_pattern(a.pattern, b.pattern)
            result = Block(pattern, a.values.new_empty(pattern.nnz, batch))
        else:
            plan = plan_product(a.pattern, b.pattern)
            result = Block(plan.pattern, plan.multiply(a.values, b.values))
        self._add(a.pattern, multiply_adds(a.pattern, b.pattern), batch, result.pattern.nnz)
        return result

    def apply(self, a: Block, x: torch.Tensor) -> torch.Tensor:
        """``A x``."""
        batch = max(a.values.shape[1], x.shape[1])
        self._add(a.pattern, a.pattern.nnz, batch, a.pattern.shape[0])
        if isinstance(a.pattern.structure, Identity):
            return x
        if a.values.is_meta:
            return x.new_empty(a.pattern.shape[0], batch)
        y: torch.Tensor = matvec(a.pattern, a.values, x)
        return y

    @staticmethod
    def sum(terms: Sequence[Block]) -> Block:
        """The sum of blocks of one shape."""
        if len(terms) == 1:
            return terms[0]
        batch = max(term.values.shape[1] for term in terms)
        patterns = [term.pattern for term in terms]
        if terms[0].values.is_meta:
            pattern = sum_pattern(patterns)
            return Block(pattern, terms[0].values.new_empty(pattern.nnz, batch))
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
        terms: dict[tuple[int, int], list[Block]] = {}
        for (row, middle), block in self.blocks.items():
            for column, factor in rows.get(middle, ()):
                terms.setdefault((row, column), []).append(work.product(block, factor))
        return BlockMatrix({place: work.sum(blocks) for place, blocks in terms.items()})

    def apply(self, x: Vector, work: Work) -> Vector:
        """The product with a vector; parts that are zero are left out."""
        y: Vector = {}
        for (row, column), block in self.blocks.items():
            if column in x:
                term = work.apply(block, x[column])
                y[row] = y[row] + term if row in y else term
        return y

    def plus(self, other: BlockMatrix, work: Work) -> BlockMatrix:
        """The sum with another matrix."""
        places = dict.fromkeys((*self.blocks, *other.blocks))
        terms = {place: [m.blocks[place] for m in (self, other) if place in m.blocks] for place in places}
        return BlockMatrix({place: work.sum(blocks) for place, blocks in terms.items()})

    def between(self, rows: set[int], columns: set[int]) -> BlockMatrix:
        """The blocks in some rows and columns."""
        return BlockMatrix({(i, j): block for (i, j), block in self.blocks.items() if i in rows and j in columns})

    def sample(self, at: slice) -> BlockMatrix:
        """The blocks of a sample, as a batch of one."""
        return BlockMatrix(
            {
                place: block if block.values.shape[1] == 1 else Block(block.pattern, block.values[:, at].contiguous())
                for place, block in self.blocks.items()
            }
        )

    def on_meta(self) -> BlockMatrix:
        """The matrix without numbers."""
        return BlockMatrix({place: block.on_meta() for place, block in self.blocks.items()})


def add(x: Vector, y: Vector) -> Vector:
    """The sum of two vectors."""
    return {node: x[node] + y[node] if node in x and node in y else x.get(node, y.get(node)) for node in {**x, **y}}  # type: ignore[misc]


def diagonal_block(values: torch.Tensor) -> Block:
    """A diagonal matrix with these values, ``(n, batch)``."""
    return Block(Pattern.of(Diagonal(len(values))), values)


def identity_block(size: int, like: torch.Tensor) -> Block:
    """The identity."""
    return Block(Pattern.of(Identity(size)), like.new_ones(size, 1))
