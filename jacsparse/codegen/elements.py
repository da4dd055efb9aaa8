"""Graphs of tensors as arithmetic on single elements.

Each element that a tensor holds, or an operation computes, has a number. What only moves elements, as a roll, a slice
or a concatenation, is applied to these numbers when preparing, and costs nothing later; an elementwise call computes
new elements from those of its operands. Sums of products of local derivatives are operations like any other.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..runtime import index_dtype, row_starts, within_rows
from .calls import CallResult, Calls, mapped
from .kernels import mark_makers, number_kinds, sort_sums
from .operations import FLOATS, OPERAND, ElementOperation, is_operation, operation_of

#: The most terms of a sum that is one operation; longer ones are sums of sums.
MOST_SUM_TERMS = 8
#: The most elements that a call may sum up to one: PyTorch computes longer sums as fast.
MOST_SUMMED = 64
#: The most distinct numbers, or kinds of sums, of which each has code of its own.
MOST_KINDS = 16

aten = torch.ops.aten

#: What only moves elements, and may fill up with zeros.
_MOVES = {
    "alias", "broadcast_to", "cat", "chunk", "clone", "constant_pad_nd", "contiguous", "detach", "diagonal",
    "expand", "flip", "gather", "index", "index_select", "lift_fresh", "lift_fresh_copy", "movedim", "narrow",
    "permute", "repeat", "reshape", "roll", "select", "select_backward", "select_scatter", "slice",
    "slice_backward", "slice_scatter", "split", "split_with_sizes", "squeeze", "stack", "t", "tile",
    "transpose", "tril", "triu", "unbind", "unsqueeze", "view", "_unsafe_view",
}  # fmt: skip
#: Those whose other operands are indices.
_INDEXED = ("gather", "index", "index_select")
#: What depends on the form of its operands alone.
_FILLS = {
    "_new_zeros_with_same_feature_meta", "arange", "full", "full_like", "new_full", "new_ones", "new_zeros",
    "ones", "ones_like", "scalar_tensor", "zeros", "zeros_like",
}  # fmt: skip
_DTYPES = (*FLOATS, torch.bool)


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
            self.places_of_nodes = np.concatenate(
                [self.places_of_nodes[: node.first], np.zeros(2 * self.count, np.int32)]
            )
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
        firsts, kinds = kinds_of(array.view(f"i{array.itemsize}")[:, None], MOST_KINDS)
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
        makers, numbers = np.zeros(len(self.nodes), np.bool_), unrepeated(numbers)
        mark_makers(0, numbers.size, in_own_order(numbers).reshape(-1), self.places_of_nodes, makers)
        return np.flatnonzero(makers).tolist()  # type: ignore[no-any-return]


class UnreadableWriteError(Exception):
    """A call writes to a tensor in a way that cannot be followed element by element."""


def _name_of(overload: Any) -> str | None:
    """The name of an operator of ATen; other libraries may have the same ones."""
    name: str = overload.overloadpacket.__name__
    return name if overload.namespace == "aten" else None


def may_be_loops(name: str) -> bool:
    """Whether calls of an operator, as ``aten.add``, are no work of PyTorch's, unless they sum many elements."""
    library, _, name = name.partition(".")
    return library == "aten" and (name in _MOVES or name in _FILLS or name == "sum" or is_operation(name))


