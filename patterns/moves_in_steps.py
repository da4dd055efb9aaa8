"""Views and concatenations: their steps through the operands tell where elements come from, whatever their number.

A view's sizes, strides and offset are PyTorch's own, of a tensor without elements. The element at the place ``n`` of a
contiguous operand, all samples together, has three digits, and they are its sample and its place there:

    n = high · (batch · period) + sample · period + low,        place = high · period + low

Here `period` is the number of elements from one sample to the next. Each axis of a view steps through one of the
digits, or through the sample and the digit beside it. Where low digits never add up to `period`, nothing is carried
from one digit to the next, so that the sample depends on one axis alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .layout import WHOLE, Layout
from .rules import Placement, Sources, Use
from .strided import Steps, Strided

_NAMES = (
    "_unsafe_view alias as_strided clone diagonal expand permute select slice split split_with_sizes squeeze t "
    "transpose unbind unfold unsafe_split unsafe_split_with_sizes unsqueeze view"
)
_VIEWS = frozenset(f"aten.{name}" for name in _NAMES.split())


class _Walk(NamedTuple):
    """The place in an operand of each element of a tensor: `first`, and a stride for each axis."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    first: int


def placement_by_steps(use: Use) -> Placement | None:
    """Where the samples of a view or a concatenation are, and where its elements come from.

    None for other operators, and where steps do not tell: then each element has to be looked at.
    """
    if not use.output.numel() or any(0 in shape for shape in use.shapes.values()):
        return None
    if use.operator in _VIEWS and "dtype" not in use.arguments:
        return _of_view(use)
    return _of_concatenation(use) if use.operator in ("aten.cat", "aten.stack") else None


def _of_view(use: Use) -> Placement | None:
    ((name, layout),) = use.layouts.items()
    shape = use.arguments[name].shape
    view = torch.empty(shape, device="meta")
    if use.operator != "aten.clone":
        view = use.evaluate({**use.arguments, name: view})
    walk = _Walk(tuple(view.shape), view.stride(), int(view.storage_offset()))
    out = WHOLE
    if use.batch > 1:
        of_sample = _of_sample(walk, layout, shape, use.batch)
        if of_sample is None:
            return None
        walk, out = of_sample
    steps = [Steps(size, 0, size, stride if size > 1 else 0) for size, stride in zip(*walk[:2], strict=True)]
    return Placement(dict(use.layouts), out, {name: _sources(layout.shape_of_sample(shape), steps, walk.first)})


def _of_sample(walk: _Walk, layout: Layout, shape: Sequence[int], batch: int) -> tuple[_Walk, Layout] | None:
    """The walk of one sample through its own elements, and the layout of the result; None where digits are mixed."""
    period = math.prod(shape[layout.axis + 1 :]) * (1 if layout.minor else layout.copies)
    whole = batch * period
    low, out = walk.first % period, None
    if layout.axis < 0 or walk.first % whole >= period:
        return None
    sizes, strides = list(walk.sizes), list[int]()
    for axis, (size, stride) in enumerate(zip(*walk[:2], strict=True)):
        if size == 1 or stride % whole == 0:
            strides.append(stride // batch if size > 1 else 0)
        elif (size - 1) * stride < period:
            low += (size - 1) * stride
            strides.append(stride)
        elif out is None and stride <= period and size * stride == whole and period % stride == 0:
            # The sample is the slower index beside a low digit, or alone.
            out = Layout(axis, period // stride)
            low += period - stride
            sizes[axis] = out.copies
            strides.append(stride)
        elif out is None and stride == period and size % batch == 0:
            out = Layout(axis, size // batch, minor=True)
            sizes[axis] = out.copies
            strides.append(period)
        else:
            return None
    if out is None or low >= period:
        return None
    return _Walk(tuple(sizes), tuple(strides), walk.first // whole * period + walk.first % period), out


def _of_concatenation(use: Use) -> Placement | None:
    layouts, axis, shapes = {*use.layouts.values()}, use.arguments["dim"] % use.output.ndim, use.shapes
    parts = [f"tensors.{number}" for number in range(len(shapes))]
    if len(layouts) > 1 or not all(name in shapes for name in parts):
        return None
    (layout,), stacks = layouts, use.operator == "aten.stack"
    out = layout
    if use.batch > 1:
        if layout.axis < 0 or (layout.axis == axis and not stacks):
            return None
        out = Layout(layout.axis + (stacks and axis <= layout.axis), layout.copies, layout.minor)
    shape, sources, stop = out.shape_of_sample(use.output.shape), dict[str, Sources](), 0
    for name in parts:
        part = shapes[name]
        start, stop = stop, stop + (1 if stacks else part[axis])
        if name in use.layouts:
            of_sample = layout.shape_of_sample(part)
            boxed = (*of_sample[:axis], 1, *of_sample[axis:]) if stacks else of_sample
            strides = [*itertools.accumulate(reversed(boxed[1:]), int.__mul__, initial=1)][::-1]
            steps = [
                Steps(size, 0, size, stride if size > 1 else 0) for size, stride in zip(boxed, strides, strict=True)
            ]
            steps[axis] = Steps(shape[axis], start, stop, steps[axis].stride)
            sources[name] = _sources(of_sample, steps, -start * steps[axis].stride)
    return Placement(dict(use.layouts), out, sources)


def _sources(shape: Sequence[int], steps: Sequence[Steps], offset: int) -> Sources:
    """The places in an operand of that shape from which the elements along the steps come."""
    strided = Strided.from_steps(math.prod(shape), offset, steps)
    rows = strided.shape[0]
    if strided.nnz == rows and offset == 0 and (rows == 1 or strided.axes == (Steps(rows, 0, rows, 1),)):
        return Sources(1, rows)
    return Sources(1, rows, strided=strided)
