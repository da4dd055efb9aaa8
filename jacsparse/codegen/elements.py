"""Graphs of tensors as arithmetic on single elements.

Each element that a tensor holds, or an operation computes, has a number. What only moves elements, as a roll, a slice
or a concatenation, is applied to these numbers when preparing, and costs nothing later (`calls`); an elementwise call
computes new elements from those of its operands. Sums of products of local derivatives are operations like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..runtime import index_dtype, row_starts, unsigned, within_rows
from .kernels import mark_makers, number_kinds, sort_sums
from .operations import OPERAND, ElementOperation

#: The most terms of a sum that is one operation; longer ones are sums of sums.
MOST_SUM_TERMS = 8
#: The most distinct numbers, or kinds of sums, of which each has code of its own.
MOST_KINDS = 16


@dataclass(frozen=True, eq=False)
class Elements:
    """Consecutive elements: those of a tensor in memory, a constant, or what an operation computes."""

    first: int
    count: int
    dtype: torch.dtype
    #: The operation, and the numbers of the elements of each operand.
    operation: ElementOperation | None = None
    operands: tuple[np.ndarray, ...] = ()
    constant: float | bool | None = None


class TooManyElementsError(Exception):
    """A graph has more elements than its dtype has numbers."""


class ElementGraph:
    """Elements in the order in which they are computed, whose numbers have a dtype.

    Raises
    ------
    TooManyElementsError
        Where elements that are added have none of its numbers.
    """

    def __init__(self, dtype: type[np.signedinteger] = np.int32) -> None:
        self.dtype = dtype
        self.nodes: list[Elements] = []
        #: What finds the tensors that hold elements, by their places among the nodes.
        self.tensors: dict[int, Any] = {}
        #: The places of nodes whose elements are stored, since others read them in any order.
        self.stored: set[int] = set()
        self._constants: dict[tuple[str, torch.dtype], Elements] = {}
        #: The number of all elements, and by their numbers the places of their nodes.
        self.count = 0
        self.places_of_nodes = np.zeros(1024, np.int32)

    def _add(self, count: int, dtype: torch.dtype, **fields: Any) -> Elements:
        node = Elements(self.count, count, dtype, **fields)
        self.count += count
        if index_dtype(self.count, 0, 0)(0).itemsize > self.dtype(0).itemsize:
            raise TooManyElementsError
        if self.count > len(self.places_of_nodes):
            before, self.places_of_nodes = self.places_of_nodes, np.empty(4 * self.count, np.int32)
            self.places_of_nodes[: node.first] = before[: node.first]
        self.places_of_nodes[node.first : self.count] = len(self.nodes)
        self.nodes.append(node)
        return node

    def tensor(self, source: Any, count: int, dtype: torch.dtype) -> np.ndarray:
        """The numbers of the elements of a tensor, as they lie in memory."""
        self.tensors[len(self.nodes)] = source
        return self.numbers(self._add(count, dtype))

    def constant(self, value: float | bool, dtype: torch.dtype) -> int:
        """The number of an element that is the same in each call."""
        # By its text: zeros have signs.
        key = repr(value), dtype
        if key not in self._constants:
            self._constants[key] = self._add(1, dtype, constant=value)
        return self._constants[key].first

    def array(self, values: torch.Tensor) -> np.ndarray:
        """The numbers of elements that are the same in each call."""
        array = values.reshape(-1).numpy()
        # By their bits: zeros have signs.
        firsts, kinds = kinds_of([array.view(f"i{array.itemsize}")], MOST_KINDS)
        if kinds is None:
            return self.tensor(values.reshape(-1).clone(), values.numel(), values.dtype)
        constants = [self.constant(each.item(), values.dtype) for each in array[firsts]]
        return np.array(constants, dtype=self.dtype)[kinds]

    def compute(self, operation: ElementOperation, operands: Sequence[np.ndarray]) -> np.ndarray:
        """The numbers of what an operation computes."""
        node = self._add(len(operands[0]), operation.dtype, operation=operation, operands=tuple(operands))
        return self.numbers(node)

    def numbers(self, node: Elements) -> np.ndarray:
        """The numbers of a node's elements."""
        return np.arange(node.first, node.first + node.count, dtype=self.dtype)

    def in_one_memory(self, numbers: np.ndarray) -> np.ndarray:
        """The numbers of elements that are stored and equal others, or are these."""
        computed = np.array([node.operation is not None for node in self.nodes])
        places = self.places(numbers)
        self.stored |= {place for place in self.makers(numbers) if computed[place]}
        others = ~computed[places]
        if others.any():
            distinct, inverse = np.unique(numbers[others], return_inverse=True)
            dtype = self.nodes[places[others][0]].dtype
            self.stored.add(len(self.nodes))
            copies = self.compute(ElementOperation("_to_copy", dtype, (dtype,), (OPERAND,)), [distinct])
            numbers = numbers.copy()
            numbers[others] = copies[inverse]
        return numbers

    def places(self, numbers: np.ndarray) -> np.ndarray:
        """The place of the node of each element."""
        return self.places_of_nodes[numbers]

    def makers(self, numbers: np.ndarray) -> list[int]:
        """The places of the nodes of some elements, each once."""
        if not numbers.size:
            return []
        numbers = unrepeated(numbers)
        first, last = self.places_of_nodes[[numbers.min(), numbers.max()]].tolist()
        if first == last:
            return [first]
        makers = np.zeros(len(self.nodes), np.bool_)
        mark_makers(0, numbers.size, unsigned(in_own_order(numbers).reshape(-1)), self.places_of_nodes, makers)
        return np.flatnonzero(makers).tolist()  # type: ignore[no-any-return]


