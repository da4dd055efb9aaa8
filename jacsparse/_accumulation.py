"""Jacobians of graphs: products along paths, summed where paths meet.

A Jacobian of a graph of operators is the sum over all paths from its input to its output of the products along them.
Eliminating a vertex ``w`` adds, for each pair of an edge into it and one out of it, their product to the edge between
their other ends (Griewank and Naumann, 2003: *Accumulating Jacobians as chained sparse matrix products*). When only
input and output are left, the one edge between them is the Jacobian.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from .patterns import Full, Identity, Pattern
from .patterns._values import gathered
from .spgemm import ProductPlan, SumPlan, meeting, multiply_adds, product_pattern, sum_pattern
from .spgemm._estimate import counts, fresh_keys, spread
from .spgemm._plan import planned

__all__ = ["Accumulation", "Region", "eliminate", "empty_pattern", "matrix_of"]


#: Share of a product's elements from which on it is made as a full matrix.
FULL = 0.3


@dataclass
class _Matrix:
    """A matrix of known pattern.

    Attributes
    ----------
    pattern : Pattern
        The positions that are not guaranteed zeros.
    stored : Pattern
        The positions that have values: all, where the pattern nearly fills up.
    """

    pattern: Pattern
    stored: Pattern


@dataclass
class _Leaf(_Matrix):
    """A matrix that is given, by its key."""

    key: Hashable


@dataclass
class _Product(_Matrix):
    """The product of two matrices, by their numbers."""

    left: int
    right: int
    factors: tuple[Pattern, Pattern]

    @cached_property
    def plan(self) -> ProductPlan:
        return planned(*self.factors, self.stored)


@dataclass
class _Sum(_Matrix):
    """The sum of matrices, by their numbers."""

    terms: tuple[int, ...]
    patterns: tuple[Pattern, ...]

    @cached_property
    def plan(self) -> SumPlan:
        return SumPlan(self.patterns, self.stored)


@dataclass
class _Pulled(_Matrix):
    """What the operators' own backward, by their key, makes of all columns of a full matrix, by its number."""

    key: Hashable
    right: int


