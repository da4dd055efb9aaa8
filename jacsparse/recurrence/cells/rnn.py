"""The plain recurrent network: ``h ← tanh(W_ih x + W_hh h + b)``, or ReLU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...runtime import flushing, inlined, kernel
from ..vector import tanh
from .cell import Terms, Weights
from .fused import FusedCell, scratch, take_backward, take_forward


@inlined
def _step(elements, vectors, relu):
    total, state = vectors
    if relu:
        for i in range(elements):
            state[i] = 0 if total[i] < 0 else total[i]
    else:
        for i in range(elements):
            state[i] = tanh(total[i])


@kernel
def _forward(first, last, sample, begin, count, direction, offset, block_size, x, w, relu, start, out, end):
    """``h = tanh(x + W h)``, or ReLU; `start` and `end` are the runs' first and last states."""
    width = w.shape[1]
    total, state = scratch(width, x), scratch(width, x)
    take_forward(
        _step, (total, state), relu, first, last, sample, begin, count, direction, offset, block_size,
        (total,), (), (total,), (state,), (), x, w, x, start, out, x[:0], end,
    )  # fmt: skip


@inlined
def _back(elements, vectors, relu):
    v, g, d, state = vectors
    zero, one = v.dtype.type(0), v.dtype.type(1)
    if relu:
        for i in range(elements):
            # Not `> zero`: the gradient of a NaN passes, as in PyTorch.
            d[i] = zero if state[i] <= zero else v[i] + g[i]
    else:
        for i in range(elements):
            d[i] = (v[i] + g[i]) * (one - state[i] * state[i])
    for i in range(elements):
        v[i] = zero


@flushing
@kernel
def _backward(
    first, last, sample, begin, count, direction, offset, block_size,
    h, w, relu, grad_out, grad_end, grad_gates, grad_start, live_steps,
):  # fmt: skip
    """``v_t = g_t + Wᵀ (v_{t+1} ∘ f'_{t+1})``: writes ``v ∘ f'`` of each step, and each run's gradient of its start.

    `grad_out` or `grad_gates` without rows: there are no gradients of outputs, or those of gates are not wanted.
    """
    width = w.shape[1]
    v, g = scratch(width, grad_end), scratch(width, grad_end)
    d, state = scratch(width, grad_end), scratch(width, grad_end)
    take_backward(
        _back, (v, g, d, state), relu, first, last, sample, begin, count, direction, offset, block_size,
        (state,), h, (), h, h, begin, (v,), g, (d,), (d,), w, grad_out, grad_end, grad_gates, grad_start, live_steps,
    )  # fmt: skip


@dataclass(frozen=True)
class RnnCell(FusedCell):
    """The cell of `torch.nn.RNN`."""

    relu: bool = False
    gates = grad_width = 1
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

    def forward_constants(self, weights: Weights) -> tuple[Any, ...]:
        return (self.relu,)

    @property
    def backward_constants(self) -> tuple[Any, ...]:
        return (self.relu,)
