"""Results of a call whose graph of autograd is the call's own: it begins with copies of what the results depend on.

A backward pass of PyTorch's that asks for the gradient of a tensor, as a parameter, goes through all of the graph that
leads there: through a call's arguments also to the calls before it, if they read that parameter too. A call whose
backward pass takes passes of its own, as that of a Jacobian's values does, would take those of all calls before it
each time: of calls one after the other, that is exponential time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..tracing import ending_at, saved_handle


@dataclass(frozen=True, eq=False)
class OwnGraph:
    """Tensors, and the places in their graph where the gradients of what they depend on are computed."""

    results: Sequence[torch.Tensor]
    ends: Sequence[GradientEdge]

    def connected_to(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The results as results of these tensors, one for each end, with gradients of any order."""
        return _Results.apply(self, len(inputs), *inputs)  # type: ignore[no-any-return]

    def gradients(
        self, weights: Sequence[torch.Tensor | None], needed: Sequence[bool], *, create_graph: bool
    ) -> list[torch.Tensor | None]:
        """The gradients at the ends that are needed, of the sum of the weighted results."""
        pairs = [(y, g) for y, g in zip(self.results, weights, strict=True) if g is not None]
        ends = [end for end, each in zip(self.ends, needed, strict=True) if each]
        gradients: list[torch.Tensor | None] = [None] * len(self.ends)
        if pairs and ends:
            results, of_results = zip(*pairs, strict=True)
            starts = [get_gradient_edge(y).node for y in results]
            with ending_at(ends, starts):
                computed = torch.autograd.grad(
                    results, ends, of_results, retain_graph=True, create_graph=create_graph, allow_unused=True
                )
            rest = iter(computed)
            gradients = [next(rest) if each else None for each in needed]
        return gradients


class _Results(torch.autograd.Function):
    """The results of an own graph."""

    @staticmethod
    def forward(ctx: Any, graph: OwnGraph, count: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(saved_handle(graph), *inputs)
        return tuple([result.detach() for result in graph.results])

    @staticmethod
    def backward(ctx: Any, *weights: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        handle, *inputs = ctx.saved_tensors
        graph, needed = handle.content, ctx.needs_input_grad[2:]
        if not torch.is_grad_enabled():
            return None, None, *graph.gradients(weights, needed, create_graph=False)
        # Weights of its own, since those may depend on what the results do.
        of_results = [None if g is None else g.detach().requires_grad_() for g in weights]
        gradients = graph.gradients(of_results, needed, create_graph=True)
        ends = [*graph.ends, *(get_gradient_edge(g) for g in of_results if g is not None)]
        return None, None, *reconnected(gradients, ends, [*inputs, *(g for g in weights if g is not None)])


def reconnected(
    tensors: Sequence[torch.Tensor | None], ends: Sequence[GradientEdge], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """The same tensors, those that have a graph, with these ends, as results of these inputs."""
    results = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    if not results:
        return list(tensors)
    connected = iter(OwnGraph(results, ends).connected_to(inputs))
    return [next(connected) if tensor is not None and tensor.requires_grad else tensor for tensor in tensors]
