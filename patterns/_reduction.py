"""Reductions: each element of the input goes into one output."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np
import torch

from ._pattern import Pattern
from ._rules import _RULES, POINTWISE, Call, Rule, add_rule
from ._structure import Csr, Full

__all__: list[str] = []


def _axes(call: Call) -> list[int]:
    """The axes that are reduced, from 0 on."""
    given = call.arguments.get("dim")
    rank = len(call.in_shape)
    if given is None or (isinstance(given, (list, tuple)) and not given):
        return list(range(rank))
    return [axis % max(1, rank) for axis in (given if isinstance(given, (list, tuple)) else [given])]


@add_rule(
    *(f"aten.{name}" for name in ("amax", "amin", "logsumexp", "prod", "median", "nanmean", "nansum")),
    *(f"aten.{name}" for name in ("std", "var", "std_mean", "var_mean", "norm", "linalg_vector_norm")),
)
class _ReductionRule(Rule):
    """Values by one pass of the operator's own derivative: no two outputs share an element of the input."""

    def pattern(self, call: Call) -> Pattern:
        axes, size = _axes(call), call.in_size
        shape = [1 if axis in axes else length for axis, length in enumerate(call.in_shape)]
        outputs = math.prod(shape)
        if outputs == 1:
            return Pattern.of(Full(1, size))
        targets = np.broadcast_to(np.arange(outputs).reshape(shape), call.in_shape).reshape(-1)
        return Pattern.of(Csr.picking(targets, outputs)).T


@add_rule("aten.max", "aten.min")
class _ExtremeRule(_ReductionRule):
    """``aten.max`` and ``aten.min``: of two operands they are pointwise."""

    def chosen(self, call: Call) -> Rule:
        return _RULES[POINTWISE] if "other" in {*call.arguments, call.argument} else self


@add_rule("aten.cosine_similarity", "aten.pairwise_distance")
class _ComparisonRule(_ReductionRule):
    """Each line of one operand with that of the other; distances are along the last axis."""

    several = True

    def check(self, call: Call) -> None:
        super().check(call)
        if self.pattern(call).shape[0] != call.out_size:
            raise call.unsupported(f"{call.argument} of {call.operator} is broadcast", "expand it before")

    def pattern(self, call: Call) -> Pattern:
        return super().pattern(replace(call, arguments={"dim": -1, **call.arguments}))


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
