"""Gradients by PyTorch's engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge


def holds_numbers(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements are real or complex numbers, and no indices or truth values."""
    return tensor.is_floating_point() or tensor.is_complex()


def requiring_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor where it requires a gradient, else another one on its memory that does."""
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_()


def gradient_of(y: torch.Tensor, x: torch.Tensor, g: torch.Tensor, *, retain_graph: bool = False) -> torch.Tensor:
    """``Jᵀ g`` for the Jacobian of `y` by `x`, for as many elements as `y` has; zeros without a path."""
    gradient = None
    if y.requires_grad:
        (gradient,) = gradients_of(y, [x], g.reshape(y.shape).to(y.dtype), retain_graph=retain_graph)
    return torch.zeros_like(x) if gradient is None else gradient


def gradients_of(
    outputs: torch.Tensor | GradientEdge | list[torch.Tensor],
    inputs: Sequence[torch.Tensor | GradientEdge],
    gradients: torch.Tensor | list[torch.Tensor],
    *,
    retain_graph: bool = False,
) -> Sequence[torch.Tensor | None]:
    """The gradients of inputs for those of outputs, as ``torch.autograd.grad`` computes them; None without a path.

    That function's first call with a gradient imports SymPy, which would take a third of a first Jacobian's time.
    """
    ends, of_ends = (outputs, gradients) if isinstance(outputs, list) else ([outputs], [gradients])
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    if engine is None:
        grad: Any = torch.autograd.grad
        return grad(ends, inputs, of_ends, retain_graph=retain_graph, allow_unused=True)  # type: ignore[no-any-return]
    # No graph is made of the gradient.
    results: Sequence[torch.Tensor | None] = engine.run_backward(
        tuple(ends), tuple(of_ends), retain_graph, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    return results
