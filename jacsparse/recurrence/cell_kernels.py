"""Kernels of recurrent cells: forward keeping the gates, and backward, each over runs of consecutive steps.

A *run* is some consecutive steps of one sample in one direction of time: a whole sequence, or a chunk of it. Step ``i``
of run ``r`` is at time ``t = begin[r] + i * direction``, in row ``offset[t] + sample[r]`` of the arrays that have a row
for each time and sample, as a `PackedSequence` orders them. Runs come longest first and are taken `together`, at most
`ROWS`, at a time: those share their passes over the weights, and each one's arithmetic is the same whichever others it
is with.

Weights are padded: ``w[k, g * width + j]`` is what element ``k`` of the state weighs in element ``j`` of gate ``g``
(forward), or what element ``k`` of gate ``g``, row ``g * width + k``, weighs in element ``j`` of the state (backward).

Backward kernels compute in the dtype of `grad_end`, whatever the dtypes of the saved states and weights.
On x86 processors gradients below the smallest normal number become zeros. Steps that no gradient comes to are passed
over, but for a run's last one: a NaN in an earlier state has reached that one too, and is to be seen. Where `reach` has
elements, it takes how many steps of each run, from its end, were computed; the gates' gradients of the others are not
written then, and count as zeros.

All loops over elements are over whole arrays by a plain index, for LLVM to vectorise.
"""

from __future__ import annotations

import numpy as np

from ..runtime import flushing, inlined, kernel
from .vector import ROWS, any_nonzero, copy_elements, multiply_rows, sigmoid, tanh

#: Every so many steps it is looked whether any gradient is left.
CHECKED = 16


@inlined
def _row(sample, begin, direction, offset, run, step):
    """In which row a run's step is."""
    return offset[begin[run] + step * direction] + sample[run]


@inlined
def _scratch(width, like):
    return np.zeros(ROWS * width, like.dtype)


@inlined
def _any_added(added, size, active, sample, begin, count, direction, offset, run, back):
    """Whether anything is added to the gradients so many steps from the runs' ends."""
    # No branch and one way out: else Numba counts references to each array at each call.
    nonzero = False
    for r in range(active):
        row = _row(sample, begin, direction, offset, run + r, count[run + r] - 1 - back)
        nonzero |= any_nonzero(added, row * size, size)
    return nonzero


@inlined
def _write_zeros(written, columns, rows, sample, begin, count, direction, offset, run, since, until):
    """The gates' gradients between two numbers of steps from the runs' ends, where they are wanted and all are zero."""
    if len(written):
        for r in range(rows):
            for back in range(since, min(until, count[run + r])):
                row = _row(sample, begin, direction, offset, run + r, count[run + r] - 1 - back)
                written[row * columns : (row + 1) * columns] = 0


@inlined
def _record_reach(reach, written, columns, rows, sample, begin, count, direction, offset, run, reached):
    """Tell, where that is asked for, how many steps from the runs' ends were reached; else the others are zeros."""
    if len(reach):
        for r in range(rows):
            reach[run + r] = min(reached, count[run + r])
    else:
        _write_zeros(written, columns, rows, sample, begin, count, direction, offset, run, reached, count[run])


@kernel
def rnn_forward(first, last, sample, begin, count, direction, offset, together, x, w, relu, start, out, end):
    """``h = tanh(x + W h)``, or ReLU; `start` and `end` are the runs' first and last states."""
    size, width = start.shape[1], w.shape[1]
    zero = x.dtype.type(0)
    starts, ends, weights, entered, shown = (
        start.reshape(-1),
        end.reshape(-1),
        w.reshape(-1),
        x.reshape(-1),
        out.reshape(-1),
    )
    state, total = _scratch(width, x), _scratch(width, x)
    for block in range(first, last):
        run = block * together
        rows = min(together, len(sample) - run)
        for r in range(rows):
            copy_elements(state, r * width, starts, (run + r) * size, size)
        active = rows
        for step in range(count[run]):
            while count[run + active - 1] <= step:
                active -= 1
            for r in range(active):
                row = _row(sample, begin, direction, offset, run + r, step)
                copy_elements(total, r * width, entered, row * size, size)
            multiply_rows(total, 0, width, weights, 0, width, state, 0, width, size, width, active)
            if relu:
                for i in range(active * width):
                    state[i] = zero if total[i] < zero else total[i]
            else:
                for i in range(active * width):
                    state[i] = tanh(total[i])
            for r in range(active):
                row = _row(sample, begin, direction, offset, run + r, step)
                copy_elements(shown, row * size, state, r * width, size)
        for r in range(rows):
            copy_elements(ends, (run + r) * size, state, r * width, size)


