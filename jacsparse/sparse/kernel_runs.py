"""Runs of kernels on tensors, which a recording of a whole model sees, and the memory of what they compute."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..runtime import MEMORY_POOL, SMALLEST, KernelRun, run_rows

#: Some tensors, and None where an optional one is left out.
Tensors = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class TensorKernelRun:
    """A kernel that was run on tensors, so that it can be run on others."""

    kernel: Callable[..., Any]
    rows: int
    #: What makes the kernel's arguments from the inputs and the outputs.
    arguments: Callable[..., tuple[Any, ...]]
    inputs: Tensors
    outputs: Tensors
    lanes: int

    def prepared(self) -> KernelRun:
        """The run with its arguments, which name the tensors by their addresses."""
        return KernelRun(self.kernel, self.rows, self.arguments(*self.inputs, *self.outputs), self.lanes)


#: What is told of each run on this thread, if anything is.
recorder: ContextVar[Callable[[TensorKernelRun], None] | None] = ContextVar("recorder", default=None)


def run_kernel(
    kernel: Callable[..., Any],
    rows: int,
    arguments: Callable[..., tuple[Any, ...]],
    inputs: Tensors,
    outputs: Tensors,
    *,
    lanes: int,
) -> None:
    """Run ``kernel(first, last, *arguments(*inputs, *outputs))`` on ranges that cover all rows.

    The kernel writes all elements of the outputs, and no others.
    """
    run_rows(kernel, rows, *arguments(*inputs, *outputs), lanes=lanes)
    if (record := recorder.get()) is not None:
        record(TensorKernelRun(kernel, rows, arguments, inputs, outputs, lanes))


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor that begins at a cache line, in memory of an earlier one where it is large."""
    if math.prod(shape) * dtype.itemsize < SMALLEST:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.from_numpy(MEMORY_POOL.empty(shape, numpy_dtype(dtype)))


def numpy_dtype(dtype: torch.dtype) -> Any:
    """NumPy's float32 or float64."""
    return np.float32 if dtype is torch.float32 else np.float64
