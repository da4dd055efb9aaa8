"""Jacobians of graphs: products along paths, summed where paths meet.

The Jacobian of a graph of operators is a sum over all paths from its input to its output: of the products of the local
Jacobians along each path. To eliminate a vertex ``w``, each edge into it is multiplied by each edge out of it, and the
product is added to the edge between their other ends (Griewank and Naumann, 2003: *Accumulating Jacobians as chained
sparse matrix products*). After the last inner vertex, the edge from input to output is the Jacobian.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from ..patterns import Full, Identity, Pattern, gathered
from ..spgemm import SparseJacobian, counts, fresh_keys, multiply_adds, product_pattern, spread, sum_pattern
from .costs import COSTS, Costs
from .elimination import eliminate
from .last_products import LastProducts, batch_of, sample_of
from .matrices import Leaf, LeafValues, Matrix, MatrixProduct, PullBack, Pulled, Sum

#: A product with a larger share of possible nonzeros is stored as a full matrix.
FULL = 0.3


@dataclass
class Accumulation:
    """Products and sums of matrices of known patterns, in the order in which they are computed.

    Each method that adds a matrix returns its number. Plans are made when `run` first computes values.
    """

    #: The shape of the matrix that all are for, and its number; None where that is without any entry.
    shape: tuple[int, int] = (0, 0)
    result: int | None = None
    matrices: list[Matrix] = field(default_factory=list)
    multiply_adds: int = 0
    #: Whether `run` is never called.
    patterns_only: bool = False
    #: Those of the device.
    costs: Costs = field(default_factory=lambda: COSTS["cpu"])

    @property
    def pattern(self) -> Pattern:
        """The pattern of the result."""
        return empty_pattern(*self.shape) if self.result is None else self.matrices[self.result].pattern

    def leaf(self, key: Hashable, pattern: Pattern) -> int:
        """Add a matrix whose values `run` gets for this key."""
        return self._append(Leaf(pattern, pattern, (), key))

    def multiply(self, left: int, right: int) -> int:
        """Add the product of two matrices; where one of them is an identity, it is the other matrix."""
        left_matrix, right_matrix = self.matrices[left], self.matrices[right]
        if isinstance(left_matrix.pattern.structure, Identity):
            return right
        if isinstance(right_matrix.pattern.structure, Identity):
            return left
        factors = (left_matrix.stored, right_matrix.stored)
        pattern = product_pattern(left_matrix.pattern, right_matrix.pattern)
        work = multiply_adds(*factors)
        self.multiply_adds += work
        if self.patterns_only:
            return self._append(MatrixProduct(pattern, pattern, (left, right), factors, work))
        rows, columns = pattern.shape
        full = any(isinstance(factor.structure, Full) for factor in factors)
        fills = not full and pattern.nnz > FULL * rows * columns
        if fills and factors[1].shape[0] <= rows and factors[0].nnz * columns <= self.costs.full * work:
            # The product is to be full in any case.
            self.multiply_adds -= work
            return self.multiply(left, self.add([right], full=True))
        # Where no factor is stored as a full matrix, each is stored on its pattern, and so is the product.
        stored = Pattern.of(Full(rows, columns)) if full else pattern
        product = self._append(MatrixProduct(pattern, stored, (left, right), factors, work))
        if fills and not isinstance(stored.structure, Full):
            return self.add([product], full=True)
        return product

    def products(self, lefts: Sequence[int], rights: Sequence[int]) -> list[list[int]]:
        """Add the products of each one of some matrices with each one of others."""
        return [[self.multiply(left, right) for right in rights] for left in lefts]

    def add(self, terms: Sequence[int], *, full: bool = False) -> int:
        """Add the sum of matrices, as a full matrix on request; the sum of one matrix is that matrix."""
        if len(terms) == 1 and not full:
            return terms[0]
        patterns = tuple(self.matrices[term].stored for term in terms)
        pattern = sum_pattern([self.matrices[term].pattern for term in terms])
        full = full or any(isinstance(stored.structure, Full) for stored in patterns)
        stored = Pattern.of(Full(*pattern.shape)) if full else pattern
        return self._append(Sum(pattern, stored, tuple(terms), patterns))

    def add_pulled(self, key: tuple[int, int], right: int, pattern: Pattern) -> int:
        """Add the product of an interval of stages and a matrix, which the operators' own backward computes."""
        if not isinstance(self.matrices[right].stored.structure, Full):
            right = self.add([right], full=True)
        return self._append(
            Pulled(pattern, Pattern.of(Full(*pattern.shape)), (right,), key, self.matrices[right].stored.shape)
        )

    def finish(self, number: int | None) -> None:
        """Take a matrix for the result; not a copy as a full matrix, which is for a product, and none follows."""
        if number is not None and number == len(self.matrices) - 1:
            matrix = self.matrices[number]
            if isinstance(matrix, Sum) and len(matrix.operands) == 1:
                self.matrices.pop()
                (number,) = matrix.operands
        self.result = number

    def nnz_of(self, matrix: int) -> int:
        """The number of entries of a matrix."""
        return self.matrices[matrix].pattern.nnz

    def product_work(self, left: int, right: int) -> int:
        """The number of pairs of entries that meet in a product."""
        return multiply_adds(self.matrices[left].pattern, self.matrices[right].pattern)

    def _append(self, matrix: Matrix) -> int:
        self.matrices.append(matrix)
        return len(self.matrices) - 1

    def run(
        self,
        leaf: LeafValues,
        pull: PullBack | None = None,
        *,
        transposed: bool = False,
    ) -> torch.Tensor:
        """Values of the result, which has entries, ``(nnz, batch)``, or ``(nnz, 1)`` where all samples share them.

        Where `transposed`, they are in the order of the transposed pattern's entries.
        ``leaf(key)`` computes the values of a leaf, and ``pull(key, matrix)`` pulls back the columns of a matrix
        ``(rows, columns, batch)`` by the operators' own backward.
        """
        result = self.result
        assert result is not None
        alone = self.matrices[result]

        def in_order(values: torch.Tensor) -> torch.Tensor:
            return SparseJacobian(alone.pattern, values).T.values if transposed else values

        if isinstance(alone, Leaf):
            return in_order(leaf(alone.key))
        order, last_use = self._uses(result)
        large = self._large(order)
        read = {operand for number in large for operand in self.matrices[number].operands}.difference(large)

        compute = partial(self._computed, leaf=leaf, pull=pull, last_use=last_use)
        values = compute([number for number in order if number not in large], {}, needed=read)
        batch = max((values[number].shape[1] for number in read), default=1)
        on_cpu = not any(values[number].is_cuda or values[number].requires_grad for number in read)
        if large and on_cpu:
            last = self._last_products
            others = [number for number in large if number not in last.numbers]
            known = {number: values[number] for number in read}
            by_strips = last.values(known, batch, partial(compute, others), transposed)
            if by_strips is not None:
                return by_strips
        if large and batch > 1 and on_cpu:
            samples = (compute(large, {n: sample_of(values[n], s) for n in read})[result] for s in range(batch))
            values[result] = batch_of(samples, batch)
        else:
            compute(large, values)
        pattern, stored = alone.pattern, alone.stored
        return in_order(values[result] if stored.nnz == pattern.nnz else gathered(values[result], pattern.places))

    @cached_property
    def _last_products(self) -> LastProducts:
        assert self.result is not None
        return LastProducts(self.matrices, self.result)

    def _computed(
        self,
        numbers: Iterable[int],
        values: dict[int, torch.Tensor],
        leaf: LeafValues,
        pull: PullBack | None,
        last_use: Mapping[int, Sequence[int]],
        needed: Collection[int] = (),
    ) -> dict[int, torch.Tensor]:
        """The values of some matrices beside those of others.

        Those that were used for the last time are let go of, unless they are `needed`.
        """
        for number in numbers:
            matrix = self.matrices[number]
            values[number] = matrix.values([values[operand] for operand in matrix.operands], leaf, pull)
            for used in last_use.get(number, ()):
                if used not in needed:
                    del values[used]
        return values

    def _large(self, order: Sequence[int]) -> list[int]:
        """The large products of a sparse and a full matrix, and what is computed from them, if that takes one sample.

        Of one sample such a product leaves out the zeros of both factors and reads whole cache lines. One sample's
        matrices stay in the cache from one product to the next, and those of all samples need not fit in memory.
        Products that move values only for these are among them: of all samples they would be copied once more.
        """
        large: dict[int, None] = {}
        for number in order:
            matrix = self.matrices[number]
            if not large.keys().isdisjoint(matrix.operands) or matrix.is_large:
                large[number] = None
        if not all(self.matrices[number].takes_one_sample for number in large):
            return []
        others = {order[-1]}
        for number in reversed(order) if large else ():
            matrix = self.matrices[number]
            if number not in others and matrix.moves:
                large[number] = None
            if number not in large:
                others.update(matrix.operands)
        return sorted(large)

    def work(self, batch: int, is_shared: Callable[[Any], bool]) -> tuple[int, int]:
        """For so many samples, the values of all matrices and those that products and sums read, and the multiply-adds.

        ``is_shared(key)`` says whether all samples share a leaf's values: what is made of such leaves alone is computed
        once.
        """
        values, multiply_adds, counts = 0, 0, list[int]()
        for matrix in self.matrices:
            count = matrix.count(batch, [counts[operand] for operand in matrix.operands], is_shared)
            values += sum(counts[operand] * self.matrices[operand].stored.nnz for operand in matrix.operands)
            values += count * matrix.stored.nnz
            multiply_adds += count * matrix.multiply_adds
            counts.append(count)
        return values, multiply_adds

    @property
    def passes(self) -> list[tuple[slice, int]]:
        """The operators' own backward passes: the stages of each, and the columns that it takes for a sample."""
        pulled = [matrix for matrix in self.matrices if isinstance(matrix, Pulled)]
        return [(slice(matrix.key[0], matrix.key[1] + 1), matrix.pattern.shape[1]) for matrix in pulled]

    def _uses(self, result: int) -> tuple[list[int], dict[int, list[int]]]:
        """The matrices that a result is computed from, in order; and those that each of them uses for the last time."""
        last: dict[int, int] = {result: result}
        for number in range(result, -1, -1):
            if number in last:
                for operand in self.matrices[number].operands:
                    last.setdefault(operand, number)
        uses: dict[int, list[int]] = {}
        for number, user in last.items():
            if number != result:
                uses.setdefault(user, []).append(number)
        return sorted(last), uses


