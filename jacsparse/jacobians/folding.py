"""Folding: each entry of a Jacobian as a constant plus a short sum of weighted local derivatives.

Most discretised equations are constant matrices, differences, sums and selections, around few elementwise operators.
Vertex elimination multiplies their local Jacobians along paths; here it multiplies all that is constant when preparing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import fx

from ..patterns import Identity, Pattern, gradient_of
from ..stages import Accumulation, Edge, Record, eliminate
from ..tracing import graph_of_values
from .linearised import Linearised, evaluated, place_of
from .terms import NONE, Algebra, Monomials, Step, Terms, TooManyTermsError, joined, merged, step_of, terms_at

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
    derivatives : int
        The number of local derivatives, which are the first variables.
    steps : tuple of Step
        The sums and products of variables, in the order in which they run; the last one computes the entries.
    """

    pattern: Pattern
    monomials: Monomials
    constants: tuple[np.ndarray, np.ndarray, np.ndarray]
    derivatives: int
    steps: tuple[Step, ...]

    def describe(self) -> dict[str, Any]:
        """All of it as plain numbers and arrays."""
        content: dict[str, Any] = {"derivatives": self.derivatives, "steps": len(self.steps)}
        content["monomials"] = self.monomials.table()
        names = ("entry", "monomial", "coefficient")
        content |= {f"constants.{name}": array for name, array in zip(names, self.constants, strict=True)}
        for number, step in enumerate(self.steps):
            content |= {f"{number}.{name}": array for name, array in step.describe().items()}
        return content

    @classmethod
    def restore(cls, content: Mapping[str, Any], pattern: Pattern, numbers: int) -> Folded:
        """The terms that `describe` described.

        Raises
        ------
        ValueError
            Where an array is missing, or refers to a variable, an entry or a number that there is not.
        """
        monomials = Monomials.restore(content.get("monomials"), numbers)
        names = ("entry", "monomial", "coefficient")
        entry, monomial, coefficient = (_array(content, f"constants.{name}") for name in names)
        _check_range("constants.entry", entry, pattern.nnz)
        _check_range("constants.monomial", monomial, len(monomials))
        if not len(entry) == len(monomial) == len(coefficient):
            raise ValueError("the arrays of the constants differ in length")
        count, first = content.get("steps"), content.get("derivatives")
        if type(count) is not int or type(first) is not int or first < 0:
            raise ValueError(f"steps is {count!r} and derivatives {first!r}; expected counts")
        derivatives, steps = first, []
        for number in range(count):
            prefix = f"{number}."
            arrays = {name.removeprefix(prefix): content[name] for name in content if name.startswith(prefix)}
            steps.append(Step.restore(first, arrays, len(monomials)))
            first = steps[-1].stop
        if not steps or first - steps[-1].first != pattern.nnz:
            raise ValueError("the last step does not compute the entries of the pattern")
        return cls(pattern, monomials, (entry, monomial, coefficient), derivatives, tuple(steps))


def _array(content: Mapping[str, Any], name: str) -> np.ndarray:
    array = content.get(name)
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "if":
        raise ValueError(f"{name} is no array of numbers")
    return array


def _check_range(name: str, array: np.ndarray, stop: int) -> None:
    if array.dtype.kind != "i" or (len(array) and not 0 <= array.min() <= array.max() < stop):
        raise ValueError(f"{name} does not run from 0 to {stop - 1}")


def folded(function: Linearised, most: int | None = None) -> tuple[Folded, fx.GraphModule | None]:
    """The entries of a function's Jacobian as terms, and the graph of its local derivatives, if any.

    Parameters
    ----------
    function : Linearised
        The function.
    most : int, optional
        The most terms of all products where elements of weights are variables too; by default none are.

    Raises
    ------
    NotFoldableError
        Where a local Jacobian is neither constant nor elementwise, and no selection of a weight's elements where these
        are variables, or there are too many paths.
    """
    leaves = _Leaves(function, weights=most is not None)
    terms = leaves.folded(most)
    constant = terms.variable == NONE
    constants, others = terms[constant], merged(terms[~constant])
    entries = np.searchsorted(function.pattern.places, constants.place)
    counts = np.bincount(np.searchsorted(function.pattern.places, others.place), minlength=function.pattern.nnz)
    last = step_of(leaves.algebra.variables, counts, others.variable, None, others.monomial, others.coefficient)
    return Folded(
        function.pattern,
        leaves.algebra.monomials,
        (entries, constants.monomial, constants.coefficient),
        leaves.count,
        (*leaves.algebra.steps, last),
    ), leaves.graph


def derivatives_of(function: Linearised) -> tuple[int, fx.GraphModule | None]:
    """The number of a function's local derivatives, and the graph that computes them, if any."""
    leaves = _Leaves(function, weights=True)
    leaves.matrices()
    return leaves.count, leaves.graph


