"""What can be differentiated once, in reverse mode and without batching, and says so."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["differentiable_once", "once"]


def differentiable_once(subject: str, remedy: str) -> type[torch.autograd.Function]:
    """A base of Functions that raise one clear sentence where PyTorch asks for more than a first derivative.

    Parameters
    ----------
    subject : str
        Of the sentences, in the plural.
    remedy : str
        What to do.
    """

    class Once(torch.autograd.Function):
        def __init_subclass__(cls) -> None:
            super().__init_subclass__()
            # PyTorch asks for it at each call; looking it up takes as long as ten steps.
            cls.forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            raise NotImplementedError(f"{subject} cannot be differentiated twice; {remedy}")

        #: What is said where several calls are asked for at once.
        no_batching = (
            f"{subject} have no batching rule for torch.vmap, as torch.nn's have none; for torch.func.jacrev and for "
            f"is_grads_batched, which use it, {remedy}"
        )

        @classmethod
        def vmap(cls, *_: Any) -> Any:
            raise NotImplementedError(cls.no_batching)

        @staticmethod
        def jvp(*_: Any) -> Any:
            raise NotImplementedError(f"{subject} have no derivative in forward mode; {remedy}")

    return Once


def once(solve: Callable[..., tuple[torch.Tensor, ...]], base: Any) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A backward pass that cannot be differentiated: where autograd makes a graph of it, that raises.

    Parameters
    ----------
    solve : callable
        The pass.
    base : type
        As `differentiable_once` makes it.
    """

    class Pass(base):  # type: ignore[misc, valid-type]
        @staticmethod
        def forward(*inputs: Any) -> tuple[torch.Tensor, ...]:
            return solve(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
            pass

    def run(*inputs: Any) -> tuple[torch.Tensor, ...]:
        try:
            gradients: tuple[torch.Tensor, ...] = (Pass.apply if torch.is_grad_enabled() else solve)(*inputs)
        except RuntimeError as error:
            # PyTorch batches the gradients of is_grads_batched by another vmap, which no Function has a rule for.
            if "Batching rule not implemented" not in str(error):
                raise
            raise NotImplementedError(base.no_batching) from error
        return gradients

    return run
