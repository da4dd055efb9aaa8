"""Selections by computed indices as sums over the elements that they may select.

Which element an index names is known only when the function runs, so each output depends on all elements of its line::

    y[j] = Σ_k [i_j = k] · x[k]

The same holds where a computed index tells the places at which elements are put or added::

    y[k] = Σ_j [i_j = k] · s[j]  (+ x[k])

Where two elements are put at one place, the derivative has both, as autograd's has.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional


def _gather(x: torch.Tensor, dim: int, index: torch.Tensor, **_: Any) -> torch.Tensor:
    if not x.ndim:
        return _gather(x[None], 0, index.reshape(1)).reshape(index.shape)
    lines, index = x.movedim(dim, -1), index.movedim(dim, -1)
    lines = lines[tuple(slice(size) for size in index.shape[:-1])]
    return _selected(lines, index).movedim(-1, dim)


def _index_select(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    return _selected(x.movedim(dim, -1), index.reshape(-1)).movedim(-1, dim)


def _index(x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
    axes, index = _joined(x, indices)
    chosen = _selected(_as_lines(x, axes), index.reshape(-1))
    place = _place_of_index(axes)
    return chosen.reshape([*chosen.shape[:-1], *index.shape]).movedim(
        list(range(-index.ndim, 0)), list(range(place, place + index.ndim))
    )


def _scatter(x: torch.Tensor, dim: int, index: torch.Tensor, source: Any, *, adds: bool = False) -> torch.Tensor:
    if not x.ndim:
        source = source.reshape(1) if isinstance(source, torch.Tensor) else source
        return _scatter(x[None], 0, index.reshape(1), source, adds=adds)[0]
    if isinstance(source, torch.Tensor):
        source = source[tuple(slice(size) for size in index.shape)].movedim(dim, -1)
    else:
        source = x.new_full(index.shape, source).movedim(dim, -1)
    lines, index = x.movedim(dim, -1), index.movedim(dim, -1)
    rows = tuple(slice(size) for size in index.shape[:-1])
    placed = _placed(lines[rows], index, source, adds=adds)
    if placed.shape != lines.shape:
        # The index has fewer lines than the tensor.
        inside = torch.zeros(lines.shape, dtype=torch.bool, device=x.device)
        inside[rows] = True
        sizes = zip(reversed(lines.shape), reversed(placed.shape), strict=True)
        placed = functional.pad(placed, [pad for size, count in sizes for pad in (0, size - count)])
        placed = torch.where(inside, placed, lines)
    return placed.movedim(-1, dim)


def _index_add(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: float = 1
) -> torch.Tensor:
    source = (source if alpha == 1 else source * alpha).movedim(dim, -1)
    return _placed(x.movedim(dim, -1), index.reshape(-1), source, adds=True).movedim(-1, dim)


def _index_copy(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return _placed(x.movedim(dim, -1), index.reshape(-1), source.movedim(dim, -1), adds=False).movedim(-1, dim)


def _index_fill(x: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> torch.Tensor:
    lines = x.movedim(dim, -1)
    source = torch.as_tensor(value, dtype=x.dtype, device=x.device).expand(*lines.shape[:-1], index.numel())
    return _placed(lines, index.reshape(-1), source, adds=False).movedim(-1, dim)


def _index_put(
    x: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False, *_: Any
) -> torch.Tensor:
    axes, index = _joined(x, indices)
    others = [axis for axis in range(x.ndim) if axis not in axes]
    place, shape = _place_of_index(axes), [x.shape[axis] for axis in others]
    values = values.expand([*shape[:place], *index.shape, *shape[place:]])
    source = values.movedim(list(range(place, place + index.ndim)), list(range(-index.ndim, 0)))
    placed = _placed(_as_lines(x, axes), index.reshape(-1), source.reshape([*shape, index.numel()]), adds=accumulate)
    return placed.unflatten(-1, [x.shape[axis] for axis in axes]).permute(
        [(others + axes).index(axis) for axis in range(x.ndim)]
    )


def _masked_scatter(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    mask = mask.expand(x.shape)
    number = mask.reshape(-1).cumsum(0) - 1
    return torch.where(mask, _selected(source.reshape(-1), number.clamp(min=0)).reshape(x.shape), x)


def _masked_scatter_backward(gradient: torch.Tensor, mask: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    mask = mask.expand(gradient.shape).reshape(-1)
    # What the mask leaves out goes to a place behind the last one.
    number = torch.where(mask, mask.cumsum(0) - 1, math.prod(sizes))
    zeros = gradient.new_zeros(math.prod(sizes) + 1)
    return _placed(zeros, number, gradient.reshape(-1), adds=True)[:-1].reshape(sizes)


def _joined(x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> tuple[list[int], torch.Tensor]:
    """The axes that are indexed, and one index into these axes as one."""
    axes: list[int] = []
    numbers: list[torch.Tensor] = []
    axis = 0
    for index in indices:
        if index is None:
            axis += 1
            continue
        is_mask = index.dtype in (torch.bool, torch.uint8)
        count = index.ndim if is_mask else 1
        axes += range(axis, axis + count)
        numbers += index.nonzero().unbind(1) if is_mask else [index % x.shape[axis]]
        axis += count
    joined = numbers[0]
    for axis, number in zip(axes[1:], numbers[1:], strict=True):
        joined = joined * x.shape[axis] + number
    return axes, joined


def _place_of_index(axes: Sequence[int]) -> int:
    """The first of an index's axes in a result: where the axes are that it replaces, or before all others."""
    return axes[0] if list(axes) == list(range(axes[0], axes[-1] + 1)) else 0


def _as_lines(x: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    """The tensor with these axes behind the others, as one."""
    return x.movedim(list(axes), list(range(-len(axes), 0))).flatten(-len(axes))


def _selected(lines: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The elements of lines, ``(..., size)``, that an index names along their last axis."""
    chosen = index[..., None] % max(1, lines.shape[-1]) == torch.arange(lines.shape[-1], device=lines.device)
    return torch.where(chosen, lines[..., None, :], lines.new_zeros(())).sum(-1)


def _placed(lines: torch.Tensor, index: torch.Tensor, source: torch.Tensor, *, adds: bool) -> torch.Tensor:
    """Lines, ``(..., size)``, with a source's elements put or added where an index names them."""
    named = index[..., None] % max(1, lines.shape[-1]) == torch.arange(lines.shape[-1], device=lines.device)
    sums = torch.where(named, source[..., None], source.new_zeros(())).sum(-2)
    return sums + (lines if adds else torch.where(named.any(-2), lines.new_zeros(()), lines))


def selection(overload: Any, args: Sequence[Any]) -> Callable[..., torch.Tensor] | None:
    """A selection by computed indices as a sum; None where a call is none."""
    return _SELECTIONS.get(overload)


aten: Any = torch.ops.aten
_SELECTIONS: dict[Any, Callable[..., torch.Tensor]] = {
    aten.gather.default: _gather,
    aten.index.Tensor: _index,
    aten.index_add.default: _index_add,
    aten.index_copy.default: _index_copy,
    aten.index_fill.int_Scalar: _index_fill,
    aten.index_fill.int_Tensor: _index_fill,
    aten.index_put.default: _index_put,
    aten.index_put_.default: _index_put,
    aten.index_select.default: _index_select,
    aten.masked_scatter.default: _masked_scatter,
    aten.masked_scatter_.default: _masked_scatter,
    aten.masked_scatter_backward.default: _masked_scatter_backward,
    aten.scatter.src: _scatter,
    aten.scatter.value: _scatter,
    aten.scatter_add.default: functools.partial(_scatter, adds=True),
}
