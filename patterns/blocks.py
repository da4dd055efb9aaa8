"""Operators that work along lines: softmax and normalisation, where each output depends on all of its line.

Their Jacobians are full blocks along the diagonal, and have one form. With ``y`` at place ``i`` and ``x`` at place
``j`` of a line::

    ∂y_i/∂x_j = scale_i · (δ_ij - left_i · right_j - mean)

For softmax ``scale = y``, ``left = 1``, ``right = y``; for its logarithm ``scale = left = 1``, ``right = exp(y)``. For
a normalisation over `n` elements with ``x̂ = (x - μ)/σ``: ``scale = weight/σ``, ``left = x̂/n``, ``right = x̂``,
``mean = 1/n``; where no mean is subtracted, as in RMSNorm, ``mean = 0``.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..runtime import frozen, index_dtype, row_starts, uploaded
from .axis import axis_labels, split_at_axis
from .layout import Labels, MixedSamplesError
from .pattern import Pattern
from .rules import Call, Placement, Rule, Use, add_rule
from .structure import Blocks, Csr, Diagonal, Full
from .value_kernels import gathered


def with_entries(places: np.ndarray, present: np.ndarray, call: Call) -> Pattern:
    """The pattern whose rows have, of the columns along the last axis of `places`, those that are `present`."""
    indices, counts = places[present], present.sum(axis=-1).reshape(-1)
    dtype = index_dtype(len(indices), call.out_size, call.in_size)
    starts = row_starts(counts, dtype)
    return Pattern.of(Csr(call.out_size, call.in_size, frozen(starts), frozen(indices.astype(dtype))))


def scores_left(mask: torch.Tensor) -> torch.Tensor:
    """A mask of scores as a weight: zero, or False, where it leaves a score out by minus infinity, or by False."""
    return mask if mask.dtype == torch.bool else (mask != -math.inf).to(mask.dtype)


def block_pattern(outer: int, rows: int, columns: int, inner: int = 1) -> Pattern:
    """``I_outer ⊗ full(rows, columns) ⊗ I_inner``, by the simplest structure."""
    if rows == columns == 1:
        return Pattern.of(Diagonal(outer * inner))
    if outer == inner == 1:
        return Pattern.of(Full(rows, columns))
    return Pattern.of(Blocks(outer, rows, columns, inner))


def equal_rows(indices: np.ndarray, columns: int) -> Pattern:
    """The pattern whose rows have equally many entries: their columns, ascending, are the last axis of `indices`."""
    rows = math.prod(indices.shape[:-1])
    return Pattern((rows, columns), np.arange(rows + 1) * indices.shape[-1], indices.reshape(-1))


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
    """Values of the form above; each factor is ``(outer, length, inner, batch)``, or broadcast to that."""
    if transposed:
        # A row is a place of the input: the two axes along the lines change their roles.
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
    """Values of the form above, from each operator's factors."""

    @abstractmethod
    def lines(self, call: Call) -> _Lines:
        """The lines of the input."""

    @abstractmethod
    def factors(self, call: Call, lines: _Lines) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
        """Scale, left, right and mean."""

    def pattern(self, call: Call) -> Pattern:
        lines = self.lines(call)
        return block_pattern(lines.outer, lines.length, lines.length, lines.inner)

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        return _block_values(*self.factors(call, self.lines(call)), transposed=False)

    def transposed_values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        return _block_values(*self.factors(call, self.lines(call)), transposed=True)


class _AxisLineRule(_LineRule):
    """Lines along one axis."""

    def labels(self, use: Use) -> tuple[dict[str, Labels], Labels]:
        return axis_labels(use, use.arguments["dim"])

    def lines(self, call: Call) -> _Lines:
        before, _, length, after = split_at_axis(call)
        return _Lines(before, length, after)


