"""What is told of the transforms that watch a call."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from jacsparse.runtime.tracers import is_batched


class Noted(torch.autograd.Function):
    """The identity, which notes whether its gradient stands for several."""

    gradients: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Noted.gradients.append(is_batched(gradient))
        return gradient


def test_several_gradients_at_once_are_told_from_one() -> None:
    x, noted = torch.ones(3, requires_grad=True), list[bool]()
    y = Noted.apply(x)
    torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True, retain_graph=True)
    torch.autograd.grad(y, x, torch.ones(3))
    assert Noted.gradients == [True, False]
    torch.vmap(lambda each: noted.append(is_batched(each)) or each)(torch.eye(3))
    assert noted == [True] and not is_batched(x)
