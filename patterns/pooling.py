"""Pooling: each output is a function of one window of one channel.

With ``S`` the matrix over positions that has an entry where input position ``i`` lies in the window of output position
``o``, the Jacobian's pattern is ``I ⊗ S``: one copy of ``S`` for each channel. Average pooling divides each row by the
window's divisor. Max-pooling *selects*: for each sample a row has a single one, at the window's winner.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch.nn import functional

from ..runtime import frozen, index_dtype, on_device, row_starts, uploaded
from .layout import Labels
from .pattern import Pattern
from .rules import Call, Rule, Use, add_rule
from .sliding import LARGEST_TABLE, Sliding, described_axes, joined, pairs, restored_axes
from .structure import Arrays, Structure, axes_table, byte_array, check_size, csr_of_transpose, flag, natural
from .value_kernels import constants, placed, selected, take


@dataclass(frozen=True)
class Adaptive:
    """One axis of adaptive pooling: window ``o`` covers ``floor(o·size/windows)`` to ``ceil((o+1)·size/windows)``."""

    size: int
    windows: int

    @functools.cached_property
    def sources(self) -> np.ndarray:
        """Input positions of each window, ascending, padded with -1; shape ``(windows, longest window)``."""
        o = np.arange(self.windows)
        first = o * self.size // max(1, self.windows)
        last = -(-(o + 1) * self.size // max(1, self.windows))
        positions = first[:, None] + np.arange(max((last - first).max(initial=0), 0))
        return np.where(positions < last[:, None], positions, -1)


@dataclass(frozen=True)
class Weighted:
    """One axis along which each window may have any positions."""

    size: int
    windows: int
    #: ``numpy.packbits`` of a mask over ``(windows, size)``: which positions are in which window.
    reached: bytes

    @functools.cached_property
    def sources(self) -> np.ndarray:
        """Input positions of each window, ascending, padded with -1; shape ``(windows, longest window)``."""
        bits = np.unpackbits(np.frombuffer(self.reached, dtype=np.uint8), count=self.windows * self.size)
        mask = bits.reshape(self.windows, self.size)
        longest = int(mask.sum(axis=1).max(initial=0))
        order = np.argsort(1 - mask, axis=1, kind="stable")[:, :longest]
        return np.where(np.take_along_axis(mask, order, axis=1) == 1, order, -1)


@dataclass(frozen=True)
class Pooling(Structure):
    """The Jacobian of a pooling operator, or its transpose.

    Attributes
    ----------
    channels : int
        Copies of the pattern over positions.
    axes : tuple of Sliding, of Adaptive or of Weighted
        The spatial axes.
    selects : bool
        Whether each window has exactly one nonzero value per sample, which is 1: max-pooling.
    transposed : bool
        Whether this is the structure of the transposed Jacobian.
    """

    channels: int
    axes: tuple[Sliding, ...] | tuple[Adaptive, ...] | tuple[Weighted, ...]
    selects: bool = False
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        windows, positions = self._single_shape
        shape = (self.channels * windows, self.channels * positions)
        return shape[::-1] if self.transposed else shape

    @property
    def _single_shape(self) -> tuple[int, int]:
        return math.prod(axis.windows for axis in self.axes), math.prod(axis.size for axis in self.axes)

    @functools.cached_property
    def nnz(self) -> int:
        return self.channels * math.prod(int((axis.sources >= 0).sum()) for axis in self.axes)

    @functools.cached_property
    def T(self) -> Pooling:
        return replace(self, transposed=not self.transposed)

    def scaled(self) -> Pooling:
        return replace(self, selects=False) if self.selects else self

    @functools.cached_property
    def _single(self) -> Arrays:
        """``indptr`` and ``indices`` of one channel."""
        table = joined([axis.sources for axis in self.axes], [axis.size for axis in self.axes])
        indptr, indices = row_starts((table >= 0).sum(axis=1), np.int64), table[table >= 0]
        return csr_of_transpose(indptr, indices, self._single_shape) if self.transposed else (indptr, indices)

    def row_counts(self) -> np.ndarray:
        return np.tile(np.diff(self._single[0]).astype(np.int64), self.channels)

    def meeting(self, occupied: np.ndarray) -> np.ndarray:
        indptr, indices = self._single
        rows, columns = (size // max(1, self.channels) for size in self.shape)
        ones = np.ones(len(indices), dtype=np.int64)
        single = scipy.sparse.csr_array((ones, indices, indptr), shape=(rows, columns))
        return np.ravel((single @ occupied.reshape(self.channels, columns).T.astype(np.int64)).T)

    def csr(self) -> Arrays:
        indptr, indices = self._single
        dtype = index_dtype(self.nnz, *self.shape)
        channel = np.arange(self.channels, dtype=dtype)[:, None]
        starts = (indptr[:-1].astype(dtype) + channel * dtype(len(indices))).ravel()
        columns = self.shape[1] // max(1, self.channels)
        indices = (indices.astype(dtype) + channel * dtype(columns)).ravel()
        return frozen(np.append(starts, dtype(self.nnz))), frozen(indices)

    @property
    def _single_positions(self) -> np.ndarray:
        """Input position of each entry of one channel."""
        indptr, indices = self._single
        return _rows(indptr) if self.transposed else indices

    @functools.cached_property
    def entry_of_position(self) -> np.ndarray | None:
        """The entry of each position among its channel's; None where windows overlap."""
        positions = self._single_positions
        if len(np.unique(positions)) < len(positions):
            return None
        entries = np.zeros(self._single_shape[1], dtype=np.uint32)
        entries[positions] = np.arange(len(positions))
        return frozen(entries)

    @functools.cached_property
    def entry_windows(self) -> np.ndarray:
        """Window of each entry, numbered through all channels; int32 or int64, shape ``(nnz,)``."""
        indptr, indices = self.csr()
        return indices if self.transposed else frozen(_rows(indptr))

    @functools.cached_property
    def entry_positions(self) -> np.ndarray:
        """Input position of each entry within its channel, shape ``(nnz,)``."""
        dtype = index_dtype(0, 0, self._single_shape[1])
        return frozen(np.tile(self._single_positions.astype(dtype), self.channels))

    def describe(self) -> Mapping[str, Any]:
        sizes = [(axis.size, axis.windows) for axis in self.axes if not isinstance(axis, Sliding)]
        sliding = tuple(axis for axis in self.axes if isinstance(axis, Sliding))
        reached = b"".join(axis.reached for axis in self.axes if isinstance(axis, Weighted))
        return {
            "channels": self.channels,
            "axes": np.array(sizes, dtype=np.int64) if sizes else described_axes(sliding),
            "adaptive": any(isinstance(axis, Adaptive) for axis in self.axes),
            "reached": np.frombuffer(reached, dtype=np.uint8),
            "selects": self.selects,
            "transposed": self.transposed,
        }

    @classmethod
    def restore(cls, description: Mapping[str, Any]) -> Pooling:
        axes: tuple[Any, ...]
        reached = byte_array(description, "reached")
        if flag(description, "adaptive"):
            axes = tuple(Adaptive(*row) for row in _restored_sizes(description))
        elif len(reached):
            axes = _restored_weighted(_restored_sizes(description), reached)
        else:
            axes = restored_axes(description)
        channels = natural(description, "channels")
        structure = cls(channels, axes, flag(description, "selects"), flag(description, "transposed"))
        check_size(structure)
        return structure


