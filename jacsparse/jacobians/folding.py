"""Folding: each entry of a Jacobian as a constant plus a short sum of weighted local derivatives.

Most discretised equations are constant matrices, differences, sums and selections, around few elementwise operators.
Vertex elimination multiplies their local Jacobians along paths; here it multiplies all that is constant when preparing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..codegen import CallResult
from ..patterns import Diagonal, Identity, Pattern, Rule, compressed_values, row_colors
from ..runtime import index_dtype, row_starts
from ..stages import Edge, LocalJacobian, eliminate, empty_pattern
from ..tracing import Operation, Scalar, Trace, Value, Values
from .terms import (
    FEW_TERMS,
    NONE,
    TERMS_OF_FACTORS,
    TERMS_PER_ENTRY,
    Algebra,
    NotFoldableError,
    TermMatrix,
    WeightedSums,
    terms_at,
)
from .traced_function import TracedFunction
from .value_functions import ValueFunction, elementwise_derivatives

#: The most backward passes of an operator that make the values of its Jacobian.
MOST_PASSES = 16
#: The most multiply-adds of a chain's own order for each term that its Jacobian may have, where elimination is tried.
WORK_PER_TERM = 8


@dataclass(frozen=True, eq=False)
class Folded:
    """The entries of a Jacobian as sums of terms.

    Attributes
    ----------
    pattern : Pattern
        The pattern of the entries.
    constants : ndarray, (nnz,)
        The sum of the constant terms of each entry.
    derivatives : ValueFunction or None
        What computes the local derivatives, and the numbers that scale others, each ``(batch, elements)``: the first
        variables. None where there are none.
    steps : tuple of WeightedSums
        The sums and products of variables, in the order in which they run; the last one computes the entries.
    """

    pattern: Pattern
    constants: np.ndarray
    derivatives: ValueFunction | None
    steps: tuple[WeightedSums, ...]


class Folding:
    """The local Jacobians of a function as matrices of terms, and the entries of its Jacobian as such."""

    def __init__(self, function: TracedFunction) -> None:
        self.function, self.by_factors, self.algebra = function, False, Algebra()
        #: The edges whose local derivatives are variables, in the order of these; and what computes them.
        self.varying: list[Edge] = []
        self.computed: ValueFunction | None = None
        #: The first variable of each edge, and how many there are.
        self._firsts, self._count = list[int](), 0
        #: For those that are elements of another factor, or a number: its name, and which element each entry is.
        self.selections: dict[Edge, tuple[str, np.ndarray]] = {}

    def folded(self, *, most: int | None = None) -> Folded:
        """The entries of the function's Jacobian as terms.

        All products may have at most so many terms; elements of factors, and entries that a few backward passes of an
        operator make, are variables only where that limit is given.

        Raises
        ------
        NotFoldableError
            Where a local Jacobian is neither constant nor elementwise, and none of these where they are variables, or
            there are too many paths.
        """
        terms, algebra = self._product(most), self.algebra
        # The term of an entry that has no variable comes first.
        begins = terms.entries[1]
        constant, varies = terms.variable[begins[:-1]] == NONE, terms.varies
        of_entries = np.where(constant, terms.coefficient[begins[:-1]], 0.0)
        indptr = row_starts(np.diff(begins) - constant, index_dtype(len(terms), 0, 0))
        others = terms[varies]
        last = WeightedSums(algebra.variables, indptr, others.variable, None, others.coefficient)
        return Folded(terms.pattern, of_entries, self.computed, (*algebra.steps, last))

    def _product(self, most: int | None) -> TermMatrix:
        """The function's Jacobian as terms, of which all products may have so many."""
        chain, self.by_factors, self.algebra = self.function.chain, most is not None, Algebra()
        if not len(chain):
            return terms_at(chain.pattern)
        rows, columns = math.prod(chain.out_shape), math.prod(chain.in_shape)
        sizes = [
            e.transposed_pattern.nnz for e in chain.edges if not isinstance(e.transposed_pattern.structure, Identity)
        ]
        # Products of a loop's steps, or of a mesh's elements, have a few terms for each entry of the operators.
        size = max(max(sizes, default=0) + rows + columns, sum(sizes) // 2)
        limit = max(FEW_TERMS, TERMS_PER_ENTRY * size)
        if most is not None:
            limit = min(most, max(FEW_TERMS, TERMS_OF_FACTORS * size))
            if sum(sizes) > limit:
                raise NotFoldableError("its local Jacobians have more elements of factors than pay")
            # The chain's own order has about as few products of entries: elimination would find out after most of them.
            if chain.accumulation.multiply_adds > WORK_PER_TERM * limit:
                raise NotFoldableError("its paths meet in too many terms")
        matrices = self.matrices()
        self.algebra.grows, self.algebra.limit = most is None, limit
        # From the output to the input. A matrix is let go of where it is used for the last time.
        edges = ((edge.target, edge.source, matrices.pop(edge)) for edge in chain.edges)
        result = eliminate(self.algebra, edges, chain.stages[-1].stop, chain.stages[0].start)
        return terms_at(empty_pattern(rows, columns)) if result is None else result

    def matrices(self) -> dict[Edge, TermMatrix]:
        """The local Jacobians of all edges; their variables come before those of products."""
        before, self.varying, self.selections = self.varying, [], {}
        constants = [(edge, self.constant(edge)) for edge in self.function.chain.edges]
        if self.varying != before:
            self.computed = None
        matrices = {
            edge: terms_at(edge.pattern, coefficient=transposed(edge, each))
            for edge, each in constants
            if each is not None
        }
        return matrices | self._varying_matrices()

    def constant(self, edge: Edge) -> float | np.ndarray | None:
        """The one value of a local Jacobian, or those of the transposed one, where they are the same in each run.

        Else None, and the edge is one of `varying`; NotFoldableError as in `folded`.
        """
        if isinstance(edge.transposed_pattern.structure, Identity):
            return 1.0
        operation, coefficient = edge.operation, self._coefficient(edge)
        if coefficient is not None:
            return coefficient
        if power_of(edge) is not None and self._is_number(operation.referenced["other"]):
            self.varying.append(edge)
            self.selections[edge] = "other", np.zeros(edge.pattern.nnz, np.int64)
            return None
        # A pruned weight varies where it is not zero; a mask that selects is a part of the program.
        selects = edge.call.sources is not None or any(not weight.floating for weight in edge.omissions)
        if edge.shared and (selects or not self._varies(edge, operation)):
            return LocalJacobian(edge, self.function.trace).transposed_values[:, 0].numpy(force=True)
        if not is_elementwise(edge):
            selection = selection_of(edge, self.function.trace) if self.by_factors else None
            if selection is not None:
                self.selections[edge] = selection
            elif not (self.by_factors and _takes_few_passes(edge)):
                raise NotFoldableError(f"{edge.call.path}: {edge.call.operator} is neither constant nor elementwise")
        self.varying.append(edge)
        return None

    @property
    def by_passes(self) -> list[Edge]:
        """Those of `varying` whose derivatives are made by their operators' backward passes."""
        return [edge for edge in self.varying if edge not in self.selections and not is_elementwise(edge)]

    def _varies(self, edge: Edge, operation: Operation) -> bool:
        """Whether another argument of an edge's operator than its operand may differ between runs."""
        infos = self.function.graph.infos
        arguments = (value for name, value in operation.referenced.items() if name != edge.call.argument)
        return any(
            self.function.varies(each.place) if type(each) is Scalar else not infos[each.number].fixed
            for each in arguments
            if type(each) in (Scalar, Value)
        )

    def _terms_of(self, edge: Edge, first: int) -> TermMatrix:
        """The local Jacobian of an edge, whose entries are variables from the first one on."""
        if edge in self.selections:
            return terms_at(edge.pattern, variable=transposed(edge, first + self.selections[edge][1]))
        places = np.arange(edge.pattern.nnz)
        if edge.omissions:
            # There is a derivative at each place, and an entry in some of the rows.
            places = np.flatnonzero(np.diff(edge.pattern.indptr))
        return terms_at(edge.pattern, variable=first + places)

    def _varying_matrices(self) -> dict[Edge, TermMatrix]:
        """The local Jacobians of the edges that have derivatives."""
        if not self.varying:
            return {}
        if self.computed is None:
            references = (value for edge in self.varying for value in edge.operation.referenced.values())
            reads = [value.number for value in references if type(value) is Value]
            computed = self.computed = ValueFunction(self.function, self._derivatives, reads)
            parts, firsts, self._count = computed.outputs, dict[CallResult, int](), 0
            for part in dict.fromkeys(parts):
                firsts[part] = self._count
                self._count += part.value.shape[1]
            self._firsts = [firsts[part] for part in parts]
            computed.return_only(list(firsts))
        self.algebra.variables = self._count
        return {edge: self._terms_of(edge, first) for edge, first in zip(self.varying, self._firsts, strict=True)}

    def _derivatives(self, values: Values) -> list[torch.Tensor]:
        """The local derivatives, each ``(batch, elements)`` or ``(1, elements)``."""
        function, batch, parts = self.function, self.function.batch, []
        for edge in self.varying:
            if edge in self.selections:
                name = self.selections[edge][0]
                factor, layout = values.arguments(edge.operation.referenced)[name], edge.operation.layouts.get(name)
                factor = factor.reshape(1, -1) if layout is None else layout.split(factor).reshape(batch, -1)
                # In coarser numbers it would be rounded.
                factor = factor.to(function.x.dtype)
                factor = factor.reciprocal() if power_of(edge) == -1 else factor
                parts.append(factor if function.shared else factor.expand(batch, -1))
                continue
            parts.append((derivative_of if is_elementwise(edge) else _derivative_by_passes)(function, edge, values))
        return parts

    def _coefficient(self, edge: Edge) -> float | None:
        """The number by which a linear operator scales elements in all runs; None where it does not."""
        name, argument, arguments = edge.call.operator, edge.call.argument, edge.operation.referenced
        factor = edge.rule.factor(edge.call)
        if factor is not None:
            return factor
        if name == "aten.neg":
            return -1.0
        if name in ("aten.add", "aten.sub", "aten.rsub"):
            if argument != ("self" if name == "aten.rsub" else "other"):
                return 1.0
            alpha = self._number(arguments.get("alpha", 1))
            return alpha if alpha is None or name == "aten.add" else -alpha
        if name in ("aten.addmm", "aten.addmv", "aten.baddbmm") and argument == "self":
            return self._number(arguments.get("beta", 1))
        power = power_of(edge)
        other = None if power is None else self._number(arguments["other"])
        if other is None or power is None:
            return None
        # As PyTorch, which divides by zero, and overflows, without a warning.
        with np.errstate(all="ignore"):
            return float(np.float64(other) ** power)

    def _number(self, argument: Any) -> float | None:
        """The number that an argument is in all runs; None where it is none."""
        if type(argument) is Scalar:
            return None if self.function.varies(argument.place) else float(self.function.trace.scalars[argument.place])
        return None if type(argument) is Value else float(argument)

    def _is_number(self, argument: Any) -> bool:
        """Whether an argument is a number that may vary: one of a run, or a tensor without axes."""
        if type(argument) is not Value:
            return type(argument) is Scalar
        tensor, info = self.function.trace.tensor(argument.number), self.function.graph.infos[argument.number]
        return not tensor.ndim and tensor.is_floating_point() and not info.dependent


def is_elementwise(edge: Edge) -> bool:
    """Whether an operator works on each place by itself."""
    # It may do so in one overload alone, as `aten.max` does.
    overload: Any = edge.operation.overload
    return torch.Tag.pointwise in getattr(overload, "tags", ()) or edge.rule.elementwise(edge.call)


def derivative_of(function: TracedFunction, edge: Edge, values: Values) -> torch.Tensor:
    """The derivative of an elementwise operator, ``(batch, elements)``, or ``(1, elements)`` where samples share it."""
    arguments, name, layout = values.arguments(edge.operation.referenced), edge.call.argument, edge.operation.layout
    assert layout is not None
    shape = function.trace.tensor(edge.target).shape
    derivative = elementwise_derivatives(edge.operation.evaluate, arguments, [name], shape)[name]
    # A function may compute in coarser numbers, as under ``torch.autocast``.
    of_samples = layout.split(derivative).reshape(function.batch, -1).to(function.x.dtype)
    return of_samples[:1] if function.shared else of_samples


def passes_of(edge: Edge) -> int:
    """How many of its operator's backward passes make the values of an edge."""
    return 1 + int(row_colors(edge.pattern).max(initial=-1))


def _takes_few_passes(edge: Edge) -> bool:
    """Whether a few of its operator's backward passes, which other runs can repeat, make the values of an edge."""
    # PyTorch has no derivative of some further results, as a norm's statistics, but a rule may.
    is_pytorchs = not edge.operation.number or type(edge.rule).values is Rule.values
    is_plain = is_pytorchs and not (edge.operation.random or edge.omissions or edge.excluded)
    return is_plain and passes_of(edge) <= MOST_PASSES


def _derivative_by_passes(function: TracedFunction, edge: Edge, values: Values) -> torch.Tensor:
    """The entries of an edge by `compressed_values`, ``(batch, nnz)``, or ``(1, nnz)`` where samples share them."""
    # Where no operand is the input itself, its form alone is asked for, and that of the result.
    x = values.get(0, function.x)
    trace = Trace.replayed(function.graph, function.trace.module, x, {}, values.scalars)
    referenced = [each.number for each in edge.operation.referenced.values() if type(each) is Value]
    trace.copies |= {edge.target: function.trace.tensor(edge.target)} | {value: values[value] for value in referenced}
    # Some operators have no derivative of their backward passes, of which forward mode is made.
    call = replace(LocalJacobian(edge, trace).call, jvp=None)
    of_samples = compressed_values(edge.pattern, call).T
    return of_samples[:1] if function.shared else of_samples


def selection_of(edge: Edge, trace: Trace) -> tuple[str, np.ndarray] | None:
    """The name of another factor among an operator's arguments, and which of its elements an edge's entries are.

    It is a weight, or depends on the input too. None where the entries are no elements of a factor.
    """
    call = LocalJacobian(edge, trace).call
    names = edge.rule.pruned_arguments(edge.call)
    if len(names) != 1 or not (edge.shared or names[0] in call.batched):
        return None
    (name,) = names
    factor = call.arguments[name]
    if trace.tensor(edge.operation.number_of(name)).numel() != factor.numel():
        return None

    def values_of(factor: torch.Tensor) -> torch.Tensor:
        of_factor = replace(call, arguments={**call.arguments, name: factor})
        return edge.rule.transposed_values(of_factor, edge.transposed_pattern)[:, 0]

    # The rule itself tells where the elements of a factor of consecutive numbers come to lie; other numbers tell
    # these from multiples and sums of elements.
    shape = factor.shape[name in call.batched :]
    numbered = (
        torch.arange(shape.numel(), dtype=torch.float64, device=factor.device).reshape(shape).expand(factor.shape)
    )
    elements, others = values_of(numbered).long().clamp(0, max(0, shape.numel() - 1)), (numbered + 1).cos()
    are_elements = torch.equal(others.reshape(-1)[elements], values_of(others))
    return (name, elements.numpy(force=True)) if are_elements else None


def transposed(edge: Edge, values: Any) -> Any:
    """Values of the transposed Jacobian of an edge, in the order of the Jacobian's entries; or one for all of them."""
    pattern = edge.transposed_pattern
    is_one = isinstance(values, float) or isinstance(pattern.structure, Diagonal)
    return values if is_one else values[pattern.transposition]


def power_of(edge: Edge) -> int | None:
    """The power of the operator's other argument that scales its operand; None where none does."""
    name, arguments = edge.call.operator, edge.operation.referenced
    if name not in ("aten.mul", "aten.div") or edge.call.argument != "self" or "rounding_mode" in arguments:
        return None
    return 1 if name == "aten.mul" else -1
