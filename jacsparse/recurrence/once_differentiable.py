"""Backward passes that refuse double differentiation, forward mode and batching, each with one clear sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: A tensor without the wrapper in which a transform of ``torch.func`` may have left it.
alive = torch._C._functorch.unwrap_if_dead


def differentiable_once(subject: str, remedy: str) -> type[torch.autograd.Function]:
    """A base class of Functions that raise where PyTorch asks for more than a first derivative.

    Parameters
    ----------
    subject : str
        The subject of the sentences, in the plural.
    remedy : str
        What to do instead.
    """

    class Once(torch.autograd.Function):
        @classmethod
        def apply(cls, *arguments: Any) -> Any:
            if torch._C._are_functorch_transforms_active():
                return super().apply(*arguments)
            return cls.apply_outside(*[alive(each) if isinstance(each, torch.Tensor) else each for each in arguments])

        @classmethod
        def apply_outside(cls, *arguments: Any) -> Any:
            """As `apply`, outside all transforms, to tensors that are `alive`.

            PyTorch's own first binds the arguments to names, in Python, which takes as long as ten steps.
            """
            return super(torch.autograd.Function, cls).apply(*arguments)  # type: ignore[misc]

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            raise NotImplementedError(f"{subject} cannot be differentiated twice; {remedy}")

        #: The sentence about several calls at once.
        no_batching = (
            f"{subject} have no batching rule for torch.vmap, as torch.nn's have none: pass all samples as one batch, "
            f"or call them in a loop; for torch.func.jacrev and for is_grads_batched, which use it, {remedy}"
        )

        @classmethod
        def vmap(cls, *_: Any) -> Any:
            raise NotImplementedError(cls.no_batching)

        @staticmethod
        def jvp(*_: Any) -> Any:
            raise NotImplementedError(f"{subject} have no derivative in forward mode; {remedy}")

    return Once


def once(
    solve: Callable[..., tuple[torch.Tensor | None, ...]], base: Any
) -> Callable[..., tuple[torch.Tensor | None, ...]]:
    """`solve` as a backward pass; a graph that autograd makes of it raises when it is differentiated.

    Tensors are arguments of their own: autograd does not see those within a sequence.

    Parameters
    ----------
    solve : callable
        Computes the gradients.
    base : type
        What `differentiable_once` returned.
    """

    class Pass(base):  # type: ignore[misc, valid-type]
        @staticmethod
        def forward(*inputs: Any) -> tuple[torch.Tensor | None, ...]:
            return solve(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor | None, ...]) -> None:
            pass

    def run(*inputs: Any) -> tuple[torch.Tensor | None, ...]:
        try:
            gradients: tuple[torch.Tensor | None, ...] = (Pass.apply if torch.is_grad_enabled() else solve)(*inputs)
        except RuntimeError as error:
            # is_grads_batched uses another vmap, for which a Function cannot have a rule.
            if "Batching rule not implemented" not in str(error):
                raise
            raise NotImplementedError(base.no_batching) from error
        return gradients

    return run


#: Of recurrent layers.
LayerOnce: Any = differentiable_once(
    "jacsparse.nn's recurrent layers",
    "use torch.nn's layers of the same names: jacsparse.nn.convert(model, to='torch')",
)
