"""Long short-term memory, without projections."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...codegen import any_nonzero, copy_elements
from ...runtime import flushing, kernel
from ..vector import join_row, multiply_rows, sigmoid, split_row, tanh
from .cell import Terms
from .fused import CHECKED, FusedCell, any_added, record_live_steps, row_of, scratch, write_zeros


@kernel
def _forward(first, last, sample, begin, count, direction, offset, block_size, x, w, _, start, out, gates, end):
    """``c ← σ(f) c + σ(i) tanh(g)``, ``h ← σ(o) tanh(c)``; states hold h and then c.

    Where `gates` has rows, i, f, g, o and c are saved there.
    """
    size, width = start.shape[1] // 2, w.shape[1] // 4
    starts, ends, weights = start.reshape(-1), end.reshape(-1), w.reshape(-1)
    input_projection, shown = x.reshape(-1), out.reshape(-1)
    saved = gates.reshape(-1)
    state, cell = scratch(width, x), scratch(width, x)
    input_gate, forget_gate = scratch(width, x), scratch(width, x)
    candidate, output_gate = scratch(width, x), scratch(width, x)
    entering = input_gate, forget_gate, candidate, output_gate
    for block in range(first, last):
        run = block * block_size
        rows = min(block_size, len(sample) - run)
        for r in range(rows):
            split_row((state, cell), r * width, starts, 2 * (run + r) * size, size)
        active = rows
        for step in range(count[run]):
            while count[run + active - 1] <= step:
                active -= 1
            for r in range(active):
                at = 4 * size * row_of(sample, begin, direction, offset, run + r, step)
                split_row(entering, r * width, input_projection, at, size)
            multiply_rows(entering, weights, width, 4 * width, state, size, width, active)
            for i in range(active * width):
                input_gate[i] = sigmoid(input_gate[i])
            for i in range(active * width):
                forget_gate[i] = sigmoid(forget_gate[i])
            for i in range(active * width):
                candidate[i] = tanh(candidate[i])
            for i in range(active * width):
                output_gate[i] = sigmoid(output_gate[i])
            for i in range(active * width):
                cell[i] = forget_gate[i] * cell[i] + input_gate[i] * candidate[i]
            for i in range(active * width):
                state[i] = output_gate[i] * tanh(cell[i])
            for r in range(active):
                row = row_of(sample, begin, direction, offset, run + r, step)
                copy_elements(shown, row * size, state, r * width, size)
                if len(saved):
                    join_row(saved, 5 * row * size, (*entering, cell), r * width, size)
        for r in range(rows):
            join_row(ends, 2 * (run + r) * size, (state, cell), r * width, size)


@flushing
@kernel
def _backward(
    first, last, sample, begin, count, direction, offset, block_size,
    _h, gates, initial, first_times, w, _, grad_out, grad_end, grad_gates, grad_start, live_steps,
):  # fmt: skip
    """Writes the gradients of what enters i, f, g and o; `initial` is the state before time ``first_times[sample]``."""
    size, width = grad_end.shape[1] // 2, w.shape[1]
    zero, one, part = grad_end.dtype.type(0), grad_end.dtype.type(1), width * width
    weights, first_states, saved = w.reshape(-1), initial.reshape(-1), gates.reshape(-1)
    added, written = grad_out.reshape(-1), grad_gates.reshape(-1)
    ends, starts = grad_end.reshape(-1), grad_start.reshape(-1)
    v, cell_v = scratch(width, grad_end), scratch(width, grad_end)
    g, before = scratch(width, grad_end), scratch(width, grad_end)
    input_gate, forget_gate, candidate = scratch(width, grad_end), scratch(width, grad_end), scratch(width, grad_end)
    output_gate, cell = scratch(width, grad_end), scratch(width, grad_end)
    entering = input_gate, forget_gate, candidate, output_gate
    for block in range(first, last):
        run = block * block_size
        rows = min(block_size, len(sample) - run)
        for r in range(rows):
            split_row((v, cell_v), r * width, ends, 2 * (run + r) * size, size)
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
                split_row((*entering, cell), r * width, saved, 5 * row * size, size)
                if time == first_times[who]:
                    copy_elements(before, r * width, first_states, (2 * who + 1) * size, size)
                else:
                    copy_elements(before, r * width, saved, (5 * (offset[time - direction] + who) + 4) * size, size)
                if len(added):
                    copy_elements(g, r * width, added, row * size, size)
            for i in range(active * width):
                cell[i] = tanh(cell[i])
            for i in range(active * width):
                grad = v[i] + g[i]
                grad_cell = cell_v[i] + grad * output_gate[i] * (one - cell[i] * cell[i])
                cell_v[i] = grad_cell * forget_gate[i]
                grad_input_gate = grad_cell * candidate[i] * input_gate[i] * (one - input_gate[i])
                candidate[i] = grad_cell * input_gate[i] * (one - candidate[i] * candidate[i])
                input_gate[i] = grad_input_gate
                forget_gate[i] = grad_cell * before[i] * forget_gate[i] * (one - forget_gate[i])
                output_gate[i] = grad * cell[i] * output_gate[i] * (one - output_gate[i])
                v[i] = zero
            if len(written):
                for r in range(active):
                    row = row_of(sample, begin, direction, offset, run + r, count[run + r] - 1 - back)
                    join_row(written, 4 * row * size, entering, r * width, size)
            multiply_rows(v, weights, part, width, entering, size, width, active)
            if back % CHECKED == 0:
                alive = any_nonzero(v, 0, active * width) or any_nonzero(cell_v, 0, active * width)
        record_live_steps(live_steps, written, 4 * size, rows, sample, begin, count, direction, offset, run, reached)
        for r in range(rows):
            join_row(starts, 2 * (run + r) * size, (v, cell_v), r * width, size)


@dataclass(frozen=True)
class LstmCell(FusedCell):
    """The cell of `torch.nn.LSTM`, whose state is h, then c."""

    gates = 4
    states = 2
    saved_vectors = 5
    terms = (Terms(gates=(0, 1, 2, 3), states=(1,)), Terms(gates=(0, 1, 2), states=(1,)))
    mode = "LSTM"
    bounded = True
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
