"""A tape's graph of ATen calls beside the chain of its stages: each operator's local Jacobian has its node."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from ..patterns import Pattern, UnsupportedOperatorError
from ..stages import Chain, Edge, Record, chain_of
from ..tracing import Reads, Tape, facts_of, graph_of_tape, inputs_of, trace, without_autocast

aten = torch.ops.aten


def evaluated(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    visit: Callable[[fx.Node, tuple[Any, ...], dict[str, Any], Any], None],
) -> Any:
    """Run a graph on its inputs; ``visit(node, args, kwargs, result)`` sees each call."""
    values: dict[fx.Node, Any] = {}
    rest = iter(inputs)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(rest)
        elif node.op == "get_attr":
            values[node] = getattr(graph, node.target)
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
            visit(node, args, kwargs, values[node])
        else:
            (result,) = fx.map_arg(node.args, values.__getitem__)
    return result


def calls_of_input(graph: fx.GraphModule) -> list[fx.Node]:
    """The calls that compute something from the first input."""
    first, *rest = graph.graph.nodes
    dependent = {first}
    for node in rest:
        if node.op == "call_function" and dependent.intersection(node.all_input_nodes):
            dependent.add(node)
    return [node for node in rest if node in dependent]


_VIEWS = (
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.expand.default,
    aten.detach.default,
)


def place_of(node: fx.Node, name: str) -> int | None:
    """The place of an argument among a call's positional ones, if it is there."""
    if node.target is operator.getitem:
        return None
    names = [parameter.name for parameter in node.target._schema.arguments]  # type: ignore[union-attr]
    return names.index(name) if name in names[: len(node.args)] else None


class GraphRun(nn.Module):
    """One run of a graph as a module of its first input, with the nodes of its tensors."""

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        # For messages, which name modules.
        self.__qualname__ = "the prepared program"
        # In a tuple, so that they are neither parts nor buffers.
        self._graph_and_inputs = graph, inputs
        self.nodes: list[tuple[fx.Node, torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> Any:
        graph, inputs = self._graph_and_inputs

        def visit(node: fx.Node, args: Any, kwargs: Any, result: Any) -> None:
            if isinstance(result, torch.Tensor):
                self.nodes.append((node, result))

        return evaluated(graph, [x, *inputs[1:]], visit)

    # The hooks of all modules are not for this one.
    __call__ = forward


@dataclass(eq=False)
class Linearised:
    """A function as a graph, whose operators' local Jacobians are the edges of a chain."""

    tape: Tape
    graph: fx.GraphModule
    chain: Chain
    records: list[Record]
    #: The node that computes each value of the chain's program; those of decomposed operators have none.
    nodes: dict[int, fx.Node]
    #: The inputs of the graph in the run that was recorded.
    inputs: list[torch.Tensor]

    @property
    def pattern(self) -> Pattern:
        """The pattern of the Jacobian."""
        return self.chain.pattern.T

    @property
    def batch(self) -> int:
        """The number of samples."""
        return len(self.inputs[0])

    @property
    def shared(self) -> bool:
        """Whether all samples share the Jacobian's values."""
        return all(stage.shared for stage in self.chain)

    @property
    def numbers(self) -> dict[fx.Node, int]:
        """The place of each number among the tape's, by its placeholder."""
        first = 1 + len(self.tape.inputs)
        return {node: place for place, node in enumerate(self.placeholders[first:])}

    @property
    def externals(self) -> list[fx.Node | None]:
        """The placeholder of each external; None for those of sparse matrices, which have three."""
        nodes: dict[int, list[fx.Node]] = {}
        for slot, node in zip(self.tape.inputs, self.placeholders[1:], strict=False):
            nodes.setdefault(slot, []).append(node)
        return [parts[0] if len(parts) == 1 else None for parts in nodes.values()]

    @property
    def placeholders(self) -> list[fx.Node]:
        """The nodes of the inputs."""
        return [node for node in self.graph.graph.nodes if node.op == "placeholder"]

    def argument(self, edge: Edge, name: str) -> fx.Node | None:
        """The node that computes an argument of an edge's operator; views of it, if any, have its elements."""
        node = self.nodes.get(edge.target)
        place = None if node is None else place_of(node, name)
        value = None if node is None or place is None else node.args[place]
        while isinstance(value, fx.Node) and value.target in _VIEWS:
            value = value.args[0]
        return value if isinstance(value, fx.Node) else None

    def edges(self) -> Iterator[tuple[Edge, Record]]:
        """The edges of all stages in order, with their stages' records."""
        for record_of_stage in self.records:
            for edge in record_of_stage.stage.edges:
                yield edge, record_of_stage


def linearised(
    tape: Tape, x: torch.Tensor, reads: Reads, *, pruned: bool = True, watched: Collection[int] = ()
) -> Linearised:
    """A tape's graph and the chain of its operators, at an input and what the function read there.

    Patterns omit zeros of constants where `pruned`, but of what the function reads those of the `watched` externals
    alone, which whoever evaluates the graph has to watch: `WatchedWeights` does.
    """
    inputs = inputs_of(tape, x, reads)
    graph = graph_of_tape(tape, inputs)
    _check_indices(graph, tape)
    run = GraphRun(graph, inputs)
    traced = trace(run, inputs[0], readable=False)
    with without_autocast(x.device):
        # Indices and masks from elsewhere are parts of a program, and a zero computed from them stays one.
        externals = list(tape.forms)
        slots = {externals[place] for place in watched}
        is_watched = [False, *(slot in slots for slot in tape.inputs), *[False] * len(tape.dtypes)]
        varies = [t.is_floating_point() or place > len(tape.inputs) for place, t in enumerate(inputs)]
        varying, weights = (
            [t for t, watches, each in zip(inputs, is_watched, varies, strict=True) if each and watches is which]
            for which in (False, True)
        )
        chain, records = chain_of(traced, pruned=pruned, varying=varying, watched=weights).records(traced)
    of_tensors = {id(tensor): node for node, tensor in run.nodes}
    values = [value for call in traced.graph.nodes if not call.parts for value in call.results]
    tensors = [(value, id(traced.tensors[value])) for value in values]
    nodes = {value: of_tensors[tensor] for value, tensor in tensors if tensor in of_tensors}
    return Linearised(tape, graph, chain, records, nodes, inputs)


def _check_indices(graph: fx.GraphModule, tape: Tape) -> None:
    """Raise where indices that move elements are computed from an external or a number, and not from the input."""
    varies: set[fx.Node] = set()
    of_input: set[fx.Node] = set()
    fixed = {1 + place for place, slot in enumerate(tape.inputs) if slot in tape.contents}
    for place, node in enumerate(graph.graph.nodes):
        if (node.op == "placeholder" and place not in fixed) or varies.intersection(node.all_input_nodes):
            varies.add(node)
        if not place or of_input.intersection(node.all_input_nodes):
            of_input.add(node)
        if node.op == "call_function" and moves_by_contents(node.target):
            for operand in node.all_input_nodes:
                value = operand.meta.get("val")
                if operand in varies - of_input and isinstance(value, torch.Tensor) and not value.is_floating_point():
                    raise UnsupportedOperatorError(
                        f"{node.target}: its indices are computed from what a tensor holds, so that no pattern holds "
                        "for all inputs; call jacsparse.jacobian, which follows each run"
                    )


def moves_by_contents(overload: Any) -> bool:
    """Whether the pattern of an operator depends on the elements of indices."""
    return hasattr(overload, "_schema") and facts_of(overload).contents
