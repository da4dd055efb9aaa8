"""Batch normalisation by running statistics as what it is, a scaling of each channel.

PyTorch's own derivative of it is one for all modes: with many seeds at once, it copies the input for each of them.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx

from .linearised import calls_of_input

aten = torch.ops.aten

#: All have the arguments input, weight, bias, mean, variance, training, momentum, eps.
_NORMALISATIONS = (aten.native_batch_norm.default, aten.cudnn_batch_norm.default)


def with_scaling(graph: fx.GraphModule) -> fx.GraphModule:
    """The same graph, whose batch normalisations by running statistics have the derivatives of a scaling."""
    if not any(node.target in _NORMALISATIONS for node in graph.graph.nodes):
        return graph
    graph = copy.deepcopy(graph)
    dependent = set(calls_of_input(graph))
    for node in dependent:
        if node.target in _NORMALISATIONS and _scales(node, dependent):
            node.args, node.target = (node.target, *node.args), _normalised
    graph.recompile()
    return graph


def _scales(node: fx.Node, dependent: set[fx.Node]) -> bool:
    """Whether a batch normalisation is by running statistics, and nothing but its first result has derivatives."""
    _, *others, training, _, _ = node.args
    # A backward pass reads the other results.
    alone = all(user.args[1] == 0 for user in node.users)
    return not training and alone and dependent.isdisjoint(others)  # type: ignore[arg-type]


def _normalised(overload: Any, x: torch.Tensor, weight: torch.Tensor | None, *others: Any) -> tuple[Any, ...]:
    _, _, variance, _, _, eps = others
    scale = torch.rsqrt(variance + eps)
    if weight is not None:
        scale = scale * weight
    return (_Scaling.apply(x, scale.reshape(-1, *[1] * (x.ndim - 2)), overload, weight, *others),)


class _Scaling(torch.autograd.Function):
    """A linear operator that scales, by its own kernel; `scale` has the shape of one sample or broadcasts to it.

    Elements may be of fewer bits than weights and statistics, as under ``torch.autocast``, and so are the derivatives.
    """

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
        return ((gradient * ctx.saved_tensors[0]).to(gradient.dtype), *[None] * ctx.others)

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *others: Any) -> Any:  # type: ignore[override]
        return (tangent * ctx.saved_tensors[0]).to(tangent.dtype)
