"""Values by forward accumulation, for functions of many calls on few elements each, as loops over steps.

The products of an element's derivatives with the seeds of all colours of columns are those of the elements that it is
computed from, scaled by local derivatives. One kernel takes them in the order of the calls. Calls that do the same, as
those of all steps of a loop, have their local derivatives computed together. So planning takes little for each call.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ..patterns import Full, Pattern, row_colors
from ..runtime import MEMORY_POOL, on_this_thread, row_starts
from ..stages import Edge
from ..tracing import Scalar, Trace, Value
from . import kernels
from .evaluator import Evaluator
from .folding import Folding, power_of, transposed
from .terms import NotFoldableError
from .traced_function import TracedFunction
from .value_functions import elementwise_derivatives

#: The fewest local Jacobians, and the fewest for each group of those whose values are computed together.
FEWEST, FEWEST_OF_GROUP = 128, 32
#: The most multiply-adds of a local Jacobian on average, and for how many an entry counts beside its colours: about
#: 3 µs, where the run itself takes ten times as long for a call.
MOST_WORK, ENTRY = 2**13, 24


@dataclass(eq=False)
class _Group:
    """Local Jacobians whose values are computed together: derivatives of calls that do the same, or numbers."""

    #: 1 where they are the numbers that scale operands, -1 where they are the inverses of these.
    power: int | None
    edges: list[Edge] = field(default_factory=list)
    #: Where its values begin, among those of all groups, and how many there are.
    first: int = 0
    count: int = 0

    def add(self, edge: Edge) -> int | np.ndarray:
        """Add an edge; return which of the group's values its entries are."""
        first = self.count
        self.edges.append(edge)
        self.count += 1 if self.power else edge.call.out_size
        return first if self.power else first + edge.pattern.rows

    @functools.cached_property
    def _references(self) -> dict[str, list[Any]]:
        """What the edges' calls refer to, by argument."""
        calls = [edge.operation.referenced for edge in self.edges]
        return {name: [call[name] for call in calls] for name in (["other"] if self.power else calls[0])}

    def values(self, trace: Trace) -> np.ndarray:
        """The values in a run, of one edge after the other: numbers, or derivatives at all places of results."""
        operation, argument, count = self.edges[0].operation, self.edges[0].call.argument, len(self.edges)
        if self.power:
            numbers = [float(trace.read(each)) for each in self._references["other"]]
            return (torch.tensor(numbers, dtype=trace.input.dtype, device="cpu") ** self.power).numpy()
        shape, arguments = tuple(trace.tensor(self.edges[0].target).shape), dict[str, Any]()
        for name, references in self._references.items():
            arguments[name] = trace.read(references[0])
            if count > 1 and type(references[0]) is Value:
                stacked = torch.stack([trace.elements(each.number) for each in references])
                arguments[name] = stacked.reshape(count, *(1,) * (1 + len(shape) - stacked.ndim), *stacked.shape[1:])
        shape = (count, *shape) if count > 1 else shape
        derivative = elementwise_derivatives(operation.evaluate, arguments, [argument], shape)[argument]
        return derivative.reshape(-1).to(trace.input.dtype).numpy()


class _Part(NamedTuple):
    """The entries of a local Jacobian: their rows of products, those that they scale, and by what.

    That is a coefficient, times values of a group where there is one.
    """

    rows: np.ndarray
    scaled: np.ndarray
    coefficient: float | np.ndarray
    group: _Group | None
    which: int | np.ndarray