@dataclass(eq=False)
class Region:
    """A graph of matrices between two vertices, which stands for the matrix that they make together."""

    #: The shape of that matrix.
    shape: tuple[int, int]
    #: Edges are (vertex, vertex, pattern); all edges into a vertex come before those out of it.
    edges: Sequence[tuple[Any, Any, Pattern]]
    #: The vertices of the rows and of the columns of the matrix.
    start: Any
    stop: Any
    #: The multiply-adds of the edges that couple samples, by their numbers: vectors go through the region then, and no
    #: matrix stands for it.
    coupling: Mapping[int, int] = field(default_factory=dict)

    @property
    def nnz(self) -> int:
        """Multiply-adds of a product with a full vector: the entries of all edges' patterns."""
        return sum(self.coupling.get(number, pattern.nnz) for number, (*_, pattern) in enumerate(self.edges))

    @property
    def pattern(self) -> Pattern:
        """The pattern of the one matrix: the union over all paths."""
        return self._eliminated[0]

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds to compute the one matrix."""
        return self._eliminated[1]

    @cached_property
    def estimate(self) -> float:
        """Estimated multiply-adds, without patterns of products: each edge is multiplied by the product behind it."""
        backwards = [(target, source, pattern) for source, target, pattern in reversed(self.edges)]
        into: dict[Any, list[Pattern]] = {}
        for target, _, pattern in backwards:
            into.setdefault(target, []).append(pattern)
        total = 0.0
        for vertex, keys in spread(backwards, self.stop, fresh_keys(self.shape[1], 0)):
            if vertex != self.stop and vertex in into:
                reached = counts(keys, np.array([self.shape[1]]))[:, 0]
                total += float(sum(pattern.structure.column_counts() @ reached for pattern in into[vertex]))
        return total

    @cached_property
    def _eliminated(self) -> tuple[Pattern, int]:
        """The pattern of the one matrix, and the multiply-adds to compute it."""
        shadow = Accumulation(self.shape, patterns_only=True)
        edges = [(source, target, shadow.leaf(None, pattern)) for source, target, pattern in self.edges]
        shadow.finish(eliminate(shadow, edges, self.start, self.stop))
        return shadow.pattern, shadow.multiply_adds


def matrix_of(factor: Pattern | Region) -> Pattern:
    """The pattern of a factor, which stands for one operator or for several."""
    return factor.pattern if isinstance(factor, Region) else factor


def empty_pattern(rows: int, columns: int) -> Pattern:
    """The pattern without any position."""
    return Pattern((rows, columns), np.zeros(rows + 1, dtype=np.int64), np.zeros(0, dtype=np.int64))


def is_light(pattern: Pattern) -> bool:
    """Whether no row has more than one entry: the pattern of a diagonal, or of a selection of rows."""
    return bool(pattern.structure.row_counts().max(initial=0) <= 1)
