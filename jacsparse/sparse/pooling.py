"""Max-pooling of blocks, as part of autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..runtime import run_rows
from .convolution import empty
from .pooling_kernels import pull_winners, take_winners
from .windows import Pair


def max_pool(
    x: torch.Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, relu: bool = False
) -> torch.Tensor:
    """The maximum of each window, as ``torch.nn.functional.max_pool2d``, then ReLU where asked; `x` are blocks."""
    return _MaxPool.apply(x, kernel, stride, padding, dilation, relu)  # type: ignore[no-any-return]


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Any, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, relu: bool
    ) -> torch.Tensor:
        sizes = [
            (x.shape[axis + 2] + 2 * padding[axis] - dilation[axis] * (kernel[axis] - 1) - 1) // stride[axis] + 1
            for axis in (0, 1)
        ]
        y = empty((*x.shape[:2], *sizes, x.shape[4]), x.dtype)
        # A winner's number in its window; that after the last one where ReLU lets none through.
        winners = np.empty(y.shape, np.uint8 if kernel[0] * kernel[1] < 256 else np.uint32)
        ctx.shape, ctx.window, ctx.winners = x.shape, np.array([*kernel, *stride, *padding, *dilation]), winners
        _run(take_winners, x, y, winners, ctx.window, relu)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        x = empty(ctx.shape, gradient.dtype)
        _run(pull_winners, x, gradient.contiguous(), ctx.winners, ctx.window)
        return x, None, None, None, None, None


def _run(kernel: Any, x: torch.Tensor, y: torch.Tensor, winners: np.ndarray, *rest: Any) -> None:
    planes = x.shape[0] * x.shape[1]
    run_rows(
        kernel,
        planes,
        x.detach().flatten(0, 1).numpy(),
        y.detach().flatten(0, 1).numpy(),
        winners.reshape(planes, *winners.shape[2:]),
        *rest,
        lanes=max(1, x[0, 0].numel() // 2),
    )
