"""Operators that have no rule as compositions of others, of which only the derivative counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._decomp

from ..patterns import UnsupportedOperatorError
from .backward_operators import BACKWARD
from .linear_solves import SOLVES

aten = torch.ops.aten


def decomposition(overload: Any) -> Callable[..., Any] | None:
    """An operator by others, ours or PyTorch's own; None where there is no such function."""
    ours = _OURS.get(overload)
    if ours is not None:
        return ours
    if overload.namespace != "prim" and overload._can_decompose():
        # Only within parts of another operator: elsewhere autograd decomposes such an operator before it is seen here.
        # PyTorch 2.6 cannot ask this of ``prim.device``.
        return overload.decompose  # type: ignore[no-any-return]
    return torch._decomp.decomposition_table.get(overload)  # type: ignore[no-any-return]


def _cross(a: torch.Tensor, b: torch.Tensor, *, dim: int = -1) -> torch.Tensor:
    """``aten.linalg_cross`` by other operators; PyTorch's decomposition loads SymPy, which takes half a second."""
    a, b = torch.broadcast_tensors(a, b)
    return a.roll(-1, dim) * b.roll(-2, dim) - a.roll(-2, dim) * b.roll(-1, dim)


def _lstm_layer(
    x: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor,
    b_hh: torch.Tensor,
    h: torch.Tensor,
    c: torch.Tensor,
    reverse: bool,
    *_: Any,
) -> list[torch.Tensor]:
    """A layer of an LSTM on ``(time, batch, features)``, which oneDNN computes as one operator."""
    gates, states = torch.nn.functional.linear(x, w_ih, b_ih), []
    for step in reversed(gates.unbind(0)) if reverse else gates.unbind(0):
        i, f, g, o = (step + torch.nn.functional.linear(h, w_hh, b_hh)).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        states.append(h)
    return [torch.stack(states[::-1] if reverse else states), h, c]


def _embedding(
    weight: torch.Tensor, indices: torch.Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, *_: Any
) -> torch.Tensor:
    """Rows of a table that depends on the input."""
    if padding_idx >= 0 or scale_grad_by_freq:
        raise UnsupportedOperatorError(
            "aten.embedding: with padding_idx or scale_grad_by_freq the gradient of its table, which depends on the "
            "input, is not its derivative; leave them out"
        )
    return weight[indices]


_OURS: dict[Any, Callable[..., Any]] = {
    **SOLVES,
    **BACKWARD,
    aten.mkldnn_rnn_layer.default: _lstm_layer,
    aten.embedding.default: _embedding,
    aten.linalg_cross.default: _cross,
}
