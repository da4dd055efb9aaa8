"""Which difference from autograd is an error."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

#: The tolerance in units in the last place, for numbers coarser than the input's.
ROUNDINGS = 16

#: The largest difference from autograd that is no error, as a share of the largest element, by the input's dtype.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


def tolerance_for(dtype: torch.dtype, tensors: Iterable[torch.Tensor | None]) -> float:
    """The default tolerance for an input of a dtype, or for coarser numbers among the tensors of a run."""
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None and tensor.is_floating_point()}
    return max([_TOLERANCE[dtype], *(ROUNDINGS * torch.finfo(each).eps for each in dtypes)])


def largest_finite(tensor: torch.Tensor) -> float:
    """The largest finite absolute value; 0 where there is none."""
    return tensor.nan_to_num(0, 0, 0).abs().max().item() if tensor.numel() else 0.0


def magnitude(difference: torch.Tensor) -> float:
    """The largest absolute value, infinite where an element is NaN."""
    return difference.abs().nan_to_num(math.inf, math.inf).max().item() if difference.numel() else 0.0


def difference_of(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The difference; zero where autograd's element is NaN, or both are the same infinity."""
    return torch.where(expected.isnan() | (actual == expected), 0.0, actual - expected)


def rounding_of(x: torch.Tensor, y: torch.Tensor | None, units: int = 100) -> float:
    """The rounding error of a derivative that is zero: so many units in the last place of output over input."""
    scale = 0.0 if y is None else largest_finite(y.detach()) / (largest_finite(x.detach()) or 1.0)
    return units * torch.finfo(x.dtype).eps * scale


def share_of(difference: float, largest: float, rounding: float, limit: float) -> float:
    """A difference as a share of the largest element, or of the rounding error where that is larger."""
    return difference / max(largest, rounding / limit if limit else 0.0, 1e-300)


def places_over(difference: torch.Tensor, limit: float) -> torch.Tensor:
    """The samples and columns at which a difference is beyond a limit, or NaN."""
    return (~(difference.abs() <= limit)).nonzero()
