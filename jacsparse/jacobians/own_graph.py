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

from ..patterns import UnsupportedOperatorError
from ..runtime import is_batched
from ..tracing import ending_at, is_hooked, saved_handle


@dataclass(frozen=True, eq=False)
class OwnGraph:
    """Results of a call, and where their graph computes the gradients of what they depend on.

    The first ends are those of the call's own copies, the last ones those of the `others`, which it has no copies of.
    """

    results: Sequence[torch.Tensor]
    ends: Sequence[GradientEdge]
    others: Sequence[torch.Tensor]

    def gradients(
        self, weights: Sequence[torch.Tensor | None], needed: Sequence[bool], *, create_graph: bool
    ) -> list[torch.Tensor | None]:
        """The gradients at as many ends as are asked about, where needed, of the sum of the weighted results."""
        pairs = [(y, g) for y, g in zip(self.results, weights, strict=True) if g is not None]
        ends = [end for end, each in zip(self.ends, needed, strict=False) if each]
        if not pairs or not ends:
            return [None] * len(needed)
        results, of_results = zip(*pairs, strict=True)
        with ending_at(ends, [y.grad_fn for y in results]):
            gradients = torch.autograd.grad(
                results, ends, of_results, retain_graph=True, create_graph=create_graph, allow_unused=True
            )
        computed = iter(gradients)
        return [next(computed) if each else None for each in needed]


def connected(
    results: Sequence[Any], ends: Sequence[GradientEdge], inputs: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
) -> list[Any]:
    """The same results, of which tensors with gradients have these by what the call has copies of, too.

    The ends are those of the copies; by the others the results have gradients in any case.
    """
    tensors = [each for each in results if _has_gradient(each)]
    if not tensors:
        return list(results)
    graph = OwnGraph(tensors, [*ends, *map(get_gradient_edge, others)], others)
    outputs = iter(_Connected.apply(graph, *tensors, *inputs, *others))
    return [next(outputs) if _has_gradient(each) else each for each in results]


def _has_gradient(result: Any) -> bool:
    return isinstance(result, torch.Tensor) and result.requires_grad


class _Connected(torch.autograd.Function):
    """Results of an own graph: the caller's backward pass goes on through it, and to what the call has copies of."""

    @staticmethod
    def forward(ctx: Any, graph: OwnGraph, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        count = len(graph.results)
        ctx.save_for_backward(saved_handle(graph), *tensors[count:])
        return tuple([result.view_as(result) for result in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *weights: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        check_alone(weights)
        handle, *inputs = ctx.saved_tensors
        graph, needed = handle.content, ctx.needs_input_grad[1 + len(weights) :]
        count = len(graph.ends) - len(graph.others)
        if not torch.is_grad_enabled():
            of_copies = graph.gradients(weights, needed[:count], create_graph=False)
            return None, *weights, *of_copies, *[None] * len(graph.others)
        # Gradients by the others depend on the copies as well, so that they are computed here: beside their hooks.
        check_no_hooks(graph.others)
        # Copies of the weights, since those may depend on what the results do.
        copies = [None if g is None else g.detach().requires_grad_() for g in weights]
        gradients = graph.gradients(copies, needed, create_graph=True)
        ends = [*graph.ends[:count], *(get_gradient_edge(g) for g in copies if g is not None)]
        own_inputs = [*inputs[:count], *(g for g in weights if g is not None)]
        return None, *[None] * len(weights), *connected(gradients, ends, own_inputs, inputs[count:])


def check_no_hooks(tensors: Sequence[torch.Tensor]) -> None:
    """Raise where a hook of a tensor that a function reads would see gradients of gradients twice."""
    if any(map(is_hooked, tensors)):
        raise UnsupportedOperatorError(
            "a hook, or retain_grad, of a tensor that a function reads sees gradients of gradients of a Jacobian's "
            "values, or of what is returned beside it; remove it"
        )


def check_alone(weights: Sequence[torch.Tensor | None]) -> None:
    """Raise where a backward pass goes back with several gradients at once, as with ``is_grads_batched=True``."""
    if any(weight is not None and is_batched(weight) for weight in weights):
        raise UnsupportedOperatorError(
            "torch.vmap and is_grads_batched=True ask for several gradients at once of a Jacobian's values, or of what "
            "is returned beside it, which these do not give; take one after the other, as vectorize=False does"
        )
