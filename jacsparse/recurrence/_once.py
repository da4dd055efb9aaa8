"""Gradients that cannot be differentiated again, and say so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["once"]


def once(
    gradients: Sequence[torch.Tensor | None], sources: Sequence[torch.Tensor | None], message: str
) -> list[torch.Tensor | None]:
    """The same gradients; where a graph of them is wanted, one that leads to all `sources` and raises on the way."""
    leads = [source for source in sources if source is not None and source.requires_grad]
    if not torch.is_grad_enabled() or not leads:
        return list(gradients)
    return [None if gradient is None else _Once.apply(message, gradient, *leads) for gradient in gradients]


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, message: str, gradient: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        ctx.message = message
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[None, ...]:
        raise NotImplementedError(ctx.message)
