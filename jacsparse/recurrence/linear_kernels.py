"""Kernels of linear recurrences over runs of steps: ``h_t = A_t h_{t-1} + b_t``, and its adjoint.

The adjoint goes through a run's steps the other way, ``v_t = g_t + A_{t+1}ᵀ v_{t+1}``. An empty array means that the
argument is absent. Runs are as in `cells.fused`; `back` says that this is the adjoint, and `shared` that all samples
have the same blocks. States have the dtype of `start`, in which all is computed, whichever that of the blocks and of
`b` is. On x86 processors adjoints below the smallest normal number become zeros.
"""

from __future__ import annotations

import numpy as np

from ..codegen import copy_elements, dot
from ..runtime import flushing, inlined, kernel
from .vector import multiply_rows


@inlined
def _block(time, sample, batch, shared):
    """Which block a step has."""
    return time if shared else time * batch + sample


@inlined
def _time(begin, count, direction, step, back):
    """The time of the step that a run takes after so many others."""
    return begin + (count - 1 - step if back else step) * direction


@kernel
def _dense(first, last, sample, begin, count, direction, batch, back, blocks, shared, b, start, out, end):
    size = start.shape[1]
    flat, added, shown = blocks.reshape(-1), b.reshape(-1), out.reshape(-1)
    starts, ends = start.reshape(-1), end.reshape(-1)
    state, fresh = np.zeros(size, start.dtype), np.zeros(size, start.dtype)
    for run in range(first, last):
        copy_elements(state, 0, starts, run * size, size)
        for step in range(count[run]):
            time = _time(begin[run], count[run], direction, step, back)
            row = (time * batch + sample[run]) * size
            at = _block(time, sample[run], batch, shared) * size * size
            if back:
                copy_elements(fresh, 0, state, 0, size)
            else:
                for i in range(size):
                    fresh[i] = dot(flat, at + i * size, state, 0, size)
            if len(added):
                for i in range(size):
                    fresh[i] += added[row + i]
            if len(shown):
                copy_elements(shown, row, fresh, 0, size)
            if back:
                for i in range(size):
                    state[i] = 0
                for k in range(size):
                    weights = flat[at + k * size : at + (k + 1) * size]
                    for i in range(size):
                        state[i] += weights[i] * fresh[k]
            else:
                copy_elements(state, 0, fresh, 0, size)
        copy_elements(ends, run * size, state, 0, size)


@kernel
def _diagonal_sweep(first, last, sample, begin, count, direction, batch, _, d, shared, b, start, out, end):
    size = start.shape[1]
    flat, added, shown = d.reshape(-1), b.reshape(-1), out.reshape(-1)
    for run in range(first, last):
        state = end[run]
        for i in range(size):
            state[i] = start[run, i]
        for step in range(count[run]):
            time = begin[run] + step * direction
            row = (time * batch + sample[run]) * size
            at = _block(time, sample[run], batch, shared) * size
            scale = flat[at : at + size]
            for i in range(size):
                state[i] = scale[i] * state[i]
            if len(added):
                addend = added[row : row + size]
                for i in range(size):
                    state[i] += addend[i]
            if len(shown):
                copy_elements(shown, row, state, 0, size)


@flushing
@kernel
def _diagonal_adjoint(first, last, sample, begin, count, direction, batch, _, d, shared, g, start, out, end):
    size = start.shape[1]
    flat, added, shown = d.reshape(-1), g.reshape(-1), out.reshape(-1)
    for run in range(first, last):
        state = end[run]
        for i in range(size):
            state[i] = start[run, i]
        for back in range(count[run]):
            time = begin[run] + (count[run] - 1 - back) * direction
            row = (time * batch + sample[run]) * size
            at = _block(time, sample[run], batch, shared) * size
            if len(added):
                addend = added[row : row + size]
                for i in range(size):
                    state[i] += addend[i]
            if len(shown):
                copy_elements(shown, row, state, 0, size)
            scale = flat[at : at + size]
            for i in range(size):
                state[i] = scale[i] * state[i]


@kernel
def _scaled(first, last, sample, begin, count, direction, batch, back, w, d, shared, b, start, out, end):
    """``A_t = W diag(d_t)``; `w` has a padded row for each column of ``W`` or, back, for each row."""
    size, width = start.shape[1], w.shape[1]
    weights, flat, added, shown = w.reshape(-1), d.reshape(-1), b.reshape(-1), out.reshape(-1)
    starts, ends = start.reshape(-1), end.reshape(-1)
    state, scale, addend = np.zeros(width, start.dtype), np.zeros(width, start.dtype), np.zeros(width, start.dtype)
    for run in range(first, last):
        copy_elements(state, 0, starts, run * size, size)
        for step in range(count[run]):
            time = _time(begin[run], count[run], direction, step, back)
            row = (time * batch + sample[run]) * size
            copy_elements(scale, 0, flat, _block(time, sample[run], batch, shared) * size, size)
            if back:
                if len(added):
                    copy_elements(addend, 0, added, row, size)
                for i in range(width):
                    addend[i] += state[i]
                    state[i] = 0
                if len(shown):
                    copy_elements(shown, row, addend, 0, size)
                multiply_rows(state, weights, 0, width, addend, size, width, 1)
                for i in range(width):
                    state[i] = scale[i] * state[i]
                    addend[i] = 0
            else:
                for i in range(width):
                    scale[i] = scale[i] * state[i]
                    state[i] = 0
                if len(added):
                    copy_elements(state, 0, added, row, size)
                multiply_rows(state, weights, 0, width, scale, size, width, 1)
                if len(shown):
                    copy_elements(shown, row, state, 0, size)
        copy_elements(ends, run * size, state, 0, size)


@kernel
def _sparse(first, last, sample, begin, count, direction, batch, back, indptr, indices, values, b, start, out, end):
    """`values` has shape ``(time, nnz, batch or 1)``."""
    size = start.shape[1]
    added, shown = b.reshape(-1), out.reshape(-1)
    starts, ends = start.reshape(-1), end.reshape(-1)
    state, fresh = np.zeros(size, start.dtype), np.zeros(size, start.dtype)
    for run in range(first, last):
        copy_elements(state, 0, starts, run * size, size)
        who = sample[run] if values.shape[2] > 1 else 0
        for step in range(count[run]):
            time = _time(begin[run], count[run], direction, step, back)
            row = (time * batch + sample[run]) * size
            for i in range(size):
                fresh[i] = added[row + i] if len(added) else start.dtype.type(0)
                if back:
                    fresh[i] += state[i]
                    state[i] = 0
                else:
                    total = fresh[i]
                    for entry in range(indptr[i], indptr[i + 1]):
                        total += values[time, entry, who] * state[indices[entry]]
                    fresh[i] = total
            if len(shown):
                copy_elements(shown, row, fresh, 0, size)
            if back:
                for i in range(size):
                    for entry in range(indptr[i], indptr[i + 1]):
                        state[indices[entry]] += values[time, entry, who] * fresh[i]
            else:
                copy_elements(state, 0, fresh, 0, size)
        copy_elements(ends, run * size, state, 0, size)


#: Kernels of recurrences, and of their adjoints, by the form of the matrices. Diagonals' are two: their steps take less
#: time than a question.
KERNELS = {
    "dense": (_dense, flushing(_dense)),
    "diagonal": (_diagonal_sweep, _diagonal_adjoint),
    "scaled": (_scaled, flushing(_scaled)),
    "sparse": (_sparse, flushing(_sparse)),
}
