"""Arithmetic on several samples at once: the batch is the fastest axis, and these are its SIMD instructions.

A kernel takes the batch in blocks of samples, the widest first (`block_width`), and runs each block through all of a
row's multiply-adds: it reads one index for a whole vector, and needs no inner loop over samples. There is no fused
multiply-add: every batch, and every method, rounds alike.
"""

from __future__ import annotations

from ..codegen import WIDE, Register, Variable, emitted
from ..runtime import inlined

#: How many samples blocks have.
_SAMPLES = (16, 4, 1)


@emitted()
def write_sum_of_rows(e, c, at_c, columns, values, starts, first, last, b, at_b):
    """``c[at_c + q] = Σ_t values[t] * b[starts[t] + at_b + q]`` for each ``q`` of `columns` elements.

    The sum is over terms from `first` to `last`, in order, and stays in a register.
    """
    for q, lanes in e.blocks(columns, WIDE):
        total = Variable(e.value(0.0, b.element).spread(lanes))
        with e.each(first, last) as term:
            total.value += values[term].spread(lanes) * b[starts.index(term) + at_b + q, lanes]
        c[at_c + q] = total.value


@emitted()
def write_row_times_vectors(e, y, row, values, indices, begin, end, x, batch, values_batch, x_batch):
    """``y[row * batch + s] = Σ_k values[k * batch + s] * x[indices[k] * batch + s]``, for each sample ``s``.

    The sum is over entries ``k`` from `begin` to `end`; a factor with a batch of 1 is shared by all samples. Each
    fourth term is added to one of four sums, so that an addition need not wait for the one before it; samples all have
    one order.
    """

    def write(lane: Register, lanes: int, shared: tuple[bool, bool]) -> None:
        sums = [Variable(e.value(0.0, y.element).spread(lanes)) for _ in range(4)]

        def add(total: Variable, entry: Register) -> None:
            pairs = zip((values, x), (entry, indices.index(entry)), shared, strict=True)
            left, right = (
                memory[at].spread(lanes) if alone else memory[at * batch + lane, lanes] for memory, at, alone in pairs
            )
            total.value += left * right

        whole = begin + (end - begin & -4)
        with e.each(begin, whole, 4) as first:
            for place, total in enumerate(sums):
                add(total, first + place)
        with e.each(whole, end) as entry:
            add(sums[0], entry)
        one, two, three, four = (total.value for total in sums)
        y[row * batch + lane] = (one + two) + (three + four)

    for values_shared in e.either(values_batch.equals(1)):
        for x_shared in [False] if values_shared else e.either(x_batch.equals(1)):
            for lane, lanes in e.blocks(batch, _SAMPLES):
                write(lane, lanes, (values_shared, x_shared))


@inlined
def block_width(left):
    """The number of samples in the next block, where `left` remain."""
    if left >= 16:
        return 16
    return 4 if left >= 4 else 1


@emitted()
def accumulate_row(e, c, at_c, c_step, slots, first, last, a, at_a, a_batch, b, at_b, b_batch, width):
    """Add one entry of A times a row of B, for one block of samples.

    ``c[at_c + slots[q] * c_step] += a[at_a] * b[at_b + (q - first) * b_batch]`` for each ``q`` from `first` to `last`,
    at each of `width` samples from there; a factor with a batch of 1 is shared by all samples.
    """

    def add(lanes: int, a_shared: bool, b_shared: bool) -> None:
        left = a[at_a].spread(lanes) if a_shared else a[at_a, lanes]
        with e.each(first, last) as q:
            at = at_b + (q - first) * b_batch
            right = b[at].spread(lanes) if b_shared else b[at, lanes]
            c[at_c + slots.index(q) * c_step, lanes] += left * right

    for lanes in e.cases(width, _SAMPLES):
        for a_shared in e.either(a_batch.equals(1)) if lanes > 1 else [True]:
            for b_shared in [False] if a_shared else e.either(b_batch.equals(1)):
                add(lanes, a_shared, b_shared)
