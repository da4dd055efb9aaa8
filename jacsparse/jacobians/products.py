"""Values by products of local Jacobians along paths, all that is constant in them multiplied when preparing.

Most discretised equations are constant matrices, differences, sums and selections, around few elementwise operators. By
vertex elimination, each entry of their Jacobian is a constant plus a short sum of weighted local derivatives. What is
left for a call: the graph that computes these derivatives, and one pass of a kernel over the entries.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from torch import fx

from ..patterns import Identity, is_pointwise
from ..runtime import run_rows
from ..stages import Accumulation, Edge, Record, eliminate
from ..tracing import graph_of_values, record
from . import kernels
from .linearised import GraphRun, Linearised, evaluated
from .terms import NONE, Algebra, Step, Terms, TooManyTermsError, joined, merged, step_of, terms_at

#: Terms of all products, for each entry of the Jacobian, beyond which its products are not folded.
TERMS_PER_ENTRY = 64


class NotFoldableError(Exception):
    """A local Jacobian is neither constant nor elementwise, or there are too many paths."""


class Products:
    """The values of a function's Jacobian from the local derivatives of its elementwise operators.

    Parameters
    ----------
    function : Linearised
        The function.
    compile : bool
        Whether the local derivatives are computed under ``torch.compile``.

    Raises
    ------
    NotFoldableError
        Where an operator's local Jacobian is neither constant nor elementwise, or there are too many paths.
    """

    name = "products"

    def __init__(self, function: Linearised, compile: bool = False) -> None:
        if function.inputs[0].is_cuda:
            raise NotFoldableError("its kernels run on the CPU")
        self.batch = 1 if function.shared else function.batch
        self.dtype, self.pattern = function.inputs[0].dtype, function.pattern
        leaves = _Leaves(function)
        terms = leaves.folded()
        self.steps, self.monomials = leaves.algebra.steps, leaves.algebra.monomials
        self.variables, self._graph = leaves.algebra.variables, None if leaves.graph is None else leaves.graph.forward
        if compile and self._graph is not None:
            self._graph = torch.compile(self._graph, dynamic=False)
        self._entries = np.searchsorted(self.pattern.places, terms.place)
        constant = terms.variable == NONE
        self._constants, self._constant_entries = terms[constant], self._entries[constant]
        self._final = self._last_step(merged(terms[~constant]))
        self._weights: tuple[tuple[float, ...], list[np.ndarray]] | None = None

    def _last_step(self, terms: Terms) -> Step:
        """The step whose variables are the values, without their constants."""
        entries = np.searchsorted(self.pattern.places, terms.place)
        counts = np.bincount(entries, minlength=self.pattern.nnz)
        return step_of(self.variables, counts, terms.variable, None, terms.monomial, terms.coefficient)

    @property
    def details(self) -> str:
        """The number of local derivatives, and of products that each call takes of them."""
        return f" ({self.variables} local derivatives and products of these)"

    @property
    def flop(self) -> int:
        """Operations of the sums and products for one sample, without those of the local derivatives."""
        return sum(len(step.left) * (2 if step.right is None else 3) for step in (*self.steps, self._final))

    @property
    def nbytes(self) -> int:
        """Bytes of the plan's arrays."""
        steps = (*self.steps, self._final)
        return sum(a.nbytes for s in steps for a in (s.indptr, s.left, s.right, s.coefficient) if a is not None)

    def weights(self, numbers: tuple[float, ...]) -> list[np.ndarray]:
        """The constants of the entries, and the weights of each step's terms, for the function's numbers."""
        weights = self._weights
        if weights is None or weights[0] != numbers:
            monomials, constants = self.monomials.values(numbers), self._constants
            scaled = constants.coefficient * monomials[constants.monomial]
            constant = np.bincount(self._constant_entries, scaled, minlength=self.pattern.nnz)
            steps = [step.coefficient * monomials[step.monomial] for step in (*self.steps, self._final)]
            dtype = torch.empty(0, dtype=self.dtype).numpy().dtype
            weights = self._weights = numbers, [array.astype(dtype, copy=False) for array in (constant, *steps)]
        return weights[1]

    def values(self, inputs: list[torch.Tensor], numbers: tuple[float, ...]) -> torch.Tensor:
        """The values on the pattern, ``(nnz, batch)``, or ``(nnz, 1)`` where none depends on a tensor."""
        constant, *weights = self.weights(numbers)
        if self._graph is None:
            return torch.from_numpy(constant.copy())[:, None]
        variables = self._graph(*inputs)
        if self.steps:
            computed = variables.new_empty((self.variables, self.batch))
            computed[: len(variables)] = variables
            variables = computed
        for step, weight in zip(self.steps, weights, strict=False):
            self._run(step, weight, variables, variables[step.first : step.stop])
        out = variables.new_empty((self.pattern.nnz, self.batch))
        self._run(self._final, weights[-1], variables, out, constant)
        return out

    def _run(
        self,
        step: Step,
        weight: np.ndarray,
        variables: torch.Tensor,
        out: torch.Tensor,
        constant: np.ndarray | None = None,
    ) -> None:
        arrays = [variables.numpy(), out.numpy()]
        suffix = "_batch"
        if self.batch == 1:
            arrays, suffix = [array.reshape(-1) for array in arrays], ""
        if step.right is None:
            if constant is None:
                constant = np.zeros(len(out), dtype=weight.dtype)
            kernel = getattr(kernels, f"weighted_sums{suffix}")
            args: tuple[Any, ...] = (step.indptr, step.left, weight, constant)
        else:
            kernel = getattr(kernels, f"weighted_products{suffix}")
            args = (step.indptr, step.left, step.right, weight)
        run_rows(kernel, step.indptr, *args, *arrays, lanes=self.batch)


