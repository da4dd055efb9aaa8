"""Activations into blocks and out of them again, as steps of autograd."""

from __future__ import annotations

from typing import Any

import torch

from .blocks import BlockTensor, Memory, count_bytes, from_blocks, planes, to_blocks


def in_blocks(x: torch.Tensor, lanes: int) -> BlockTensor:
    """A tensor in blocks, below autograd."""
    return x if type(x) is BlockTensor else _entered(x, lanes, 1)


def records_gradients() -> bool:
    """Whether autograd sees what is computed; in inference mode it does not, whatever else enables gradients."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, lanes: int, columns: int) -> BlockTensor:
        ctx.batch, ctx.lanes, ctx.columns = len(x), lanes, columns
        return _entered(x, lanes, columns)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        return leave(enter(gradient, ctx.lanes), ctx.batch, ctx.columns), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: BlockTensor, batch: int, columns: int) -> torch.Tensor:
        ctx.lanes, ctx.columns = x.memory.lanes, columns
        return _left(x, batch, columns)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        return enter(gradient, ctx.lanes, ctx.columns), None, None


def enter(x: torch.Tensor, lanes: int, columns: int = 1) -> BlockTensor:
    """A tensor in blocks, as a step of autograd.

    With several columns, `x` is of two dimensions, and so many of its blocks stand side by side in one of four.
    """
    if type(x) is BlockTensor and columns == 1:
        return x
    if records_gradients() and x.requires_grad:
        return _Enter.apply(x, lanes, columns)  # type: ignore[no-any-return]
    return _entered(x, lanes, columns)


def leave(x: BlockTensor, batch: int = 0, columns: int = 1) -> torch.Tensor:
    """The tensor that `enter` takes, as a step of autograd; `batch` is for several columns."""
    if records_gradients() and x.requires_grad:
        return _Leave.apply(x, batch, columns)  # type: ignore[no-any-return]
    return _left(x, batch, columns)


def _entered(x: torch.Tensor, lanes: int, columns: int) -> BlockTensor:
    blocks = to_blocks(planes(x), lanes * columns)
    if columns == 1:
        count_bytes(x)
        return BlockTensor(Memory(blocks, len(x)), tuple(x.shape))
    batch, channels = len(blocks) * lanes, blocks.shape[1]
    side_by_side = blocks.view(-1, channels, 1, columns, lanes)
    return BlockTensor(Memory(side_by_side, batch, batch * columns - len(x)), (batch, channels, 1, columns))


def _left(x: BlockTensor, batch: int, columns: int) -> torch.Tensor:
    if columns == 1:
        return x.copied()
    return from_blocks(x.blocks.flatten(3)[:, :, :, None], batch).flatten(1)
