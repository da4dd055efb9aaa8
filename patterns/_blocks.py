"""Operators that work along lines: softmax and normalisation, each output of which depends on all of its own line.

Their Jacobians are full blocks along the diagonal, and of one form. With ``y`` at place ``i`` and ``x`` at place ``j``
of a line::

    ∂y_i/∂x_j = scale_i · (δ_ij - left_i · right_j - mean)

For softmax ``scale = y``, ``left = 1``, ``right = y``; for its logarithm ``scale = left = 1``, ``right = exp(y)``. For
a normalisation over `n` elements with ``x̂ = (x - μ)/σ``: ``scale = weight/σ``, ``left = x̂/n``, ``right = x̂``,
``mean = 1/n``; where no mean is taken off, as in RMSNorm, ``mean = 0``.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from ._pattern import Pattern
from ._rules import Call, Rule, add_rule
from ._structure import Blocks, Diagonal, Full

__all__ = ["blocks"]


def blocks(outer: int, rows: int, columns: int, inner: int = 1) -> Pattern:
    """``I_outer ⊗ full(rows, columns) ⊗ I_inner``, by the simplest structure that says so."""
    if rows == columns == 1:
        return Pattern.of(Diagonal(outer * inner))
    if outer == inner == 1:
        return Pattern.of(Full(rows, columns))
    return Pattern.of(Blocks(outer, rows, columns, inner))


@dataclass(frozen=True)
class _Lines:
    """A shape as lines: places before them, along them and after them."""

    outer: int
    length: int
    inner: int = 1

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """``(batch, *shape)`` as ``(outer, length, inner, batch)``."""
        return tensor.detach().reshape(len(tensor), self.outer, self.length, self.inner).movedim(0, -1)


def _block_values(
    scale: torch.Tensor, left: torch.Tensor, right: torch.Tensor, mean: float, transposed: bool
) -> torch.Tensor:
    """Values of the form above; each factor ``(outer, length, inner, batch)``, or broadcast to that."""
    if transposed:
        # A row is a place of the input: the roles of the axes that are lines change.
        across, along = right[:, :, :, None], left.movedim(1, 2)[:, None]
        scale = scale.movedim(1, 2)[:, None]
    else:
        across, along = left[:, :, :, None], right.movedim(1, 2)[:, None]
        scale = scale[:, :, :, None]
    length = max(across.shape[1], along.shape[3])
    eye = torch.eye(length, dtype=right.dtype, device=right.device)[None, :, None, :, None]
    values: torch.Tensor = torch.addcmul(eye - mean, across, along, value=-1).mul(scale)
    return values.flatten(0, -2)


class _LineRule(Rule):
    """Values of the form above, from each operator's own factors."""

    @abstractmethod
    def lines(self, call: Call) -> _Lines:
        """Of one operator."""

    @abstractmethod
    def factors(self, call: Call, lines: _Lines) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
        """Scale, left, right and mean."""

    def pattern(self, call: Call) -> Pattern:
        lines = self.lines(call)
        return blocks(lines.outer, lines.length, lines.length, lines.inner)

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        return _block_values(*self.factors(call, self.lines(call)), transposed=False)

    def transposed_values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        return _block_values(*self.factors(call, self.lines(call)), transposed=True)


class _AxisRule(_LineRule):
    """Along one axis."""

    def lines(self, call: Call) -> _Lines:
        axis = call["dim"] % max(1, len(call.in_shape))
        before, after = call.in_shape[:axis], call.in_shape[axis + 1 :]
        return _Lines(math.prod(before), call.in_shape[axis] if call.in_shape else 1, math.prod(after))


@add_rule("aten.softmax", "aten._softmax")
class _SoftmaxRule(_AxisRule):
    """``aten.softmax``."""

    def factors(self, call: Call, lines: _Lines) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
        assert call.output is not None
        y = lines.of(call.output)
        return y, torch.ones_like(y), y, 0.0


@add_rule("aten.log_softmax", "aten._log_softmax")
class _LogSoftmaxRule(_AxisRule):
    """``aten.log_softmax``."""

    def factors(self, call: Call, lines: _Lines) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
        assert call.output is not None
        y = lines.of(call.output)
        return torch.ones_like(y), torch.ones_like(y), y.exp(), 0.0


