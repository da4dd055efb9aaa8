"""Operators that put the elements of a line in another order: each output is one element of its line.

Which one depends on the values, so every output may depend on all of its line; at each sample it has a single one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from ._axis import axis_labels
from ._blocks import blocks
from ._layout import Labels
from ._pattern import Pattern
from ._rules import Call, Rule, Use, add_rule

__all__: list[str] = []


@add_rule("aten.sort", "aten.topk")
class _OrderingRule(Rule):
    """``aten.sort`` and ``aten.topk``: along one axis, all of it or its first elements."""

    reads = ()

    def labels(self, use: Use) -> tuple[dict[str, Labels], Labels]:
        return axis_labels(use, use.arguments["dim"])

    def _sizes(self, call: Call) -> tuple[int, int, int, int]:
        """Places before the axis, outputs and inputs along it, places behind it."""
        axis = call["dim"] % max(1, len(call.in_shape))
        before, after = call.in_shape[:axis], call.in_shape[axis + 1 :]
        rows, columns = (shape[axis] if shape else 1 for shape in (call.out_shape, call.in_shape))
        return math.prod(before), rows, columns, math.prod(after)

    def pattern(self, call: Call) -> Pattern:
        return blocks(*self._sizes(call))

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        assert call.input is not None and call.vjp is not None
        outer, rows, columns, inner = self._sizes(call)
        batch = len(call.input)
        # Each element of the input is told which output it became, from 1 on: by one gradient.
        places = torch.arange(1, rows + 1, device=call.input.device).to(call.input).reshape(1, 1, rows, 1)
        gradient = places.expand(batch, outer, rows, inner).reshape(batch, *call.out_shape)
        became = call.vjp(gradient).reshape(batch, outer, 1, columns, inner)
        chosen = (became == places.reshape(1, 1, rows, 1, 1)).to(call.input)
        # (outer, rows, inner, columns, batch): the order of the pattern's entries.
        return chosen.permute(1, 2, 4, 3, 0).reshape(-1, batch).contiguous()


@add_rule("aten.max_unpool2d", "aten.max_unpool3d")
class _UnpoolRule(Rule):
    """``aten.max_unpool2d`` and its like: each element of a channel goes to a place of it that another tensor names."""

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
        """Channels, and of each the places of the output and of the input."""
        count = len(call["output_size"])
        shapes = (call.out_shape, call.in_shape)
        outputs, inputs = (math.prod(shape[len(shape) - count :]) for shape in shapes)
        return math.prod(call.in_shape[: len(call.in_shape) - count]), outputs, inputs

    def pattern(self, call: Call) -> Pattern:
        return blocks(*self._sizes(call))

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        assert call.input is not None
        channels, outputs, inputs = self._sizes(call)
        indices = call["indices"] if "indices" in call.batched else call["indices"][None]
        indices = indices.reshape(-1, channels, 1, inputs)
        places = torch.arange(outputs, device=indices.device).reshape(1, 1, outputs, 1)
        return (indices == places).to(call.input).flatten(1).T.contiguous()


@add_rule("aten.grid_sampler_2d", "aten.grid_sampler_3d")
class _GridSamplerRule(Rule):
    """``aten.grid_sampler_2d`` and its like: each output a mean of places of its channel that the grid names."""

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
            return blocks(images * channels, places, math.prod(call.in_shape[2:]))
        # A place of all channels reads the same coordinates.
        count = call.in_shape[-1]
        columns = np.arange(call.in_size).reshape(images, 1, places, count)
        indices = np.broadcast_to(columns, (images, channels, places, count)).reshape(-1)
        return Pattern((call.out_size, call.in_size), np.arange(call.out_size + 1) * count, indices)


@add_rule("aten._cdist_forward")
class _DistanceRule(Rule):
    """``aten._cdist_forward``: of each point of one set to each of another."""

    several = True

    def labels(self, use: Use) -> tuple[dict[str, Labels], Labels]:
        lead = tuple(range(use.output.ndim - 2))
        labels = {"x1": (*lead, "p", "m"), "x2": (*lead, "r", "m")}
        return {name: own[len(own) - use.rank(name) :] for name, own in labels.items()}, (*lead, "p", "r")

    def pattern(self, call: Call) -> Pattern:
        *lead, rows, columns = call.out_shape
        width = call.in_shape[-1]
        places = np.arange(call.in_size).reshape(call.in_shape)
        own = places[..., :, None, :] if call.argument == "x1" else places[..., None, :, :]
        indices = np.broadcast_to(own, (*lead, rows, columns, width)).reshape(-1)
        return Pattern((call.out_size, call.in_size), np.arange(call.out_size + 1) * width, indices)

    def values(self, call: Call, pattern: Pattern) -> torch.Tensor:
        # PyTorch has no second derivative of it, by which columns are found.
        return super().values(replace(call, jvp=None), pattern)


@add_rule("aten._trilinear")
class _TrilinearRule(Rule):
    """``aten._trilinear``: a sum of products of three factors, as ``nn.Bilinear`` has it."""

    several = True

    def _axes(self, arguments: Mapping[str, object], rank: int) -> dict[str, list[int]]:
        """Which axes of the product before it is summed each factor has."""
        expanded = zip(("i1", "i2", "i3"), ("expand1", "expand2", "expand3"), strict=True)
        return {name: [a for a in range(rank) if a not in arguments[given]] for name, given in expanded}  # type: ignore[operator]

    def labels(self, use: Use) -> tuple[dict[str, Labels], Labels]:
        rank = use.rank("i1") + len(use.arguments["expand1"])
        labels: dict[str, Labels] = {name: tuple(own) for name, own in self._axes(use.arguments, rank).items()}
        return labels, tuple(axis for axis in range(rank) if axis not in use.arguments["sumdim"])

    def pattern(self, call: Call) -> Pattern:
        rank = len(call.in_shape) + len(call.arguments["expand" + call.argument[1:]])
        own = self._axes(call.arguments, rank)[call.argument]
        out = [axis for axis in range(rank) if axis not in call["sumdim"]]
        sizes = dict(zip(own, call.in_shape, strict=True)) | dict(zip(out, call.out_shape, strict=True))
        summed = [axis for axis in own if axis not in out]
        # For each output the elements that have its place along the axes they share.
        places = np.arange(call.in_size).reshape(call.in_shape)
        ordered = places.transpose([own.index(a) for a in (*(a for a in out if a in own), *summed)])
        shape = [sizes[a] if a in own else 1 for a in out] + [sizes[a] for a in summed]
        terms = math.prod(sizes[a] for a in summed)
        indices = np.broadcast_to(ordered.reshape(shape), (*call.out_shape, *(sizes[a] for a in summed)))
        indices = np.sort(indices.reshape(call.out_size, terms), axis=1)
        return Pattern((call.out_size, call.in_size), np.arange(call.out_size + 1) * terms, indices.reshape(-1))


@add_rule("aten.scatter_reduce")
class _ScatterReduceRule(Rule):
    """``aten.scatter_reduce``: each element of the source enters one output, the one that the index names."""

    several = True
    reads_contents = True

    def labels(self, use: Use) -> tuple[dict[str, Labels], Labels]:
        axis, rank = use.arguments["dim"] % max(1, use.output.ndim), use.output.ndim
        own: Labels = tuple(("source", a) if a == axis else a for a in range(rank))
        return {"self": tuple(range(rank)), "index": own, "src": own}, tuple(range(rank))

    def check(self, call: Call) -> None:
        if "index" in call.dependent | call.batched:
            raise call.unsupported("an index that is another for each sample", "use the same for all")

    def pattern(self, call: Call) -> Pattern:
        if call.argument == "self":
            return blocks(call.in_size, 1, 1)
        index = call["index"].numpy(force=True)
        axis = call["dim"] % max(1, index.ndim)
        places = list(np.indices(index.shape))
        places[axis] = index
        targets = np.full(call.in_shape, -1)
        targets[tuple(slice(size) for size in index.shape)] = np.ravel_multi_index(tuple(places), call.out_shape)
        return _reaching(targets.reshape(-1), call.out_size)


def _reaching(targets: np.ndarray, rows: int) -> Pattern:
    """Each column has one entry, in the row that is its target; none where that is negative."""
    columns = np.flatnonzero(targets >= 0)
    order = columns[np.argsort(targets[columns], kind="stable")]
    counts = np.bincount(targets[columns], minlength=rows)
    return Pattern((rows, len(targets)), np.concatenate([[0], np.cumsum(counts)]), order)
