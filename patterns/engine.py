"""Gradients by PyTorch's engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import GradientEdge


def requiring_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor where it requires a gradient, else another one on its memory that does."""
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_()


def gradient_of(y: torch.Tensor, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """``Jᵀ g`` for the Jacobian of `y` by `x`; zeros without a path."""
    (gradient,) = gradients_of(y, [x], g)
    return torch.zeros_like(x) if gradient is None else gradient


def gradients_of(
    output: torch.Tensor | GradientEdge,
    inputs: Sequence[torch.Tensor | GradientEdge],
    gradient: torch.Tensor,
    *,
    retain_graph: bool = False,
) -> Sequence[torch.Tensor | None]:
    """The gradients of inputs for that of an output, as ``torch.autograd.grad`` computes them; None without a path.

    That function's first call with a gradient imports SymPy, which would take a third of a first Jacobian's time.
    """
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    if engine is None:
        return torch.autograd.grad([output], inputs, [gradient], retain_graph=retain_graph, allow_unused=True)
    # No graph is made of the gradient.
    results: Sequence[torch.Tensor | None] = engine.run_backward(
        (output,), (gradient,), retain_graph, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    return results
