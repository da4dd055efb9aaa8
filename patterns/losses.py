"""Losses: of each element or of each line of classes, and their sums and means.

Values are those of PyTorch's own backward pass, which decides at kinks and margins, and where a square overflows.
"""

from __future__ import annotations

import numpy as np
import torch

from .elementwise import PointwiseRule
from .layout import Labels
from .pattern import Pattern
from .rules import Call, Rule, Use, add_rule
from .strided import pattern_from_sources
from .structure import Full

#: The argument ``reduction`` of a loss that is neither summed nor averaged.
_UNREDUCED = 0


@add_rule(
    *("aten.mse_loss", "aten.smooth_l1_loss", "aten.huber_loss", "aten.soft_margin_loss"),
    *("aten.binary_cross_entropy", "aten.binary_cross_entropy_with_logits"),
)
class _ElementLossRule(PointwiseRule):
    """The loss of each element; the input and the target may both depend on the sample."""

    def labels(self, use: Use) -> tuple[dict[str, Labels], Labels]:
        if use.arguments["reduction"] == _UNREDUCED:
            return super().labels(use)
        rank = max(map(len, use.shapes.values()))
        return {name: tuple(range(rank - len(shape), rank)) for name, shape in use.shapes.items()}, ()

    def elementwise(self, call: Call) -> bool:
        return bool(call["reduction"] == _UNREDUCED)

    def pattern(self, call: Call) -> Pattern:
        return super().pattern(call) if self.elementwise(call) else Pattern.of(Full(1, call.in_size))

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        return super().values(call, pattern) if self.elementwise(call) else Rule.values(self, call, pattern)


@add_rule("aten.multi_margin_loss", "aten.multilabel_margin_loss_forward")
class _MarginLossRule(Rule):
    """The loss of each line of classes, along the last axis."""

    several = True
    reads = ()

    def labels(self, use: Use) -> tuple[dict[str, Labels], Labels]:
        # A target has the classes that are right, or the number of the one that is; weights are those of the classes.
        line: Labels = (*range(use.rank("self") - 1), "class")
        lines = line[:-1]
        of_target = line if use.rank("target") == len(line) and "p" not in use.arguments else lines
        labels: dict[str, Labels] = {"self": line, "target": of_target, "weight": ("class",)}
        return labels, lines if use.arguments["reduction"] == _UNREDUCED else ()

    def pattern(self, call: Call) -> Pattern:
        if call.out_size == 1:
            return Pattern.of(Full(1, call.in_size))
        lines = np.broadcast_to(np.arange(call.out_size)[:, None], (call.out_size, call.in_size // call.out_size))
        return pattern_from_sources(lines, call.out_size).T
