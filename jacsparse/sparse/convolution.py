"""Sparse convolutions of activations in blocks, and their gradients, as part of autograd."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from ..runtime import RowWork, run_rows
from .activations import GradientOfSums
from .blocks import BlockTensor
from .deferred import LayerOutput
from .kernel_runs import Tensors, empty, numpy_dtype, run_kernel, tell_multiply_adds
from .layouts import enter, records_gradients
from .processor import columns_for, tile_positions
from .vector_kernels import (
    add_products,
    correlate,
    correlate_and_multiply,
    correlate_tile,
    differentiate,
    multiply,
)
from .vectors import Tile
from .weights import Entries, WeightPlaces
from .windows import Pair, PlaneTiles, Reading, Window, reading, tiles, transposed_reading

#: Vectors that a kernel multiplies and adds in the time of one elementary operation.
_VECTORS = 2
#: How many weights take the time in which a tile is begun and ended.
_CALL = 8


class Correlation:
    """Sums over the weights that are left, in one direction.

    Parameters
    ----------
    entries : Entries
        The weights' places.
    reading : Reading
        Which input positions an output position reads.
    lanes : int
        Samples of a block.
    dtype : torch.dtype
        float32 or float64.
    """

    def __init__(self, entries: Entries, reading: Reading, lanes: int, dtype: torch.dtype) -> None:
        self.entries, self.reading, self.lanes, self.dtype = entries, reading, lanes, dtype
        #: Columns of a vector, where it holds those of one sample.
        self._along = 1
        if lanes == 1 and reading.in_step[1] == 1 and reading.out_step == (1, 1):
            self._along = columns_for(reading.out_size[1], dtype.itemsize)
        self._tiles = tiles(reading, tile_positions(), along=self._along)
        rows, columns = reading.in_size
        distances = np.array([tap.offset[0] * columns + tap.offset[1] for tap in reading.taps], dtype=np.int32)
        self._offsets = torch.from_numpy(entries.source * np.int32(rows * columns) + distances[entries.tap])
        self._starts = int(entries.starts.ctypes.data)
        self._no_bias = torch.zeros(entries.channels, dtype=dtype)
        self._position = lanes * dtype.itemsize
        self._taps = len(reading.taps)
        self._pooled: dict[tuple[Pair, bool], tuple[PlaneTiles, Tile]] = {}
        self._tile = self._tile_of(self._tiles)

    def _tile_of(self, tiles: PlaneTiles, pool: Pair = (1, 1), winners: bool = True) -> Tile:
        return Tile.of(self.dtype.itemsize, max(self.lanes, self._along), tiles, pool, self._along > 1, winners)

    def _pooled_tiles(self, pool: Pair, winners: bool) -> tuple[PlaneTiles, Tile]:
        """Tiles of whole windows."""
        if (pool, winners) not in self._pooled:
            pooled = tiles(self.reading, tile_positions(), pool, self._along)
            self._pooled[pool, winners] = pooled, self._tile_of(pooled, pool, winners)
        return self._pooled[pool, winners]

    def __call__(
        self,
        x: torch.Tensor,
        values: torch.Tensor,
        bias: torch.Tensor | None,
        floor: float = -np.inf,
        other: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``max(floor, bias + the sums + other)`` of blocks `x`."""
        y = empty((x.shape[0], self.entries.channels, *self.reading.out_size, self.lanes), self.dtype)
        function = correlate_tile(self._tile if other is None else self._tile._replace(adds=True))
        self._add_up(function, self._tiles, floor, (x, values, bias, other), (y, None))
        return y

    def pools(self, pool: Pair) -> bool:
        """Whether windows of that size, which cover each output position once, can be a part of the kernel."""
        return pool[0] * pool[1] <= tile_positions() and (self._along == 1 or pool[1] == 2)

    def pooled(
        self, x: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, pool: Pair, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The maximum of each window of the sums, and of zero, and the winners' numbers in their windows, in bytes.

        The windows cover each output position once. The winners are None where they are not to be kept.
        """
        pooled_tiles, tile = self._pooled_tiles(pool, keep)
        size = [count // window for count, window in zip(self.reading.out_size, pool, strict=True)]
        y = empty((x.shape[0], self.entries.channels, *size, self.lanes), self.dtype)
        winners = torch.empty(y.shape, dtype=torch.uint8) if keep else None
        self._add_up(correlate_tile(tile), pooled_tiles, 0.0, (x, values, bias, None), (y, winners))
        return y, winners

    def _add_up(
        self,
        function: int,
        tiles: PlaneTiles,
        floor: float,
        inputs: Tensors,
        outputs: tuple[torch.Tensor, torch.Tensor | None],
    ) -> None:
        weights = _CALL + len(self.entries.source) // max(1, self.entries.channels)
        x, *others = inputs
        assert x is not None
        # Parameters and gradients may be laid out in any way.
        others = [None if each is None else each.contiguous() for each in others]
        run_kernel(
            correlate,
            x.shape[0] * len(tiles.table) * self.entries.channels,
            functools.partial(self._arguments, function, tiles, floor),
            (x, *others),
            outputs,
            lanes=8 * weights * tiles.rows * tiles.columns // _VECTORS,
            blocks=x.shape[0],
        )

    def _arguments(
        self,
        function: int,
        tiles: PlaneTiles,
        floor: float,
        x: torch.Tensor,
        values: torch.Tensor,
        bias: torch.Tensor | None,
        other: torch.Tensor | None,
        y: torch.Tensor,
        winners: torch.Tensor | None,
    ) -> tuple[Any, ...]:
        return (
            function,
            tiles.table,
            self._starts,
            self._taps,
            self.entries.channels,
            values.data_ptr(),
            self._offsets.data_ptr(),
            (self._no_bias if bias is None else bias).data_ptr(),
            self.dtype.itemsize,
            numpy_dtype(self.dtype)(floor),
            0 if winners is None else winners.data_ptr(),
            0 if other is None else other.data_ptr() - y.data_ptr(),
            *self._steps(x, y),
        )

    def reads_winners(self) -> bool:
        """Whether `products` takes windows' gradients."""
        return self._along == 1

    def products(
        self, x: torch.Tensor, y: torch.Tensor, winners: torch.Tensor | None = None, pool: Pair = (1, 1)
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """For each weight, the sum of its inputs `x` times its outputs `y`; and for each channel, the sum of `y`.

        With winners, `y` has an element for each window, which stands where its winner is.
        """
        of_tiles, tile = (self._tiles, self._tile) if winners is None else self._pooled_tiles(pool, True)
        kind, blocks = numpy_dtype(self.dtype), x.shape[0]
        sums, bias_sums = np.empty(len(self.entries.source), kind), np.empty(self.entries.channels, kind)
        positions = blocks * self.reading.out_size[0] * self.reading.out_size[1]
        run_rows(
            multiply,
            self._work,
            add_products(tile),
            of_tiles.table,
            self.entries.starts,
            self._taps,
            self._offsets.data_ptr(),
            0 if winners is None else winners.data_ptr(),
            blocks,
            *self._steps(x, y, sums, bias_sums),
            lanes=1 + positions // _VECTORS,
        )
        return torch.from_numpy(sums), torch.from_numpy(bias_sums)

    def with_products(
        self, x: torch.Tensor, factors: torch.Tensor, values: torch.Tensor, order: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sums of `x` with ``values[order]``, and for each weight, the sum of its inputs times `factors`.

        The factors have the shape of the sums. Each input is loaded once for both, which takes hardly longer than one.
        """
        y, products = empty(factors.shape, self.dtype), torch.empty(len(self.entries.source), dtype=self.dtype)
        positions = x.shape[0] * self.reading.out_size[0] * self.reading.out_size[1]
        values = values.contiguous()
        run_rows(
            differentiate,
            self._work,
            correlate_and_multiply(self._tile),
            self._tiles.table,
            self.entries.starts,
            self._taps,
            values.data_ptr(),
            order.data_ptr(),
            self._offsets.data_ptr(),
            x.shape[0],
            factors.data_ptr() - y.data_ptr(),
            *self._steps(x, y, products.numpy()),
            lanes=1 + 2 * positions // _VECTORS,
        )
        return y, products

    def _steps(self, x: torch.Tensor, y: torch.Tensor, *between: Any) -> tuple[Any, ...]:
        (in_rows, in_columns), (out_rows, out_columns) = self.reading.in_size, y.shape[2:4]
        in_step, out_step = self.reading.in_step, self.reading.out_step
        position = self._position
        return (
            position,
            *between,
            x.data_ptr(),
            self.entries.sources * in_rows * in_columns * position,
            in_step[0] * in_columns * position,
            y.data_ptr(),
            self.entries.channels * out_rows * out_columns * position,
            out_step[0] * out_columns * position,
            out_step[1] * position,
            out_rows * out_columns * position,
        )

    @functools.cached_property
    def _work(self) -> RowWork:
        """That of channels: their weights; one without any still has a bias."""
        return RowWork(self.entries.starts[:: self._taps].astype(np.int64) + np.arange(self.entries.channels + 1))


class BlockConvolution:
    """A convolution of blocks with the weights that are left, and its two adjoints.

    Each of the three is linear in both of its arguments, and the other two give its gradients.

    Parameters
    ----------
    structure : WeightPlaces
        The weights' places.
    window : Window
        The window.
    in_size, out_size : tuple of int
        Rows and columns.
    lanes : int
        Samples of a block.
    dtype : torch.dtype
        float32 or float64.
    """

    def __init__(
        self, structure: WeightPlaces, window: Window, in_size: Pair, out_size: Pair, lanes: int, dtype: torch.dtype
    ) -> None:
        self.structure = structure
        #: Channels, rows, columns and lanes of the output.
        self.out_shape = (structure.forward.channels, *out_size, lanes)
        self.forward = Correlation(structure.forward, reading(window, in_size, out_size), lanes, dtype)
        self._transposed = (structure.transposed, transposed_reading(window, in_size, out_size), lanes, dtype)

    @functools.cached_property
    def transposed(self) -> Correlation:
        return Correlation(*self._transposed)

    def __call__(self, x: BlockTensor, values: torch.Tensor, bias: torch.Tensor | None) -> BlockTensor:
        """The convolution of an activation, differentiable."""
        if records_gradients():
            return _Convolve.apply(x, values, bias, self)  # type: ignore[no-any-return]
        self._tell(x)
        return x.like(Output(self, x.blocks, values, bias).reading(values, bias))

    def _tell(self, x: BlockTensor, times: int = 1) -> None:
        """Tell who counts FLOP of a product with each weight, for an activation of the input or of the output."""
        _, rows, columns, _ = self.out_shape
        positions = x.memory.batch * rows * columns - x.memory.empty_positions
        tell_multiply_adds(self.structure.places, times * len(self.structure.places) * positions)

    def input_gradient(self, y: BlockTensor, values: torch.Tensor) -> BlockTensor:
        """The gradient of the input, where `y` is that of the output; differentiable."""
        if records_gradients():
            return _Transposed.apply(y, values, self)  # type: ignore[no-any-return]
        self._tell(y)
        return y.like(self.transposed(y.blocks, values.index_select(0, self.structure.order), None))

    def weight_gradients(self, x: BlockTensor, y: BlockTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of the values and of the bias, where `y` is that of the output; differentiable."""
        if records_gradients():
            return _Products.apply(x, y, self)  # type: ignore[no-any-return]
        self._tell(y)
        pending, forward = y.pending, self.forward
        if isinstance(pending, GradientOfSums) and pending.window != (1, 1) and forward.reads_winners():
            return forward.products(x.padded, pending.y, pending.marks, pending.window)
        return forward.products(x.padded, y.padded)

    def both_gradients(self, x: BlockTensor, y: BlockTensor, values: torch.Tensor, with_bias: bool) -> tuple[Any, ...]:
        """The gradients of the input, of the values and, if asked for, of the bias, where `y` is that of the output."""
        self._tell(y, 2)
        structure, pending, of_bias = self.structure, y.pending, None
        of_x, of_values = self.transposed.with_products(y.padded, x.padded, values, structure.order)
        if with_bias:
            of_bias = pending.sums if isinstance(pending, GradientOfSums) else y.blocks.sum((0, 2, 3, 4))
        return x.like(of_x), of_values.index_select(0, structure.inverse), of_bias


class Output(LayerOutput):
    """A convolution's output, perhaps with a summand and ReLU.

    Parameters
    ----------
    convolution : BlockConvolution
        The convolution.
    x, values, bias : Tensor
        The input's blocks, the weights that are left and the bias, if there is one.
    """

    def __init__(
        self, convolution: BlockConvolution, x: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        self.convolution, self.x, self.values, self.bias = convolution, x, values, bias
        self.shape, self.dtype = (x.shape[0], *convolution.out_shape), x.dtype

    def compute(self) -> torch.Tensor:
        floor = 0.0 if self.relu else -np.inf
        return self.convolution.forward(self.x, self.values, self.bias, floor, self.other)

    def scaled(self, scale: torch.Tensor, shift: torch.Tensor) -> Output | None:
        if self.relu or self.other is not None:
            return None
        self.check()
        values = self.values.detach() * scale.index_select(0, self.convolution.structure.outputs)
        bias = shift if self.bias is None else torch.addcmul(shift, self.bias.detach(), scale)
        return Output(self.convolution, self.x, values, bias)

    def pooled(self, pool: Any, keep: bool) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        _, rows, columns, _ = self.convolution.out_shape
        # The kernel that pools adds nothing else.
        alone = self.relu and self.other is None
        if not (alone and pool.tiles((rows, columns)) and self.convolution.forward.pools(pool.kernel)):
            return None
        self.check()
        return self.convolution.forward.pooled(self.x, self.values, self.bias, pool.kernel, keep)


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: BlockTensor, values: Any, bias: Any, convolution: BlockConvolution) -> BlockTensor:
        ctx.convolution, ctx.lanes = convolution, x.memory.lanes
        ctx.save_for_backward(x, values)
        return convolution(x, values, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        x, values = ctx.saved_tensors
        convolution, (input_too, *parameters, _) = ctx.convolution, ctx.needs_input_grad
        # What is saved may come back in PyTorch's layout, as where hooks have stored it elsewhere.
        x, gradient = enter(x, ctx.lanes), enter(gradient, ctx.lanes)
        if input_too and any(parameters) and not torch.is_grad_enabled():
            gradients = convolution.both_gradients(x, gradient, values, parameters[1])
        else:
            of_parameters = convolution.weight_gradients(x, gradient) if any(parameters) else (None, None)
            gradients = convolution.input_gradient(gradient, values) if input_too else None, *of_parameters
        return *[each if asked else None for each, asked in zip(gradients, ctx.needs_input_grad, strict=False)], None


class _Transposed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: BlockTensor, values: Any, convolution: BlockConvolution) -> BlockTensor:
        ctx.convolution, ctx.lanes = convolution, y.memory.lanes
        ctx.save_for_backward(y, values)
        return convolution.input_gradient(y, values)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        y, values = ctx.saved_tensors
        y, gradient = enter(y, ctx.lanes), enter(gradient, ctx.lanes)
        of_values, _ = ctx.convolution.weight_gradients(gradient, y)
        return ctx.convolution(gradient, values, None), of_values, None


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: BlockTensor, y: BlockTensor, convolution: BlockConvolution
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.convolution, ctx.lanes = convolution, x.memory.lanes
        ctx.save_for_backward(x, y)
        return convolution.weight_gradients(x, y)

    @staticmethod
    def backward(ctx: Any, gradient: Any, bias_gradient: Any) -> tuple[Any, ...]:
        x, y = (enter(each, ctx.lanes) for each in ctx.saved_tensors)
        return ctx.convolution.input_gradient(y, gradient), ctx.convolution(x, gradient, bias_gradient), None