class CallsOfElements:
    """The elements that a graph of calls computes.

    Parameters
    ----------
    elements : ElementGraph
        What they are added to.
    calls : Calls
        The calls.
    inputs : sequence of Tensor
        Its inputs in a run.
    sources : mapping of int to object
        By places among the inputs, what finds them in each call; the others are the same in each call.
    leaves : bool
        Whether all calls are left to PyTorch.

    Attributes
    ----------
    results : list of ndarray
        The numbers of the elements of each tensor that the graph returns, in its shape.
    left : list of Node
        The calls that are no operations, and whose results are tensors in memory: PyTorch makes them.

    Raises
    ------
    UnreadableWriteError
        Where calls write to tensors, unless all are left to PyTorch.
    """

    def __init__(
        self,
        elements: ElementGraph,
        calls: Calls,
        inputs: Sequence[torch.Tensor],
        sources: Mapping[int, Any],
        *,
        leaves: bool,
    ) -> None:
        self.elements, self.left, self._leaves = elements, list[CallResult](), leaves
        #: The tensors that are the same in each call, and the numbers of the elements of others, in their shapes.
        self._known: dict[CallResult, Any] = {}
        self._numbers: dict[CallResult, Any] = {}
        for place, (node, tensor) in enumerate(zip(calls.inputs, inputs, strict=True)):
            if place not in sources:
                self._known[node] = tensor
            elif tensor.dtype in _DTYPES and tensor.layout == torch.strided:
                self._numbers[node] = self._in_memory(tensor, sources[place])
        self._known |= {node: node.constant for node in calls.read if node.constant is not None}
        for node in calls.steps:
            self._call(node)
        self.results = [self._result(node).numpy() for node in calls.outputs]

    def _in_memory(self, tensor: torch.Tensor, source: Any) -> torch.Tensor:
        """The numbers of the elements of a tensor, which may lie in memory in any order."""
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        extent = 1 + sum((size - 1) * step for size, step in steps) if tensor.numel() else 0
        numbers = torch.from_numpy(self.elements.tensor(source, extent, tensor.dtype))
        return numbers.as_strided(tensor.shape, tensor.stride())

    def _result(self, node: CallResult) -> torch.Tensor:
        if node not in self._known and node not in self._numbers:
            # It has another dtype, and is converted.
            self._leave(node, torch.float32)
        return self._numbers_of(node, torch.float64)

    def _numbers_of(self, node: CallResult, dtype: torch.dtype) -> torch.Tensor:
        """The numbers of the elements of a tensor; where it is the same in each call, in a dtype."""
        if node in self._numbers:
            return self._numbers[node]  # type: ignore[no-any-return]
        tensor = self._known[node]
        return torch.from_numpy(self.elements.array(tensor.to(dtype))).reshape(tensor.shape)

    def _leave(self, node: CallResult, dtype: torch.dtype | None = None) -> None:
        """Leave a call to PyTorch, whose result may be converted to a dtype that operations read."""
        value = node.form
        if isinstance(value, torch.Tensor) and (dtype or value.dtype) in _DTYPES:
            self.left.append(node)
            numbers = self.elements.tensor(node, value.numel(), dtype or value.dtype)
            self._numbers[node] = torch.from_numpy(numbers).reshape(value.shape)

    def _call(self, node: CallResult) -> None:
        target: Any = node.target
        first = next((each for each in (self._known, self._numbers) if node.args and node.args[0] in each), None)
        if self._leaves or (target is operator.getitem and first is None):
            self._leave(node)
            return
        if target is operator.getitem:
            first[node] = first[node.args[0]][node.args[1]]  # type: ignore[index]
        elif target._schema.is_mutable:
            self._write(node)
        elif _name_of(target) in _FILLS:
            self._known[node] = target(*mapped(node.args, _of_form), **node.kwargs)
        elif all(each in self._known for each in node.operands):
            self._known[node] = target(*mapped(node.args, self._known.__getitem__), **node.kwargs)
        elif not all(each in self._known or each in self._numbers for each in node.operands):
            self._leave(node)
        elif _name_of(target) in _MOVES and target is not aten.view.dtype:
            self._move(node)
        else:
            numbers = self._summed(node) if _name_of(target) == "sum" else self._computed(node)
            if numbers is None:
                self._leave(node)
            else:
                self._numbers[node] = numbers
        if node.written:
            self._check_written(node)

    def _move(self, node: CallResult) -> None:
        """Apply a call to the numbers of elements, each one more: at zeros it fills up."""
        target: Any = node.target
        name = target.overloadpacket.__name__
        # Those that are joined may have several dtypes.
        dtypes = [each.value.dtype for each in node.operands if each in self._numbers]
        dtype = functools.reduce(torch.promote_types, dtypes)
        if node.written and any(argument.alias_info for argument in target._schema.arguments):
            # A view, through which the numbers are written to.
            self._numbers[node] = target(*mapped(node.args, self._numbers.__getitem__), **node.kwargs)
            return

        def argument(each: CallResult) -> torch.Tensor:
            if name in _INDEXED and each in self._known:
                return self._known[each]  # type: ignore[no-any-return]
            return self._numbers_of(each, dtype) + 1

        def moved(numbers: torch.Tensor) -> torch.Tensor:
            return torch.where(numbers == 0, filling, numbers - 1)

        if name in ("view", "_unsafe_view"):
            # The numbers may lie in memory otherwise than the elements.
            target = aten.reshape.default
        args: Any = mapped(node.args, argument)
        filling = self.elements.constant(0.0, dtype)
        if target is aten.constant_pad_nd.default and len(args) > 2:
            *args, value = args
            filling = self.elements.constant(float(value), dtype)
        result = target(*args, **node.kwargs)
        self._numbers[node] = moved(result) if isinstance(result, torch.Tensor) else [moved(each) for each in result]

    def _computed(self, node: CallResult) -> torch.Tensor | None:
        """The numbers of what an elementwise call computes; None where there is no operation for it."""
        target: Any = node.target
        value: Any = node.form
        given = (
            dict(zip([argument.name for argument in target._schema.arguments], node.args, strict=False)) | node.kwargs
        )
        forms = {name: each.value if isinstance(each, CallResult) else each for name, each in given.items()}
        found = operation_of(target, forms, value.dtype) if isinstance(value, torch.Tensor) else None
        if found is None:
            return None
        operation, taken = found
        operands = []
        for name, dtype in zip(taken, operation.reads, strict=True):
            operand: Any = given[name]
            numbers = self._numbers_of(operand, dtype).expand(value.shape).reshape(-1)
            # A later write replaces the numbers of what is written to.
            operands.append((numbers.clone() if operand.written else numbers).numpy())
        return torch.from_numpy(self.elements.compute(operation, operands)).reshape(value.shape)

    def _summed(self, node: CallResult) -> torch.Tensor | None:
        """The numbers of sums along some axes; None where they are long, or of another dtype than their elements."""
        operand: Any = node.args[0]
        value, dtype = node.value, operand.value.dtype
        numbers = self._numbers_of(operand, dtype)
        axes: Any = (node.args[1] if len(node.args) > 1 else None) or range(numbers.ndim)
        numbers = numbers.movedim(list(axes), list(range(-len(axes), 0)))
        numbers = numbers.reshape(value.numel(), -1 if value.numel() else 1)
        rows, count = numbers.shape
        if dtype not in FLOATS or value.dtype != dtype or count > MOST_SUMMED:
            return None
        weights = torch.ones(rows * count, dtype=dtype, device="cpu").numpy()
        terms = numbers.reshape(-1, 1).numpy()
        summed = sums(self.elements, np.arange(rows + 1) * count, [terms], weights, None, dtype)
        return torch.from_numpy(summed).reshape(value.shape)

    def _write(self, node: CallResult) -> None:
        """Write the numbers of elements over those of others, in the memory that views of these share."""
        target, written = node.target, self._numbers.get(node.args[0])  # type: ignore[arg-type]
        if not isinstance(written, torch.Tensor):
            raise UnreadableWriteError
        dtype = node.args[0].value.dtype
        numbers: torch.Tensor | None
        if target is aten.copy_.default and node.args[1].value.dtype == dtype:
            numbers = self._numbers_of(node.args[1], dtype)  # type: ignore[arg-type]
        elif target is aten.zero_.default or target is aten.fill_.Scalar:
            value = node.args[1] if len(node.args) > 1 else 0.0
            numbers = torch.tensor(self.elements.constant(float(value), dtype))  # type: ignore[arg-type]
        else:
            numbers = self._computed(node)
        if numbers is None:
            raise UnreadableWriteError
        written.copy_(numbers)
        self._numbers[node] = written

    def _check_written(self, node: CallResult) -> None:
        """See that the numbers of a tensor that is written to lie in memory as it does."""
        if node in self._known:
            if node.value.is_complex():
                raise UnreadableWriteError
            self._numbers[node] = self._numbers_of(node, node.value.dtype).clone()
            del self._known[node]
        numbers, target = self._numbers.get(node), node.target
        if node in self.left or target is operator.getitem or not isinstance(numbers, torch.Tensor):
            raise UnreadableWriteError
        aliases = any(argument.alias_info for argument in target._schema.arguments)
        if not aliases and numbers.stride() != node.value.stride():
            raise UnreadableWriteError