def _restored_sizes(description: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Positions and windows of each axis, checked."""
    table = axes_table(description, 2)
    if (table < 0).any() or (table > LARGEST_TABLE).any():
        raise ValueError(f"axes holds a size below 0 or beyond {LARGEST_TABLE}")
    return [(size, windows) for size, windows in table.tolist()]


def _restored_weighted(sizes: list[tuple[int, int]], reached: np.ndarray) -> tuple[Weighted, ...]:
    lengths = [-(-size * windows // 8) for size, windows in sizes]
    if len(reached) != sum(lengths):
        raise ValueError(f"reached has {len(reached)} bytes; these axes need {sum(lengths)}")
    parts = np.split(reached, np.cumsum(lengths)[:-1])
    return tuple(Weighted(*size, part.tobytes()) for size, part in zip(sizes, parts, strict=True))


def _rows(indptr: np.ndarray) -> np.ndarray:
    """Row of each entry."""
    return np.repeat(np.arange(len(indptr) - 1, dtype=indptr.dtype), np.diff(indptr))


@functools.cache
def count_of_windowed_axes(operator: str) -> int:
    """Axes along which windows slide: the last ones, as many as the operator's name says."""
    match = re.search(r"(\d)d", operator)
    assert match is not None
    return int(match[1])


def _sizes(call: Call) -> tuple[int, ...]:
    return call.in_shape[-count_of_windowed_axes(call.operator) :]


def _windows(call: Call) -> tuple[int, ...]:
    return call.out_shape[-count_of_windowed_axes(call.operator) :]


def _channels(call: Call) -> int:
    """The product of a sample's axes before the windowed ones; 1 where the samples stand in the channels' place."""
    return math.prod(call.in_shape[: -count_of_windowed_axes(call.operator)])


@functools.lru_cache(maxsize=64)
def _firsts(channels: int, positions: int) -> np.ndarray:
    """The number of each channel's first position, ``(channels, 1)``."""
    return frozen(positions * np.arange(channels)[:, None])


class _WindowRule(Rule):
    """Windows that slide over the last axes, at each place of the others."""

    selects = False

    def labels(self, use: Use) -> tuple[dict[str, Labels], Labels]:
        rank, count = use.output.ndim, count_of_windowed_axes(use.operator)
        out = tuple(axis if axis < rank - count else ("windows", axis) for axis in range(rank))
        return dict.fromkeys(use.layouts, tuple(range(rank))), out

    def shared(self, call: Call) -> bool:
        return not self.selects

    def axes(self, call: Call) -> tuple[Any, ...]:
        """Sliding windows, or adaptive ones for an operator without a kernel size."""
        sizes, count = _sizes(call), count_of_windowed_axes(call.operator)
        if "kernel_size" not in call.arguments:
            return tuple(Adaptive(size, windows) for size, windows in zip(sizes, _windows(call), strict=True))
        kernel = pairs(call["kernel_size"], count)
        stride = pairs(call["stride"] or kernel, count)
        padding, dilation = pairs(call["padding"], count), pairs(call.arguments.get("dilation", 1), count)
        return tuple(
            Sliding(size, taps, step, before, before, spread, bool(call["ceil_mode"]))
            for size, taps, step, before, spread in zip(sizes, kernel, stride, padding, dilation, strict=True)
        )

    def pattern(self, call: Call) -> Pattern:
        return Pattern.of(Pooling(_channels(call), self.axes(call), self.selects))


@add_rule(
    *("aten.max_pool2d_with_indices", "aten.max_pool3d_with_indices"),
    *("aten.adaptive_max_pool2d", "aten.adaptive_max_pool3d"),
)
class _MaxPoolRule(_WindowRule):
    """Each window passes its gradient to its winner, ties broken as PyTorch breaks them."""

    selects = True

    def check(self, call: Call) -> None:
        super().check(call)
        if any((axis.sources < 0).all(axis=1).any() for axis in self.axes(call)):
            # PyTorch 2.13's own backward then writes outside its tensor.
            raise call.unsupported(
                "a window of this max-pooling lies wholly in the padding and has no winner",
                "choose a padding, dilation or ceil_mode that leaves none",
            )

    def winners(self, call: Call) -> torch.Tensor:
        """Position within its channel that wins each window, int64, ``(batch, channels, *windows)``."""
        batch = len(call.input)
        try:
            saved = None if call.node is None else getattr(call.node(), "_saved_result1", None)
        except RuntimeError:
            # A backward pass has freed it.
            saved = None
        if not isinstance(saved, torch.Tensor) or saved.shape != (batch, *call.out_shape[1:]):
            pool = getattr(functional, call.operator.removeprefix("aten.").removesuffix("_with_indices"))
            names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
            sliding = "kernel_size" in call.arguments
            arguments = [call[name] for name in names] if sliding else [_windows(call)]
            _, saved = pool(call.input.detach().flatten(0, 1), *arguments, return_indices=True)
        return saved.reshape(batch, _channels(call), *_windows(call))

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        assert isinstance(pattern.structure, Pooling)
        structure, dtype = pattern.structure, call.input.dtype
        if structure.entry_of_position is not None and not on_device(call.input):
            entries = pattern.nnz // max(1, structure.channels)
            return placed(self.winners(call), structure.entry_of_position, entries, dtype)
        return selected(self.winners(call), structure.entry_windows, structure.entry_positions, dtype)

    transposed_values = values

    def pull_back(self, call: Call, pattern: Pattern, gradients: torch.Tensor) -> torch.Tensor:
        if on_device(gradients):
            # Where windows overlap, `index_add_` adds in any order there.
            return super().pull_back(call, pattern, gradients)
        winners = self.winners(call).flatten(0, 1).flatten(1)
        channels, positions = len(winners), math.prod(_sizes(call))
        places = winners + uploaded(_firsts(channels, positions), winners.device)
        sums = gradients.new_zeros(len(gradients), channels * positions)
        return sums.index_add_(1, places.flatten(), gradients.flatten(1))

    def selection(self, call: Call) -> torch.Tensor:
        winners = self.winners(call).flatten(2)
        batch, channels, windows = winners.shape
        firsts = uploaded(_firsts(channels, math.prod(_sizes(call))), winners.device)
        rows = torch.empty((channels * windows, batch), dtype=torch.int32, device=winners.device)
        torch.add(winners, firsts, out=rows.view(channels, windows, batch).permute(2, 0, 1))
        return rows


@add_rule("aten.avg_pool2d", "aten.avg_pool3d", "aten._adaptive_avg_pool2d", "aten._adaptive_avg_pool3d")
class _AveragePoolRule(_WindowRule):
    """A window's mean: each value is one over the window's divisor."""

    reads = ()

    def divisors(self, call: Call) -> np.ndarray:
        """Divisor of each window of a channel, float64."""
        axes, override = self.axes(call), call.arguments.get("divisor_override")
        if override:
            return np.full(math.prod(axis.windows for axis in axes), float(override))
        lengths = [(axis.sources >= 0).sum(axis=1) for axis in axes]
        if call.arguments.get("count_include_pad"):
            # A window counts its padding, but not the positions beyond, which a number rounded up may reach.
            starts = [np.arange(axis.windows) * axis.stride - axis.before for axis in axes]
            ends = [np.minimum(s + axis.kernel, axis.size + axis.after) for s, axis in zip(starts, axes, strict=True)]
            lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        return functools.reduce(lambda area, length: np.outer(area, length).ravel(), lengths, np.ones(1))

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        assert isinstance(pattern.structure, Pooling)
        weights = constants(call, pattern, lambda: np.tile(1.0 / self.divisors(call), _channels(call)))
        return take(weights, pattern.structure.entry_windows)

    transposed_values = values


@add_rule(
    *(f"aten.upsample_{how}" for how in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "trilinear3d")),
    *(f"aten._upsample_nearest_exact{axes}" for axes in ("1d", "2d", "3d")),
    *(f"aten.upsample_{how}2d" for how in ("bilinear", "bicubic")),
    *(f"aten._upsample_{how}2d_aa" for how in ("bilinear", "bicubic")),
)
class _UpsampleRule(_WindowRule):
    """Interpolation: each weight is a product of one for each axis, which PyTorch's own operator is asked for."""

    reads = ()
    reads_numbers = True

    def axes(self, call: Call) -> tuple[Weighted, ...]:
        return tuple(Weighted(w.shape[1], w.shape[0], np.packbits(w != 0).tobytes()) for w in self._weights(call))

    def _weights(self, call: Call) -> list[np.ndarray]:
        """A matrix ``(windows, size)`` for each axis, float64."""
        matrices = []
        count = len(call.out_shape) - 2
        for axis, windows in enumerate(call.out_shape[2:]):
            # A channel for each window of this axis, at the first window of the other axes, whose weights add up to
            # one. Weights are derivatives: PyTorch's antialiased forward differs from its derivative where an axis has
            # one position.
            x = torch.zeros((1, windows, *call.in_shape[2:]), dtype=torch.float64, device="cpu", requires_grad=True)
            with torch.enable_grad():
                y = call.function({**call.arguments, call.argument: x})
            gradient = torch.zeros_like(y)
            line: list[Any] = [0] * count
            line[axis] = slice(None)
            gradient[(0, slice(None), *line)] = torch.eye(windows, device="cpu").to(y)
            (weights,) = torch.autograd.grad(y, x, gradient)
            others = [2 + other for other in range(count) if other != axis]
            matrices.append((weights.sum(others) if others else weights)[0].numpy())
        return matrices

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        return constants(call, pattern, lambda: self._entries(call)).clone().reshape(-1, 1)

    def _entries(self, call: Call) -> np.ndarray:
        """The weights of all channels' entries, float64."""
        axes = [scipy.sparse.csr_array(weights) for weights in self._weights(call)]
        single = functools.reduce(lambda left, right: scipy.sparse.kron(left, right, format="csr"), axes)
        single.sort_indices()
        return np.tile(single.data, _channels(call))
