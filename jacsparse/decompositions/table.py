"""Operators that have no rule as compositions of others, of which only the derivative counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._decomp

from ..patterns import UnsupportedOperatorError
from .backward_operators import BACKWARD, pairs
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
    # A layer without biases has zeros of the weights' shapes in their place.
    biases = (b_ih, b_hh) if b_ih.ndim == 1 else (None, None)
    gates, states = torch.nn.functional.linear(x, w_ih, biases[0]), []
    for step in reversed(gates.unbind(0)) if reverse else gates.unbind(0):
        i, f, g, o = (step + torch.nn.functional.linear(h, w_hh, biases[1])).chunk(4, 1)
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


def _pdist(x: torch.Tensor, p: float = 2.0) -> torch.Tensor:
    """Distances of the pairs of points, each as that of two sets of one point."""
    first, second = (x[:, None].index_select(0, places) for places in pairs(x))
    return aten._cdist_forward(first, second, p, None).reshape(-1)  # type: ignore[no-any-return]


def _index_reduce(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, reduce: str, *, include_self: bool = True
) -> torch.Tensor:
    shape = [-1 if axis == dim % source.ndim else 1 for axis in range(source.ndim)]
    index = index.reshape(shape).expand(source.shape)
    return torch.scatter_reduce(x, dim, index, source, reduce, include_self=include_self)


_REDUCTIONS = {"max": "amax", "min": "amin"}


def _segment_reduce(
    x: torch.Tensor,
    reduce: str,
    *,
    lengths: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    axis: int = 0,
    initial: float | None = None,
    **_: Any,
) -> torch.Tensor:
    """Reductions of the segments of lines, as those of elements that name their segment."""
    ends = lengths.cumsum(-1) if offsets is None else offsets[..., 1:]  # type: ignore[union-attr]
    count = ends.shape[-1]
    places = torch.arange(x.shape[axis], device=x.device)
    # The segments that end before a place.
    segment = (places >= ends[..., None]).sum(-2)
    segment = segment.reshape(*segment.shape, *[1] * (x.ndim - axis - 1)).expand(x.shape)
    # The initial number takes part in a product, and in no tie: nothing equals NaN.
    start = math.nan if reduce in _REDUCTIONS else 1 if initial is None else initial
    begin = x.new_full((*x.shape[:axis], count, *x.shape[axis + 1 :]), start)
    how = _REDUCTIONS.get(reduce, reduce)
    reduced = torch.scatter_reduce(begin, axis, segment, x, how, include_self=reduce == "prod")
    if initial is None or reduce not in _REDUCTIONS:
        return reduced
    return torch.where(reduced < initial if reduce == "max" else reduced > initial, initial, reduced)


def _trilinear(
    i1: torch.Tensor,
    i2: torch.Tensor,
    i3: torch.Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    summed: Sequence[int],
    *_: Any,
) -> torch.Tensor:
    """The sum of products of three factors along some of their axes, as ``nn.Bilinear`` has it."""
    axes = range(i1.ndim + len(expand1))
    factors = []
    for factor, left_out in ((i1, expand1), (i2, expand2), (i3, expand3)):
        factors += [factor, [axis for axis in axes if axis not in left_out]]
    return torch.einsum(*factors, [axis for axis in axes if axis not in summed])  # type: ignore[no-any-return]


def _masked_select(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    x, mask = torch.broadcast_tensors(x, mask)
    return x[mask]


_OURS: dict[Any, Callable[..., Any]] = {
    **SOLVES,
    **BACKWARD,
    aten.mkldnn_rnn_layer.default: _lstm_layer,
    aten.embedding.default: _embedding,
    aten._pdist_forward.default: _pdist,
    aten.index_reduce.default: _index_reduce,
    aten.segment_reduce.default: _segment_reduce,
    aten.masked_select.default: _masked_select,
    aten._trilinear.default: _trilinear,
    aten.linalg_cross.default: _cross,
    aten._neg_view.default: torch.neg,
}
