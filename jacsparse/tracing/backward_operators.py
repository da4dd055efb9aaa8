"""Operators of backward passes as others, where PyTorch has no decomposition, or one of wrong second derivatives.

The backward pass of a normalisation gets the mean and the deviation that the forward pass saved, and PyTorch
differentiates it as if it computed them from the input. So the decomposition computes them.

The second derivatives of ELU at 0, of Softplus at its threshold and of the Huber loss at its delta are zero in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._decomp

from ..patterns import UnsupportedOperatorError

aten = torch.ops.aten


def _convolution(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> tuple[torch.Tensor | None, None, None]:
    """The gradient of a convolution's input, which is a convolution the other way round."""
    if mask[1] or mask[2]:
        raise UnsupportedOperatorError(
            "aten.convolution_backward: the gradient of a weight depends on the input, and has no rule; write the "
            "convolution as a product with torch.nn.functional.unfold"
        )
    if not mask[0]:
        return None, None, None
    left_over = [0] * len(stride)
    if not transposed:
        sizes = zip(x.shape[2:], gradient.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
        left_over = [n - ((m - 1) * s - 2 * p + d * (k - 1) + 1) for n, m, k, s, p, d in sizes]
    return (
        aten.convolution(gradient, weight, None, stride, padding, dilation, not transposed, left_over, groups),
        None,
        None,
    )


def _layer_norm(
    gradient: torch.Tensor,
    x: torch.Tensor,
    shape: Sequence[int],
    mean: torch.Tensor,
    deviation: torch.Tensor,
    *rest: Any,
) -> Any:
    """The gradients of layer normalisation; the saved deviation is a reciprocal one."""
    axes = list(range(x.ndim - len(shape), x.ndim))
    variance = x.var(axes, correction=0, keepdim=True)
    # The difference is zero, and there for its derivative.
    deviation = (variance - variance.detach() + deviation.detach() ** -2) ** -0.5
    mean = x.mean(axes, keepdim=True)
    return _decomposition(aten.native_layer_norm_backward.default)(gradient, x, shape, mean, deviation, *rest)


def _batch_norm(gradient: torch.Tensor, x: torch.Tensor, *rest: Any) -> Any:
    _, _, _, _, _, training, _, _ = rest
    if training:
        raise UnsupportedOperatorError(
            "aten.native_batch_norm_backward, of a normalisation by the statistics of its input, has no rule; "
            "write it with operators"
        )
    return _decomposition(aten.native_batch_norm_backward.default)(gradient, x, *rest)


def _elu(
    gradient: torch.Tensor, alpha: float, scale: float, input_scale: float, is_result: bool, x: torch.Tensor
) -> torch.Tensor:
    """The gradient of ELU, from its result or its input."""
    negative = torch.where(x < 0, x, 0.0)
    rise = negative + alpha * scale if is_result else alpha * scale * torch.exp(negative * input_scale)
    return gradient * torch.where(x <= 0, input_scale * rise, scale)


def _softplus(gradient: torch.Tensor, x: torch.Tensor, beta: float, threshold: float) -> torch.Tensor:
    x = x * beta
    rise = torch.where(x < threshold, x, x.detach()).sigmoid()
    return gradient * torch.where(x > threshold, 1.0, rise)


def _huber(gradient: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int, delta: float) -> torch.Tensor:
    difference = x - target
    inside = torch.where(difference.abs() < delta, difference, difference.detach().clamp(-delta, delta))
    return gradient * inside / (x.numel() if reduction == 1 else 1)


def _decomposition(overload: Any) -> Any:
    return torch._decomp.decomposition_table[overload]


#: What computes the results of these operators, with the derivatives that PyTorch has of them.
BACKWARD: dict[Any, Callable[..., Any]] = {
    aten.convolution_backward.default: _convolution,
    aten.native_layer_norm_backward.default: _layer_norm,
    aten.native_batch_norm_backward.default: _batch_norm,
    aten.elu_backward.default: _elu,
    aten.softplus_backward.default: _softplus,
    aten.huber_loss_backward.default: _huber,
}