class _NormRule(_LineRule):
    """Over lines that lie next to each other, their elements scaled by a weight."""

    #: Whether a mean is taken off.
    centred = True

    def weight(self, call: Call, lines: _Lines) -> torch.Tensor | None:
        """As many elements as the lines, or as one line."""
        return None if call["weight"] is None else call["weight"].detach()

    def factors(self, call: Call, lines: _Lines) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
        assert call.input is not None
        x = lines.of(call.input)
        if self.centred:
            x = x - x.mean(dim=1, keepdim=True)
        epsilon = call["eps"] if call["eps"] is not None else torch.finfo(x.dtype).eps
        scale = torch.rsqrt((x * x).mean(dim=1, keepdim=True) + epsilon)
        normal = x * scale
        weight = self.weight(call, lines)
        if weight is not None:
            scale = scale * weight.reshape(-1, lines.length)[:, :, None, None]
        return scale, normal / max(1, lines.length), normal, 1 / max(1, lines.length) if self.centred else 0.0


@add_rule("aten.layer_norm", "aten.native_layer_norm")
class _LayerNormRule(_NormRule):
    """``aten.layer_norm``: over the last axes."""

    def lines(self, call: Call) -> _Lines:
        length = math.prod(call["normalized_shape"])
        return _Lines(call.in_size // max(1, length), length)


@add_rule("aten.rms_norm")
class _RmsNormRule(_LayerNormRule):
    """``aten.rms_norm``: as layer_norm, but no mean is taken off."""

    centred = False


@add_rule("aten.group_norm", "aten.native_group_norm")
class _GroupNormRule(_NormRule):
    """``aten.group_norm``: over the channels of each group, at all positions."""

    def groups(self, call: Call) -> int:
        """Groups of one image."""
        return int(call.arguments["group"] if "group" in call.arguments else call["num_groups"])

    def lines(self, call: Call) -> _Lines:
        groups = call.in_shape[0] * self.groups(call)
        return _Lines(groups, call.in_size // max(1, groups))

    def weight(self, call: Call, lines: _Lines) -> torch.Tensor | None:
        """Each channel's, at each of its positions, for each image of the sample."""
        own = super().weight(call, lines)
        if own is None:
            return None
        images, _, *sizes = call.in_shape
        return own.repeat_interleave(math.prod(sizes)).repeat(images)


@add_rule("aten.instance_norm")
class _InstanceNormRule(_GroupNormRule):
    """``aten.instance_norm``: a group for each channel; by running statistics, as batch_norm."""

    def groups(self, call: Call) -> int:
        return call.in_shape[1]

    def shared(self, call: Call) -> bool:
        return not call["use_input_stats"]

    def pattern(self, call: Call) -> Pattern:
        return super().pattern(call) if call["use_input_stats"] else Pattern.of(Diagonal(call.in_size))

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        return super().values(call, pattern) if call["use_input_stats"] else _running_scale(call)

    def transposed_values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        return super().transposed_values(call, pattern) if call["use_input_stats"] else _running_scale(call)


_COUPLING = ("aten._native_batch_norm_legit", "aten._native_batch_norm_legit_functional")


@add_rule("aten.batch_norm", "aten._native_batch_norm_legit_no_training", *_COUPLING)
class _BatchNormRule(Rule):
    """``aten.batch_norm`` in eval mode: a scale for each channel."""

    def check(self, call: Call) -> None:
        super().check(call)
        if call.arguments.get("training", call.operator in _COUPLING):
            raise call.unsupported(
                "batch normalisation in training mode couples the samples of a batch", "call .eval() on it first"
            )

    def shared(self, call: Call) -> bool:
        return True

    def pattern(self, call: Call) -> Pattern:
        return Pattern.of(Diagonal(call.in_size))

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        return _running_scale(call)


def _running_scale(call: Call) -> torch.Tensor:
    """The scale of each element by running statistics, ``(in_size, 1)``."""
    scale: Any = torch.rsqrt(call["running_var"] + call["eps"])
    if call["weight"] is not None:
        scale = scale * call["weight"].detach()
    images, channels, *sizes = call.in_shape
    return scale.reshape(1, -1, 1).expand(images, channels, math.prod(sizes)).reshape(-1, 1)
