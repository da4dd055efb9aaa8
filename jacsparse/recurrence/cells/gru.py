"""The gated recurrent unit (thesis, equations 4.3 and 4.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...runtime import flushing, inlined, kernel
from ..vector import sigmoid, tanh
from .cell import Terms, Weights
from .fused import FusedCell, scratch, take_backward, take_forward


@inlined
def _step(elements, vectors, _):
    reset, update, candidate, inner, state = vectors
    for i in range(elements):
        reset[i] = sigmoid(reset[i])
    for i in range(elements):
        update[i] = sigmoid(update[i])
    for i in range(elements):
        candidate[i] = tanh(candidate[i] + reset[i] * inner[i])
    for i in range(elements):
        state[i] = candidate[i] + update[i] * (state[i] - candidate[i])


@kernel
def _forward(first, last, sample, begin, count, direction, offset, block_size, x, w, bias, start, out, gates, end):
    """Equation 4.3: ``r = σ(x_r + W_r h)``, ``z = σ(x_z + W_z h)``, ``n = tanh(x_n + r (W_n h + b))``.

    ``h ← n + z (h - n)``. Where `gates` has rows, r, z, n and ``m = W_n h + b`` are saved there.
    """
    width = w.shape[1] // 3
    reset, update, candidate = scratch(width, x), scratch(width, x), scratch(width, x)
    inner, state = scratch(width, x), scratch(width, x)
    take_forward(
        _step, (reset, update, candidate, inner, state), False,
        first, last, sample, begin, count, direction, offset, block_size,
        (reset, update, candidate), (inner,), (reset, update, inner), (state,), (reset, update, candidate, inner),
        x, w, bias, start, out, gates, end,
    )  # fmt: skip


@inlined
def _back(elements, vectors, _):
    v, g, before, reset, update, candidate, inner = vectors
    one = v.dtype.type(1)
    for i in range(elements):
        grad = v[i] + g[i]
        grad_candidate = grad * (one - update[i]) * (one - candidate[i] * candidate[i])
        v[i] = grad * update[i]
        update[i] = grad * (before[i] - candidate[i]) * update[i] * (one - update[i])
        candidate[i] = grad_candidate
        grad_inner = grad_candidate * reset[i]
        reset[i] = grad_inner * inner[i] * (one - reset[i])
        inner[i] = grad_inner


@flushing
@kernel
def _backward(
    first, last, sample, begin, count, direction, offset, block_size,
    h, gates, initial, first_times, w, grad_out, grad_end, grad_gates, grad_start, live_steps,
):  # fmt: skip
    """Writes the gradients of what enters r, z, n and of m; `initial` is the state before ``first_times[sample]``."""
    width = w.shape[1]
    v, g, before = scratch(width, grad_end), scratch(width, grad_end), scratch(width, grad_end)
    reset, update = scratch(width, grad_end), scratch(width, grad_end)
    candidate, inner = scratch(width, grad_end), scratch(width, grad_end)
    past = reset, update, candidate, inner
    take_backward(
        _back, (v, g, before, *past), False, first, last, sample, begin, count, direction, offset, block_size,
        past, gates, (before,), h, initial, first_times, (v,), g, past, (reset, update, inner), w,
        grad_out, grad_end, grad_gates, grad_start, live_steps,
    )  # fmt: skip


@dataclass(frozen=True)
class GruCell(FusedCell):
    """The cell of `torch.nn.GRU`."""

    gates = 3
    grad_width = saved_vectors = 4
    terms = (Terms(gates=(0, 1, 2), states=(0,)),)
    mode = "GRU"
    bounded = True
    kernels = (_forward, _backward)

    def step(
        self, input_projection: torch.Tensor, recurrent_projection: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        (r, z, n), (of_r, of_z, of_n) = input_projection.chunk(3, dim=1), recurrent_projection.chunk(3, dim=1)
        candidate = torch.tanh(n + torch.sigmoid(r + of_r) * of_n)
        return candidate + torch.sigmoid(z + of_z) * (state - candidate)

    def limit(self, states: torch.Tensor, initial_state: torch.Tensor) -> torch.Tensor:
        # Between the state before and a tanh.
        bound = initial_state.abs().amax(dim=1, keepdim=True).clamp(min=1)
        return torch.clamp(states, -bound, bound)

    def grad_columns(self, size: int) -> tuple[slice, list[slice]]:
        # r, z and n from the input; r, z and m = W_n h + b from the state.
        return slice(0, 3 * size), [slice(0, 2 * size), slice(3 * size, 4 * size)]

    def entering_bias(self, bias: torch.Tensor, hidden_bias: torch.Tensor) -> torch.Tensor:
        # n's hidden bias is inside the product with r.
        outside = len(bias) // 3 * 2
        return torch.cat([bias[:outside] + hidden_bias[:outside], bias[outside:]])

    def forward_constants(self, weights: Weights) -> tuple[Any, ...]:
        size = weights.size
        bias = weights.hidden.new_zeros(size) if weights.hidden_bias is None else weights.hidden_bias[2 * size :]
        return (bias,)
