"""Weights whose zeros a pattern leaves out: whether they are zero still."""

from __future__ import annotations

from torch import nn

from ..tracing import Trace
from .traced_function import TracedFunction


class FilledWeightError(RuntimeError):
    """An element that a pattern leaves out is not zero; `weight` says which tensors it is computed from."""

    def __init__(self, weight: str) -> None:
        super().__init__(f"{weight}, of which a pattern leaves out elements, has others than zeros there")
        self.weight = weight


class WatchedWeights:
    """The pruned weights of a traced function that may differ between runs."""

    def __init__(self, function: TracedFunction) -> None:
        self._function, infos = function, function.graph.infos
        self._uses = [
            (edge, function.operation(edge, record), weight)
            for edge, record in function.edges()
            for weight in edge.pruned_weights
            # Truth values that select are compared themselves.
            if weight.floating and not infos[record.node(edge.target).arguments[weight.name].number].fixed
        ]

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return bool(self._uses)

    def check(self, trace: Trace) -> None:
        """Raise FilledWeightError where an element that the pattern leaves out is not zero in a run."""
        for edge, operation, weight in self._uses:
            tensor = operation.of_sample(weight.name, trace.argument(operation.node, weight.name))
            if not weight.holds(edge.weight(weight.name, tensor)):
                raise FilledWeightError(self._name_of(operation.node.arguments[weight.name].number, trace))

    def _name_of(self, value: int, trace: Trace) -> str:
        """The parameters and buffers that a weight is computed from, or the shapes of other tensors."""
        graph = self._function.graph
        module = trace.module if isinstance(trace.module, nn.Module) else nn.Module()
        of_module = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
        tensors = [trace.tensor(each) for each in graph.captures if graph.made_of(value, {each})]
        names = [of_module.get(id(t), f"a tensor of shape {tuple(t.shape)}") for t in tensors]
        return " and ".join(names) or "a weight"