@flushing
@kernel
def rnn_backward(
    first,
    last,
    sample,
    begin,
    count,
    direction,
    offset,
    together,
    h,
    w,
    relu,
    grad_out,
    grad_end,
    grad_gates,
    grad_start,
    reach,
):
    """``v_t = g_t + Wᵀ (v_{t+1} ∘ f'_{t+1})``: writes ``v ∘ f'`` of each step, and each run's gradient of its start.

    `grad_out` or `grad_gates` without rows: there are no gradients of outputs, or those of gates are not wanted.
    """
    size, width = grad_end.shape[1], w.shape[1]
    zero, one = grad_end.dtype.type(0), grad_end.dtype.type(1)
    weights, outputs, added, written = w.reshape(-1), h.reshape(-1), grad_out.reshape(-1), grad_gates.reshape(-1)
    ends, starts = grad_end.reshape(-1), grad_start.reshape(-1)
    v, g = _scratch(width, grad_end), _scratch(width, grad_end)
    d, state = _scratch(width, grad_end), _scratch(width, grad_end)
    for block in range(first, last):
        run = block * together
        rows = min(together, len(sample) - run)
        for r in range(rows):
            copy_elements(v, r * width, ends, (run + r) * size, size)
        active, alive, reached = rows, True, 0
        for back in range(count[run]):
            while count[run + active - 1] <= back:
                active -= 1
            if not alive:
                if len(added):
                    alive = _any_added(added, size, active, sample, begin, count, direction, offset, run, back)
                if not alive:
                    continue
                _write_zeros(written, size, rows, sample, begin, count, direction, offset, run, reached, back)
            reached = back + 1
            for r in range(active):
                row = _row(sample, begin, direction, offset, run + r, count[run + r] - 1 - back)
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
                    row = _row(sample, begin, direction, offset, run + r, count[run + r] - 1 - back)
                    copy_elements(written, row * size, d, r * width, size)
            for i in range(active * width):
                v[i] = zero
            multiply_rows(v, 0, width, weights, 0, width, d, 0, width, size, width, active)
            if back % CHECKED == 0:
                alive = any_nonzero(v, 0, active * width)
        _record_reach(reach, written, size, rows, sample, begin, count, direction, offset, run, reached)
        for r in range(rows):
            copy_elements(starts, (run + r) * size, v, r * width, size)


@kernel
def gru_forward(first, last, sample, begin, count, direction, offset, together, x, w, bias, start, out, gates, end):
    """Equation 4.3: ``r = σ(x_r + W_r h)``, ``z = σ(x_z + W_z h)``, ``n = tanh(x_n + r (W_n h + b))``.

    ``h ← n + z (h - n)``. Where `gates` has rows, r, z, n and ``m = W_n h + b`` are saved there.
    """
    size, width = start.shape[1], w.shape[1] // 3
    starts, ends, weights, entered, shown = (
        start.reshape(-1),
        end.reshape(-1),
        w.reshape(-1),
        x.reshape(-1),
        out.reshape(-1),
    )
    keep = gates.reshape(-1)
    state, reset, update = _scratch(width, x), _scratch(width, x), _scratch(width, x)
    fresh, inner = _scratch(width, x), _scratch(width, x)
    for block in range(first, last):
        run = block * together
        rows = min(together, len(sample) - run)
        for r in range(rows):
            copy_elements(state, r * width, starts, (run + r) * size, size)
        active = rows
        for step in range(count[run]):
            while count[run + active - 1] <= step:
                active -= 1
            for r in range(active):
                at = 3 * size * _row(sample, begin, direction, offset, run + r, step)
                copy_elements(reset, r * width, entered, at, size)
                copy_elements(update, r * width, entered, at + size, size)
                copy_elements(fresh, r * width, entered, at + 2 * size, size)
                copy_elements(inner, r * width, bias, 0, size)
            multiply_rows(reset, 0, width, weights, 0, 3 * width, state, 0, width, size, width, active)
            multiply_rows(update, 0, width, weights, width, 3 * width, state, 0, width, size, width, active)
            multiply_rows(inner, 0, width, weights, 2 * width, 3 * width, state, 0, width, size, width, active)
            for i in range(active * width):
                reset[i] = sigmoid(reset[i])
            for i in range(active * width):
                update[i] = sigmoid(update[i])
            for i in range(active * width):
                fresh[i] = tanh(fresh[i] + reset[i] * inner[i])
            for i in range(active * width):
                state[i] = fresh[i] + update[i] * (state[i] - fresh[i])
            for r in range(active):
                row = _row(sample, begin, direction, offset, run + r, step)
                copy_elements(shown, row * size, state, r * width, size)
                if len(keep):
                    copy_elements(keep, 4 * row * size, reset, r * width, size)
                    copy_elements(keep, (4 * row + 1) * size, update, r * width, size)
                    copy_elements(keep, (4 * row + 2) * size, fresh, r * width, size)
                    copy_elements(keep, (4 * row + 3) * size, inner, r * width, size)
        for r in range(rows):
            copy_elements(ends, (run + r) * size, state, r * width, size)


