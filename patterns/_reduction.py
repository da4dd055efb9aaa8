"""Reductions: each element of the input goes into one output."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ._layout import Labels
from ._pattern import Pattern
from ._rules import Call, Rule, Use, add_rule
from ._strided import picking
from ._structure import Full

__all__: list[str] = []


def _axes(call: Call) -> list[int]:
    """The axes that are reduced, from 0 on."""
    return _reduced(call.arguments, len(call.in_shape)) if call.in_shape else []


def _reduced(arguments: Mapping[str, Any], rank: int) -> list[int]:
    given = arguments.get("dim")
    if given is None or (isinstance(given, (list, tuple)) and not given):
        return list(range(rank))
    return [axis % max(1, rank) for axis in (given if isinstance(given, (list, tuple)) else [given])]


@add_rule(
    *(
        f"aten.{name}"
        for name in (
            "amax",
            "amin",
            "max",
            "min",
            "logsumexp",
            "prod",
            "median",
            "nanmedian",
            "nansum",
            "kthvalue",
            "mode",
        )
    ),
    *(f"aten.{name}" for name in ("std", "var", "std_mean", "var_mean", "norm", "linalg_vector_norm")),
)
class _ReductionRule(Rule):
    """Values by one pass of the operator's own derivative: no two outputs share an element of the input."""

    all_results = True

    def labels(self, use: Use) -> tuple[dict[str, Labels], Labels]:
        ((name, shape),) = use.shapes.items()
        axes, rank = _reduced(use.arguments, len(shape)), len(shape)
        left: list[Any] = [axis for axis in range(rank) if axis not in axes]
        if use.output.ndim == rank:
            left = [("reduced", axis) if axis in axes else axis for axis in range(rank)]
        return {name: tuple(range(rank))}, tuple(left)

    def pattern(self, call: Call) -> Pattern:
        axes, size = _axes(call), call.in_size
        shape = [1 if axis in axes else length for axis, length in enumerate(call.in_shape)]
        outputs = math.prod(shape)
        if outputs == 1:
            return Pattern.of(Full(1, size))
        return picking(np.broadcast_to(np.arange(outputs).reshape(shape), call.in_shape), outputs).T


@add_rule("aten.sum", "aten.mean")
class _SumRule(_ReductionRule):
    """One, or one over the number of elements."""

    def shared(self, call: Call) -> bool:
        return True

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        assert call.input is not None
        count = functools.reduce(lambda product, axis: product * call.in_shape[axis], _axes(call), 1)
        value = 1.0 if call.operator == "aten.sum" else 1.0 / max(1, count)
        return call.input.new_full((pattern.nnz, 1), value)

    transposed_values = values