class ForwardAccumulation(Evaluator):
    """The values of a function's Jacobian from products with the seeds of the colours of its columns.

    Parameters
    ----------
    function : TracedFunction
        The function, of one sample.

    Raises
    ------
    NotFoldableError
        Where a local Jacobian is neither constant nor elementwise, or where other ways may take much less in each call.
    """

    name = "compressed"

    def __init__(self, function: TracedFunction) -> None:
        self.function, self._columns, edges = function, function.x.numel(), [*function.chain.edges]
        if function.batch != 1 or function.x.is_cuda or len(edges) < FEWEST:
            raise NotFoldableError("it makes too few calls, or has several samples")
        most = MOST_WORK * len(edges)
        if ENTRY * sum(edge.transposed_pattern.nnz for edge in edges) > most:
            raise NotFoldableError("its calls work on many elements")
        nowhere = np.empty(0, np.int64)
        folding, groups, parts = Folding(function), dict[object, _Group](), [_Part(nowhere, nowhere, 1.0, None, 0)]
        # By value, the rows of its elements' products: those of the input come first, then one of zeros.
        rows, count = {0: np.arange(self._columns)}, self._columns + 1
        for target, operands in itertools.groupby(edges, key=lambda edge: edge.target):
            of_target = [_part(edge, rows[edge.source], folding, groups) for edge in operands]
            moved = _moved(of_target, size := function.trace.tensor(target).numel(), self._columns)
            rows[target] = np.arange(count, count + size) if moved is None else moved
            if moved is None:
                parts += [part._replace(rows=count + part.rows) for part in of_target]
                count += size
        self._groups, self._count = [*groups.values()], count
        if len(edges) < FEWEST_OF_GROUP * len(groups) or count * self._columns // 8 > most:
            raise NotFoldableError("too few of its calls do the same, or there are many arguments")
        self._plan(parts, rows[function.chain.stages[-1].stop])
        if len(self._scaled) * (ENTRY + self._width) > most:
            raise NotFoldableError("its calls work on many elements")
        self.details = f" ({self._width} colours of columns, through {len(self._scaled)} entries of local Jacobians)"
        # Of all products, without the local derivatives.
        self.flop = 2 * self._width * len(self._scaled)
        self.nbytes = sum(array.nbytes for array in vars(self).values() if isinstance(array, np.ndarray))

    def _plan(self, parts: Sequence[_Part], out: np.ndarray) -> None:
        """Make the arrays of all entries, and find the pattern and its colours; `out` are the output's rows."""
        # The value of what is constant comes first.
        begin = 1
        for group in self._groups:
            group.first, begin = begin, begin + group.count
        lengths = [len(part.rows) for part in parts]
        firsts = np.repeat([0 if part.group is None else part.group.first for part in parts], lengths)
        which = firsts + np.concatenate([np.broadcast_to(part.which, len(part.rows)) for part in parts])
        coefficients = np.concatenate([np.broadcast_to(part.coefficient, len(part.rows)) for part in parts])
        targets, scaled = (
            np.concatenate(each) for each in zip(*((part.rows, part.scaled) for part in parts), strict=True)
        )
        order = np.argsort(targets, kind="stable")
        self._indptr = row_starts(np.bincount(targets, minlength=self._count), np.int64)
        self._one = torch.ones(1, dtype=self.function.x.dtype, device="cpu").numpy()
        self._scaled, self._which = scaled[order], which[order]
        self._coefficients = coefficients[order].astype(self._one.dtype)
        self._are_finite = bool(np.isfinite(self._coefficients).all())
        reached = np.unpackbits(self._reached(np.arange(self._columns))[out], axis=1, count=self._columns)
        counts, (height, width) = reached.sum(1), reached.shape
        indptr, indices = row_starts(counts, np.int64), np.nonzero(reached)[1]
        is_full = len(indices) == reached.size
        self.pattern = Pattern.of(Full(height, width)) if is_full else Pattern((height, width), indptr, indices)
        # Where a row is half full, colours save little.
        dense = 2 * counts.max(initial=0) >= self._columns
        self._colors = np.arange(self._columns) if dense else row_colors(self.pattern.T)
        self._places = out[self.pattern.rows] * self._width + self._colors[self.pattern.indices]

    @property
    def _width(self) -> int:
        """The number of colours."""
        return int(self._colors.max(initial=0)) + 1

    def _reached(self, colors: np.ndarray) -> np.ndarray:
        """For each row of products, the colours of the columns that its element depends on, as bits."""
        reached = np.zeros((self._count, int(colors.max(initial=0)) // 8 + 1), np.uint8)
        reached[np.arange(self._columns), colors // 8] = 128 >> colors % 8
        kernels.reach(self._columns + 1, self._count, self._indptr, self._scaled, reached)
        return reached

    def computed(self, trace: Trace) -> torch.Tensor:
        # Where a core is busy, other threads would wait for it, much longer than so little takes.
        with on_this_thread():
            values = np.concatenate([self._one, *(group.values(trace) for group in self._groups)])
        products = MEMORY_POOL.empty((self._count, self._width), values.dtype)
        products[: self._columns + 1] = 0
        products[np.arange(self._columns), self._colors] = 1
        are_finite = self._are_finite and np.isfinite(values).all()
        reached = np.empty((0, 0), np.uint8) if are_finite else self._reached(self._colors)
        entries = self._indptr, self._scaled, self._coefficients, self._which
        kernels.accumulate(self._columns + 1, self._count, *entries, values, reached, products)
        out = MEMORY_POOL.empty((len(self._places), 1), values.dtype)
        return torch.from_numpy(np.take(products, self._places[:, None], out=out))


def _part(edge: Edge, rows: np.ndarray, folding: Folding, groups: dict[object, _Group]) -> _Part:
    """The entries of an edge by the elements of its result, from the rows of its operand."""
    pattern, constant = edge.pattern, folding.constant(edge)
    if constant is not None:
        return _Part(pattern.rows, rows[pattern.indices], transposed(edge, constant), None, 0)
    power = power_of(edge) if edge in folding.selections else None
    group = groups.setdefault(power or _alike(edge, folding.function), _Group(power))
    return _Part(pattern.rows, rows[pattern.indices], 1.0, group, group.add(edge))


def _alike(edge: Edge, function: TracedFunction) -> object:
    """What edges have in common whose derivatives are computed together."""
    others = [each for each in edge.operation.referenced.values() if type(each) is not Value]
    tags = getattr(edge.operation.overload, "tags", ())
    if torch.Tag.pointwise not in tags or any(type(each) is Scalar and function.varies(each.place) for each in others):
        # Its arguments may not be broadcast, or be other numbers in each run.
        return edge
    return id(edge.call), repr([function.trace.read(each) for each in others])


def _moved(parts: Sequence[_Part], size: int, zero: int) -> np.ndarray | None:
    """The rows of a result whose elements are elements of operands, or zero; None where they are no such elements."""
    if any(part.group is not None or np.any(part.coefficient != 1) for part in parts):
        return None
    places = np.concatenate([part.rows for part in parts])
    if np.bincount(places).max(initial=0) > 1:
        return None
    rows = np.full(size, zero)
    rows[places] = np.concatenate([part.scaled for part in parts])
    return rows
