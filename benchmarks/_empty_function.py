"""A layer that computes nothing: what PyTorch itself takes to call an `autograd.Function` with a layer's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ._calls import Call


class _EmptyLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shapes: Sequence[Sequence[int]], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return tuple([tensors[0].new_empty(shape) for shape in shapes])

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        needs = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        return (None, *[torch.empty_like(tensor) if need else None for tensor, need in needs])


def empty_passes(layer: nn.RNNBase, x: torch.Tensor) -> tuple[Call, Call]:
    """A forward and a backward pass of a Function with a layer's inputs and outputs, which computes nothing.

    The forward pass saves its inputs and returns uninitialised outputs; the backward pass, from a gradient of the last
    state, returns uninitialised gradients of the weights.

    Parameters
    ----------
    layer : Module
        A layer of one direction, or another with its weights.
    x : Tensor, (time, batch, features)
        Its input.
    """
    time, batch, _ = x.shape
    states = 2 if isinstance(layer, nn.LSTM) else 1
    shapes = (time, batch, layer.hidden_size), *[(layer.num_layers, batch, layer.hidden_size)] * states
    weights = list(layer.parameters())
    _, last, *_ = _EmptyLayer.apply(shapes, x, *weights)  # type: ignore[no-untyped-call]
    gradient = torch.ones_like(last)
    return (
        lambda: _EmptyLayer.apply(shapes, x, *weights),  # type: ignore[no-untyped-call]
        lambda: torch.autograd.grad(last, weights, gradient, retain_graph=True),
    )
