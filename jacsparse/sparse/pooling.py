"""Max-pooling of activations in blocks, as part of autograd."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from .activations import GradientOfSums
from .blocks import BlockTensor
from .deferred import Deferred
from .kernel_runs import empty, run_kernel
from .layouts import enter, records_gradients
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

    def scattered(
        self, y: BlockTensor, winners: torch.Tensor, sizes: tuple[int, ...], source: Deferred | None
    ) -> BlockTensor:
        """An activation with `y` where each window's maximum was, and zeros elsewhere; differentiable."""
        if torch.is_grad_enabled():
            return _Scatter.apply(y, winners, sizes, self)  # type: ignore[no-any-return]
        if self.tiles((sizes[2], sizes[3])):
            return y.like(GradientOfSums(y.padded, winners, self.kernel, source))
        x = empty((*winners.shape[:1], *sizes[1:], y.memory.lanes), y.memory.dtype).zero_()
        self.run(add_to_winners, x, y.blocks, winners)
        return y.like(x)


def max_pool(x: BlockTensor, pool: Pool) -> BlockTensor:
    """The maximum of each window, as ``torch.nn.functional.max_pool2d``."""
    if records_gradients() and x.requires_grad:
        return _MaxPool.apply(x, pool)  # type: ignore[no-any-return]
    return x.like(_maxima(x, pool, keep=False)[0])


def _maxima(x: BlockTensor, pool: Pool, keep: bool) -> tuple[torch.Tensor, torch.Tensor | None, Deferred | None]:
    """The maxima, the winners if they are to be kept, and what has computed both in the place of `x`."""
    pending = x.pending
    pooled = None if pending is None else pending.pooled(pool, keep)
    if pooled is not None:
        return *pooled, pending
    blocks = x.blocks
    y = empty((*blocks.shape[:2], *pool.out_size((blocks.shape[2], blocks.shape[3])), blocks.shape[4]), blocks.dtype)
    winners = torch.empty(y.shape, dtype=torch.uint8)
    pool.run(find_winners, blocks, y, winners)
    return y, winners, None


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: BlockTensor, pool: Pool) -> BlockTensor:
        y, winners, source = _maxima(x, pool, keep=True)
        # Autograd releases what is saved, and not what else is held here.
        ctx.source = (lambda: None) if source is None else weakref.ref(source)
        ctx.sizes, ctx.pool = x.sizes, pool
        ctx.save_for_backward(winners)
        return x.like(y)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        (winners,) = ctx.saved_tensors
        return ctx.pool.scattered(enter(gradient, winners.shape[-1]), winners, ctx.sizes, ctx.source()), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: BlockTensor, winners: Any, sizes: Any, pool: Pool) -> BlockTensor:
        ctx.pool = pool
        ctx.save_for_backward(winners)
        return pool.scattered(y, winners, sizes, None)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        (winners,) = ctx.saved_tensors
        return _Gather.apply(enter(gradient, winners.shape[-1]), winners, ctx.pool), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: BlockTensor, winners: Any, pool: Pool) -> BlockTensor:
        ctx.sizes, ctx.pool = x.sizes, pool
        ctx.save_for_backward(winners)
        y = empty(winners.shape, x.memory.dtype)
        pool.run(take_winners, x.blocks, y, winners)
        return x.like(y)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        (winners,) = ctx.saved_tensors
        return ctx.pool.scattered(enter(gradient, winners.shape[-1]), winners, ctx.sizes, None), None, None
