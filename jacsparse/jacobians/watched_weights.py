"""Weights whose zeros a pattern leaves out: whether they are zero still."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ..stages import Edge
from ..tracing import PrunedWeight, graph_of_values
from .linearised import Linearised, evaluated, place_of


class FilledWeightError(RuntimeError):
    """An element that a pattern leaves out is not zero; `places` are those of the inputs that it is computed from."""

    def __init__(self, places: Sequence[int] = ()) -> None:
        super().__init__("a weight that a pattern leaves out is not zero")
        self.places = tuple(places)


class _Use(NamedTuple):
    """A weight as an argument of a call: how to take it for one sample, and the inputs that it is computed from."""

    weight: PrunedWeight
    place: int
    of_sample: Callable[[torch.Tensor], torch.Tensor]
    inputs: tuple[int, ...]


class WatchedWeights:
    """The pruned weights of a function, as its graph computes them.

    Parameters
    ----------
    function : Linearised
        The function; `can_be_watched` holds for it.
    """

    def __init__(self, function: Linearised) -> None:
        uses = _uses(function)
        self._uses = [use for node in function.graph.graph.nodes for use in uses.get(node, ())]

        def weights(*inputs: torch.Tensor) -> list[torch.Tensor]:
            tensors: list[torch.Tensor] = []

            def visit(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
                tensors.extend(use.of_sample(args[use.place]) for use in uses.get(node, ()))

            evaluated(function.graph, inputs, visit)
            return tensors

        with torch.no_grad():
            self._graph = graph_of_values(weights, function.inputs)

    def check(self, inputs: Sequence[torch.Tensor]) -> None:
        """Raise FilledWeightError where an element that the pattern leaves out is not zero."""
        for use, tensor in zip(self._uses, self._graph.forward(*inputs), strict=True):
            if not use.weight.holds(tensor):
                raise FilledWeightError(use.inputs)


def _uses(function: Linearised) -> dict[fx.Node, list[_Use]]:
    """The uses of pruned weights by the node of the call."""
    inputs = {node: place for place, node in enumerate(function.placeholders)}
    uses: dict[fx.Node, list[_Use]] = {}
    for edge, record in function.edges():
        operation = record.stage.program.operations[edge.target]
        for weight in floating(edge):
            node = function.nodes[edge.target]
            place = place_of(node, weight.name)
            assert place is not None

            def of_sample(value: torch.Tensor, e: Edge = edge, o: Any = operation, name: str = weight.name) -> Any:
                return e.weight(name, o.of_sample(name, value))

            uses.setdefault(node, []).append(_Use(weight, place, of_sample, _inputs_of(node.args[place], inputs)))
    return uses


def _inputs_of(value: Any, inputs: dict[fx.Node, int]) -> tuple[int, ...]:
    """The places of the inputs that an argument is computed from."""
    waiting, seen = [value], set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if isinstance(node, fx.Node) and node not in seen:
            seen.add(node)
            waiting.extend(node.all_input_nodes)
    return tuple(sorted(inputs[node] for node in seen if node in inputs))


def floating(edge: Edge) -> list[PrunedWeight]:
    """The weights of numbers, not of truth values, from which the pattern of an edge omits elements."""
    return [weight for weight in edge.pruned_weights if weight.floating]


def can_be_watched(function: Linearised) -> bool:
    """Whether all pruned weights of a function are arguments of calls of its graph."""
    for edge, _ in function.edges():
        node = function.nodes.get(edge.target)
        if any(node is None or place_of(node, weight.name) is None for weight in floating(edge)):
            return False
    return True
