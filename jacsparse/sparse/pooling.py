"""Max-pooling of blocks, alone or within a convolution, as part of autograd."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from .activations import gradient_of_sums
from .convolution import Convolution, gradients, needed
from .kernel_runs import empty, run_kernel
from .pooling_kernels import add_to_winners, find_winners, on_windows, take_winners
from .vectors import Tile
from .windows import Pair

#: The most positions of a window: winners are bytes, and one number says that none has won.
MOST_POSITIONS = 255
#: The most positions of a window for each of which there is code of its own.
_MOST_UNROLLED = 25


@dataclass(frozen=True)
class Pool:
    """The windows of a max-pooling."""

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair

    def out_size(self, in_size: Pair) -> Pair:
        """Rows and columns of the output, for those of an input."""
        rows, columns = (
            (in_size[axis] + 2 * self.padding[axis] - self.dilation[axis] * (self.kernel[axis] - 1) - 1)
            // self.stride[axis]
            + 1
            for axis in (0, 1)
        )
        return rows, columns

    def tiles(self, in_size: Pair) -> bool:
        """Whether the windows, which are more than one position, cover each position of a plane once."""
        whole = all(size % kernel == 0 for size, kernel in zip(in_size, self.kernel, strict=True))
        several = math.prod(self.kernel) > 1
        return whole and several and self.stride == self.kernel and self.padding == (0, 0) and self.dilation == (1, 1)

    def run(self, function: Any, x: torch.Tensor, y: torch.Tensor, winners: torch.Tensor) -> None:
        """Run a function of windows over the planes of blocks."""
        # Larger windows would take long to compile: none of theirs is of the tile's size.
        unrolled = self.kernel if math.prod(self.kernel) <= _MOST_UNROLLED else (0, 0)
        tile = Tile(x.dtype.itemsize, x.shape[4], pool=unrolled)

        def arguments(x: torch.Tensor, y: torch.Tensor, winners: torch.Tensor) -> tuple[Any, ...]:
            return (
                function(tile),
                x.data_ptr(),
                y.data_ptr(),
                winners.data_ptr(),
                (*x.shape[2:4], *y.shape[2:4]),
                (*self.kernel, *self.stride, *self.padding, *self.dilation),
                tile.lanes,
                tile.itemsize,
            )

        work = max(1, 2 * x[0, 0].numel() // tile.lanes)
        planes = x.shape[0] * x.shape[1]
        run_kernel(on_windows, planes, arguments, (x,), (y, winners), lanes=work, blocks=x.shape[0])

    def scattered(self, y: torch.Tensor, winners: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Blocks of a shape with `y` where each window's maximum was, and zeros elsewhere; differentiable."""
        if torch.is_grad_enabled():
            return _Scatter.apply(y, winners, shape, self)  # type: ignore[no-any-return]
        if self.tiles((shape[2], shape[3])):
            return gradient_of_sums(y, winners, self.kernel)[0]
        x = empty(shape, y.dtype).zero_()
        self.run(add_to_winners, x, y, winners)
        return x


def max_pool(x: torch.Tensor, pool: Pool) -> torch.Tensor:
    """The maximum of each window, as ``torch.nn.functional.max_pool2d``; `x` are blocks."""
    return _MaxPool.apply(x, pool)  # type: ignore[no-any-return]


def convolve_and_pool(
    x: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, convolution: Convolution, pool: Pool
) -> torch.Tensor:
    """The maximum of each window of a convolution's output, then ReLU; the output itself is never stored."""
    if torch.is_grad_enabled():
        return _ConvolveAndPool.apply(x, values, bias, convolution, pool)  # type: ignore[no-any-return]
    return convolution.forward.pooled(x, values, bias, pool.kernel, keep=False)[0]


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, pool: Pool) -> torch.Tensor:
        y = empty((*x.shape[:2], *pool.out_size(x.shape[2:4]), x.shape[4]), x.dtype)
        winners = torch.empty(y.shape, dtype=torch.uint8)
        pool.run(find_winners, x, y, winners)
        ctx.shape, ctx.pool = x.shape, pool
        ctx.save_for_backward(winners)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        (winners,) = ctx.saved_tensors
        return ctx.pool.scattered(gradient.contiguous(), winners, ctx.shape), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Any, winners: Any, shape: Any, pool: Pool) -> torch.Tensor:
        ctx.pool = pool
        ctx.save_for_backward(winners)
        return pool.scattered(y, winners, shape)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        (winners,) = ctx.saved_tensors
        return _Gather.apply(gradient.contiguous(), winners, ctx.pool), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, winners: Any, pool: Pool) -> torch.Tensor:
        ctx.shape, ctx.pool = x.shape, pool
        ctx.save_for_backward(winners)
        y = empty(winners.shape, x.dtype)
        pool.run(take_winners, x, y, winners)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        (winners,) = ctx.saved_tensors
        return ctx.pool.scattered(gradient.contiguous(), winners, ctx.shape), None, None


class _ConvolveAndPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, values: Any, bias: Any, convolution: Convolution, pool: Pool) -> torch.Tensor:
        y, winners = convolution.forward.pooled(x, values, bias, pool.kernel, keep=any(ctx.needs_input_grad))
        ctx.convolution, ctx.pool = convolution, pool
        ctx.save_for_backward(x, values, winners)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        x, values, winners = ctx.saved_tensors
        gradient, forward = gradient.contiguous(), ctx.convolution.forward
        if not (ctx.needs_input_grad[0] or torch.is_grad_enabled()) and forward.reads_winners():
            # As of the first layer of a model, whose output is the largest.
            products = forward.products(x, gradient, winners, ctx.pool.kernel)
            return *needed(ctx, None, *products), None, None
        of_bias = None
        if torch.is_grad_enabled():
            gradient = ctx.pool.scattered(gradient, winners, (x.shape[0], *ctx.convolution.out_shape))
        else:
            gradient, of_bias = gradient_of_sums(gradient, winners, ctx.pool.kernel)
        return *gradients(ctx, x, values, gradient, of_bias), None, None