@add_rule("aten._safe_softmax", "aten._softmax")
class _SoftmaxRule(_AxisLineRule):
    """``aten._softmax``, and ``aten._safe_softmax``, which is zero on lines of minus infinity.

    Scores that constants make minus infinity have no entries, unless all of their line are.
    """

    lists_entries = True
    prunes_variables = False

    def pruned_arguments(self, call: Call) -> list[str]:
        return [call.argument]

    def as_weight(self, call: Call, name: str, value: torch.Tensor) -> torch.Tensor:
        return scores_left(value)

    def entries(self, call: Call) -> int:
        return call.in_size * self.lines(call).length

    def _present(self, call: Call) -> torch.Tensor | None:
        """Which entries of the lines' blocks masks leave, ``(outer, length, inner, length)``; None without any."""
        for mask in call.masks.values():
            lines = self.lines(call)
            allowed = mask.expand(call.in_shape).reshape(lines.outer, lines.length, lines.inner)
            allowed = allowed | ~allowed.any(1, keepdim=True)
            return allowed[..., None] & allowed.movedim(1, 2)[:, None]
        return None

    def pattern(self, call: Call) -> Pattern:
        present, pattern = self._present(call), super().pattern(call)
        if present is None:
            return pattern
        left = present.cpu().flatten(0, 2).numpy()
        return with_entries(pattern.indices.reshape(left.shape), left, call)

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        return self._of_entries(call, pattern) if call.masks else super().values(call, pattern)

    def transposed_values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        return self._of_entries(call, pattern) if call.masks else super().transposed_values(call, pattern)

    def _of_entries(self, call: Call, pattern: Pattern) -> torch.Tensor:
        """The values of single entries of the Jacobian, which is symmetric."""
        y = call.output.detach().reshape(len(call.output), -1).T.contiguous()
        of_rows = gathered(y, pattern.rows)
        of_diagonal = uploaded(pattern._on_diagonal, y.device, None)[:, None]
        return torch.where(of_diagonal, of_rows, 0.0) - of_rows * gathered(y, pattern.indices)

    def factors(self, call: Call, lines: _Lines) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
        y = lines.of(call.output)
        return y, torch.ones_like(y), y, 0.0


@add_rule("aten._log_softmax")
class _LogSoftmaxRule(_AxisLineRule):
    def factors(self, call: Call, lines: _Lines) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
        y = lines.of(call.output)
        return torch.ones_like(y), torch.ones_like(y), y.exp(), 0.0


def _epsilon(call: Call) -> float | None:
    return call.arguments.get("eps", call.arguments.get("epsilon"))


class _NormRule(_LineRule):
    """Normalised lines whose elements are contiguous, scaled by a weight.

    Where the variance of a line overflows, its elements are scaled by zero, and the derivative is zero; that of
    PyTorch's backward pass is no number.
    """

    #: Whether the mean is subtracted.
    centred = True

    def weight(self, call: Call, lines: _Lines) -> torch.Tensor | None:
        """``(outer, length, 1, batch)``, or of size 1 along axes where it is the same."""
        return None if call["weight"] is None else call["weight"].detach().reshape(1, -1, 1, 1)

    def factors(self, call: Call, lines: _Lines) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
        x = lines.of(call.input)
        if self.centred:
            x = x - x.mean(dim=1, keepdim=True)
        epsilon = _epsilon(call)
        if epsilon is None:
            epsilon = torch.finfo(x.dtype).eps
        scale = torch.rsqrt((x * x).mean(dim=1, keepdim=True) + epsilon)
        normal = x * scale
        weight = self.weight(call, lines)
        if weight is not None:
            scale = scale * weight
        return scale, normal / max(1, lines.length), normal, 1 / max(1, lines.length) if self.centred else 0.0


