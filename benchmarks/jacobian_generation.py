"""Transposed Jacobians of single operators, against autograd column by column: the last column of Table 3.1."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse
import torch
from jacsparse.patterns import Pattern
from torch import nn

from jacsparse import chain
from jacsparse.runtime import intercepted
from jacsparse.stages import Record

from ._calls import GRAPH, MODES, Call, in_mode, labelled, ready
from ._context import Context
from ._experiment import Grid
from ._rows import Group, Row, reason
from ._text import amount

#: The rows' labels; the first two are followed by the mode in which they run.
_KERNEL, _COPY = "values, kernel alone", "copy of as many bytes"
_CALL, _OVERHEAD = "call from tensors", "call from tensors, without its kernel"
_OPERATOR, _BOTH = "PyTorch's operator, on 2 × 2 pixels", "pattern and values, from nothing"
_GRAD = "autograd, grad() of each output"
_STACKED, _EVERY = f"{_GRAD}, stacked to a dense matrix", f"{_GRAD}, none extrapolated"
PRINTED = "thesis, Algorithms 2 to 4, in NumPy"
#: The target for the time of a call from tensors without its kernel, as a multiple of PyTorch's operator.
OVERHEAD = 4
#: The most columns that autograd computes all of, once more than the sample from which it is extrapolated.
_ALL = 20_000
#: Allowed differences relative to the largest entry: on CUDA, autograd's convolutions may transform their operands.
_TOLERANCE = {"cpu": 0.0, "cuda": 1e-5}


@dataclass(frozen=True)
class _Operator:
    """One line of the table."""

    name: str
    build: Callable[[], nn.Module]
    #: Channels of the input.
    channels: int
    #: How many times as fast as autograd the thesis makes the Jacobian.
    published: float


_OPERATORS = (
    _Operator("convolution 3 → 64, 3 × 3", lambda: nn.Conv2d(3, 64, 3, padding=1), 3, 8.3e3),
    _Operator("ReLU", nn.ReLU, 64, 1.2e6),
    _Operator("max-pooling 2 × 2", lambda: nn.MaxPool2d(2), 64, 1.5e5),
)


@dataclass(frozen=True)
class JacobianGeneration(Grid):
    """VGG-11's first convolution, ReLU and max-pooling: batch 1, float32."""

    #: Height and width of the operators' input.
    size: int = 32
    #: The number of columns that autograd computes; its time for the other columns is extrapolated.
    columns: int = 200

    name = "jacobian_generation"
    title = "Transposed Jacobians of VGG-11's first convolution, ReLU and max-pooling"
    source = "thesis, Table 3.1"
    devices = ("cpu", "cuda")

    def cases(self, context: Context) -> Iterable[_Operator]:
        torch.manual_seed(0)
        return _OPERATORS

    def measure(self, case: _Operator, context: Context) -> list[Row]:
        shape, device, module = (case.channels, self.size, self.size), context.device, case.build().to(context.place)
        try:
            (record,) = chain(module, shape).run(torch.randn(1, *shape).to(context.place))
            columns = _Columns(record.input, record.output, self.columns)
            columns.check(record.transposed_jacobian().to_scipy(), _TOLERANCE[device])
            functions = _functions(module, record, columns, device)
        except (RuntimeError, ValueError) as error:
            return [Row.missing("transposed Jacobian", reason(error), group=case.name)]
        rows, kernel, copy = Group(case.name), *(labelled(label, MODES[device][-1]) for label in (_KERNEL, _COPY))
        _add_sizes(rows, record.stage.transposed_pattern)
        extrapolated, peers = (_GRAD, _STACKED), (_GRAD, _STACKED, _EVERY, PRINTED)
        roles = {**dict.fromkeys(peers, "peer"), **dict.fromkeys((_OPERATOR, copy), "reference")}
        rows.in_turns(context, functions, per=dict.fromkeys(extrapolated, columns.count / columns.total), role=roles)
        for label in (kernel, _CALL):
            rows.add(replace(rows[label], floor=rows[copy].fastest))
        for label in extrapolated:
            time = amount((rows[label].median or 0.0) / columns.total, "s")
            note = f"{columns.count} of {columns.total:,} columns, {time} each, the rest extrapolated"
            rows.add(replace(rows[label], note=note))
        rows.compare("kernel / copy", kernel, copy, at=kernel, at_most=4)
        rows.compare("grad() / kernel", _GRAD, kernel)
        rows.compare("stacked / kernel", _STACKED, kernel, published=case.published)
        rows.compare("all of grad() / kernel", _EVERY, kernel)
        rows.compare("time / operator", _OVERHEAD, _OPERATOR, at=_OVERHEAD, at_most=OVERHEAD)
        rows.compare("grad() / call", _GRAD, _CALL)
        rows.compare("stacked / from nothing", _STACKED, _BOTH, published=case.published)
        rows.compare("Algorithms 2 to 4 / from nothing", PRINTED, _BOTH)
        return rows.rows()


