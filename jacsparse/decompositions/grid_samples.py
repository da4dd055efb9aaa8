"""The backward pass of grid sampling as products with its weights, which have further derivatives.

With ``w_a[o, i]`` the weight of position ``i`` along axis ``a`` in what is sampled at ``o``, and ``W[o, p]`` their
product over all axes::

    y[c, o] = Σ_p W[o, p] · x[c, p]      ∂x[c, p] = Σ_o W[o, p] · ∂y[c, o]      ∂W[o, p] = Σ_c ∂y[c, o] · x[c, p]

Along each axis a weight is a function of one coordinate. Which positions have weights is read off the coordinates as
constants, as it is in all that selects.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

_NEAREST, _CUBIC = 1, 2
_BORDER, _REFLECTION = 1, 2
#: The free number of PyTorch's cubic interpolation.
_FREE = -0.75


def grid_sample_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    grid: torch.Tensor,
    interpolation: int,
    padding: int,
    align_corners: bool,
    mask: Sequence[bool] = (True, True),
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of the input and of the grid; see ``torch.nn.functional.grid_sample``."""
    sizes = x.shape[2:]
    # The last axis of the input has the first coordinate.
    coordinates = grid.flatten(1, -2).flip(-1).unbind(-1)
    axes = [
        _weights(coordinate, size, interpolation, padding, align_corners)
        for coordinate, size in zip(coordinates, sizes, strict=True)
    ]
    gradient, flat = gradient.flatten(2), x.flatten(2)
    of_x = of_grid = None
    if mask[0]:
        of_x = torch.bmm(gradient, _joined([weights for weights, _ in axes])).unflatten(2, sizes)
    if mask[1]:
        of_weights = torch.bmm(gradient.transpose(1, 2), flat)
        parts = []
        for place, (_, derivative) in enumerate(axes):
            factors = [derivative if other == place else weights for other, (weights, _) in enumerate(axes)]
            parts.append((of_weights * _joined(factors)).sum(-1))
        of_grid = torch.stack(parts[::-1], -1).reshape(grid.shape)
    return of_x, of_grid


def _joined(factors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The products of weights along all axes, ``(batch, samples, positions)``."""
    return functools.reduce(lambda left, right: (left[..., :, None] * right[..., None, :]).flatten(2), factors)


def _weights(
    coordinate: torch.Tensor, size: int, interpolation: int, padding: int, align_corners: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of the positions along an axis, and their derivatives by the coordinate: ``(batch, samples, size)``."""
    scale = (size - 1) / 2 if align_corners else size / 2
    place = (coordinate + 1) * scale - (0 if align_corners else 0.5)
    if interpolation != _CUBIC:
        place, slope = _inside(place, size, padding, align_corners)
        slope = slope * scale
    else:
        slope = torch.full_like(place, scale)
    positions = torch.arange(size, device=place.device)
    zero = place.new_zeros(())
    if interpolation == _NEAREST:
        weights = (place.detach().round()[..., None] == positions).to(place)
        return weights, torch.zeros_like(weights)
    first = place.detach().floor()
    taps = (_cubic if interpolation == _CUBIC else _linear)(place - first)
    sums = [zero, zero]
    for step, (weight, derivative) in taps.items():
        tap = first + step
        if interpolation == _CUBIC:
            tap = _inside(tap, size, padding, align_corners)[0]
        named = tap[..., None] == positions
        values = (weight, derivative * slope)
        sums = [s + torch.where(named, value[..., None], zero) for s, value in zip(sums, values, strict=True)]
    return sums[0], sums[1]


def _inside(place: torch.Tensor, size: int, padding: int, align_corners: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Places moved to where the padding has its elements, and the constant derivative of each by itself before."""
    slope = torch.ones_like(place.detach())
    if padding == _REFLECTION:
        low, span = (0.0, size - 1.0) if align_corners else (-0.5, float(size))
        if span == 0:
            return torch.zeros_like(place), torch.zeros_like(slope)
        distance = (place - low).detach()
        count = (distance.abs() / span).floor()
        # Between two borders places run forward or backward.
        slope = torch.where(distance < 0, -1.0, 1.0) * torch.where(count % 2 == 0, 1.0, -1.0).to(place)
        rest = distance.abs() - count * span
        reflected = torch.where(count % 2 == 0, rest, span - rest) + low
        place = reflected + (place - place.detach()) * slope
    if padding in (_BORDER, _REFLECTION):
        within = (place.detach() > 0) & (place.detach() < size - 1)
        place = torch.where(within, place, place.detach().clamp(0, size - 1))
        slope = torch.where(within, slope, 0.0)
    return place, slope


def _linear(offset: torch.Tensor) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """For each neighbour its weight and the derivative of that."""
    one = torch.ones_like(offset.detach())
    return {0: (1 - offset, -one), 1: (offset, one)}


def _cubic(offset: torch.Tensor) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    return {
        -1: _far(offset + 1, 1),
        0: _near(offset, 1),
        1: _near(1 - offset, -1),
        2: _far(2 - offset, -1),
    }


def _near(distance: torch.Tensor, sign: int) -> tuple[torch.Tensor, torch.Tensor]:
    value = ((_FREE + 2) * distance - (_FREE + 3)) * distance * distance + 1
    return value, sign * (3 * (_FREE + 2) * distance - 2 * (_FREE + 3)) * distance


def _far(distance: torch.Tensor, sign: int) -> tuple[torch.Tensor, torch.Tensor]:
    value = ((_FREE * distance - 5 * _FREE) * distance + 8 * _FREE) * distance - 4 * _FREE
    return value, sign * ((3 * _FREE * distance - 10 * _FREE) * distance + 8 * _FREE)
