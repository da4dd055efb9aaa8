"""Sorting, unpooling, grid sampling, distances and scattered reductions.

Where values decide which elements an output depends on, the pattern has an entry for each element that they may choose.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from ..runtime import grid_sampler_is_differentiable_twice
from .axis import axis_labels, split_at_axis
from .blocks import block_pattern, equal_rows
from .layout import Labels
from .pattern import Pattern
from .rules import Call, Rule, Use, add_rule
from .structure import Csr, Diagonal


@add_rule("aten.sort", "aten.topk")
class _OrderingRule(Rule):
    """``aten.sort`` and ``aten.topk``: each output along an axis is one element of its line."""

    reads = ()

    def labels(self, use: Use) -> tuple[dict[str, Labels], Labels]:
        return axis_labels(use, use.arguments["dim"])

    def pattern(self, call: Call) -> Pattern:
        return block_pattern(*split_at_axis(call))

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        outer, rows, columns, inner = split_at_axis(call)
        batch = len(call.input)
        # One gradient tells each element of the input which output it became, from 1 on.
        places = torch.arange(1, rows + 1, device=call.input.device).to(call.input).reshape(1, 1, rows, 1)
        gradient = places.expand(batch, outer, rows, inner).reshape(batch, *call.out_shape)
        outputs = call.vjp(gradient).reshape(batch, outer, 1, columns, inner)
        selected = (outputs == places.reshape(1, 1, rows, 1, 1)).to(call.input)
        # (outer, rows, inner, columns, batch): the order of the pattern's entries.
        return selected.permute(1, 2, 4, 3, 0).reshape(-1, batch).contiguous()


@add_rule("aten.max_unpool2d", "aten.max_unpool3d")
class _UnpoolRule(Rule):
    """Max-unpooling: each element goes to the place in its channel that another tensor names."""

    reads = ()

    def labels(self, use: Use) -> tuple[dict[str, Labels], Labels]:
        rank = use.output.ndim
        count = len(use.arguments["output_size"])
        channels = tuple(range(rank - count))
        places, out = (tuple((what, axis) for axis in range(count)) for what in ("place", "other"))
        return dict.fromkeys(("self", "indices"), (*channels, *places)), (*channels, *out)

    def check(self, call: Call) -> None:
        if call.argument != "self":
            super().check(call)

    def _sizes(self, call: Call) -> tuple[int, int, int]:
        """Channels, and for each its places in the output and in the input."""
        count = len(call["output_size"])
        shapes = (call.out_shape, call.in_shape)
        outputs, inputs = (math.prod(shape[len(shape) - count :]) for shape in shapes)
        return math.prod(call.in_shape[: len(call.in_shape) - count]), outputs, inputs

    def pattern(self, call: Call) -> Pattern:
        return block_pattern(*self._sizes(call))

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        channels, outputs, inputs = self._sizes(call)
        indices = call["indices"] if "indices" in call.batched else call["indices"][None]
        indices = indices.reshape(-1, channels, 1, inputs)
        places = torch.arange(outputs, device=indices.device).reshape(1, 1, outputs, 1)
        return (indices == places).to(call.input).flatten(1).T.contiguous()


def _without_jvp(call: Call) -> Call:
    """A call of an operator whose second derivative PyTorch lacks: by it, Jacobian-vector products are computed."""
    return replace(call, jvp=None)


@add_rule("aten.grid_sampler_2d", "aten.grid_sampler_3d")
class _GridSamplerRule(Rule):
    """Grid sampling: each output is a mean of elements of its channel, at the coordinates that the grid names."""

    several = True

    def labels(self, use: Use) -> tuple[dict[str, Labels], Labels]:
        count = use.output.ndim - 2
        out = tuple(("out", axis) for axis in range(count))
        image = tuple(("in", axis) for axis in range(count))
        return {"input": (0, "channel", *image), "grid": (0, *out, "coordinate")}, (0, "channel", *out)

    def pattern(self, call: Call) -> Pattern:
        images, channels, *sizes = call.out_shape
        places = math.prod(sizes)
        if call.argument == "input":
            return block_pattern(images * channels, places, math.prod(call.in_shape[2:]))
        # A place of all channels reads the same coordinates.
        count = call.in_shape[-1]
        columns = np.arange(call.in_size).reshape(images, 1, places, count)
        return equal_rows(np.broadcast_to(columns, (images, channels, places, count)), call.in_size)

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        if not grid_sampler_is_differentiable_twice(len(call.out_shape) - 2):
            call = _without_jvp(call)
        return super().values(call, pattern)


@add_rule("aten._cdist_forward")
class _DistanceRule(Rule):
    """``aten._cdist_forward``: the distance of each point of one set to each point of another."""

    several = True

    def labels(self, use: Use) -> tuple[dict[str, Labels], Labels]:
        lead = tuple(range(use.output.ndim - 2))
        labels = {"x1": (*lead, "p", "m"), "x2": (*lead, "r", "m")}
        return {name: axes[len(axes) - use.rank(name) :] for name, axes in labels.items()}, (*lead, "p", "r")

    def pattern(self, call: Call) -> Pattern:
        places = np.arange(call.in_size).reshape(call.in_shape)
        points = places[..., :, None, :] if call.argument == "x1" else places[..., None, :, :]
        return equal_rows(np.broadcast_to(points, (*call.out_shape, call.in_shape[-1])), call.in_size)

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        return super().values(_without_jvp(call), pattern)


@add_rule("aten.scatter_reduce")
class _ScatterReduceRule(Rule):
    """``aten.scatter_reduce``: each element of the source enters the output that the index names."""

    several = True
    reads_contents = True

    def labels(self, use: Use) -> tuple[dict[str, Labels], Labels]:
        rank = use.output.ndim
        dim = use.arguments["dim"] % max(1, rank)
        source: Labels = tuple(("source", axis) if axis == dim else axis for axis in range(rank))
        return {"self": tuple(range(rank)), "index": source, "src": source}, tuple(range(rank))

    def check(self, call: Call) -> None:
        if "index" in call.dependent | call.batched:
            raise call.unsupported(
                f"the index of {call.operator} depends on the input or differs between the samples", "use one for all"
            )

    def pattern(self, call: Call) -> Pattern:
        if call.argument == "self":
            return Pattern.of(Diagonal(call.in_size))
        index = call["index"].numpy(force=True)
        axis = call["dim"] % max(1, index.ndim)
        places = list(np.indices(index.shape))
        places[axis] = index
        targets = np.full(call.in_shape, -1)
        targets[tuple(slice(size) for size in index.shape)] = np.ravel_multi_index(tuple(places), call.out_shape)
        return Pattern.of(Csr.from_sources(targets.reshape(-1), call.out_size)).T
