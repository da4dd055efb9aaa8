"""What has no derivative, and says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["once"]


def once(solve: Callable[..., tuple[torch.Tensor, ...]], refusal: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A backward pass that cannot be differentiated: where autograd makes a graph of it, that raises the refusal.

    Parameters
    ----------
    solve : callable
        The pass.
    refusal : str
        Of the NotImplementedError.
    """

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(*given: Any) -> tuple[torch.Tensor, ...]:
            return solve(*given)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            raise NotImplementedError(refusal)

    def run(*given: Any) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = (Once.apply if torch.is_grad_enabled() else solve)(*given)
        return found

    return run
