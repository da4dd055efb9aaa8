"""Selections by computed indices as sums over the elements that they may select.

Which element an index names is known only when the function runs, so each output depends on all elements of its line::

    y[j] = Σ_k [i_j = k] · x[k]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def _gather(x: torch.Tensor, dim: int, index: torch.Tensor, **_: Any) -> torch.Tensor:
    lines = x.movedim(dim, -1)
    places = index.movedim(dim, -1)
    lines = lines[tuple(slice(size) for size in places.shape[:-1])]
    return _chosen(lines[..., None, :], places).movedim(-1, dim)


def _index_select(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    return _chosen(x.movedim(dim, -1)[..., None, :], index).movedim(-1, dim)


def _index(x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
    ((dim, index),) = ((dim, index) for dim, index in enumerate(indices) if index is not None)
    chosen = _index_select(x, dim, index.reshape(-1))
    return chosen.reshape(*x.shape[:dim], *index.shape, *x.shape[dim + 1 :])


def _chosen(lines: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The elements of lines, ``(..., 1, elements)``, that an index names along their last axis."""
    size = lines.shape[-1]
    chosen = index[..., None] % size == torch.arange(size, device=lines.device)
    return torch.where(chosen, lines, lines.new_zeros(())).sum(-1)


def selection(overload: Any, args: Sequence[Any]) -> Callable[..., torch.Tensor] | None:
    """A selection by computed indices as a sum; None where a call is none, or has several indices."""
    if overload == aten.index.Tensor:
        indices = [index for index in args[1] if index is not None]
        return _index if len(indices) == 1 and indices[0].dtype != torch.bool else None
    return _SELECTIONS.get(overload)


aten: Any = torch.ops.aten
_SELECTIONS = {aten.gather.default: _gather, aten.index_select.default: _index_select}
