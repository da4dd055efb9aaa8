"""Which layers of a model can be sparse, which pruned weights it has elsewhere, and why a layer stays dense."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .attention import PRUNED_BIAS, UnpackedAttention, hooks_of
from .convolutional import SparseConv1d, SparseConv2d
from .linear import SparseLinear, linear_classes

_CONVOLUTIONS: dict[type[nn.Module], type[SparseConv2d]] = {nn.Conv1d: SparseConv1d, nn.Conv2d: SparseConv2d}


def sparse_class(layer: nn.Module) -> type[SparseConv2d | SparseLinear] | None:
    """The class of sparse layers that computes what a layer does; None where there is none."""
    if type(layer) in linear_classes():
        return SparseLinear
    return _CONVOLUTIONS.get(type(layer))


def is_layer(part: nn.Module) -> bool:
    """Whether it is a convolution or a linear layer, or says to be one."""
    return isinstance(part, (nn.Conv1d, nn.Conv2d, *linear_classes()))


def weight_counts(part: nn.Module, pruned: bool = False) -> list[tuple[int, int]]:
    """Of each weight of a module, without its parts, how many elements are left, and how many there are.

    With `pruned`, of each weight that is pruned: by a mask, or with more than a sixteenth of zeros. One with zeros
    alone has not been trained.
    """
    counts = list[tuple[int, int]]()
    for name, parameter in part.named_parameters(recurse=False):
        mask = part._buffers.get(f"{name.removesuffix('_orig')}_mask", None if parameter.ndim < 2 else parameter)
        if mask is None:
            continue
        left, total = int(mask.count_nonzero()), parameter.numel()
        if not pruned or (left < total if mask is not parameter else 0 < left <= total * 15 / 16):
            counts.append((left, total))
    if counts or pruned or not is_layer(part):
        return counts
    # A parametrisation computes it.
    return [(int(part.weight.count_nonzero()), part.weight.numel())]  # type: ignore[operator, union-attr]


@dataclass(frozen=True)
class LayerInput:
    """What a layer was called with."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def shared_parameters(model: nn.Module) -> set[int]:
    """Parameters that several modules hold."""
    holders = Counter(
        id(parameter) for part in model.modules() for parameter in part.parameters(recurse=False) if parameter.numel()
    )
    return {parameter for parameter, count in holders.items() if count > 1}


def obstacle_of(layer: Any, x: LayerInput | None, shared: set[int]) -> str | None:
    """Why a layer cannot be sparse, if it cannot."""
    if not is_layer(layer):
        return UnpackedAttention.obstacle(layer)
    if sparse_class(layer) is None:
        return f"a {type(layer).__name__} may compute something else than its base class"
    if any(id(parameter) in shared for parameter in layer.parameters(recurse=False)):
        return "another layer has the same weight or bias"
    if hasattr(layer, "bias_mask"):
        return PRUNED_BIAS
    if (reason := hooks_of(layer)) is not None:
        return reason
    if x is None and isinstance(layer, NonDynamicallyQuantizableLinear):
        return "its attention uses its weight itself, and stays dense"
    if x is None:
        return "it did not run on x, or not with one tensor alone"
    weight = getattr(layer, "weight_orig", layer.weight)
    if weight.dtype not in (torch.float32, torch.float64) or x.dtype != weight.dtype:
        return f"its weight is {weight.dtype} and its input {x.dtype}; sparse layers take float32 or float64 for both"
    return None
