"""Transposed Jacobians of single operators, against autograd a column at a time: the last column of Table 3.1."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from jacsparse.patterns import Pattern, _runtime, _values
from torch import nn

from jacsparse import chain

from ._context import Context
from ._experiment import Experiment, Row, compare
from ._figures import bars
from ._text import amount

__all__ = ["JacobianGeneration"]


@dataclass(frozen=True)
class _Operator:
    """One line of the table.

    Attributes
    ----------
    name : str
        What it is called there.
    build : callable
        Makes the module.
    channels : int
        Of its input.
    target, published : float
        By how much the call from tensors should be faster than autograd, and what the thesis prints.
    """

    name: str
    build: Callable[[], nn.Module]
    channels: int
    target: float
    published: float


_OPERATORS = (
    _Operator("convolution 3 → 64, 3 × 3", lambda: nn.Conv2d(3, 64, 3, padding=1), 3, 5e4, 8.3e3),
    _Operator("ReLU", nn.ReLU, 64, 5e5, 1.2e6),
    _Operator("max-pooling 2 × 2", lambda: nn.MaxPool2d(2), 64, 5e4, 1.5e5),
)


@dataclass(frozen=True)
class JacobianGeneration(Experiment):
    """VGG-11's first convolution, ReLU and max-pooling: batch 1, float32.

    Attributes
    ----------
    size : int
        Height and width of the operators' input.
    columns : int
        How many columns autograd computes; the others are taken to last as long.
    """

    size: int = 32
    columns: int = 200

    name = "jacobian_generation"
    title = "Transposed Jacobians of VGG-11's first convolution, ReLU and max-pooling"
    source = "thesis, Table 3.1"

    def run(self, context: Context) -> list[Row]:
        torch.manual_seed(0)
        rows: list[Row] = []
        for operator in _OPERATORS:
            rows += self._operator(operator, context)
        return rows

    def figure(self, rows: Sequence[Row], path: Path) -> None:
        bars(rows, path, self.title)

    def _operator(self, operator: _Operator, context: Context) -> list[Row]:
        shape = (operator.channels, self.size, self.size)
        module = operator.build()
        (record,) = chain(module, shape).run(torch.randn(1, *shape))
        stage = record.stage
        pattern, rule, call = stage.pattern, stage.rule, record._call(slice(None))
        kernels = _kernel_runs(lambda: rule.transposed_values(call, pattern))
        source, target = torch.ones(pattern.nnz), torch.empty(pattern.nnz)
        columns = _Columns(record.input, record.output, self.columns)
        columns.check(record.transposed_jacobian().to_scipy())

        def fresh() -> Pattern:
            made = rule.pattern(stage.call).T
            _ = made.indices
            return made

        say = context.say
        context.say = lambda line: say(f"{operator.name}, {line}")
        found = context.times(
            {
                "pattern": fresh,
                "values": lambda: [run() for run in kernels],
                "call": record.transposed_jacobian,
                "both": lambda: rule.transposed_values(call, fresh()),
                "copy": lambda: target.copy_(source),
                "autograd": columns.run,
            }
        )
        context.say = say

        def row(label: str, key: str, **rest: Any) -> Row:
            return Row.timed(label, found[key], group=operator.name, **rest)

        copy = row("copy of as many bytes", "copy", role="reference")
        values = row("values, kernel alone", "values", floor=copy.fastest)
        values = replace(values, comparisons=compare("kernel / copy", values, copy, at_most=4))
        call = row("call from tensors", "call", floor=copy.fastest)
        share = columns.count / columns.total
        autograd = row(
            "autograd, a column at a time",
            "autograd",
            per=share,
            role="peer",
            note=f"{columns.count} of {columns.total:,} columns, the rest extrapolated; "
            f"{np.median(found['autograd'].seconds) / columns.count * 1e6:.1f} µs a column",
        )
        targets = {"at_least": operator.target, "published": operator.published}
        assert call.median is not None and values.median is not None
        return [
            _size_row(pattern, operator.name),
            row("pattern, from nothing", "pattern"),
            values,
            replace(
                call,
                note=f"{amount(call.median - values.median, 's')} more than the kernel",
                comparisons=compare("autograd / call", autograd, call, **targets),
            ),
            row("pattern and values, from nothing", "both"),
            copy,
            autograd,
        ]


def _size_row(pattern: Pattern, group: str) -> Row:
    mebibytes = 4 * pattern.nnz / 2**20
    with_indices = (4 * pattern.nnz + pattern.index_nbytes) / 2**20
    note = f"sparsity {pattern.sparsity:.5f}; values {mebibytes:.2f} MiB, with indices {with_indices:.2f} MiB"
    return Row.of_value("entries", pattern.nnz, "count", group=group, note=note, data={"sparsity": pattern.sparsity})


def _kernel_runs(call: Callable[[], object]) -> list[Callable[[], None]]:
    """The kernels that a call runs, each as a function that runs it again on the very same arrays."""
    runs: list[Callable[[], None]] = []
    original = _runtime.run_rows

    def note(*args: Any, **options: Any) -> None:
        original(*args, **options)
        runs.append(lambda: original(*args, **options))

    with mock.patch.object(_values, "run_rows", note):
        call()
    if not runs:
        raise RuntimeError("the call runs no kernel of jacsparse.patterns; time what it runs now")
    return runs


class _Columns:
    """Columns of a transposed Jacobian by autograd: the gradient of one output each."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, count: int) -> None:
        self.x, self.y = x, y
        self.total = y.numel()
        self.count = min(count, self.total)
        # Spread over the whole matrix.
        self.chosen = [math.floor(number * self.total / self.count) for number in range(self.count)]
        self.one_hot = torch.zeros_like(y)

    def column(self, number: int) -> torch.Tensor:
        """One column, in the input's shape."""
        flat = self.one_hot.view(-1)
        flat[number] = 1
        (gradient,) = torch.autograd.grad(self.y, self.x, self.one_hot, retain_graph=True)
        flat[number] = 0
        return gradient

    def run(self) -> None:
        """All chosen columns."""
        for number in self.chosen:
            self.column(number)

    def check(self, transposed: Any) -> None:
        """Raise RuntimeError where a column of ours is another one."""
        ours = transposed.tocsc()
        for number in itertools.islice(self.chosen, 0, None, max(1, self.count // 10)):
            expected = self.column(number).reshape(-1).numpy()
            found = ours[:, [number]].toarray()[:, 0]
            if not np.array_equal(found, expected):
                raise RuntimeError(f"column {number} differs from autograd's by {np.abs(found - expected).max()}")
