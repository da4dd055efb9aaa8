"""Runs of kernels on tensors, which a recording of a whole model sees, and the memory of what they compute."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import register_flop_formula

from ..runtime import MEMORY_POOL, SMALLEST, KernelRun, run_rows

#: Those of blocks of samples: blocks, channels, rows, columns, and the samples of a block.
BLOCK_DIMENSIONS = 5
#: Some tensors, and None where an optional one is left out.
Tensors = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class TensorKernelRun:
    """A kernel that was run on tensors, so that it can be run on others.

    Those of `BLOCK_DIMENSIONS` are blocks of samples; all others belong to all blocks.
    """

    kernel: Callable[..., Any]
    rows: int
    #: What makes the kernel's arguments from the inputs and the outputs.
    arguments: Callable[..., tuple[Any, ...]]
    inputs: Tensors
    outputs: Tensors
    lanes: int
    #: The number of blocks, where each has as many rows, which follow each other; else 0.
    blocks: int = 0

    def with_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> TensorKernelRun:
        """The same kernel on other tensors."""
        inputs, outputs = (
            tuple([None if each is None else change(each) for each in tensors])
            for tensors in (self.inputs, self.outputs)
        )
        return replace(self, inputs=inputs, outputs=outputs)

    def of_blocks(self, count: int) -> TensorKernelRun:
        """The same kernel for fewer blocks, whose tensors are yet to be given."""
        return replace(self, rows=self.rows // self.blocks * count, blocks=count)

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
    blocks: int = 0,
) -> None:
    """Run ``kernel(first, last, *arguments(*inputs, *outputs))`` on ranges that cover all rows.

    The kernel writes all elements of the outputs, and no others. `blocks` tells that it goes from block to block.
    """
    run_rows(kernel, rows, *arguments(*inputs, *outputs), lanes=lanes)
    if (record := recorder.get()) is not None:
        record(TensorKernelRun(kernel, rows, arguments, inputs, outputs, lanes, blocks))


#: An operator that does nothing but tell dispatch modes what kernels do, as ``torch.utils.flop_counter`` asks.
_LIBRARY = torch.library.Library("jacsparse", "DEF")
_LIBRARY.define("multiply_adds(Tensor weights, int count) -> ()")
_LIBRARY.impl("multiply_adds", lambda weights, count: None, "CompositeExplicitAutograd")


@register_flop_formula(torch.ops.jacsparse.multiply_adds)  # type: ignore[untyped-decorator]
def _flop(weights: Any, count: int, **kwargs: Any) -> int:
    return 2 * count


def tell_multiply_adds(weights: torch.Tensor, count: int) -> None:
    """Tell dispatch modes, where there are any, how often a kernel multiplies and adds; the tensor is any one."""
    if torch._C._len_torch_dispatch_stack():
        torch.ops.jacsparse.multiply_adds(weights, count)


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor that begins at a cache line, in memory of an earlier one where it is large."""
    if math.prod(shape) * dtype.itemsize < SMALLEST:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.from_numpy(MEMORY_POOL.empty(shape, numpy_dtype(dtype)))


def numpy_dtype(dtype: torch.dtype) -> Any:
    """NumPy's float32 or float64."""
    return np.float32 if dtype is torch.float32 else np.float64