class _Leaves:
    """The local Jacobians of a function as matrices of terms, transposed as the edges' patterns are."""

    def __init__(self, function: Linearised, weights: bool) -> None:
        self.function, self.numbers, self.weights = function, function.numbers, weights
        if function.inputs[0].is_cuda:
            raise NotFoldableError("its kernels run on the CPU")
        self.algebra = Algebra()
        #: The edges whose local derivatives are variables, in the order of these.
        self.derivatives: list[Edge] = []
        #: For those that are selections of a weight's elements: its place among the node's arguments, and the elements.
        self.selections: dict[Edge, tuple[int, np.ndarray]] = {}
        #: Computes the distinct local derivatives, a list of ``(batch, elements)``; None where there are none.
        self.graph: fx.GraphModule | None = None
        self.count = 0
        self._varying = _varying(function)

    def folded(self, most: int | None) -> Terms:
        """The function's Jacobian as terms, of which all products may have so many."""
        if most is not None and sum(edge.pattern.nnz for edge, _ in self.function.edges()) > most:
            raise NotFoldableError("its local Jacobians have more elements of weights than pay")
        # Before the limit, so that what does not fold costs no pattern.
        matrices = self.matrices()
        limit = TERMS_PER_ENTRY * (self.function.pattern.nnz + sum(self.function.pattern.shape))
        self.algebra.limit = limit if most is None else min(limit, int(most))
        accumulation, edges, chain = Accumulation(patterns_only=True), self.function.edges(), self.function.chain
        leaves = {accumulation.leaf(edge, edge.pattern): (edge, record) for edge, record in edges}
        rows, columns = self.function.pattern.shape
        if not len(chain):
            diagonal = np.arange(rows)
            return terms_at((rows, columns), diagonal, diagonal)
        graph = [(edge.source, edge.target, number) for number, (edge, _) in leaves.items()]
        result = eliminate(accumulation, graph, chain.stages[0].start, chain.stages[-1].stop)
        if result is None:
            return terms_at((rows, columns), np.zeros(0), np.zeros(0))
        try:
            transposed = accumulation.evaluate(result, matrices.__getitem__, self.algebra.multiply, joined)
        except TooManyTermsError:
            raise NotFoldableError("its paths meet in too many terms") from None
        t = transposed
        return Terms((rows, columns), t.column, t.row, t.variable, t.monomial, t.coefficient)

    def matrices(self) -> dict[Edge, Terms]:
        """The transposed local Jacobians of all edges; their variables come before those of products."""
        constants = {edge: self._constant(edge, record) for edge, record in self.function.edges()}
        return {edge: terms for edge, terms in constants.items() if terms is not None} | self._of_derivatives()

    def _constant(self, edge: Edge, record: Record) -> Terms | None:
        """The transposed local Jacobian of an edge where it is constant; else None, and the edge has a derivative."""
        pattern = edge.pattern
        entries = (pattern.shape, pattern.rows, pattern.indices)
        if isinstance(pattern.structure, Identity):
            return terms_at(*entries)
        node = self.function.nodes.get(edge.target)
        if node is None:
            raise NotFoldableError(f"{edge.call.operator} is no call of the graph")
        factor = self._factor(edge, node)
        if factor is not None:
            number, power, coefficient = factor
            monomial = self.algebra.monomials.index({} if number is None else {number: power})
            return terms_at(*entries, monomial=monomial, coefficient=coefficient)
        place = place_of(node, edge.call.argument)
        others = [] if place is None else [other for other in node.all_input_nodes if other is not node.args[place]]
        # A pruned weight varies where it is not zero; a mask that selects is a part of the program.
        selects = edge.call.sources is not None or any(not weight.floating for weight in edge.pruned_weights)
        if edge.shared and (selects or (place is not None and not self._varying.intersection(others))):
            return terms_at(*entries, coefficient=record.values(edge)[:, 0].numpy())
        # An operator may work on places in one overload alone, as `aten.max` does.
        overload: Any = node.target
        if place is None or not (torch.Tag.pointwise in overload.tags or edge.rule.elementwise(edge.call)):
            selection = self._selection(edge, record, node) if self.weights else None
            if selection is None:
                raise NotFoldableError(f"{edge.call.path}: {edge.call.operator} is neither constant nor elementwise")
            self.selections[edge] = selection
        self.derivatives.append(edge)
        return None

    def _selection(self, edge: Edge, record: Record, node: fx.Node) -> tuple[int, np.ndarray] | None:
        """The place of a weight among a node's arguments, and which of its elements an edge's entries are.

        None where the entries are no elements of a weight.
        """
        call, names = record.call(edge), edge.rule.pruned_arguments(edge.call)
        if not edge.shared or len(names) != 1 or names[0] in call.dependent:
            return None
        (name,) = names
        place, weight = place_of(node, name), call.arguments[name]
        if place is None:
            return None
        operand = node.args[place]
        if not isinstance(operand, fx.Node) or operand.meta["val"].numel() != weight.numel():
            return None
        # The rule itself tells where the elements of a weight of consecutive numbers come to lie.
        numbered = torch.arange(weight.numel(), dtype=torch.float64).reshape(weight.shape)
        of_numbers = replace(call, arguments={**call.arguments, name: numbered})
        numbers = edge.rule.transposed_values(of_numbers, edge.pattern)[:, 0]
        elements = numbers.long().clamp(0, max(0, weight.numel() - 1))
        if not torch.equal(weight.reshape(-1)[elements], record.values(edge)[:, 0]):
            return None
        return (place, elements.numpy()) if torch.equal(elements.to(numbers), numbers) else None

    def _of_derivative(self, edge: Edge, first: int) -> Terms:
        """The transposed local Jacobian of an edge, whose entries are variables from the first one on."""
        pattern, jacobian = edge.pattern, edge.pattern.T
        if edge in self.selections:
            leaf = terms_at(pattern.shape, pattern.rows, pattern.indices)
            return replace(leaf, variable=first + self.selections[edge][1])
        leaf = terms_at(jacobian.shape, jacobian.rows, jacobian.indices, first_variable=first)
        return Terms(pattern.shape, leaf.column, leaf.row, leaf.variable, leaf.monomial, leaf.coefficient)

    def _of_derivatives(self) -> dict[Edge, Terms]:
        """The local Jacobians of the edges that have derivatives; the graph that computes these is set."""
        if not self.derivatives:
            return {}
        self.graph = self._graph()
        parts: list[fx.Node] = list(self.graph.graph.output_node().args[0])  # type: ignore[arg-type]
        first, firsts = 0, {}
        for part in dict.fromkeys(parts):
            firsts[part] = first
            first += part.meta["val"].shape[1]
        self.algebra.variables = self.count = first
        self.graph.graph.output_node().args = (list(firsts),)
        self.graph.recompile()
        return {
            edge: self._of_derivative(edge, firsts[part]) for edge, part in zip(self.derivatives, parts, strict=True)
        }

    def _factor(self, edge: Edge, node: fx.Node) -> tuple[int | None, int, float] | None:
        """The number, its power and the coefficient by which a linear elementwise operator scales; else None."""
        name, argument = edge.call.operator, edge.call.argument
        if name == "aten.neg":
            return None, 0, -1.0
        if name in ("aten.add", "aten.sub", "aten.rsub"):
            alpha = float(node.kwargs.get("alpha", 1))  # type: ignore[arg-type]
            scaled = argument == ("self" if name == "aten.rsub" else "other")
            return None, 0, (alpha if name == "aten.add" else -alpha) if scaled else 1.0
        if name not in ("aten.mul", "aten.div") or argument != "self":
            return None
        number = self.numbers.get(node.args[1])  # type: ignore[arg-type]
        return None if number is None else (number, 1 if name == "aten.mul" else -1, 1.0)

    def _graph(self) -> fx.GraphModule:
        """The graph that computes the distinct local derivatives, each ``(batch, elements)``, from the inputs."""
        function = self.function
        wanted: dict[fx.Node, list[Edge]] = {}
        for edge in self.derivatives:
            wanted.setdefault(function.nodes[edge.target], []).append(edge)
        layouts = {edge: record.stage.program.layouts[edge.target] for edge, record in function.edges()}

        def derivatives(*inputs: torch.Tensor) -> list[torch.Tensor]:
            parts: dict[Edge, torch.Tensor] = {}

            def visit(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
                for edge in wanted.get(node, ()):
                    if edge in self.selections:
                        weight = args[self.selections[edge][0]].reshape(1, -1)
                        parts[edge] = weight if function.shared else weight.expand(function.batch, -1)
                        continue
                    place = place_of(node, edge.call.argument)
                    assert place is not None
                    derivative = _derivative(node, args, kwargs, place, result.shape)
                    of_samples = layouts[edge].split(derivative).reshape(function.batch, -1)
                    parts[edge] = of_samples[:1] if function.shared else of_samples

            with torch.no_grad():
                evaluated(function.graph, inputs, visit)
            return [parts[edge] for edge in self.derivatives]

        return graph_of_values(derivatives, function.inputs)


def _varying(function: Linearised) -> set[fx.Node]:
    """The nodes whose floating-point elements may differ between calls."""
    varying: set[fx.Node] = set()
    for node in function.graph.graph.nodes:
        if (node.op == "placeholder" and node.meta["val"].is_floating_point()) or varying.intersection(
            node.all_input_nodes
        ):
            varying.add(node)
    return varying


def _derivative(
    node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], place: int, shape: torch.Size
) -> torch.Tensor:
    """The derivative of an elementwise operator at each place of its result, by its own backward on ones."""
    with torch.enable_grad():
        operand = args[place].expand(shape).detach().requires_grad_()
        y = node.target(*args[:place], operand, *args[place + 1 :], **kwargs)  # type: ignore[operator]
        return gradient_of(y, operand, torch.ones_like(y))
