"""Values by products of local Jacobians along paths.

Where the entries fold into sums of products of local derivatives and elements of factors, fused loops compute all of
them. Else a call multiplies the matrices of the operators: where many rows of the Jacobian have entries
in the same columns, by groups of these from the output to the input, or else in the order of least cost.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from ..codegen import ElementGraph, sums
from ..patterns import Diagonal, Full, Identity, rows_alike
from ..runtime import MEMORY_POOL, on_device
from ..spgemm import RowGroups
from ..stages import Edge, LocalJacobian
from ..tracing import Trace, Value
from .evaluator import Evaluator
from .folding import Folded, derivative_of, is_elementwise, selection_of, transposed
from .fused_values import FusedValues
from .traced_function import TracedFunction
from .value_functions import ValueFunction

#: The most entries of a Jacobian whose rows are compared, and the most terms of a plan for groups of them.
MOST_ENTRIES, MOST_PLAN_TERMS = 2**26, 2**22
#: Groups have at least so many rows on average.
SAME_ROWS = 4


class FoldedProducts(Evaluator):
    """The values of a function's Jacobian from local derivatives of elementwise operators and elements of factors.

    Parameters
    ----------
    function : TracedFunction
        The function.
    folded : Folded
        The entries of its Jacobian.
    compile : bool
        Whether machine code computes them. Else a kernel interprets the same loops.
    """

    name = "products"
    uncompiled = "its values are constants"

    def __init__(self, function: TracedFunction, folded: Folded, *, compile: bool = False) -> None:
        self.function, self.pattern, dtype = function, folded.pattern, function.x.dtype
        first, last = folded.steps[0].first, folded.steps[-1].first
        self.details = f" ({first} local derivatives, {last - first} products and sums of them)"
        # Of the sums and products, without the local derivatives.
        self.flop = sum(len(s.left) * (2 if s.right is None else 3) for s in folded.steps)
        if folded.derivatives is not None and self.pattern.nnz:
            entries = partial(_entries, folded, 1 if function.shared else function.batch, dtype)
            self.fused = FusedValues(folded.derivatives, function, entries, self.pattern, compile=compile)
        #: Where nothing varies.
        self._constants = torch.from_numpy(folded.constants[: 0 if self.fused else None]).to(function.x)
        self.nbytes = self._constants.nbytes if self.fused is None else self.fused.nbytes

    def computed(self, trace: Trace) -> torch.Tensor:
        """The constants of the entries, of which no local derivative is a part."""
        return self._constants.clone()[:, None]


def _entries(
    folded: Folded, batch: int, dtype: torch.dtype, graph: ElementGraph, parts: list[np.ndarray]
) -> np.ndarray:
    """The numbers of the entries, from those of the local derivatives."""
    variables = np.empty((folded.steps[-1].first, batch), graph.dtype)
    of_derivatives = [np.broadcast_to(part.T, (part.shape[1], batch)) for part in parts]
    np.concatenate(of_derivatives, out=variables[: folded.steps[0].first])
    constants = graph.array(torch.from_numpy(folded.constants).to(dtype))[:, None]
    for step in folded.steps:
        start = constants if step is folded.steps[-1] else None
        weights = torch.from_numpy(step.coefficient).to(dtype).numpy()
        factors = [variables.take(factor, 0) for factor in step.factors]
        computed = sums(graph, step.indptr, factors, weights, start, dtype)
        # Those of the last step are the entries.
        variables[step.first : step.first + len(computed)] = computed[: len(variables) - step.first]
    return computed


class ChainProducts(Evaluator):
    """The values of a function's Jacobian from those of each operator, multiplied in the order of least cost.

    It is for functions whose local Jacobians are full of weights, as those of networks.
    """

    name = "products"
    uncompiled = "products of operators' matrices cannot be compiled"
    remedy: str | None = "leave it out, or pass method='compressed'"

    def __init__(self, function: TracedFunction) -> None:
        self.function, self.pattern, self.chain = function, function.pattern, function.chain
        if not self.pattern.nnz:
            self.uncompiled, self.remedy = "it has no entries", None
        self.details = f" ({len(self.chain)} stages)"
        # Without the operators' own backward.
        self.flop = 2 * self.chain.accumulation.multiply_adds if len(self.chain) else 0
        self.nbytes = self.pattern.index_nbytes

    def computed(self, trace: Trace) -> torch.Tensor:
        return trace.in_own_memory(self.chain.products(self.chain.records(trace), trace.input.detach()).values)


class GroupedProducts(Evaluator):
    """The values of a function's Jacobian by groups of rows with entries in the same columns, from output to input.

    A group's rows go through all operators at once, so that no product but the Jacobian is in memory as a whole. All
    samples share the values of each operator whose matrix is not diagonal. It is a kernel as it is: ``compile`` changes
    nothing.

    Parameters
    ----------
    function : TracedFunction
        The function.
    factors : sequence of Edge
        The operators whose matrices are not diagonal, from the output to the input.
    diagonals : sequence of sequence of Edge
        Those with diagonal matrices: in front of the first factor, and behind each one.
    groups : RowGroups
        Those of the product of the factors.
    """

    name = "products"
    uncompiled = "its kernel is machine code as it is"

    def __init__(
        self,
        function: TracedFunction,
        factors: Sequence[Edge],
        diagonals: Sequence[Sequence[Edge]],
        groups: RowGroups,
    ) -> None:
        self.function, self.pattern = function, function.pattern
        self._batch = 1 if function.shared else function.batch
        varying = [edge for edges in diagonals for edge in edges]
        reads = [value.number for e in varying for value in e.operation.referenced.values() if type(value) is Value]
        #: What computes the derivatives of the operators with diagonal matrices.
        self._derivatives = ValueFunction(
            function, lambda values: [derivative_of(function, edge, values) for edge in varying], reads
        )
        self._weights = [_Weights.of(edge, function.trace) for edge in factors]
        firsts = itertools.accumulate((weights.size for weights in self._weights), initial=0)
        elements = [first + weights.elements for first, weights in zip(firsts, self._weights, strict=False)]
        sizes = [edges[0].call.in_size if edges else 0 for edges in diagonals]
        begins = [*itertools.accumulate(sizes, initial=0)]
        #: How many elements the diagonals have together, and how many diagonals follow one another at each place.
        self._count, self._lengths = begins[-1], [len(edges) for edges in diagonals if edges]
        scales = [begin if size else None for begin, size in zip(begins, sizes, strict=False)]
        self._product = groups.plan(elements, scales, self._batch)
        #: The cost of a call, in multiply-adds of sparse products.
        self.cost = function.chain.costs.start + self._product.cost
        self.details = f" ({groups.count} groups of rows with the same entries)"
        self.flop = 2 * groups.multiply_adds
        self.nbytes = self.pattern.index_nbytes + self._product.nbytes

    @classmethod
    def of(cls, function: TracedFunction, most: float) -> GroupedProducts | None:
        """The values by groups, where the function is a chain of such operators and groups have a few rows or more.

        None also where they do not cost less than `most`, which is mostly known before they are planned.
        """
        x, factors, diagonals = function.x, list[Edge](), [list[Edge]()]
        if on_device(x) or not function.batch or function.pattern.nnz > MOST_ENTRIES:
            return None
        # Where all rows are alike, PyTorch's products of full matrices do as much.
        if isinstance(function.pattern.structure, Full):
            return None
        for stage in reversed(function.chain.stages):
            edge = stage.operator
            if edge is None:
                return None
            structure = edge.transposed_pattern.structure
            if isinstance(structure, Identity):
                continue
            if isinstance(structure, Diagonal) and is_elementwise(edge):
                diagonals[-1].append(edge)
            elif edge.shared:
                factors.append(edge)
                diagonals.append([])
            else:
                return None
        if len(factors) < 2:
            return None
        firsts, _ = rows_alike(function.pattern)
        if len(firsts) < 2 or SAME_ROWS * len(firsts) > function.pattern.shape[0]:
            return None
        try:
            groups = RowGroups([edge.pattern for edge in factors], most=MOST_PLAN_TERMS)
        except ValueError:
            return None
        least = function.chain.costs.start + groups.least_cost(1 if function.shared else function.batch)
        if least >= most or not groups.fit_in_caches or groups.pattern != function.pattern:
            return None
        grouped = cls(function, factors, diagonals, groups)
        return grouped if grouped.cost < most else None

    def computed(self, trace: Trace) -> torch.Tensor:
        values = np.concatenate([weights.values(trace) for weights in self._weights])
        # What it is computed from is gone before the Jacobian takes memory.
        scales = self._scales(trace, values.dtype)
        out = MEMORY_POOL.empty((self.pattern.nnz, self._batch), values.dtype)
        self._product.multiply(values, scales, out)
        return torch.from_numpy(out)

    def _scales(self, trace: Trace, dtype: np.dtype) -> np.ndarray:
        """The derivatives of the operators with diagonal matrices, multiplied where several follow one another."""
        scales = MEMORY_POOL.empty((self._count, self._product.padded), dtype)
        scales[:, self._batch :] = 1
        derivatives = (derivative.numpy().T for derivative in self._derivatives(trace))
        parts = [functools.reduce(np.multiply, itertools.islice(derivatives, length)) for length in self._lengths]
        np.concatenate([scales[:0, : self._batch], *parts], out=scales[:, : self._batch])
        return scales


class _Weights(NamedTuple):
    """The numbers of which an operator's Jacobian is made, in all samples."""

    edge: Edge
    #: How many there are, and for each entry of the Jacobian, which of them it is.
    size: int
    elements: np.ndarray
    #: The argument whose elements they are; None where they are the entries of the transposed Jacobian.
    name: str | None

    @classmethod
    def of(cls, edge: Edge, trace: Trace) -> _Weights:
        selection, nnz = selection_of(edge, trace), edge.pattern.nnz
        if selection is None:
            return cls(edge, nnz, transposed(edge, np.arange(nnz)), None)
        name, elements = selection
        return cls(edge, trace.tensor(edge.operation.number_of(name)).numel(), transposed(edge, elements), name)

    def values(self, trace: Trace) -> np.ndarray:
        """The numbers in a run."""
        if self.name is None:
            return LocalJacobian(self.edge, trace).transposed_values.numpy().reshape(-1)
        weight = trace.elements(self.edge.operation.number_of(self.name)).detach()
        return weight.to(trace.input.dtype).resolve_neg().numpy().reshape(-1)
