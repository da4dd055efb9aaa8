"""Backward passes of linear operators and of max-pooling, whose Jacobians are the transposed ones of the operators.

With ``y = A x``, the backward pass maps a gradient ``g`` of ``y`` to ``Aᵀ g``. Its Jacobian by ``g`` is ``Aᵀ``, and
that by ``x`` is zero. Max-pooling's ``A`` selects the winner of each window, which the backward pass gets as an index.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from .layout import Labels
from .pattern import Pattern
from .pooling import Pooling, count_of_windowed_axes
from .rules import Call, Rule, Use, add_rule, overloads_of, rule_of
from .value_kernels import selected


def nothing(call: Call) -> Pattern:
    """The pattern without entries, of an operand on which an operator does not depend."""
    return Pattern((call.out_size, call.in_size), np.zeros(call.out_size + 1, dtype=np.int64), [])


def _forward_name(operator: str) -> str:
    return operator.removesuffix("_backward")


@functools.cache
def _forward(operator: str) -> Any:
    """The overload of the forward operator that takes sizes alone."""
    (first, *_) = overloads_of(_forward_name(operator))
    return getattr(first.overloadpacket, "default", first)


def _evaluated(operator: str, arguments: Mapping[str, Any]) -> torch.Tensor:
    """The forward operator for arguments of its backward pass, and its operand."""
    names = [parameter.name for parameter in _forward(operator)._schema.arguments]
    result: torch.Tensor = _forward(operator)(**{name: arguments[name] for name in names if name in arguments})
    return result


class _WindowAdjointRule(Rule):
    """Windows that slide over the last axes, at each place of the others."""

    several = True
    reads: tuple[str, ...] = ()

    def labels(self, use: Use) -> tuple[dict[str, Labels], Labels]:
        rank, count = use.output.ndim, count_of_windowed_axes(use.operator)
        lead = tuple(range(rank - count))
        windows, positions = (tuple((what, axis) for axis in range(count)) for what in ("window", "position"))
        of_windows = dict.fromkeys(("grad_output", "indices"), (*lead, *windows))
        return {**of_windows, "self": (*lead, *positions)}, (*lead, *positions)

    def shared(self, call: Call) -> bool:
        return True

    def _forward(self, call: Call) -> Call:
        """The call of the forward operator."""
        return replace(
            call,
            operator=_forward_name(call.operator),
            in_shape=call.out_shape,
            out_shape=call.in_shape,
            argument="self",
            function=lambda arguments: _evaluated(call.operator, arguments),
        )

    def _rule(self, call: Call) -> Rule:
        rule = rule_of(_forward_name(call.operator))
        assert rule is not None
        return rule

    def pattern(self, call: Call) -> Pattern:
        if call.argument != "grad_output":
            return nothing(call)
        return self._rule(call).pattern(self._forward(call)).scaled().T

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        if not pattern.nnz:
            return call.input.new_empty((0, 1))
        return self._rule(call).transposed_values(self._forward(call), pattern)

    def transposed_values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        if not pattern.nnz:
            return call.input.new_empty((0, 1))
        return self._rule(call).values(self._forward(call), pattern)


add_rule(
    *(f"aten.avg_pool{axes}d_backward" for axes in (2, 3)),
    *(f"aten._adaptive_avg_pool{axes}d_backward" for axes in (2, 3)),
)(_WindowAdjointRule)


@add_rule(
    *(f"aten.upsample_nearest{axes}d_backward" for axes in (1, 2, 3)),
    *(f"aten._upsample_nearest_exact{axes}d_backward" for axes in (1, 2, 3)),
    *(f"aten.upsample_{how}_backward" for how in ("linear1d", "bilinear2d", "trilinear3d", "bicubic2d")),
    *(f"aten._upsample_{how}2d_aa_backward" for how in ("bilinear", "bicubic")),
)
class _UpsampleAdjointRule(_WindowAdjointRule):
    """Interpolation, whose weights depend on numbers."""

    reads_numbers = True


@add_rule(
    *(f"aten.max_pool{axes}d_with_indices_backward" for axes in (2, 3)),
    *(f"aten.adaptive_max_pool{axes}d_backward" for axes in (2, 3)),
)
class _MaxPoolAdjointRule(_WindowAdjointRule):
    """Max-pooling: each window's gradient goes to its winner, any position of the window."""

    def shared(self, call: Call) -> bool:
        return "indices" not in call.dependent | call.batched

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        structure = pattern.structure
        if not isinstance(structure, Pooling):
            return call.input.new_empty((0, 1))
        indices = call["indices"] if "indices" in call.batched else call["indices"][None]
        return selected(indices.contiguous(), structure.entry_windows, structure.entry_positions, call.input.dtype)

    transposed_values = values