def _of_form(node: CallResult) -> torch.Tensor:
    """A tensor of the form of a call's result."""
    value: torch.Tensor = node.value
    return torch.zeros(value.shape, dtype=value.dtype, device="cpu")


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
        firsts, of_weights = kinds_of(weights.view(f"i{weights.itemsize}")[:, None], MOST_KINDS)
    fixed, distinct = of_weights is not None, weights[firsts]
    if of_weights is None:
        of_weights = np.zeros(len(weights), np.int32)
        if weights.dtype.kind != "i":
            weights = elements.array(torch.from_numpy(weights).to(dtype))
    for count in (np.flatnonzero(np.bincount(counts)[1:]) + 1).tolist():
        rows = np.flatnonzero(counts == count)
        sorted_by = [in_own_order(factor[:, 0]) for factor in factors]
        terms, of_terms = _sorted_terms(elements, indptr[rows], count, sorted_by, of_weights, len(distinct))
        if kinds_of(of_terms, MOST_KINDS)[1] is None:
            factors = [elements.in_one_memory(factor.reshape(-1)).reshape(factor.shape) for factor in factors]
            terms, _ = _sorted_terms(elements, indptr[rows], count, [], of_weights, len(distinct))
        for _, those in of_kinds(of_weights[terms.T]):
            of_kind = terms if len(those) == len(rows) else terms[:, those]
            weighted = distinct[of_weights[of_kind[:, 0]]].tolist() if fixed else [OPERAND] * count
            operands = [start[: len(those)] if start.strides == (0, 0) else start[rows[those]]]
            for term in of_kind:
                operands += [] if fixed else [weights[term, None]]
                operands += [factor[term] for factor in factors]
            arguments = OPERAND, tuple((weight, len(factors)) for weight in weighted)
            operation = ElementOperation("sum", dtype, (dtype,) * len(operands), arguments)
            # One sample after the other, as the operands of most lie.
            numbers = elements.compute(operation, [_by_samples(operand, batch) for operand in operands])
            results[rows[those]] = numbers.reshape(batch, -1).T
    return results