def _functions(module: nn.Module, record: Record, columns: _Columns, device: str) -> dict[str, Call]:
    """The functions that are timed: the parts of making the Jacobian, a copy of as many bytes, and autograd."""
    stage, mode = record.stage, MODES[device][-1]
    (edge,) = stage.edges
    pattern, rule, prepared = stage.transposed_pattern, edge.rule, record.call(edge)
    runs = _kernel_runs(lambda: rule.transposed_values(prepared, pattern))
    source = record.input.new_ones(pattern.nnz)
    target, small_input = torch.empty_like(source), record.input.new_ones(1, record.stage.in_shape[0], 2, 2)

    def fresh_pattern() -> Pattern:
        fresh = rule.pattern(edge.call).T
        _ = fresh.indices
        return fresh

    def in_last_mode(call: Call) -> Call:
        """A launch takes longer than a kernel of microseconds; a graph has no launches."""
        return in_mode(ready(call), mode) if mode == GRAPH else call

    functions: dict[str, Call] = {
        "pattern, from nothing": fresh_pattern,
        labelled(_KERNEL, mode): in_last_mode(lambda: [run() for run in runs]),
        _OVERHEAD: _without_kernels(record.transposed_jacobian),
        _OPERATOR: lambda: module(small_input),
        _CALL: record.transposed_jacobian,
        _BOTH: lambda: rule.transposed_values(prepared, fresh_pattern()),
        labelled(_COPY, mode): in_last_mode(lambda: target.copy_(source)),
    }
    if isinstance(module, nn.Conv2d) and device == "cpu":
        weight, (_, height, width) = module.weight.detach().numpy(), record.stage.in_shape
        functions[PRINTED] = functools.partial(printed_algorithms, weight, (height, width))
    functions |= {_GRAD: columns.run, _STACKED: columns.run_stacked}
    if columns.total <= _ALL:
        functions[_EVERY] = _Columns(record.input, record.output, columns.total).run
    return functions


def printed_algorithms(weight: np.ndarray, size: tuple[int, int]) -> scipy.sparse.csr_array:
    """The transposed Jacobian of a 3 × 3 convolution with padding 1 as the thesis prints it, row by row.

    `weight` is ``(out_channels, in_channels, 3, 3)``, `size` the height and width of the images. Positions that wrap
    around an image's left or right edge stay, as zeros. In Algorithm 3, ``r >= w (h - 1)`` begins an image's last row.
    """
    (out_channels, in_channels, *_), (height, width) = weight.shape, size
    pixels = height * width
    columns, entries, lengths = [], [], []
    for row in range(in_channels * pixels):
        channel, pixel = divmod(row, pixels)
        first, last = int(pixel < width), 3 - int(pixel >= pixels - width)
        steps = np.arange(first - 1, last - 1)[:, None] * width + np.arange(-1, 2)
        places = (np.arange(out_channels)[:, None, None] * pixels + steps + pixel) % (out_channels * pixels)
        values = weight[:, channel, ::-1, ::-1][:, first:last].copy()
        if pixel % width == 0:
            values[:, :, 0] = 0
        if pixel % width == width - 1:
            values[:, :, 2] = 0
        order = np.argsort(places, axis=None)
        columns.append(places.reshape(-1)[order])
        entries.append(values.reshape(-1)[order])
        lengths.append(len(order))
    indptr = np.append(0, np.cumsum(lengths))
    shape = in_channels * pixels, out_channels * pixels
    return scipy.sparse.csr_array((np.concatenate(entries), np.concatenate(columns), indptr), shape=shape)


def _add_sizes(rows: Group, pattern: Pattern) -> None:
    """Add the entries, their sparsity, and the memory of a full matrix and of the values in float32."""
    with_indices = (4 * pattern.nnz + pattern.index_nbytes) / 2**20
    rows.value("entries", pattern.nnz, "count")
    rows.value("sparsity", pattern.sparsity, "share")
    rows.value("memory of the full matrix", 4 * math.prod(pattern.shape) / 2**20, "memory", "MiB")
    note = f"with indices {with_indices:.2f} MiB"
    rows.value("memory of the values", 4 * pattern.nnz / 2**20, "memory", "MiB", note=note)


def _kernel_runs(call: Call) -> list[Callable[[], None]]:
    """The kernels that a call runs, as functions that run them again on the same arrays."""
    runs: list[Callable[[], None]] = []

    def note(run: Callable[[], None]) -> None:
        run()
        runs.append(run)

    with intercepted(note):
        call()
    if not runs:
        raise RuntimeError("the call runs no kernel of jacsparse; time what it runs now")
    return runs


def _without_kernels(call: Call) -> Callable[[], None]:
    """The call without its kernels: all work from tensors to kernels and back."""

    def run() -> None:
        with intercepted(lambda _: None):
            call()

    return run


class _Columns:
    """Columns of a transposed Jacobian by autograd; each is the gradient of one output."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, count: int) -> None:
        self.x, self.y = x, y
        self.total = y.numel()
        self.count = min(count, self.total)
        # The columns are spread over the whole matrix.
        self.numbers = [math.floor(number * self.total / self.count) for number in range(self.count)]
        self.one_hot = torch.zeros_like(y)

    def column(self, number: int) -> torch.Tensor:
        """One column, in the input's shape."""
        flat = self.one_hot.view(-1)
        flat[number] = 1
        (gradient,) = torch.autograd.grad(self.y, self.x, self.one_hot, retain_graph=True)
        flat[number] = 0
        return gradient

    def run(self) -> None:
        """Compute all columns."""
        for number in self.numbers:
            self.column(number)

    def run_stacked(self) -> None:
        """Compute all columns as a dense matrix."""
        torch.stack([self.column(number).reshape(-1) for number in self.numbers], 1)

    def check(self, transposed: Any, tolerance: float) -> None:
        """Raise RuntimeError if one of our columns differs by more than a share of its largest entry."""
        ours = transposed.tocsc()
        for number in itertools.islice(self.numbers, 0, None, max(1, self.count // 10)):
            expected = self.column(number).reshape(-1).cpu().numpy()
            difference = np.abs(ours[:, [number]].toarray()[:, 0] - expected).max()
            if not difference <= tolerance * np.abs(expected).max():
                raise RuntimeError(f"column {number} differs from autograd's by {difference}")
