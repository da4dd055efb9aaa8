"""The plain recurrent network: ``h ← tanh(W_ih x + W_hh h + b)``, or ReLU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...codegen import any_nonzero, copy_elements
from ...runtime import flushing, kernel
from ..vector import multiply_rows, tanh
from .cell import Terms, Weights
from .fused import CHECKED, FusedCell, any_added, record_live_steps, row_of, scratch, write_zeros


@kernel
def _forward(first, last, sample, begin, count, direction, offset, block_size, x, w, relu, start, out, end):
    """``h = tanh(x + W h)``, or ReLU; `start` and `end` are the runs' first and last states."""
    size, width = start.shape[1], w.shape[1]
    zero = x.dtype.type(0)
    starts, ends, weights = start.reshape(-1), end.reshape(-1), w.reshape(-1)
    input_projection, shown = x.reshape(-1), out.reshape(-1)
    state, total = scratch(width, x), scratch(width, x)
    for block in range(first, last):
        run = block * block_size
        rows = min(block_size, len(sample) - run)
        for r in range(rows):
            copy_elements(state, r * width, starts, (run + r) * size, size)
        active = rows
        for step in range(count[run]):
            while count[run + active - 1] <= step:
                active -= 1
            for r in range(active):
                row = row_of(sample, begin, direction, offset, run + r, step)
                copy_elements(total, r * width, input_projection, row * size, size)
            multiply_rows(total, weights, 0, width, state, size, width, active)
            if relu:
                for i in range(active * width):
                    state[i] = zero if total[i] < zero else total[i]
            else:
                for i in range(active * width):
                    state[i] = tanh(total[i])
            for r in range(active):
                row = row_of(sample, begin, direction, offset, run + r, step)
                copy_elements(shown, row * size, state, r * width, size)
        for r in range(rows):
            copy_elements(ends, (run + r) * size, state, r * width, size)


@flushing
@kernel
def _backward(
    first, last, sample, begin, count, direction, offset, block_size,
    h, w, relu, grad_out, grad_end, grad_gates, grad_start, live_steps,
):  # fmt: skip
    """``v_t = g_t + Wᵀ (v_{t+1} ∘ f'_{t+1})``: writes ``v ∘ f'`` of each step, and each run's gradient of its start.

    `grad_out` or `grad_gates` without rows: there are no gradients of outputs, or those of gates are not wanted.
    """
    size, width = grad_end.shape[1], w.shape[1]
    zero, one = grad_end.dtype.type(0), grad_end.dtype.type(1)
    weights, outputs, added, written = w.reshape(-1), h.reshape(-1), grad_out.reshape(-1), grad_gates.reshape(-1)
    ends, starts = grad_end.reshape(-1), grad_start.reshape(-1)
    v, g = scratch(width, grad_end), scratch(width, grad_end)
    d, state = scratch(width, grad_end), scratch(width, grad_end)
    for block in range(first, last):
        run = block * block_size
        rows = min(block_size, len(sample) - run)
        for r in range(rows):
            copy_elements(v, r * width, ends, (run + r) * size, size)
        active, alive, reached = rows, True, 0
        for back in range(count[run]):
            while count[run + active - 1] <= back:
                active -= 1
            if not alive:
                if len(added):
                    alive = any_added(added, size, active, sample, begin, count, direction, offset, run, back)
                if not alive:
                    continue
                write_zeros(written, size, rows, sample, begin, count, direction, offset, run, reached, back)
            reached = back + 1
            for r in range(active):
                row = row_of(sample, begin, direction, offset, run + r, count[run + r] - 1 - back)
                copy_elements(state, r * width, outputs, row * size, size)
                if len(added):
                    copy_elements(g, r * width, added, row * size, size)
            if relu:
                for i in range(active * width):
                    # Not `> zero`: the gradient of a NaN passes, as in PyTorch.
                    d[i] = zero if state[i] <= zero else v[i] + g[i]
            else:
                for i in range(active * width):
                    d[i] = (v[i] + g[i]) * (one - state[i] * state[i])
            if len(written):
                for r in range(active):
                    row = row_of(sample, begin, direction, offset, run + r, count[run + r] - 1 - back)
                    copy_elements(written, row * size, d, r * width, size)
            for i in range(active * width):
                v[i] = zero
            multiply_rows(v, weights, 0, width, d, size, width, active)
            if back % CHECKED == 0:
                alive = any_nonzero(v, 0, active * width)
        record_live_steps(live_steps, written, size, rows, sample, begin, count, direction, offset, run, reached)
        for r in range(rows):
            copy_elements(starts, (run + r) * size, v, r * width, size)


@dataclass(frozen=True)
class RnnCell(FusedCell):
    """The cell of `torch.nn.RNN`."""

    relu: bool = False
    gates = 1
    terms = (Terms(gates=(0,), states=()),)
    kernels = (_forward, _backward)

    @property
    def mode(self) -> str:
        return "RNN_RELU" if self.relu else "RNN_TANH"

    @property
    def bounded(self) -> bool:
        return not self.relu

    def step(
        self, input_projection: torch.Tensor, recurrent_projection: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        return (
            torch.relu(input_projection + recurrent_projection)
            if self.relu
            else torch.tanh(input_projection + recurrent_projection)
        )

    def limit(self, states: torch.Tensor, initial_state: torch.Tensor) -> torch.Tensor:
        return states.clamp(min=0) if self.relu else states.clamp(-1, 1)

    def extra(self, weights: Weights) -> bool:
        return self.relu
