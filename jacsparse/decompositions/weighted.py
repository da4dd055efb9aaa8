"""Operators whose weights depend on the input as products with those weights, which their rules take as constants.

A normalisation is that without weights, times the weights; a convolution multiplies the weights by the windows of its
input, one column for each position (im2col)::

    y[c, o] = Σ_{d, k}  W[c, (d, k)] · X[(d, k), o]            X[(d, k), o] = x[d, o·stride - padding + k·dilation]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

aten: Any = torch.ops.aten


class Windows(NamedTuple):
    """How a convolution moves over its input, in the order of the arguments of ``aten.convolution``."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int


def _convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *options: Any) -> torch.Tensor:
    """A convolution; a transposed one is that of the input with zeros in between, by the reversed kernel."""
    windows = Windows(*options)
    columns, positions = _columns(x, weight.shape[2:], windows)
    weight = weight.reshape(windows.groups, -1, *weight.shape[1:])
    if windows.transposed:
        weight = _reversed(weight)
    y = torch.bmm(weight.flatten(2), columns).reshape(-1, len(x), *positions).transpose(0, 1)
    return y if bias is None else y + _by_channel(bias, y)


def gradient_of_weight(gradient: torch.Tensor, x: torch.Tensor, shape: Sequence[int], windows: Windows) -> torch.Tensor:
    """The gradient of a convolution's weight of a shape: that of the result times the windows of the input."""
    columns, positions = _columns(x, shape[2:], windows)
    of_result = gradient.transpose(0, 1).reshape(windows.groups, -1, len(x) * math.prod(positions))
    product = torch.bmm(of_result, columns.transpose(1, 2))
    if not windows.transposed:
        return product.reshape(list(shape))
    first, second, *kernel = shape
    by_group = product.reshape(windows.groups, second, first // windows.groups, *kernel)
    return _reversed(by_group).reshape(list(shape))


def _columns(x: torch.Tensor, kernel: Sequence[int], windows: Windows) -> tuple[torch.Tensor, list[int]]:
    """The windows of a convolution's input as columns, ``(groups, channels · kernel, batch · positions)``.

    Also the numbers of positions.
    """
    stride, padding, dilation, transposed, output_padding, groups = windows
    before, after = list(padding), list(padding)
    if transposed:
        x = _spaced(x, stride)
        before = [d * (k - 1) - p for d, k, p in zip(dilation, kernel, padding, strict=True)]
        after = [first + more for first, more in zip(before, output_padding, strict=True)]
        stride = [1] * len(kernel)
    pads = [pad for both in zip(reversed(before), reversed(after), strict=True) for pad in both]
    columns, positions = _windows(functional.pad(x, pads), kernel, stride, dilation)
    columns = columns.reshape(len(x), groups, -1, math.prod(positions)).permute(1, 2, 0, 3).flatten(2)
    return columns, positions


def _reversed(weight: torch.Tensor) -> torch.Tensor:
    """A grouped weight with input and output channels swapped, and its kernel reversed."""
    return weight.transpose(1, 2).flip(list(range(3, weight.ndim)))


def _spaced(x: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """The input with ``stride - 1`` zeros between two neighbours along each axis of its positions."""
    for axis, step in enumerate(stride, 2):
        size = x.shape[axis]
        x = functional.pad(x.movedim(axis, -1)[..., None], (0, step - 1)).flatten(-2)
        x = x[..., : (size - 1) * step + 1].movedim(-1, axis)
    return x


def _windows(
    x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[torch.Tensor, list[int]]:
    """The windows of an input, ``(batch, channels, *kernel, *positions)``, and the numbers of positions."""
    positions = []
    for axis, (taps, step, spread) in enumerate(zip(kernel, stride, dilation, strict=True), 2):
        count = (x.shape[axis] - spread * (taps - 1) - 1) // step + 1
        tap, position = torch.arange(taps, device=x.device), torch.arange(count, device=x.device)
        places = (tap[:, None] * spread + position * step).flatten()
        # Each axis becomes one of taps and, behind all others, one of positions.
        x = x.index_select(axis, places).unflatten(axis, (taps, count)).movedim(axis + 1, -1)
        positions.append(count)
    return x, positions


def _by_channel(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return weight.reshape(-1, *(1,) * (x.ndim - 2))


def _affine(normalised: Sequence[torch.Tensor], weight: Any, bias: Any) -> list[torch.Tensor]:
    """The results of a normalisation with weights from those of one without."""
    y, *statistics = normalised
    y = y if weight is None else y * weight
    return [y if bias is None else y + bias, *statistics]


def _layer_norm(x: torch.Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> list[torch.Tensor]:
    return _affine(aten.native_layer_norm(x, shape, None, None, eps), weight, bias)


def _group_norm(x: torch.Tensor, weight: Any, bias: Any, *rest: Any) -> list[torch.Tensor]:
    return _affine(aten.native_group_norm(x, None, None, *rest), *_channels(x, weight, bias))


def _batch_norm(
    x: torch.Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *rest: Any
) -> list[torch.Tensor]:
    # The call itself has updated the running statistics already.
    statistics = (None, None) if training else (mean, variance)
    normalised = aten.native_batch_norm(x, None, None, *statistics, training, *rest)
    return _affine(normalised, *_channels(x, weight, bias))


def _channels(x: torch.Tensor, *weights: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [weight if weight is None else _by_channel(weight, x) for weight in weights]


def _prelu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    # The derivative at 0 is the weight.
    return x.relu() + weight * x.clamp(max=0)


#: What computes the results of these operators where a weight or a bias depends on the input.
WEIGHTED: dict[Any, Callable[..., Any]] = {
    aten.convolution.default: _convolution,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_group_norm.default: _group_norm,
    aten.native_batch_norm.default: _batch_norm,
    aten._prelu_kernel.default: _prelu,
}