class ChainProducts:
    """The values of a function's Jacobian from those of each operator, multiplied in the order of least cost.

    It is for functions whose local Jacobians are full of weights, as those of networks.
    """

    name = "products"

    def __init__(self, function: Linearised) -> None:
        self.pattern, self.chain, self._graph = function.pattern, function.chain, function.graph

    @property
    def details(self) -> str:
        """The number of stages."""
        return f" ({len(self.chain)} stages)"

    @property
    def cost(self) -> float:
        """Predicted multiply-adds for one sample."""
        return self.chain.order.cost if len(self.chain) else 0.0

    @property
    def flop(self) -> int:
        """Predicted operations of the products for one sample."""
        return 2 * int(self.cost)

    @property
    def nbytes(self) -> int:
        """Bytes of the pattern's indices."""
        return self.pattern.index_nbytes

    def values(self, inputs: list[torch.Tensor], numbers: tuple[float, ...]) -> torch.Tensor:
        """The values on the pattern, ``(nnz, batch)``, or ``(nnz, 1)`` where all samples share them."""
        recording = record(GraphRun(self._graph, inputs), inputs[0])
        values = self.chain.jacobian(self.chain.records(recording)[1], inputs[0]).values
        # They may lie in the memory of an input.
        memories = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        return values.clone() if values.untyped_storage().data_ptr() in memories else values


