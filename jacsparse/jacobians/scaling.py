"""Batch normalisation by running statistics as what it is, a scaling of each channel.

PyTorch's own derivative of it is one for all modes: with many seeds at once, it copies the input for each of them.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

#: All have the arguments input, weight, bias, mean, variance, training, momentum, eps.
_NORMALISATIONS = (aten.native_batch_norm.default, aten.cudnn_batch_norm.default)


def with_scaling(graph: fx.GraphModule) -> fx.GraphModule:
    """The same graph, whose batch normalisations by running statistics have the derivatives of a scaling."""
    if not any(map(_scales, graph.graph.nodes)):
        return graph
    graph = copy.deepcopy(graph)
    for node in filter(_scales, graph.graph.nodes):
        node.args, node.target = (node.target, *node.args), _normalised
    graph.recompile()
    return graph


def _scales(node: fx.Node) -> bool:
    """Whether a call normalises by running statistics, which, as its weights, do not depend on the function's input."""
    if node.target not in _NORMALISATIONS or node.args[5]:
        return False
    return all(part is None or part.op in ("placeholder", "get_attr") for part in node.args[1:5])  # type: ignore[union-attr]


def _normalised(overload: Any, x: torch.Tensor, weight: torch.Tensor | None, *others: Any) -> tuple[Any, ...]:
    _, _, variance, _, _, eps = others
    scale = torch.rsqrt(variance + eps)
    if weight is not None:
        scale = scale * weight
    return (_Scaling.apply(x, scale.reshape(-1, *[1] * (x.ndim - 2)), overload, weight, *others),)


class _Scaling(torch.autograd.Function):
    """A linear operator that scales, by its own kernel; `scale` has the shape of one sample or broadcasts to it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, scale: torch.Tensor, overload: Any, *others: Any) -> Any:
        return overload(x, *others)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])
        ctx.others = len(inputs) - 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return (gradient * ctx.saved_tensors[0], *[None] * ctx.others)

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *others: Any) -> Any:  # type: ignore[override]
        return tangent * ctx.saved_tensors[0]