@flushing
@kernel
def gru_backward(
    first,
    last,
    sample,
    begin,
    count,
    direction,
    offset,
    together,
    h,
    gates,
    initial,
    edge,
    w,
    grad_out,
    grad_end,
    grad_gates,
    grad_start,
    reach,
):
    """Writes the gradients of what enters r, z, n and of ``m``; `initial` is the state before time ``edge[sample]``."""
    size, width = grad_end.shape[1], w.shape[1]
    one, part = grad_end.dtype.type(1), width * width
    weights, outputs, first_states, keep = w.reshape(-1), h.reshape(-1), initial.reshape(-1), gates.reshape(-1)
    added, written = grad_out.reshape(-1), grad_gates.reshape(-1)
    ends, starts = grad_end.reshape(-1), grad_start.reshape(-1)
    v, g, before = _scratch(width, grad_end), _scratch(width, grad_end), _scratch(width, grad_end)
    reset, update = _scratch(width, grad_end), _scratch(width, grad_end)
    fresh, inner = _scratch(width, grad_end), _scratch(width, grad_end)
    for block in range(first, last):
        run = block * together
        rows = min(together, len(sample) - run)
        for r in range(rows):
            copy_elements(v, r * width, ends, (run + r) * size, size)
        active, alive, reached = rows, True, 0
        for back in range(count[run]):
            while count[run + active - 1] <= back:
                active -= 1
            if not alive:
                if len(added):
                    alive = _any_added(added, size, active, sample, begin, count, direction, offset, run, back)
                if not alive:
                    continue
                _write_zeros(written, 4 * size, rows, sample, begin, count, direction, offset, run, reached, back)
            reached = back + 1
            for r in range(active):
                who, time = sample[run + r], begin[run + r] + (count[run + r] - 1 - back) * direction
                row = offset[time] + who
                copy_elements(reset, r * width, keep, 4 * row * size, size)
                copy_elements(update, r * width, keep, (4 * row + 1) * size, size)
                copy_elements(fresh, r * width, keep, (4 * row + 2) * size, size)
                copy_elements(inner, r * width, keep, (4 * row + 3) * size, size)
                if time == edge[who]:
                    copy_elements(before, r * width, first_states, who * size, size)
                else:
                    copy_elements(before, r * width, outputs, (offset[time - direction] + who) * size, size)
                if len(added):
                    copy_elements(g, r * width, added, row * size, size)
            for i in range(active * width):
                grad = v[i] + g[i]
                grad_fresh = grad * (one - update[i]) * (one - fresh[i] * fresh[i])
                v[i] = grad * update[i]
                update[i] = grad * (before[i] - fresh[i]) * update[i] * (one - update[i])
                fresh[i] = grad_fresh
                grad_inner = grad_fresh * reset[i]
                reset[i] = grad_inner * inner[i] * (one - reset[i])
                inner[i] = grad_inner
            if len(written):
                for r in range(active):
                    row = _row(sample, begin, direction, offset, run + r, count[run + r] - 1 - back)
                    copy_elements(written, 4 * row * size, reset, r * width, size)
                    copy_elements(written, (4 * row + 1) * size, update, r * width, size)
                    copy_elements(written, (4 * row + 2) * size, fresh, r * width, size)
                    copy_elements(written, (4 * row + 3) * size, inner, r * width, size)
            multiply_rows(v, 0, width, weights, 0, width, reset, 0, width, size, width, active)
            multiply_rows(v, 0, width, weights, part, width, update, 0, width, size, width, active)
            multiply_rows(v, 0, width, weights, 2 * part, width, inner, 0, width, size, width, active)
            if back % CHECKED == 0:
                alive = any_nonzero(v, 0, active * width)
        _record_reach(reach, written, 4 * size, rows, sample, begin, count, direction, offset, run, reached)
        for r in range(rows):
            copy_elements(starts, (run + r) * size, v, r * width, size)


