"""Backward passes of first order: a second one is taken another way or refused, as are forward mode and batching."""

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

        #: The sentence about second derivatives.
        no_second = f"{subject} cannot be differentiated twice; {remedy}"

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            raise NotImplementedError(Once.no_second)

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


_Gradients = Callable[..., tuple[torch.Tensor | None, ...]]


def once(solve: _Gradients, base: Any, again: _Gradients | None = None) -> _Gradients:
    """`solve` as a backward pass; a graph that autograd makes of it is differentiated by way of `again`, or raises.

    Tensors are arguments of their own: autograd does not see those within a sequence.

    Parameters
    ----------
    solve : callable
        Computes the gradients.
    base : type
        What `differentiable_once` returned.
    again : callable, optional
        Computes the same gradients by operators that autograd differentiates.
    """

    class Pass(base):  # type: ignore[misc, valid-type]
        @staticmethod
        def forward(*inputs: Any) -> tuple[torch.Tensor | None, ...]:
            return solve(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor | None, ...]) -> None:
            if again is not None:
                ctx.others = [None if isinstance(each, torch.Tensor) else each for each in inputs]
                ctx.save_for_backward(*[each if isinstance(each, torch.Tensor) else None for each in inputs])
                ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
            if again is None:
                return base.backward(ctx)
            with torch.enable_grad():
                # By other names, so that a path from one input to another is not gone twice.
                named = [each if each is None else each.view_as(each) for each in ctx.saved_tensors]
                inputs = zip(named, ctx.others, strict=True)
                results = again(*[other if each is None else each for each, other in inputs])
            pairs = zip(results, gradients, strict=True)
            reached = [(y, of_y) for y, of_y in pairs if y is not None and y.requires_grad and of_y is not None]
            leaves = [each for each in named if each is not None and each.requires_grad]
            if not reached:
                return (None,) * len(named)
            outputs, factors = zip(*reached, strict=True)
            options = {"create_graph": torch.is_grad_enabled(), "allow_unused": True}
            found = iter(torch.autograd.grad(outputs, leaves, factors, **options))
            return tuple([next(found) if each is not None and each.requires_grad else None for each in named])

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
