"""The gated recurrent unit (thesis, equations 4.3 and 4.4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...codegen import any_nonzero, copy_elements
from ...runtime import flushing, kernel
from ..vector import join_row, multiply_rows, sigmoid, split_row, tanh
from .cell import Terms, Weights
from .fused import CHECKED, FusedCell, any_added, record_live_steps, row_of, scratch, write_zeros


@kernel
def _forward(first, last, sample, begin, count, direction, offset, block_size, x, w, bias, start, out, gates, end):
    """Equation 4.3: ``r = σ(x_r + W_r h)``, ``z = σ(x_z + W_z h)``, ``n = tanh(x_n + r (W_n h + b))``.

    ``h ← n + z (h - n)``. Where `gates` has rows, r, z, n and ``m = W_n h + b`` are saved there.
    """
    size, width = start.shape[1], w.shape[1] // 3
    starts, ends, weights = start.reshape(-1), end.reshape(-1), w.reshape(-1)
    input_projection, shown = x.reshape(-1), out.reshape(-1)
    saved = gates.reshape(-1)
    state, reset, update = scratch(width, x), scratch(width, x), scratch(width, x)
    candidate, inner = scratch(width, x), scratch(width, x)
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
                at = 3 * size * row_of(sample, begin, direction, offset, run + r, step)
                split_row((reset, update, candidate), r * width, input_projection, at, size)
                copy_elements(inner, r * width, bias, 0, size)
            multiply_rows((reset, update, inner), weights, width, 3 * width, state, size, width, active)
            for i in range(active * width):
                reset[i] = sigmoid(reset[i])
            for i in range(active * width):
                update[i] = sigmoid(update[i])
            for i in range(active * width):
                candidate[i] = tanh(candidate[i] + reset[i] * inner[i])
            for i in range(active * width):
                state[i] = candidate[i] + update[i] * (state[i] - candidate[i])
            for r in range(active):
                row = row_of(sample, begin, direction, offset, run + r, step)
                copy_elements(shown, row * size, state, r * width, size)
                if len(saved):
                    join_row(saved, 4 * row * size, (reset, update, candidate, inner), r * width, size)
        for r in range(rows):
            copy_elements(ends, (run + r) * size, state, r * width, size)


@flushing
@kernel
def _backward(
    first, last, sample, begin, count, direction, offset, block_size,
    h, gates, initial, first_times, w, _, grad_out, grad_end, grad_gates, grad_start, live_steps,
):  # fmt: skip
    """Writes the gradients of what enters r, z, n and of m; `initial` is the state before ``first_times[sample]``."""
    size, width = grad_end.shape[1], w.shape[1]
    one, part = grad_end.dtype.type(1), width * width
    weights, outputs, first_states, saved = w.reshape(-1), h.reshape(-1), initial.reshape(-1), gates.reshape(-1)
    added, written = grad_out.reshape(-1), grad_gates.reshape(-1)
    ends, starts = grad_end.reshape(-1), grad_start.reshape(-1)
    v, g, before = scratch(width, grad_end), scratch(width, grad_end), scratch(width, grad_end)
    reset, update = scratch(width, grad_end), scratch(width, grad_end)
    candidate, inner = scratch(width, grad_end), scratch(width, grad_end)
    entering = reset, update, candidate, inner
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
                write_zeros(written, 4 * size, rows, sample, begin, count, direction, offset, run, reached, back)
            reached = back + 1
            for r in range(active):
                who, time = sample[run + r], begin[run + r] + (count[run + r] - 1 - back) * direction
                row = offset[time] + who
                split_row(entering, r * width, saved, 4 * row * size, size)
                if time == first_times[who]:
                    copy_elements(before, r * width, first_states, who * size, size)
                else:
                    copy_elements(before, r * width, outputs, (offset[time - direction] + who) * size, size)
                if len(added):
                    copy_elements(g, r * width, added, row * size, size)
            for i in range(active * width):
                grad = v[i] + g[i]
                grad_candidate = grad * (one - update[i]) * (one - candidate[i] * candidate[i])
                v[i] = grad * update[i]
                update[i] = grad * (before[i] - candidate[i]) * update[i] * (one - update[i])
                candidate[i] = grad_candidate
                grad_inner = grad_candidate * reset[i]
                reset[i] = grad_inner * inner[i] * (one - reset[i])
                inner[i] = grad_inner
            if len(written):
                for r in range(active):
                    row = row_of(sample, begin, direction, offset, run + r, count[run + r] - 1 - back)
                    join_row(written, 4 * row * size, entering, r * width, size)
            multiply_rows(v, weights, part, width, (reset, update, inner), size, width, active)
            if back % CHECKED == 0:
                alive = any_nonzero(v, 0, active * width)
        record_live_steps(live_steps, written, 4 * size, rows, sample, begin, count, direction, offset, run, reached)
        for r in range(rows):
            copy_elements(starts, (run + r) * size, v, r * width, size)


@dataclass(frozen=True)
class GruCell(FusedCell):
    """The cell of `torch.nn.GRU`."""

    gates = 3
    saved_vectors = 4
    # r, z and n from the input; r, z and m = W_n h + b from the state, whose bias is inside the product with r.
    _recurrent = (0, 1, 3)
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

    def extra(self, weights: Weights) -> torch.Tensor:
        size = weights.size
        return weights.hidden.new_zeros(size) if weights.hidden_bias is None else weights.hidden_bias[2 * size :]