@dataclass
class Accumulation:
    """Products and sums of matrices of known patterns, in the order in which they are made.

    Plans are made when values are first asked for: patterns alone need none.
    """

    matrices: list[_Leaf | _Product | _Sum | _Pulled] = field(default_factory=list)
    multiply_adds: int = 0
    #: Whether nothing will be asked for but patterns.
    patterns_only: bool = False

    def leaf(self, key: Hashable, pattern: Pattern) -> int:
        """A matrix whose values `run` is given by this key."""
        self.matrices.append(_Leaf(pattern, pattern, key))
        return len(self.matrices) - 1

    def multiply(self, left: int, right: int) -> int:
        """The product of two matrices; one with an identity is the other matrix."""
        one, other = self.matrices[left], self.matrices[right]
        if isinstance(one.pattern.structure, Identity):
            return right
        if isinstance(other.pattern.structure, Identity):
            return left
        factors = (one.stored, other.stored)
        pattern = product_pattern(one.pattern, other.pattern)
        self.multiply_adds += multiply_adds(*factors)
        if self.patterns_only:
            self.matrices.append(_Product(pattern, pattern, left, right, factors))
            return len(self.matrices) - 1
        rows, columns = pattern.shape
        full = any(isinstance(factor.structure, Full) for factor in factors)
        # Of factors that are stored as their patterns are, the product is.
        stored = Pattern.of(Full(rows, columns)) if full else pattern
        self.matrices.append(_Product(pattern, stored, left, right, factors))
        if not full and stored.nnz > FULL * rows * columns and not isinstance(stored.structure, Full):
            return self.add([len(self.matrices) - 1], full=True)
        return len(self.matrices) - 1

    def add(self, terms: Sequence[int], *, full: bool = False) -> int:
        """The sum of matrices, as a full one where asked for; of one, that one."""
        if len(terms) == 1 and not full:
            return terms[0]
        patterns = tuple(self.matrices[term].stored for term in terms)
        pattern = sum_pattern([self.matrices[term].pattern for term in terms])
        full = full or any(isinstance(each.structure, Full) for each in patterns)
        stored = Pattern.of(Full(*pattern.shape)) if full else pattern
        self.matrices.append(_Sum(pattern, stored, tuple(terms), patterns))
        return len(self.matrices) - 1

    def pulled(self, key: Hashable, right: int, pattern: Pattern) -> int:
        """The product of the operators of a key, and a matrix, by the operators' own backward."""
        if not isinstance(self.matrices[right].stored.structure, Full):
            right = self.add([right], full=True)
        self.matrices.append(_Pulled(pattern, Pattern.of(Full(*pattern.shape)), key, right))
        return len(self.matrices) - 1

    def run(
        self,
        result: int,
        leaf: Callable[[Any], torch.Tensor],
        pull: Callable[[Any, torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Values of a matrix on its pattern, ``(nnz, batch)``, or ``(nnz, 1)`` where all samples share them.

        Parameters
        ----------
        result : int
            The matrix.
        leaf : callable
            ``leaf(key)``: the values of a matrix that is given.
        pull : callable, optional
            ``pull(key, matrix)``, for what `pulled` made: all columns of ``(rows, columns, batch)`` taken back.
        """
        order, last_use = self._order(result)
        values: dict[int, torch.Tensor] = {}
        for number in order:
            matrix = self.matrices[number]
            if isinstance(matrix, _Leaf):
                values[number] = leaf(matrix.key)
            elif isinstance(matrix, _Product):
                values[number] = matrix.plan.multiply(values[matrix.left], values[matrix.right])
            elif isinstance(matrix, _Sum):
                values[number] = matrix.plan.add([values[term] for term in matrix.terms])
            else:
                assert pull is not None
                own = values[matrix.right]
                found = pull(matrix.key, own.reshape(*self.matrices[matrix.right].stored.shape, own.shape[1]))
                values[number] = found.flatten(0, 1)
            for used in last_use.get(number, ()):
                del values[used]
        return self._kept(self.matrices[result], values[result])

    def _kept(self, matrix: _Matrix, values: torch.Tensor) -> torch.Tensor:
        """Of values at all positions those of the pattern."""
        if matrix.stored.nnz == matrix.pattern.nnz:
            return values
        return gathered(values, matrix.pattern.places)

    @property
    def moved(self) -> int:
        """Values that are read and written for one sample, each product and sum by itself."""
        total = 0
        for number, matrix in enumerate(self.matrices):
            total += matrix.stored.nnz + sum(self.matrices[operand].stored.nnz for operand in self._operands(number))
        return total

    def _order(self, result: int) -> tuple[list[int], dict[int, list[int]]]:
        """What a result is made of, in order; and what is used for the last time by each of them."""
        last: dict[int, int] = {result: result}
        for number in range(result, -1, -1):
            if number in last:
                for operand in self._operands(number):
                    last.setdefault(operand, number)
        uses: dict[int, list[int]] = {}
        for number, user in last.items():
            if number != result:
                uses.setdefault(user, []).append(number)
        return sorted(last), uses

    def _operands(self, number: int) -> tuple[int, ...]:
        matrix = self.matrices[number]
        if isinstance(matrix, _Product):
            return (matrix.left, matrix.right)
        if isinstance(matrix, _Pulled):
            return (matrix.right,)
        return matrix.terms if isinstance(matrix, _Sum) else ()


@dataclass(eq=False)
class Region:
    """A graph of matrices between two vertices, in the place of the one matrix that they make together.

    Attributes
    ----------
    shape : tuple of int
        Of that matrix.
    edges : sequence of (vertex, vertex, Pattern)
        In an order in which all edges into a vertex come before those out of it.
    start, stop : vertex
        Rows and columns of the matrix.
    """

    shape: tuple[int, int]
    edges: Sequence[tuple[Any, Any, Pattern]]
    start: Any
    stop: Any

    @property
    def nnz(self) -> int:
        """Entries of all edges."""
        return sum(pattern.nnz for _, _, pattern in self.edges)

    @property
    def pattern(self) -> Pattern:
        """Of the one matrix: the union over all paths."""
        return self._made[0]

    @property
    def multiply_adds(self) -> int:
        """That it takes to make the one matrix."""
        return self._made[1]

    @cached_property
    def estimate(self) -> float:
        """About as many, without any pattern of a product: the edges one by one to what is made of those behind."""
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
    def _made(self) -> tuple[Pattern, int]:
        shadow = Accumulation(patterns_only=True)
        edges = [(source, target, shadow.leaf(None, pattern)) for source, target, pattern in self.edges]
        made = eliminate(shadow, edges, self.start, self.stop)
        pattern = empty_pattern(*self.shape) if made is None else shadow.matrices[made].pattern
        return pattern, shadow.multiply_adds

    def meeting(self, held: np.ndarray) -> tuple[int, np.ndarray]:
        """Of a vector that is taken through the edges one by one: the pairs that meet, and which rows are reached."""
        pairs, reached = self.pairs(held)
        return sum(int(own.sum()) for own in pairs.values()), reached

    def pairs(self, held: np.ndarray) -> tuple[dict[int, np.ndarray], np.ndarray]:
        """The same, with the pairs that meet in each row of each edge, by its number; an edge not reached has none."""
        reached = {self.stop: held}
        pairs: dict[int, np.ndarray] = {}
        for number in reversed(range(len(self.edges))):
            source, target, pattern = self.edges[number]
            if target in reached:
                own = pairs[number] = meeting(pattern, reached[target])
                reached[source] = reached[source] | (own > 0) if source in reached else own > 0
        return pairs, reached.get(self.start, np.zeros(self.shape[0], dtype=np.bool_))


def matrix_of(factor: Pattern | Region) -> Pattern:
    """The pattern of a factor, of one operator or of several."""
    return factor.pattern if isinstance(factor, Region) else factor


def empty_pattern(rows: int, columns: int) -> Pattern:
    """No position at all."""
    return Pattern((rows, columns), np.zeros(rows + 1, dtype=np.int64), np.zeros(0, dtype=np.int64))


def eliminate(
    accumulation: Accumulation, edges: Iterable[tuple[Hashable, Hashable, int]], start: Hashable, stop: Hashable
) -> int | None:
    """Eliminate all vertices between two of a graph, the one of the fewest multiply-adds first.

    Parameters
    ----------
    accumulation : Accumulation
        Holds the edges' matrices, and gets their products and sums.
    edges : iterable of (vertex, vertex, int)
        From where, to where and the matrix: the derivative of the first with respect to the second, transposed or not
        as long as ``edge(u, v) · edge(v, w)`` is a product along a path.
    start, stop : vertex
        The ends that stay.

    Returns
    -------
    int or None
        The matrix between them; None where no path leads from one to the other.
    """
    after: dict[Hashable, dict[Hashable, list[int]]] = {}
    before: dict[Hashable, set[Hashable]] = {}
    for source, target, matrix in edges:
        after.setdefault(source, {}).setdefault(target, []).append(matrix)
        before.setdefault(target, set()).add(source)

    def merged(source: Hashable, target: Hashable) -> int:
        terms = after[source][target]
        if len(terms) > 1:
            after[source][target] = [accumulation.add(terms)]
        return after[source][target][0]

    costs: dict[tuple[int, int], int] = {}

    def cost(vertex: Hashable) -> int:
        total = 0
        for source in before.get(vertex, ()):
            for target in after.get(vertex, {}):
                pair = (merged(source, vertex), merged(vertex, target))
                if pair not in costs:
                    factors = [accumulation.matrices[matrix].pattern for matrix in pair]
                    trivial = any(isinstance(factor.structure, Identity) for factor in factors)
                    costs[pair] = 0 if trivial else multiply_adds(*factors)
                total += costs[pair]
        return total

    inner = [vertex for vertex in dict.fromkeys([*before, *after]) if vertex not in (start, stop)]
    while inner:
        vertex = min(inner, key=cost)
        inner.remove(vertex)
        for source in before.pop(vertex, set()):
            into = merged(source, vertex)
            del after[source][vertex]
            for target in after.get(vertex, {}):
                product = accumulation.multiply(into, merged(vertex, target))
                after[source].setdefault(target, []).append(product)
                before.setdefault(target, set()).add(source)
        for target in after.pop(vertex, {}):
            before[target].discard(vertex)
    return merged(start, stop) if stop in after.get(start, {}) else None
