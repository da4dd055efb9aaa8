"""Cells whose steps are fused into kernels, which go through runs of consecutive steps, forward and backward.

A *run* is some consecutive steps of one sample in one direction of time: a whole sequence, or a chunk of it. Step ``i``
of run ``r`` is at time ``t = begin[r] + i * direction``, in row ``offset[t] + sample[r]`` of the arrays that have a row
for each time and sample, as a `PackedSequence` orders them. Runs come longest first and are taken `block_size` at a
time, at most `ROWS`: those share their passes over the weights, and each one's arithmetic is the same whichever others
it is with.

Weights are padded. Forward, ``w[k, g * width + j]`` is the weight from element ``k`` of the state to element ``j`` of
gate ``g``; backward, ``w[g * width + k, j]`` is that from element ``k`` of gate ``g`` to element ``j`` of the state.

Backward kernels compute in the dtype of `grad_end`, whatever the dtypes of the saved states and weights.
On x86 processors gradients below the smallest normal number become zeros. Steps that no gradient comes to are skipped.
A run's last step is always computed, so that a NaN of any earlier state shows. Where `live_steps` has elements, it
takes how many steps of each run, from its end, were computed; the gates' gradients of the others are not written then,
and count as zeros.

All loops over elements are over whole arrays by a plain index, for LLVM to vectorise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from ...codegen import any_nonzero
from ...runtime import inlined, inlined_with_arrays, run_rows
from ..sequences import DeviceRuns, Runs, rows_of
from ..vector import ROWS
from .cell import Cell, Saved, Weights

#: Every so many steps it is looked whether any gradient is left.
CHECKED = 16


@inlined
def row_of(sample, begin, direction, offset, run, step):
    """In which row a run's step is."""
    return offset[begin[run] + step * direction] + sample[run]


@inlined_with_arrays
def scratch(width, like):
    return np.zeros(ROWS * width, like.dtype)


@inlined
def any_added(added, size, active, sample, begin, count, direction, offset, run, back):
    """Whether anything is added to the gradients so many steps from the runs' ends."""
    # No branch and one way out: else Numba counts references to each array at each call.
    nonzero = False
    for r in range(active):
        row = row_of(sample, begin, direction, offset, run + r, count[run + r] - 1 - back)
        nonzero |= any_nonzero(added, row * size, size)
    return nonzero


@inlined
def write_zeros(written, columns, rows, sample, begin, count, direction, offset, run, since, until):
    """The gates' gradients between two numbers of steps from the runs' ends, where they are wanted and all are zero."""
    if len(written):
        for r in range(rows):
            for back in range(since, min(until, count[run + r])):
                row = row_of(sample, begin, direction, offset, run + r, count[run + r] - 1 - back)
                written[row * columns : (row + 1) * columns] = 0


@inlined
def record_live_steps(live_steps, written, columns, rows, sample, begin, count, direction, offset, run, reached):
    """Tell, where that is asked for, how many steps from the runs' ends were reached; else the others are zeros."""
    if len(live_steps):
        for r in range(rows):
            live_steps[run + r] = min(reached, count[run + r])
    else:
        write_zeros(written, columns, rows, sample, begin, count, direction, offset, run, reached, count[run])


class FusedCell(Cell):
    """A cell with a forward and a backward kernel for the CPU.

    Attributes
    ----------
    kernels : tuple
        The forward and the backward kernel.
    """

    saved_vectors = 0
    kernels: ClassVar[tuple[Any, Any]]

    @property
    def _recurrent(self) -> Sequence[int]:
        return range(self.gates)

    def extra(self, weights: Weights) -> Any:
        """The kernels' argument after the weights, which not every cell reads."""
        return False

    def forward(
        self,
        runs: Runs | DeviceRuns,
        input_projection: torch.Tensor,
        weights: Weights,
        start: torch.Tensor,
        saved: Saved,
    ) -> torch.Tensor:
        end = torch.empty_like(start)
        written = (saved.output, saved.gates) if self.saved_vectors else (saved.output,)
        arguments = (input_projection, weights.forward_rows, self.extra(weights), start, *written, end)
        self._run(self.kernels[0], runs, weights, arguments)
        return end

    def backward(
        self,
        runs: Runs | DeviceRuns,
        weights: Weights,
        saved: Saved,
        grad_output: torch.Tensor | None,
        grad_end: torch.Tensor,
        grad_gates: torch.Tensor | None,
        live_steps: np.ndarray | None = None,
    ) -> torch.Tensor:
        grad_start = torch.empty_like(grad_end)
        reached = np.empty(0, np.int64) if live_steps is None else live_steps
        past = (saved.gates, saved.initial, runs.sequences.first_times(runs.direction)) if self.saved_vectors else ()
        gradients = grad_output, grad_end, grad_gates, grad_start, reached
        arguments = (saved.output, *past, weights.backward_rows, self.extra(weights), *gradients)
        self._run(self.kernels[1], runs, weights, arguments)
        return grad_start

    def _run(self, kernel: Any, runs: Runs | DeviceRuns, weights: Weights, arguments: tuple[Any, ...]) -> None:
        assert isinstance(runs, Runs)
        size = weights.size
        # Elementary operations of one step of one sample.
        step = self.gates * (size * -(-size // 8) + 4 * size)
        blocks = runs.in_blocks(runs.block_size, step)
        run_rows(kernel, *blocks, *rows_of(arguments, weights.hidden))