def _sorted_terms(
    elements: ElementGraph,
    begins: np.ndarray,
    count: int,
    factors: Sequence[np.ndarray],
    of_weights: np.ndarray,
    kinds: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The terms of sums of so many, each sum's by the nodes of factors, then by kinds of weights; and what these are.

    The terms are ``(count, sums)``, and what tells their kinds ``(sums, count)``.
    """
    terms, of_terms = np.empty((count, len(begins)), np.int64), np.empty((len(begins), count), np.int64)
    left, right = [*factors, *[np.zeros(0, elements.dtype)] * 2][:2]
    places = begins.astype(np.int64), left, right, elements.places_of_nodes
    sort_sums(0, len(begins), *places, len(elements.nodes), of_weights, max(1, kinds), terms, of_terms)
    return terms, of_terms


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


def kinds_of(matrix: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray | None]:
    """The first row of each kind, and the kind of each row; None where there are more kinds than that."""
    firsts, kinds = np.empty(most + 1, np.int64), np.empty(len(matrix), np.int32)
    number_kinds(0, len(matrix), in_own_order(matrix), firsts, kinds)
    count = int(firsts[-1])
    return firsts[: min(count, most)], kinds if count <= most else None


def of_kinds(matrix: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """For each kind of rows, the first one, and all."""
    firsts, kinds = kinds_of(matrix, 2 * MOST_KINDS)
    if kinds is None:
        firsts, kinds = np.unique(matrix, axis=0, return_index=True, return_inverse=True)[1:]
    if len(firsts) == 1:
        yield 0, np.arange(len(matrix))
        return
    # NumPy sorts small types in linear time.
    order = np.argsort(kinds.astype(np.min_scalar_type(len(firsts))), kind="stable")
    yield from zip(firsts.tolist(), np.split(order, np.cumsum(np.bincount(kinds))[:-1]), strict=True)
