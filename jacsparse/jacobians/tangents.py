"""Tangents of operators whose forward mode takes another side of a kink than their backward passes.

PyTorch's tangent of a leaky ReLU with a learnt slope is one at 0, where its gradient is the slope; at equal elements
the tangents of `fmax`, `fmin` and of clamps between tensors are those of the other operand; that of `atan2` at the
origin is no number. Here each tangent is scaled by what the backward pass makes of ones.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

#: Elementwise operators, all of whose arguments are operands.
_ELEMENTWISE = (
    *(aten._prelu_kernel.default, aten.atan2.default, aten.fmax.default, aten.fmin.default),
    *(aten.maximum.default, aten.minimum.default),
    *(aten.clamp.Tensor, aten.clamp_max.Tensor, aten.clamp_min.Tensor),
)

#: Operators of which PyTorch's tangents are inexact, or wrong: those of `logcumsumexp` are relative to the largest
#: element of all lines, those of `scatter_reduce` ignore elements.
INEXACT = (aten.logcumsumexp.default, aten.scatter_reduce.two)


def with_gradients(graph: fx.GraphModule) -> fx.GraphModule:
    """The same graph, where the tangents of these operators are those of their backward passes."""
    if not any(node.target in _ELEMENTWISE for node in graph.graph.nodes):
        return graph
    graph = copy.deepcopy(graph)
    for node in graph.graph.nodes:
        if node.target in _ELEMENTWISE and not node.kwargs:
            node.args, node.target = (node.target, *node.args), _with_derivatives
    graph.recompile()
    return graph


def _with_derivatives(overload: Any, *args: Any) -> torch.Tensor:
    shape = torch.broadcast_shapes(*(operand.shape for operand in args if operand is not None))
    places = [place for place, operand in enumerate(args) if operand is not None and operand.is_floating_point()]
    operands = [args[place].expand(shape) for place in places]

    def applied(*operands: torch.Tensor) -> torch.Tensor:
        of_places = dict(zip(places, operands, strict=True))
        return overload(*(of_places.get(place, operand) for place, operand in enumerate(args)))  # type: ignore[no-any-return]

    y, pull_back = torch.func.vjp(applied, *(operand.detach() for operand in operands))[:2]
    return _WithDerivatives.apply(y, *operands, *pull_back(torch.ones_like(y)))  # type: ignore[no-any-return]


class _WithDerivatives(torch.autograd.Function):
    """A result with the derivatives by its operands: ``apply(result, *operands, *derivatives)``, all of one shape."""

    generate_vmap_rule = True

    @staticmethod
    def forward(y: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        return y.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, *tensors = inputs
        derivatives = tensors[len(tensors) // 2 :]
        ctx.save_for_backward(*derivatives)
        ctx.save_for_forward(*derivatives)
        ctx.dtype = output.dtype

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        derivatives = ctx.saved_tensors
        return None, *((gradient * d).to(d.dtype) for d in derivatives), *[None] * len(derivatives)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:  # type: ignore[override]
        derivatives = ctx.saved_tensors
        terms = [t * d for t, d in zip(tangents, derivatives, strict=False) if t is not None]
        return sum(terms[1:], terms[0]).to(ctx.dtype)