@add_rule("aten.native_layer_norm")
class _LayerNormRule(_NormRule):
    """``aten.native_layer_norm``: over the last axes."""

    def labels(self, use: Use) -> tuple[dict[str, Labels], Labels]:
        rank = use.output.ndim
        return axis_labels(use, *range(rank - len(use.arguments["normalized_shape"]), rank))

    def lines(self, call: Call) -> _Lines:
        length = math.prod(call["normalized_shape"])
        return _Lines(call.in_size // max(1, length), length)


@add_rule("aten._fused_rms_norm")
class _RmsNormRule(_LayerNormRule):
    centred = False


@add_rule("aten.native_group_norm")
class _GroupNormRule(_NormRule):
    """``aten.native_group_norm``: over the channels of each group, at all positions.

    Its further results are the mean and the reciprocal deviation of each group.
    """

    all_results = True

    def labels(self, use: Use) -> tuple[dict[str, Labels], Labels]:
        input_axes, out_axes = (
            (0, *(("mixed", axis) for axis in range(1, rank))) for rank in (use.rank("input"), use.output.ndim)
        )
        return {"input": input_axes}, out_axes

    def lines(self, call: Call) -> _Lines:
        groups = call.in_shape[0] * int(call["group"])
        return _Lines(groups, call.in_size // max(1, groups))

    def weight(self, call: Call, lines: _Lines) -> torch.Tensor | None:
        if call["weight"] is None:
            return None
        images, _, *sizes = call.in_shape
        weight = call["weight"].detach().repeat_interleave(math.prod(sizes)).repeat(images)
        return weight.reshape(lines.outer, lines.length, 1, 1)

    def pattern(self, call: Call) -> Pattern:
        lines = self.lines(call)
        return block_pattern(lines.outer, 1, lines.length) if _is_statistic(call) else super().pattern(call)

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        return self._derivative_of_statistic(call) if _is_statistic(call) else super().values(call, pattern)

    def transposed_values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        # The one entry of each input is in the order of the inputs.
        return self._derivative_of_statistic(call) if _is_statistic(call) else super().transposed_values(call, pattern)

    def pull_back(self, call: Call, pattern: Pattern, gradients: torch.Tensor) -> torch.Tensor:
        if not _is_statistic(call):
            return super().pull_back(call, pattern, gradients)
        # PyTorch's backward pass alone takes statistics for constants, and not so where it is differentiated.
        lines, (many, batch) = self.lines(call), gradients.shape[:2]
        derivative = self._derivative_of_statistic(call).T.reshape(batch, lines.outer, lines.length)
        return (gradients.reshape(many, batch, lines.outer, 1) * derivative).reshape(many, batch, *call.in_shape)

    def _derivative_of_statistic(self, call: Call) -> torch.Tensor:
        """The derivative of the mean or of the reciprocal deviation, ``(in_size, batch)``."""
        lines = self.lines(call)
        x, count = lines.of(call.input), max(1, lines.length)
        shape = (call["N"], call["C"], call["HxW"])
        zeros, ones = (call.function({**call.arguments, "input": x.new_full(shape, each)}) for each in (0, 1))
        if not torch.equal(zeros, ones):
            return torch.full_like(x, 1 / count).flatten(0, -2)
        x = x - x.mean(dim=1, keepdim=True)
        deviation = torch.rsqrt((x * x).mean(dim=1, keepdim=True) + call["eps"])
        return (x * deviation**3 / -count).flatten(0, -2)


def _is_statistic(call: Call) -> bool:
    """Whether the result has a number for each group; so has the normalised input in groups of one element."""
    return call.out_shape == (call.in_shape[0], call["group"])


_BATCH_NORMS = "native_batch_norm cudnn_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training"


@add_rule(*(f"aten.{name}" for name in _BATCH_NORMS.split()))
class _BatchNormRule(_NormRule):
    """Batch normalisation: in eval mode, a scale for each channel by running statistics.

    By the statistics of its input, a line is a channel at all positions of all images. That couples the samples, unless
    each sample has its own channels, as in instance normalisation.
    """

    reads = ("input",)

    def check(self, call: Call) -> None:
        super().check(replace(call, batched=frozenset()))

    def placement(self, use: Use) -> Placement:
        if use.batch > 1 and _is_training(use) and any(layout.axis != 1 for layout in use.layouts.values()):
            if use.arguments.get("running_mean") is None:
                what, remedy = "without running statistics", "make it with track_running_stats=True, and call .eval()"
            else:
                what, remedy = "in training mode", "call .eval() on it first"
            remedy += ", or take the Jacobian of the whole batch by batched=False"
            raise MixedSamplesError(f"batch normalisation {what} couples the samples of a batch", remedy)
        return super().placement(use)

    def labels(self, use: Use) -> tuple[dict[str, Labels], Labels]:
        axes: Labels = tuple(range(use.output.ndim))
        # All arguments but the input have an element for each channel.
        return {name: axes if len(shape) == len(axes) else (1,) for name, shape in use.shapes.items()}, axes

    def shared(self, call: Call) -> bool:
        return not _is_training(call) and not call.batched

    def lines(self, call: Call) -> _Lines:
        """The channels of one image."""
        channels = call.in_shape[1]
        return _Lines(channels, call.in_size // max(1, channels))

    def pattern(self, call: Call) -> Pattern:
        if not _is_training(call):
            return Pattern.of(Diagonal(call.in_size))
        images, channels, *_ = call.in_shape
        if images == 1:
            return super().pattern(call)
        places = np.arange(call.in_size).reshape(images, channels, -1)
        lines = places.transpose(1, 0, 2).reshape(1, channels, 1, -1)
        return equal_rows(np.broadcast_to(lines, (*places.shape, lines.shape[-1])), call.in_size)

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        if not _is_training(call):
            return _running_scale(call)
        return super().values(call, pattern) if call.in_shape[0] == 1 else Rule.values(self, call, pattern)

    def transposed_values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        if _is_training(call) and call.in_shape[0] == 1:
            return super().transposed_values(call, pattern)
        return Rule.transposed_values(self, call, pattern)

    def weight(self, call: Call, lines: _Lines) -> torch.Tensor | None:
        weight = call["weight"]
        return None if weight is None else weight.detach().reshape(-1, lines.outer).T[:, None, None, :]


def _is_training(run: Call | Use) -> bool:
    """Whether a normalisation takes the statistics of its input, not running ones."""
    return "no_training" not in run.operator and bool(run.arguments["training"])


def _running_scale(call: Call) -> torch.Tensor:
    """The scale of each element by running statistics, ``(in_size, 1)``, or ``(in_size, batch)`` where they differ."""
    images, channels, *sizes = call.in_shape
    scale: Any = torch.rsqrt(call["running_var"] + _epsilon(call))
    if call["weight"] is not None:
        scale = scale * call["weight"].detach()
    samples = scale.reshape(-1, 1, channels, 1)
    return samples.expand(-1, images, channels, math.prod(sizes)).flatten(1).T.contiguous()