def sums(
    elements: ElementGraph,
    indptr: np.ndarray,
    factors: Sequence[np.ndarray],
    weights: np.ndarray,
    start: np.ndarray | None,
    dtype: torch.dtype,
) -> np.ndarray:
    """The numbers of sums of weighted products, ``(rows, batch)``.

    Parameters
    ----------
    elements : ElementGraph
        What they are added to.
    indptr : ndarray of int, (rows + 1,)
        Where the terms of each row begin.
    factors : sequence of ndarray of int, (terms, batch)
        The numbers of the factors of all terms.
    weights : ndarray, (terms,)
        The weights; if integers, the numbers of elements.
    start : ndarray of int, (rows, 1), optional
        The numbers of what the sums are added to.
    dtype : dtype
        Of the sums.
    """
    counts = np.diff(indptr)
    if counts.max(initial=0) > MOST_SUM_TERMS:
        blocks = row_starts(-(-counts // MOST_SUM_TERMS), np.int64)
        begins = np.repeat(indptr[:-1], np.diff(blocks)) + MOST_SUM_TERMS * within_rows(np.diff(blocks))
        parts = sums(elements, np.append(begins, indptr[-1]), factors, weights, None, dtype)
        return sums(elements, blocks, [parts], np.ones(len(parts)), start, dtype)
    batch = factors[0].shape[1]
    if start is None:
        start = np.broadcast_to(elements.dtype(elements.constant(0.0, dtype)), (len(counts), 1))
    results = np.repeat(start, batch, 1)
    of_weights, firsts = None, np.zeros(0, np.int64)
    if weights.dtype.kind != "i":
        firsts, of_weights = kinds_of([weights.view(f"i{weights.itemsize}")], MOST_KINDS)
    fixed, distinct = of_weights is not None, weights[firsts]
    if of_weights is None:
        of_weights = np.zeros(len(weights), np.int32)
        if weights.dtype.kind != "i":
            weights = elements.array(torch.from_numpy(weights).to(dtype))
    for count in (np.flatnonzero(np.bincount(counts)[1:]) + 1).tolist():
        rows = np.flatnonzero(counts == count)
        terms = indptr[rows].astype(np.int64) + np.arange(count)[:, None]
        if _sort_terms(elements, terms, factors, of_weights):
            factors = [elements.in_one_memory(factor.reshape(-1)).reshape(factor.shape) for factor in factors]
            terms.sort(0)
            _sort_terms(elements, terms, [], of_weights)
        for _, those in of_kinds([*of_weights[terms]] if len(distinct) > 1 else [], len(rows)):
            of_kind = terms if len(those) == len(rows) else terms[:, those]
            weighted = distinct[of_weights[of_kind[:, 0]]].tolist() if fixed else [OPERAND] * count
            operands = [start[: len(those)] if start.strides == (0, 0) else start[rows[those]]]
            for term in of_kind:
                operands += [] if fixed else [weights[term, None]]
                operands += [factor.take(term, 0) for factor in factors]
            arguments = OPERAND, tuple((weight, len(factors)) for weight in weighted)
            operation = ElementOperation("sum", dtype, (dtype,) * len(operands), arguments)
            # One sample after the other, as the operands of most lie.
            numbers = elements.compute(operation, [_by_samples(operand, batch) for operand in operands])
            results[slice(None) if len(those) == len(counts) else rows[those]] = numbers.reshape(batch, -1).T
    return results


def _sort_terms(
    elements: ElementGraph, terms: np.ndarray, factors: Sequence[np.ndarray], of_weights: np.ndarray
) -> bool:
    """Sort the terms of sums, ``(count, sums)``, each sum's by the nodes of their factors and by kinds of weights.

    Returns whether there are many kinds of sums.
    """
    kinds = int(of_weights.max(initial=0)) + 1
    factors = [factor[:, 0] for factor in factors if len(elements.makers(factor[:, 0])) > 1]
    if kinds == 1 and not factors:
        return False
    left, right = [unsigned(in_own_order(factor)) for factor in (*factors, *[np.zeros(0, elements.dtype)] * 2)][:2]
    places, keys = (left, right, elements.places_of_nodes), np.empty_like(terms)
    sort_sums(0, terms.shape[1], *places, len(elements.nodes), of_weights, kinds, unsigned(terms), keys)
    return kinds_of([*keys], MOST_KINDS)[1] is None


def _by_samples(numbers: np.ndarray, batch: int) -> np.ndarray:
    """Numbers ``(terms, batch)``, or ``(terms, 1)``, one sample after the other."""
    if numbers.strides == (0, 0):
        return np.broadcast_to(numbers[0, 0], len(numbers) * batch)
    return numbers.T.reshape(-1) if numbers.shape[1] == batch else np.tile(numbers[:, 0], batch)


def unrepeated(numbers: np.ndarray) -> np.ndarray:
    """The same numbers; only one where all are one in memory."""
    return numbers[:1] if numbers.strides == (0,) else numbers


def in_own_order(array: np.ndarray) -> np.ndarray:
    """The same elements in C order in writable memory, as kernels are compiled for."""
    return np.require(array, requirements=["C", "W"])


def kinds_of(rows: Sequence[np.ndarray], most: int, count: int | None = None) -> tuple[np.ndarray, np.ndarray | None]:
    """The first place of each kind, and the kind of each place; None where there are more kinds than that.

    Places are of one kind where they have the same integer in each of several rows; `count` is how many places there
    are, where there may be no row.
    """
    count = len(rows[0]) if count is None else count
    firsts, kinds = np.zeros(most + 1, np.int64), np.zeros(count, np.int32)
    firsts[-1] = min(1, count)
    for row in rows:
        # NumPy tells sooner than the kernel that all are alike.
        if (row == row[:1]).all():
            continue
        number_kinds(0, count, in_own_order(row), kinds, firsts)
        if firsts[-1] > most:
            return firsts[:-1], None
    return firsts[: firsts[-1]], kinds


def of_kinds(rows: Sequence[np.ndarray], count: int) -> Iterator[tuple[int, np.ndarray]]:
    """For each kind of places, as of `kinds_of`, the first one, and all."""
    firsts, kinds = kinds_of(rows, 2 * MOST_KINDS, count)
    if kinds is None:
        firsts, kinds = np.unique(np.stack(rows), axis=1, return_index=True, return_inverse=True)[1:]
    if len(firsts) == 1:
        yield 0, np.arange(count)
        return
    yield from zip(firsts.tolist(), np.split(sorted_places(kinds), np.cumsum(np.bincount(kinds))[:-1]), strict=True)


def sorted_places(keys: np.ndarray) -> np.ndarray:
    """The places of keys, natural numbers, in their stable order."""
    if (keys[1:] >= keys[:-1]).all():
        return np.arange(len(keys))
    # NumPy sorts small types in linear time.
    return np.argsort(keys.astype(np.min_scalar_type(keys.max())), kind="stable")
