"""Gradients by PyTorch's engine."""

from __future__ import annotations

import torch


def requiring_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor where it requires a gradient, else another one on its memory that does."""
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_()


def gradient_of(y: torch.Tensor, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """``Jᵀ g`` for the Jacobian of `y` by `x`, as ``torch.autograd.grad`` computes it; zeros without a path.

    That function's first call with a gradient imports SymPy, which would take a third of a first Jacobian's time.
    """
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    if engine is None or not y.requires_grad:
        return torch.autograd.grad(y, x, g, materialize_grads=True)[0]
    # The graph is not kept, and none is made of the gradient.
    (gradient,) = engine.run_backward((y,), (g,), False, False, (x,), allow_unreachable=True, accumulate_grad=False)
    return torch.zeros_like(x) if gradient is None else gradient