class _Leaves:
    """The local Jacobians of a function as matrices of terms, transposed as the edges' patterns are."""

    def __init__(self, function: Linearised) -> None:
        self.function, self.numbers = function, function.numbers
        self.algebra = Algebra(0, TERMS_PER_ENTRY * (function.pattern.nnz + sum(function.pattern.shape)))
        #: The edges whose local derivatives are variables, in the order of these.
        self.derivatives: list[Edge] = []
        #: Computes the variables, ``(variables, batch)``, from the function's inputs; None where there are none.
        self.graph: fx.GraphModule | None = None
        self._varying = _varying(function)

    def folded(self) -> Terms:
        """The function's Jacobian as terms."""
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
        # All leaves first: their variables come before those of products.
        constants = {edge: self._constant(edge, record) for edge, record in leaves.values()}
        matrices = {edge: terms for edge, terms in constants.items() if terms is not None} | self._of_derivatives()
        try:
            transposed = accumulation.evaluate(result, matrices.__getitem__, self.algebra.multiply, joined)
        except TooManyTermsError:
            raise NotFoldableError("its paths meet in too many terms") from None
        t = transposed
        return Terms((rows, columns), t.column, t.row, t.variable, t.monomial, t.coefficient)

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
        place = _place(node, edge)
        others = [] if place is None else [other for other in node.all_input_nodes if other is not node.args[place]]
        moves = edge.call.sources is not None
        if edge.shared and (moves or (place is not None and not self._varying.intersection(others))):
            return terms_at(*entries, coefficient=record.values(edge)[:, 0].numpy())
        if not is_pointwise(edge.call.operator) or place is None:
            raise NotFoldableError(f"{edge.call.path}: {edge.call.operator} is neither constant nor elementwise")
        self.derivatives.append(edge)
        return None

    def _of_derivative(self, edge: Edge, first: int) -> Terms:
        """The transposed local Jacobian of an edge, whose entries are consecutive variables."""
        pattern, jacobian = edge.pattern, edge.pattern.T
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
        self.algebra.variables = first
        put_together(self.graph, list(firsts))
        return {
            edge: self._of_derivative(edge, firsts[part]) for edge, part in zip(self.derivatives, parts, strict=True)
        }

    def _factor(self, edge: Edge, node: fx.Node) -> tuple[int | None, int, float] | None:
        """The number, its power and the coefficient by which a linear elementwise operator scales; else None."""
        name, argument = edge.call.operator, edge.call.argument
        if name == "aten.neg":
            return None, 0, -1.0
        if name in ("aten.add", "aten.sub"):
            scale = float(node.kwargs.get("alpha", 1)) * (-1 if name == "aten.sub" else 1)  # type: ignore[arg-type]
            return None, 0, 1.0 if argument == "self" else scale
        if name == "aten.rsub" and argument == "self":
            return None, 0, -1.0 if len(node.args) < 3 else -float(node.args[2])  # type: ignore[arg-type]
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

            def visit(node: fx.Node, args: tuple[Any, ...], result: Any) -> None:
                for edge in wanted.get(node, ()):
                    place = _place(node, edge)
                    assert place is not None
                    derivative = _derivative(node, args, place, result)
                    of_samples = layouts[edge].split(derivative).reshape(function.batch, -1)
                    parts[edge] = of_samples[:1] if function.shared else of_samples

            with torch.no_grad():
                evaluated(function.graph, inputs, visit)
            return [parts[edge] for edge in self.derivatives]

        return graph_of_values(derivatives, function.inputs)


def put_together(graph: fx.GraphModule, parts: list[fx.Node]) -> None:
    """Let a graph return its parts, each ``(batch, elements)``, as one tensor, ``(elements, batch)``."""
    aten, output, batch = torch.ops.aten, graph.graph.output_node(), parts[0].meta["val"].shape[0]
    with graph.graph.inserting_before(output):
        together = graph.graph.call_function(aten.cat.default, (parts, 1))
        if batch == 1:
            columns = graph.graph.call_function(aten.reshape.default, (together, [-1, 1]))
        else:
            rows = graph.graph.call_function(aten.t.default, (together,))
            columns = graph.graph.call_function(aten.clone.default, (rows,), {"memory_format": torch.contiguous_format})
    output.args = (columns,)
    graph.recompile()


def _varying(function: Linearised) -> set[fx.Node]:
    """The nodes whose floating-point elements may differ between calls."""
    varying: set[fx.Node] = set()
    for node in function.graph.graph.nodes:
        value = node.meta.get("val")
        floats = isinstance(value, torch.Tensor) and value.is_floating_point()
        if (node.op == "placeholder" and floats) or varying.intersection(node.all_input_nodes):
            varying.add(node)
    return varying


def _place(node: fx.Node, edge: Edge) -> int | None:
    """The place of an edge's operand among its operator's positional arguments.

    None where it is within a list, or where the node is one of several results.
    """
    if node.target is operator.getitem:
        return None
    names = [parameter.name for parameter in node.target._schema.arguments]  # type: ignore[union-attr]
    return names.index(edge.call.argument) if edge.call.argument in names[: len(node.args)] else None


def _derivative(node: fx.Node, args: tuple[Any, ...], place: int, result: torch.Tensor) -> torch.Tensor:
    """The derivative of an elementwise operator at each place of its result, by its own backward on ones."""
    with torch.enable_grad():
        operand = args[place].expand(result.shape).detach().requires_grad_()
        y = node.target(*args[:place], operand, *args[place + 1 :])  # type: ignore[operator]
        (derivative,) = torch.autograd.grad(y, operand, torch.ones_like(y), materialize_grads=True)
    return derivative
