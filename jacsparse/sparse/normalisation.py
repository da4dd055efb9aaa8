"""Batch normalisation of blocks by the statistics of the batch, with the sum and the ReLU that follow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..runtime import SIMD, run_rows
from .deferred import LayerOutput
from .kernel_runs import empty, numpy_dtype, run_kernel
from .normalisation_kernels import (
    differentiate_channels,
    mask_and_sum,
    measure_channels,
    normalise,
    normalise_and_add,
    normalise_channels,
    set_gradient,
    sum_deviations,
)
from .processor import vector_widths
from .vectors import Tile

#: Elementary operations that take the time in which a vector is read and written.
_PASS = 5


@dataclass(frozen=True)
class _Layout:
    """How the vectors of blocks lie, for kernels that go over channels."""

    blocks: int
    #: Vectors of a plane.
    vectors: int
    lanes: int
    #: How many lanes hold samples in the last block.
    last_samples: int
    itemsize: int
    #: Elements of a channel.
    count: int

    @classmethod
    def of(cls, x: torch.Tensor, batch: int) -> _Layout:
        blocks, _, rows, columns, lanes = x.shape
        elements, last_samples = rows * columns * lanes, batch - (blocks - 1) * lanes
        if last_samples == lanes:
            # A plane is one row of the widest vectors that it is made of.
            last_samples = lanes = math.gcd(elements, vector_widths()[0] // x.itemsize)
        return cls(blocks, elements // lanes, lanes, last_samples, x.itemsize, batch * rows * columns)

    @property
    def tile(self) -> Tile:
        return Tile(self.itemsize, self.lanes)

    @property
    def steps(self) -> tuple[int, ...]:
        """Kernels' arguments."""
        return self.blocks, self.vectors, self.lanes, self.last_samples, self.lanes * self.itemsize

    @property
    def work(self) -> int:
        """Of a channel, in elementary operations."""
        return _PASS * SIMD * self.blocks * self.vectors


class Statistics(NamedTuple):
    """Of a batch, for each channel."""

    #: The mean, rounded to the dtype of the elements, whose deviations from it lose nothing.
    centres: torch.Tensor
    #: The mean and the variance, float64 of shape (channels, 2).
    moments: torch.Tensor
    layout: _Layout

    @classmethod
    def of(cls, x: torch.Tensor, batch: int) -> Statistics:
        """Those of blocks."""
        layout, channels = _Layout.of(x, batch), x.shape[1]
        centres, moments = torch.empty(channels, dtype=x.dtype), torch.empty(channels, 2, dtype=torch.float64)

        def arguments(x: torch.Tensor, centres: torch.Tensor, moments: torch.Tensor) -> tuple[Any, ...]:
            return (
                sum_deviations(layout.tile),
                x.data_ptr(),
                centres.numpy(),
                moments.numpy(),
                *layout.steps,
                layout.count,
            )

        run_kernel(measure_channels, channels, arguments, (x,), (centres, moments), lanes=2 * layout.work)
        return cls(centres, moments, layout)

    def update(self, mean: torch.Tensor, variance: torch.Tensor, momentum: float) -> None:
        """Move running statistics towards these; the variance is that of which the batch is a sample."""
        mean_here, variance_here = self.moments.unbind(1)
        unbiased = variance_here * (self.layout.count / (self.layout.count - 1))
        with torch.no_grad():
            mean.lerp_(mean_here.to(mean.dtype), momentum)
            variance.lerp_(unbiased.to(variance.dtype), momentum)


class Normalised(LayerOutput):
    """A batch, normalised by its own statistics.

    Parameters
    ----------
    x : Tensor
        Blocks.
    weight, bias : Tensor
        Of the channels.
    eps : float
        What is added to the variance.
    statistics : Statistics
        The batch's.
    """

    def __init__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, statistics: Statistics
    ) -> None:
        self.x, self.weight, self.bias, self.eps, self.statistics = x, weight, bias, eps, statistics
        self.shape, self.dtype = x.shape, x.dtype

    def compute(self) -> torch.Tensor:
        layout = self.statistics.layout
        function, floor = normalise if self.other is None else normalise_and_add, 0.0 if self.relu else -np.inf

        def arguments(
            x: torch.Tensor,
            other: torch.Tensor | None,
            weight: torch.Tensor,
            bias: torch.Tensor,
            centres: torch.Tensor,
            moments: torch.Tensor,
            y: torch.Tensor,
        ) -> tuple[Any, ...]:
            return (
                function(layout.tile),
                x.data_ptr(),
                0 if other is None else other.data_ptr(),
                y.data_ptr(),
                centres.numpy(),
                moments.numpy(),
                weight.numpy(),
                bias.numpy(),
                self.eps,
                numpy_dtype(self.dtype)(floor),
                *layout.steps,
            )

        y = empty(self.shape, self.dtype)
        tensors = (self.x, self.other, self.weight, self.bias, self.statistics.centres, self.statistics.moments)
        inputs = tuple([None if each is None else each.contiguous() for each in tensors])
        run_kernel(normalise_channels, self.shape[1], arguments, inputs, (y,), lanes=layout.work)
        return y

    def gradients(
        self, gradient: torch.Tensor, y: torch.Tensor | None, needed: Sequence[bool]
    ) -> tuple[torch.Tensor | None, ...]:
        """Those of `x`, weight, bias and the other summand that are needed; `y` is the output, where ReLU is part."""
        (centres, moments, layout), shape = self.statistics, self.shape
        of_x = empty(shape, self.dtype) if needed[0] else None
        masked = empty(shape, self.dtype) if of_x is None or needed[3] else of_x
        sums = torch.empty(shape[1], 2, dtype=torch.float64)
        run_rows(
            differentiate_channels,
            shape[1],
            mask_and_sum(layout.tile),
            set_gradient(layout.tile),
            gradient.data_ptr(),
            self.x.data_ptr(),
            (gradient if y is None else y).data_ptr(),
            masked.data_ptr(),
            0 if of_x is None else of_x.data_ptr(),
            centres.numpy(),
            moments.numpy(),
            self.weight.contiguous().numpy(),
            self.eps,
            numpy_dtype(self.dtype)(np.nan if y is None else 0.0),
            sums.numpy(),
            *layout.steps,
            layout.count,
            lanes=2 * layout.work,
        )
        of_bias, of_weight = sums.to(self.dtype).T.contiguous()
        of_each = (of_x, of_weight, of_bias, masked)
        return tuple([each if asked else None for each, asked in zip(of_each, needed, strict=True)])
