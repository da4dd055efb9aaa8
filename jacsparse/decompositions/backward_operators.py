"""Operators of backward passes as others, where PyTorch has no decomposition, or one of wrong second derivatives.

The backward pass of a normalisation gets the mean and the deviation that the forward pass saved, and PyTorch
differentiates it as if it computed them from the input. So the decomposition computes them.

The gradient of a convolution's weights is a product with the windows of its input; see `weighted`.

The second derivatives of ELU at 0, of Softplus at its threshold and of the Huber loss at its delta are zero in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._decomp

from .weighted import Windows, gradient_of_weight

aten = torch.ops.aten


def _convolution(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Any, *rest: Any
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The gradients of a convolution's input, weight and bias; the first is a convolution the other way round."""
    *options, mask = rest
    # One number stands for all axes.
    axes = x.ndim - 2
    windows = Windows._make(
        [list(each) * (axes if len(each) == 1 else 1) if isinstance(each, Sequence) else each for each in options]
    )
    stride, padding, dilation, transposed, _, groups = windows
    of_x = of_weight = of_bias = None
    if mask[0]:
        left_over = [0] * axes
        if not transposed:
            sizes = zip(x.shape[2:], gradient.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
            left_over = [n - ((m - 1) * s - 2 * p + d * (k - 1) + 1) for n, m, k, s, p, d in sizes]
        of_x = aten.convolution(gradient, weight, None, stride, padding, dilation, not transposed, left_over, groups)
        if of_x.shape != x.shape:
            # Padding of a transposed convolution's output may have room for windows that no input position has.
            of_x = of_x[(..., *(slice(size) for size in x.shape[2:]))]
    if mask[1]:
        of_weight = gradient_of_weight(gradient, x, weight.shape, windows)
    if mask[2]:
        of_bias = gradient.sum([0, *range(2, gradient.ndim)])
    return of_x, of_weight, of_bias


def _layer_norm(
    gradient: torch.Tensor,
    x: torch.Tensor,
    shape: Sequence[int],
    mean: torch.Tensor,
    deviation: torch.Tensor,
    *rest: Any,
) -> Any:
    """The gradients of layer normalisation; the saved deviation is a reciprocal one."""
    mean, deviation = _statistics(x, list(range(x.ndim - len(shape), x.ndim)), deviation, keepdim=True)
    return _decomposition(aten.native_layer_norm_backward.default)(gradient, x, shape, mean, deviation, *rest)


def _batch_norm(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_variance: torch.Tensor | None,
    mean: torch.Tensor,
    deviation: torch.Tensor,
    training: bool,
    *rest: Any,
) -> Any:
    """The gradients of batch normalisation; the saved deviation is a reciprocal one."""
    if training:
        mean, deviation = _statistics(x, [0, *range(2, x.ndim)], deviation, keepdim=False)
    statistics = (running_mean, running_variance, mean, deviation)
    return _decomposition(aten.native_batch_norm_backward.default)(gradient, x, weight, *statistics, training, *rest)


def _cudnn_batch_norm(
    x: torch.Tensor,
    gradient: torch.Tensor,
    weight: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_variance: torch.Tensor | None,
    mean: torch.Tensor,
    deviation: torch.Tensor,
    epsilon: float,
    *_: Any,
) -> Any:
    """The gradients of batch normalisation by the statistics of its input, which is what cuDNN is asked for."""
    statistics = (running_mean, running_variance, mean, deviation)
    return _batch_norm(gradient, x, weight, *statistics, True, epsilon, [True] * 3)


def _statistics(
    x: torch.Tensor, axes: list[int], deviation: torch.Tensor, *, keepdim: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean and the reciprocal deviation over some axes, which has the value of a saved one."""
    variance = x.var(axes, correction=0, keepdim=keepdim)
    # The difference is zero, and there for its derivative.
    variance = variance - variance.detach() + deviation.detach() ** -2
    return x.mean(axes, keepdim=keepdim), variance**-0.5


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


def _shrink(gradient: torch.Tensor, x: torch.Tensor, threshold: float) -> torch.Tensor:
    """The gradient of Hardshrink and of Softshrink."""
    return torch.where(x.abs() <= threshold, 0.0, gradient)


def _log_sigmoid(gradient: torch.Tensor, x: torch.Tensor, _buffer: torch.Tensor) -> torch.Tensor:
    return gradient * torch.sigmoid(-x)


def _distances(
    gradient: torch.Tensor, x1: torch.Tensor, x2: torch.Tensor, p: float, distances: torch.Tensor
) -> torch.Tensor:
    """The gradient of the points of the first set, by their distances to those of the second one in the p-norm."""
    difference = x1[..., :, None, :] - x2[..., None, :, :]
    size = difference.abs()
    if p == 0:
        # A count of the coordinates that differ.
        return torch.zeros_like(x1)
    if p == torch.inf:
        # Of several largest differences each has the gradient.
        pulled = torch.where(size == distances.detach()[..., None], difference.sgn(), 0.0)
        return (gradient[..., None] * pulled).sum(-2)
    if p == 1:
        return (gradient[..., None] * difference.sgn()).sum(-2)
    apart = size > 0
    size = torch.where(apart, size, 1.0)
    largest = size.detach().amax(-1, keepdim=True)
    # Scaled, so that no power overflows; points at one place have no gradient.
    shares = torch.where(apart, (size / largest) ** p, 0.0)
    total = shares.sum(-1, keepdim=True)
    total = torch.where(total > 0, total, 1.0) ** (1 / p - 1)
    pulled = torch.where(apart, difference.sgn() * (size / largest) ** (p - 1) * total, 0.0)
    return (gradient[..., None] * pulled).sum(-2)


def pairs(points: torch.Tensor) -> torch.Tensor:
    """The places of the first and of the second point of each pair, in the order of ``torch.pdist``."""
    return torch.triu_indices(len(points), len(points), 1, device=points.device)


def _pair_distances(gradient: torch.Tensor, x: torch.Tensor, p: float, distances: torch.Tensor) -> torch.Tensor:
    """The gradient of points by the distances of their pairs in the p-norm."""
    places = pairs(x)
    first, second = (x[:, None].index_select(0, each) for each in places)
    pulled = _distances(gradient[:, None, None], first, second, p, distances[:, None, None])[:, 0]
    return torch.zeros_like(x).index_add(0, places[0], pulled).index_add(0, places[1], -pulled)


def _put(x: torch.Tensor, index: torch.Tensor, source: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
    """Elements at numbers of flat places, where the backward pass of ``torch.take`` adds gradients."""
    return x.reshape(-1).index_put((index.reshape(-1),), source.reshape(-1), accumulate).reshape(x.shape)


def _decomposition(overload: Any) -> Any:
    return torch._decomp.decomposition_table[overload]


#: What computes the results of these operators, with the derivatives that PyTorch has of them.
BACKWARD: dict[Any, Callable[..., Any]] = {
    aten.convolution_backward.default: _convolution,
    aten.native_layer_norm_backward.default: _layer_norm,
    aten.native_batch_norm_backward.default: _batch_norm,
    aten.cudnn_batch_norm_backward.default: _cudnn_batch_norm,
    aten.elu_backward.default: _elu,
    aten.softplus_backward.default: _softplus,
    aten.huber_loss_backward.default: _huber,
    aten.hardshrink_backward.default: _shrink,
    aten.softshrink_backward.default: _shrink,
    aten.log_sigmoid_backward.default: _log_sigmoid,
    aten._cdist_backward.default: _distances,
    aten._pdist_backward.default: _pair_distances,
    aten.put.default: _put,
}
