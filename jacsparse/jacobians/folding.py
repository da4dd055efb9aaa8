"""Folding: each entry of a Jacobian as a constant plus a short sum of weighted local derivatives.

Most discretised equations are constant matrices, differences, sums and selections, around few elementwise operators.
Vertex elimination multiplies their local Jacobians along paths; here it multiplies all that is constant when preparing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import fx

from ..patterns import Identity, Pattern
from ..stages import Accumulation, Edge, LocalJacobian, eliminate
from ..tracing import Operation, Scalar, Trace, Value, Values
from .terms import NONE, Algebra, Monomials, Step, Terms, TooManyTermsError, joined, merged, step_of, terms_at
from .traced_function import TracedFunction
from .value_functions import ValueFunction, elementwise_derivatives

#: Terms of all products, for each entry of the Jacobian, beyond which its products are not folded.
TERMS_PER_ENTRY = 64


class NotFoldableError(Exception):
    """A local Jacobian is neither constant nor elementwise, or there are too many paths."""


@dataclass(frozen=True, eq=False)
class Folded:
    """The entries of a Jacobian as sums of terms.

    Attributes
    ----------
    pattern : Pattern
        The pattern of the entries.
    monomials : Monomials
        The products of numbers that scale terms.
    constants : tuple of ndarray
        The constant terms: the entry, the monomial and the coefficient of each.
    derivatives : ValueFunction or None
        What computes the local derivatives, each ``(batch, elements)``: the first variables. None where there are none.
    numbers : list of int
        The values that are numbers: they have no axes, and do not depend on the input. Monomials number them after the
        numbers of a run's own.
    steps : tuple of Step
        The sums and products of variables, in the order in which they run; the last one computes the entries.
    """

    pattern: Pattern
    monomials: Monomials
    constants: tuple[np.ndarray, np.ndarray, np.ndarray]
    derivatives: ValueFunction | None
    numbers: list[int]
    steps: tuple[Step, ...]

    def numbers_of(self, trace: Trace) -> tuple[float, ...]:
        """The numbers of a run."""
        return (*trace.scalars, *(trace.value(value).item() for value in self.numbers))


def folded(function: TracedFunction, *, replays: bool, most: int | None = None) -> Folded:
    """The entries of a function's Jacobian as terms.

    All products may have at most so many terms; elements of weights are variables only where that limit is given.

    Raises
    ------
    NotFoldableError
        Where a local Jacobian is neither constant nor elementwise, and no selection of a weight's elements where these
        are variables, or there are too many paths.
    """
    leaves = _Leaves(function, weights=most is not None, replays=replays)
    terms, algebra, pattern = leaves.product(most), leaves.algebra, function.pattern
    constant = terms.variable == NONE
    constants, others = terms[constant], merged(terms[~constant])
    entries = np.searchsorted(pattern.places, constants.place)
    counts = np.bincount(np.searchsorted(pattern.places, others.place), minlength=pattern.nnz)
    last = step_of(algebra.variables, counts, others.variable, None, others.monomial, others.coefficient)
    of_entries = entries, constants.monomial, constants.coefficient
    return Folded(pattern, algebra.monomials, of_entries, leaves.computed, leaves.numbers, (*algebra.steps, last))


class _Leaves:
    """The local Jacobians of a function as matrices of terms, transposed as the edges' patterns are."""

    def __init__(self, function: TracedFunction, *, weights: bool, replays: bool) -> None:
        self.function, self.weights, self.replays = function, weights, replays
        if function.x.is_cuda:
            raise NotFoldableError("its kernels run on the CPU")
        self.algebra = Algebra()
        #: The edges whose local derivatives are variables, in the order of these; and what computes them.
        self.derivatives: list[Edge] = []
        self.computed: ValueFunction | None = None
        #: For those that are selections of a weight's elements: the weight's name, and the elements.
        self.selections: dict[Edge, tuple[str, np.ndarray]] = {}
        #: The values that are numbers.
        self.numbers: list[int] = []

    def product(self, most: int | None) -> Terms:
        """The function's Jacobian as terms, of which all products may have so many."""
        chain, (rows, columns) = self.function.chain, self.function.pattern.shape
        if most is not None and sum(edge.transposed_pattern.nnz for edge in chain.edges) > most:
            raise NotFoldableError("its local Jacobians have more elements of weights than pay")
        # Before the limit, so that what does not fold costs no pattern.
        matrices = self.matrices()
        limit = TERMS_PER_ENTRY * (self.function.pattern.nnz + rows + columns)
        self.algebra.limit = limit if most is None else min(limit, int(most))
        if not len(chain):
            diagonal = np.arange(rows)
            return terms_at((rows, columns), diagonal, diagonal)
        accumulation = Accumulation(patterns_only=True)
        graph = [(e.source, e.target, accumulation.leaf(e, e.transposed_pattern)) for e in chain.edges]
        result = eliminate(accumulation, graph, chain.stages[0].start, chain.stages[-1].stop)
        if result is None:
            return terms_at((rows, columns), np.zeros(0), np.zeros(0))
        try:
            return accumulation.evaluate(result, matrices.__getitem__, self.algebra.multiply, joined).T
        except TooManyTermsError:
            raise NotFoldableError("its paths meet in too many terms") from None

    def matrices(self) -> dict[Edge, Terms]:
        """The transposed local Jacobians of all edges; their variables come before those of products."""
        constants = {edge: self._constant(edge) for edge in self.function.chain.edges}
        return {edge: terms for edge, terms in constants.items() if terms is not None} | self._of_derivatives()

    def _constant(self, edge: Edge) -> Terms | None:
        """The transposed local Jacobian of an edge where it is constant; else None, and the edge has a derivative."""
        pattern = edge.transposed_pattern
        entries = (pattern.shape, pattern.rows, pattern.indices)
        if isinstance(pattern.structure, Identity):
            return terms_at(*entries)
        operation = edge.operation
        factor = self._factor(edge, operation)
        if factor is not None:
            number, power, coefficient = factor
            monomial = self.algebra.monomials.index({} if number is None else {number: power})
            return terms_at(*entries, monomial=monomial, coefficient=coefficient)
        # A pruned weight varies where it is not zero; a mask that selects is a part of the program.
        selects = edge.call.sources is not None or any(not weight.floating for weight in edge.pruned_weights)
        if edge.shared and (selects or not self._varies(edge, operation)):
            return terms_at(*entries, coefficient=LocalJacobian(edge, self.function.trace).values[:, 0].numpy())
        # An operator may work on places in one overload alone, as `aten.max` does.
        overload: Any = operation.overload
        if not (torch.Tag.pointwise in getattr(overload, "tags", ()) or edge.rule.elementwise(edge.call)):
            selection = self._selection(edge) if self.weights else None
            if selection is None:
                raise NotFoldableError(f"{edge.call.path}: {edge.call.operator} is neither constant nor elementwise")
            self.selections[edge] = selection
        self.derivatives.append(edge)
        return None

    def _varies(self, edge: Edge, operation: Operation) -> bool:
        """Whether another argument of an edge's operator than its operand may differ between runs."""
        infos = self.function.graph.infos
        arguments = (value for name, value in operation.referenced.items() if name != edge.call.argument)
        return any(type(each) is Scalar or (type(each) is Value and not infos[each.number].fixed) for each in arguments)

    def _selection(self, edge: Edge) -> tuple[str, np.ndarray] | None:
        """The name of a weight among an operator's arguments, and which of its elements an edge's entries are.

        None where the entries are no elements of a weight.
        """
        trace, local = self.function.trace, LocalJacobian(edge, self.function.trace)
        call, names = local.call, edge.rule.pruned_arguments(edge.call)
        if not edge.shared or len(names) != 1 or names[0] in call.dependent:
            return None
        (name,) = names
        weight = call.arguments[name]
        if trace.tensor(edge.operation.number_of(name)).numel() != weight.numel():
            return None
        # The rule itself tells where the elements of a weight of consecutive numbers come to lie.
        numbered = torch.arange(weight.numel(), dtype=torch.float64).reshape(weight.shape)
        of_numbers = replace(call, arguments={**call.arguments, name: numbered})
        numbers = edge.rule.transposed_values(of_numbers, edge.transposed_pattern)[:, 0]
        elements = numbers.long().clamp(0, max(0, weight.numel() - 1))
        if not torch.equal(weight.reshape(-1)[elements], local.values[:, 0]):
            return None
        return (name, elements.numpy()) if torch.equal(elements.to(numbers), numbers) else None

    def _of_derivative(self, edge: Edge, first: int) -> Terms:
        """The transposed local Jacobian of an edge, whose entries are variables from the first one on."""
        if edge in self.selections:
            pattern = edge.transposed_pattern
            leaf = terms_at(pattern.shape, pattern.rows, pattern.indices)
            return replace(leaf, variable=first + self.selections[edge][1])
        return terms_at(edge.pattern.shape, edge.pattern.rows, edge.pattern.indices, first_variable=first).T

    def _of_derivatives(self) -> dict[Edge, Terms]:
        """The local Jacobians of the edges that have derivatives."""
        if not self.derivatives:
            return {}
        references = (value for edge in self.derivatives for value in edge.operation.referenced.values())
        reads = [value.number for value in references if type(value) is Value]
        computed = self.computed = ValueFunction(self.function, self._derivatives, reads, replays=self.replays)
        parts, first, firsts = computed.outputs, 0, dict[fx.Node, int]()
        for part in dict.fromkeys(parts):
            firsts[part] = first
            first += part.meta["val"].shape[1]
        computed.keep(list(firsts))
        self.algebra.variables = first
        return {
            edge: self._of_derivative(edge, firsts[part]) for edge, part in zip(self.derivatives, parts, strict=True)
        }

    def _derivatives(self, values: Values) -> list[torch.Tensor]:
        """The local derivatives, each ``(batch, elements)`` or ``(1, elements)``."""
        function, batch, parts = self.function, self.function.batch, []
        for edge in self.derivatives:
            arguments = values.arguments(edge.operation.referenced)
            if edge in self.selections:
                weight = arguments[self.selections[edge][0]].reshape(1, -1)
                parts.append(weight if function.shared else weight.expand(batch, -1))
                continue
            name, layout = edge.call.argument, edge.operation.layout
            assert layout is not None
            shape = function.trace.tensor(edge.target).shape
            derivative = elementwise_derivatives(edge.operation.evaluate, arguments, [name], shape)[name]
            # A function may compute in coarser numbers, as under ``torch.autocast``.
            of_samples = layout.split(derivative).reshape(batch, -1).to(function.x.dtype)
            parts.append(of_samples[:1] if function.shared else of_samples)
        return parts

    def _factor(self, edge: Edge, operation: Operation) -> tuple[int | None, int, float] | None:
        """The number, its power and the coefficient by which a linear elementwise operator scales; else None."""
        name, argument, arguments = edge.call.operator, edge.call.argument, operation.referenced
        if name == "aten.neg":
            return None, 0, -1.0
        if name in ("aten.add", "aten.sub", "aten.rsub"):
            alpha = arguments.get("alpha", 1)
            if type(alpha) is Scalar:
                return None
            scaled = argument == ("self" if name == "aten.rsub" else "other")
            return None, 0, (float(alpha) if name == "aten.add" else -float(alpha)) if scaled else 1.0
        if name not in ("aten.mul", "aten.div") or argument != "self" or "rounding_mode" in arguments:
            return None
        other, power = arguments["other"], 1 if name == "aten.mul" else -1
        if type(other) is Scalar:
            return other.place, power, 1.0
        if type(other) is not Value:
            return None, 0, float(other) ** power
        return (self._number(other.number), power, 1.0) if self._is_number(other.number) else None

    def _is_number(self, value: int) -> bool:
        tensor = self.function.trace.tensor(value)
        return not tensor.ndim and tensor.is_floating_point() and not self.function.graph.infos[value].dependent

    def _number(self, value: int) -> int:
        """The place of a value among the numbers that scale terms."""
        if value not in self.numbers:
            self.numbers.append(value)
        return len(self.function.trace.scalars) + self.numbers.index(value)
