"""What a layer is expected to take, dense and sparse, by its sizes and the weights that are left: a roofline.

Both ways multiply and add vectors, and move bytes. Dense kernels keep their operands in registers and do two vectors
in the time of a sparse kernel's one, which it loads from the second-level cache. The rates are those of a core of AMD's
Zen 4 (``python -m benchmarks run sparse_kernels``). Processors differ most in the clock and in the width of vectors,
which change both ways alike: what counts is the ratio. For nine of ten layers, of 18 sizes, with 5 to 80 % of their
weights and batches of 1 to 64, it is within a factor of two of what was measured on one thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from ..runtime import thread_count
from .layers import SparseLayer
from .processor import columns_for, lanes_for, tile_positions, vector_time, vector_widths
from .windows import inside

#: Training steps, forward passes, or those of a frozen model, which calls no Python code of layers.
Use = Literal["training", "inference", "frozen"]

#: Seconds in which sparse kernels multiply and add one of the largest vectors, and dense ones.
_SPARSE_VECTOR, _DENSE_VECTOR = 0.56e-9, 0.29e-9
#: Seconds of a weight in each tile; and in a training step, where gradients are put in the weights' order.
_WEIGHT, _REORDERED = 0.15e-9, 4e-9
#: How many times as long dense kernels take where an output channel reads one input channel, as in depthwise layers.
_DEPTHWISE = 6.0
#: Bytes a second: of activations, of a dense convolution's weights, which PyTorch lays out anew, of a linear layer's.
_ACTIVATIONS, _LAID_OUT, _WEIGHTS = 14e9, 15e9, 40e9
#: Dense and sparse: how many forward passes a use takes (sparse gradients share loads), and seconds beside kernels.
_PASSES = {"training": (3.5, 2.6), "inference": (1.0, 1.0), "frozen": (1.0, 1.0)}
_CALLS = {"training": (90e-6, 200e-6), "inference": (15e-6, 60e-6), "frozen": (10e-6, 10e-6)}
#: Bytes a second at which activations are put into blocks or taken out; and of a layer that does both, seconds beside
#: that.
_TURNED = 4e9
_TURNS = {"training": 100e-6, "inference": 25e-6, "frozen": 0.0}
#: Seconds of an operator between layers beside its arithmetic, on tensors and on blocks.
_OPERATORS = {"training": (15e-6, 150e-6), "inference": (5e-6, 50e-6), "frozen": (0.0, 0.0)}


def expected_seconds(layer: SparseLayer, shape: tuple[int, ...], use: Use) -> tuple[float, float]:
    """Seconds that the dense layer and the sparse one are expected to take for an input of a shape.

    Examples
    --------
    >>> import torch
    >>> from jacsparse.nn import SparseConv2d
    >>> layer = SparseConv2d(64, 64, 3, padding=1, mask=torch.arange(64 * 64 * 9).view(64, 64, 3, 3) % 20 == 0)
    >>> dense, sparse = expected_seconds(layer, (16, 64, 32, 32), "frozen")
    >>> dense > 2 * sparse
    True
    """
    total, left, itemsize = math.prod(layer.weight_shape), len(layer.values), layer.values.dtype.itemsize
    channels, axes, window = layer._structure.forward, len(layer.weight_shape) - 2, layer._window()
    # A sequence is an image of one row.
    in_size = (shape[-2] if axes == 2 else 1, shape[-1] if axes else 1)
    samples = math.prod(shape) // max(1, channels.sources * math.prod(in_size))
    in_size = layer._read_size(in_size)
    rows, columns = out_size = layer.out_size(in_size)
    elements = samples * (channels.sources * math.prod(in_size) + channels.channels * rows * columns)
    moving = itemsize * elements / _ACTIVATIONS

    lanes = lanes_for(samples, itemsize)
    # A vector holds the columns of one sample, or a position of several.
    along = columns_for(columns, itemsize) if lanes == 1 and window.stride[1] == 1 else 1
    positions, blocks = rows * -(-columns // along), -(-samples // lanes)
    one = _SPARSE_VECTOR * vector_time(lanes * along * itemsize) * inside(window, in_size, out_size)
    sparse = left * blocks * (positions * one + -(-positions // tile_positions()) * _WEIGHT) + moving

    width = vector_widths()[0]
    one = _DENSE_VECTOR * vector_time(width) * (_DEPTHWISE if layer.weight_shape[1] == 1 else 1.0)
    dense = total * samples * rows * columns * itemsize / width * one + moving
    dense += itemsize * total / (_LAID_OUT if axes else _WEIGHTS)

    if use == "training":
        sparse += left * _REORDERED / _PASSES[use][1]
    # A linear layer's rows, as of tokens, enter blocks and leave them within the layer.
    turns = not axes and len(shape) != 2
    if turns:
        sparse += itemsize * elements / _TURNED
    passes, calls, threads = _PASSES[use], _CALLS[use], thread_count()
    return passes[0] * dense / threads + calls[0], passes[1] * sparse / threads + calls[1] + turns * _TURNS[use]


def expected_gain(layers: Sequence[tuple[float, float]], operators: int, nbytes: int, use: Use) -> float:
    """How many times as fast a model's sparse layers are expected to be, with what happens to blocks between them.

    Parameters
    ----------
    layers : sequence of tuple of float
        The expected seconds of each, dense and sparse.
    operators : int
        How many operators a forward pass calls with activations in blocks.
    nbytes : int
        How many bytes of activations it puts into blocks or takes out of them between layers.
    use : str
        What the model is used for.

    Examples
    --------
    >>> layers = [(400e-6, 100e-6)]
    >>> expected_gain(layers, 0, 0, "inference"), expected_gain(layers, 10, 0, "inference") < 1
    (4.0, True)
    """
    dense, sparse = map(math.fsum, zip(*layers, strict=True))
    of_dense, of_blocks = _OPERATORS[use]
    sparse += _PASSES[use][1] * nbytes / _TURNED / thread_count()
    return (dense + operators * of_dense) / (sparse + operators * of_blocks)
