"""Nodes of autograd's graph, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["applied", "freely", "has_hooks"]


def _nothing(*_: Any) -> None:
    pass


def has_hooks(node: Any) -> bool:
    """Whether there are hooks on a node itself: PyTorch tells by the handle of one more."""
    for register in (node.register_prehook, node.register_hook):
        handle = register(_nothing)
        handle.remove()
        if handle.hooks_dict_ref():
            return True
    return False


class _Freely(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, function: Callable[[], None]) -> torch.Tensor:
        ctx.function = function
        return leaf.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        ctx.function()
        return None, None


def freely(function: Callable[[], None]) -> None:
    """Call a function that calls nodes.

    Within a backward pass, as `Scan`'s own is, a node gives only those gradients that the pass asks for. The function
    is called within one more, which asks for all.
    """
    if torch._C._current_graph_task_id() == -1:
        function()
        return
    with torch.enable_grad():
        _Freely.apply(torch.zeros((), requires_grad=True), function).backward()


def applied(node: Any, gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """The gradients that a node passes on, one for each of its ``next_functions``; no hook is called."""
    with torch.no_grad():
        found = node(*gradients)
    return found if isinstance(found, tuple) else (found,)