@kernel
def lstm_forward(first, last, sample, begin, count, direction, offset, together, x, w, start, out, gates, end):
    """``c ← σ(f) c + σ(i) tanh(g)``, ``h ← σ(o) tanh(c)``; states hold h and then c.

    Where `gates` has rows, i, f, g, o and c are saved there.
    """
    size, width = start.shape[1] // 2, w.shape[1] // 4
    starts, ends, weights, entered, shown = (
        start.reshape(-1),
        end.reshape(-1),
        w.reshape(-1),
        x.reshape(-1),
        out.reshape(-1),
    )
    keep = gates.reshape(-1)
    state, cell = _scratch(width, x), _scratch(width, x)
    enter, forget, fresh, leave = _scratch(width, x), _scratch(width, x), _scratch(width, x), _scratch(width, x)
    for block in range(first, last):
        run = block * together
        rows = min(together, len(sample) - run)
        for r in range(rows):
            copy_elements(state, r * width, starts, 2 * (run + r) * size, size)
            copy_elements(cell, r * width, starts, (2 * (run + r) + 1) * size, size)
        active = rows
        for step in range(count[run]):
            while count[run + active - 1] <= step:
                active -= 1
            for r in range(active):
                at = 4 * size * _row(sample, begin, direction, offset, run + r, step)
                copy_elements(enter, r * width, entered, at, size)
                copy_elements(forget, r * width, entered, at + size, size)
                copy_elements(fresh, r * width, entered, at + 2 * size, size)
                copy_elements(leave, r * width, entered, at + 3 * size, size)
            multiply_rows(enter, 0, width, weights, 0, 4 * width, state, 0, width, size, width, active)
            multiply_rows(forget, 0, width, weights, width, 4 * width, state, 0, width, size, width, active)
            multiply_rows(fresh, 0, width, weights, 2 * width, 4 * width, state, 0, width, size, width, active)
            multiply_rows(leave, 0, width, weights, 3 * width, 4 * width, state, 0, width, size, width, active)
            for i in range(active * width):
                enter[i] = sigmoid(enter[i])
            for i in range(active * width):
                forget[i] = sigmoid(forget[i])
            for i in range(active * width):
                fresh[i] = tanh(fresh[i])
            for i in range(active * width):
                leave[i] = sigmoid(leave[i])
            for i in range(active * width):
                cell[i] = forget[i] * cell[i] + enter[i] * fresh[i]
            for i in range(active * width):
                state[i] = leave[i] * tanh(cell[i])
            for r in range(active):
                row = _row(sample, begin, direction, offset, run + r, step)
                copy_elements(shown, row * size, state, r * width, size)
                if len(keep):
                    copy_elements(keep, 5 * row * size, enter, r * width, size)
                    copy_elements(keep, (5 * row + 1) * size, forget, r * width, size)
                    copy_elements(keep, (5 * row + 2) * size, fresh, r * width, size)
                    copy_elements(keep, (5 * row + 3) * size, leave, r * width, size)
                    copy_elements(keep, (5 * row + 4) * size, cell, r * width, size)
        for r in range(rows):
            copy_elements(ends, 2 * (run + r) * size, state, r * width, size)
            copy_elements(ends, (2 * (run + r) + 1) * size, cell, r * width, size)


