"""Long short-term memory, without projections."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...runtime import flushing, inlined, kernel
from ..vector import sigmoid, tanh
from .cell import Terms
from .fused import FusedCell, scratch, take_backward, take_forward


@inlined
def _step(elements, vectors, _):
    input_gate, forget_gate, candidate, output_gate, cell, state = vectors
    for i in range(elements):
        input_gate[i] = sigmoid(input_gate[i])
    for i in range(elements):
        forget_gate[i] = sigmoid(forget_gate[i])
    for i in range(elements):
        candidate[i] = tanh(candidate[i])
    for i in range(elements):
        output_gate[i] = sigmoid(output_gate[i])
    for i in range(elements):
        cell[i] = forget_gate[i] * cell[i] + input_gate[i] * candidate[i]
    for i in range(elements):
        state[i] = output_gate[i] * tanh(cell[i])


@kernel
def _forward(first, last, sample, begin, count, direction, offset, block_size, x, w, start, out, gates, end):
    """``c ← σ(f) c + σ(i) tanh(g)``, ``h ← σ(o) tanh(c)``; states hold h and then c.

    Where `gates` has rows, i, f, g, o and c are saved there.
    """
    width = w.shape[1] // 4
    state, cell = scratch(width, x), scratch(width, x)
    entering = scratch(width, x), scratch(width, x), scratch(width, x), scratch(width, x)
    take_forward(
        _step, (*entering, cell, state), False, first, last, sample, begin, count, direction, offset, block_size,
        entering, (), entering, (state, cell), (*entering, cell), x, w, x, start, out, gates, end,
    )  # fmt: skip


@inlined
def _back(elements, vectors, _):
    v, cell_v, g, before, input_gate, forget_gate, candidate, output_gate, cell = vectors
    zero, one = v.dtype.type(0), v.dtype.type(1)
    for i in range(elements):
        cell[i] = tanh(cell[i])
    for i in range(elements):
        grad = v[i] + g[i]
        grad_cell = cell_v[i] + grad * output_gate[i] * (one - cell[i] * cell[i])
        cell_v[i] = grad_cell * forget_gate[i]
        grad_input_gate = grad_cell * candidate[i] * input_gate[i] * (one - input_gate[i])
        candidate[i] = grad_cell * input_gate[i] * (one - candidate[i] * candidate[i])
        input_gate[i] = grad_input_gate
        forget_gate[i] = grad_cell * before[i] * forget_gate[i] * (one - forget_gate[i])
        output_gate[i] = grad * cell[i] * output_gate[i] * (one - output_gate[i])
        v[i] = zero


@flushing
@kernel
def _backward(
    first, last, sample, begin, count, direction, offset, block_size,
    gates, initial, first_times, w, grad_out, grad_end, grad_gates, grad_start, live_steps,
):  # fmt: skip
    """Writes the gradients of what enters i, f, g and o; `initial` is the state before time ``first_times[sample]``."""
    width = w.shape[1]
    v, cell_v = scratch(width, grad_end), scratch(width, grad_end)
    g, before, cell = scratch(width, grad_end), scratch(width, grad_end), scratch(width, grad_end)
    entering = (
        scratch(width, grad_end), scratch(width, grad_end), scratch(width, grad_end), scratch(width, grad_end)
    )  # fmt: skip
    take_backward(
        _back, (v, cell_v, g, before, *entering, cell), False,
        first, last, sample, begin, count, direction, offset, block_size,
        (*entering, cell), gates, (before,), gates, initial, first_times, (v, cell_v), g, entering, entering, w,
        grad_out, grad_end, grad_gates, grad_start, live_steps,
    )  # fmt: skip


@dataclass(frozen=True)
class LstmCell(FusedCell):
    """The cell of `torch.nn.LSTM`, whose state is h, then c."""

    gates = grad_width = 4
    states = 2
    saved_vectors = 5
    terms = (Terms(gates=(0, 1, 2, 3), states=(1,)), Terms(gates=(0, 1, 2), states=(1,)))
    mode = "LSTM"
    bounded, reads_output = True, False
    kernels = (_forward, _backward)

    def step(
        self, input_projection: torch.Tensor, recurrent_projection: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        input_gate, forget_gate, candidate, output_gate = (input_projection + recurrent_projection).chunk(4, dim=1)
        c = torch.sigmoid(forget_gate) * state.chunk(2, dim=1)[1] + torch.sigmoid(input_gate) * torch.tanh(candidate)
        return torch.cat([torch.sigmoid(output_gate) * torch.tanh(c), c], dim=1)

    def limit(self, states: torch.Tensor, initial_state: torch.Tensor) -> torch.Tensor:
        # The cell's own state has no bound.
        size = states.shape[1] // 2
        return torch.cat([states[:, :size].clamp(-1, 1), states[:, size:]], dim=1)
