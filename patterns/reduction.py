"""Reductions: each element of the input goes into one output."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from .layout import Labels
from .pattern import Pattern
from .rules import Call, Rule, Use, add_rule
from .strided import pattern_from_sources
from .structure import Full

_NAMES = (
    "amax amin max min logsumexp prod median nanmedian nansum kthvalue mode std var std_mean var_mean norm "
    "linalg_vector_norm"
)


def _reduced_axes(arguments: Mapping[str, Any], rank: int) -> list[int]:
    """The axes that are reduced, from 0 on."""
    dim = arguments.get("dim")
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(rank))
    return [axis % max(1, rank) for axis in (dim if isinstance(dim, (list, tuple)) else [dim])]


@add_rule(*(f"aten.{name}" for name in _NAMES.split()))
class _ReductionRule(Rule):
    """Values by one pass of the operator's own derivative: no two outputs share an element of the input."""

    all_results = True

    def labels(self, use: Use) -> tuple[dict[str, Labels], Labels]:
        ((name, shape),) = use.shapes.items()
        rank = len(shape)
        axes = _reduced_axes(use.arguments, rank)
        if use.output.ndim == rank:
            out: Labels = tuple(("reduced", axis) if axis in axes else axis for axis in range(rank))
        else:
            out = tuple(axis for axis in range(rank) if axis not in axes)
        return {name: tuple(range(rank))}, out

    def pattern(self, call: Call) -> Pattern:
        axes = _reduced_axes(call.arguments, len(call.in_shape))
        shape = [1 if axis in axes else length for axis, length in enumerate(call.in_shape)]
        outputs = math.prod(shape)
        if outputs == 1:
            return Pattern.of(Full(1, call.in_size))
        return pattern_from_sources(np.broadcast_to(np.arange(outputs).reshape(shape), call.in_shape), outputs).T


@add_rule("aten.sum", "aten.mean")
class _SumRule(_ReductionRule):
    """Each value is one, or one over the number of elements."""

    def shared(self, call: Call) -> bool:
        return True

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        axes = _reduced_axes(call.arguments, len(call.in_shape))
        count = math.prod(length for axis, length in enumerate(call.in_shape) if axis in axes)
        value = 1.0 if call.operator == "aten.sum" else 1.0 / max(1, count)
        return call.input.new_full((pattern.nnz, 1), value)

    transposed_values = values