@flushing
@kernel
def lstm_backward(
    first,
    last,
    sample,
    begin,
    count,
    direction,
    offset,
    together,
    gates,
    initial,
    edge,
    w,
    grad_out,
    grad_end,
    grad_gates,
    grad_start,
    reach,
):
    """Writes the gradients of what enters i, f, g and o; `initial` is the state before time ``edge[sample]``."""
    size, width = grad_end.shape[1] // 2, w.shape[1]
    zero, one, part = grad_end.dtype.type(0), grad_end.dtype.type(1), width * width
    weights, first_states, keep = w.reshape(-1), initial.reshape(-1), gates.reshape(-1)
    added, written = grad_out.reshape(-1), grad_gates.reshape(-1)
    ends, starts = grad_end.reshape(-1), grad_start.reshape(-1)
    v, cell_v = _scratch(width, grad_end), _scratch(width, grad_end)
    g, before = _scratch(width, grad_end), _scratch(width, grad_end)
    enter, forget, fresh = _scratch(width, grad_end), _scratch(width, grad_end), _scratch(width, grad_end)
    leave, cell = _scratch(width, grad_end), _scratch(width, grad_end)
    for block in range(first, last):
        run = block * together
        rows = min(together, len(sample) - run)
        for r in range(rows):
            copy_elements(v, r * width, ends, 2 * (run + r) * size, size)
            copy_elements(cell_v, r * width, ends, (2 * (run + r) + 1) * size, size)
        active, alive, reached = rows, True, 0
        for back in range(count[run]):
            while count[run + active - 1] <= back:
                active -= 1
            if not alive:
                if len(added):
                    alive = _any_added(added, size, active, sample, begin, count, direction, offset, run, back)
                if not alive:
                    continue
                _write_zeros(written, 4 * size, rows, sample, begin, count, direction, offset, run, reached, back)
            reached = back + 1
            for r in range(active):
                who, time = sample[run + r], begin[run + r] + (count[run + r] - 1 - back) * direction
                row = offset[time] + who
                copy_elements(enter, r * width, keep, 5 * row * size, size)
                copy_elements(forget, r * width, keep, (5 * row + 1) * size, size)
                copy_elements(fresh, r * width, keep, (5 * row + 2) * size, size)
                copy_elements(leave, r * width, keep, (5 * row + 3) * size, size)
                copy_elements(cell, r * width, keep, (5 * row + 4) * size, size)
                if time == edge[who]:
                    copy_elements(before, r * width, first_states, (2 * who + 1) * size, size)
                else:
                    copy_elements(before, r * width, keep, (5 * (offset[time - direction] + who) + 4) * size, size)
                if len(added):
                    copy_elements(g, r * width, added, row * size, size)
            for i in range(active * width):
                cell[i] = tanh(cell[i])
            for i in range(active * width):
                grad = v[i] + g[i]
                grad_cell = cell_v[i] + grad * leave[i] * (one - cell[i] * cell[i])
                cell_v[i] = grad_cell * forget[i]
                grad_enter = grad_cell * fresh[i] * enter[i] * (one - enter[i])
                fresh[i] = grad_cell * enter[i] * (one - fresh[i] * fresh[i])
                enter[i] = grad_enter
                forget[i] = grad_cell * before[i] * forget[i] * (one - forget[i])
                leave[i] = grad * cell[i] * leave[i] * (one - leave[i])
                v[i] = zero
            if len(written):
                for r in range(active):
                    row = _row(sample, begin, direction, offset, run + r, count[run + r] - 1 - back)
                    copy_elements(written, 4 * row * size, enter, r * width, size)
                    copy_elements(written, (4 * row + 1) * size, forget, r * width, size)
                    copy_elements(written, (4 * row + 2) * size, fresh, r * width, size)
                    copy_elements(written, (4 * row + 3) * size, leave, r * width, size)
            multiply_rows(v, 0, width, weights, 0, width, enter, 0, width, size, width, active)
            multiply_rows(v, 0, width, weights, part, width, forget, 0, width, size, width, active)
            multiply_rows(v, 0, width, weights, 2 * part, width, fresh, 0, width, size, width, active)
            multiply_rows(v, 0, width, weights, 3 * part, width, leave, 0, width, size, width, active)
            if back % CHECKED == 0:
                alive = any_nonzero(v, 0, active * width) or any_nonzero(cell_v, 0, active * width)
        _record_reach(reach, written, 4 * size, rows, sample, begin, count, direction, offset, run, reached)
        for r in range(rows):
            copy_elements(starts, 2 * (run + r) * size, v, r * width, size)
            copy_elements(starts, (2 * (run + r) + 1) * size, cell_v, r * width, size)
