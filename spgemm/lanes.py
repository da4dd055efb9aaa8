"""Arithmetic on several samples at once: the batch is the fastest axis, and these are its SIMD instructions.

A kernel takes the batch in blocks of samples, the widest first (`block_width`), and runs each block through all of a
row's multiply-adds: it reads one index for a whole vector, and needs no inner loop over samples. LLVM would not
vectorise such a loop, since it cannot prove that the operands of a sparse product do not overlap, so these functions
load, multiply, add and store one vector. There is no fused multiply-add: every batch, and every method, rounds alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from ..runtime import inlined


def _place(context: Any, builder: Any, array_type: Any, array: Any, place: Any, lanes: int) -> tuple[Any, int]:
    """Pointer to the vector of `lanes` that starts at element `place`, and its alignment."""
    data = context.make_array(array_type)(context, builder, array).data
    element = context.get_data_type(array_type.dtype)
    vector = ir.VectorType(element, lanes).as_pointer()
    return builder.bitcast(builder.gep(data, [place]), vector), context.get_abi_alignment(element)


def _load(context: Any, builder: Any, array_type: Any, array: Any, place: Any, lanes: int) -> Any:
    pointer, alignment = _place(context, builder, array_type, array, place, lanes)
    loaded = builder.load(pointer)
    loaded.align = alignment
    return loaded


def _add_to(context: Any, builder: Any, array_type: Any, array: Any, place: Any, lanes: int, term: Any) -> None:
    pointer, alignment = _place(context, builder, array_type, array, place, lanes)
    loaded = builder.load(pointer)
    loaded.align = alignment
    builder.store(builder.fadd(loaded, term), pointer).align = alignment


@intrinsic(prefer_literal=True)
def _add_product(typing_context, c, c_place, a, a_place, b, b_place, lanes):
    """``c[c_place + l] += a[a_place + l] * b[b_place + l]`` for each of a literal number of lanes."""
    width = lanes.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        c_type, _, a_type, _, b_type, _, _ = signature.args
        left = _load(context, builder, a_type, args[2], args[3], width)
        right = _load(context, builder, b_type, args[4], args[5], width)
        _add_to(context, builder, c_type, args[0], args[1], width, builder.fmul(left, right))
        return context.get_dummy_value()

    return types.void(c, types.intp, a, types.intp, b, types.intp, lanes), generate


@intrinsic(prefer_literal=True)
def _add_scaled(typing_context, c, c_place, scale, b, b_place, lanes):
    """``c[c_place + l] += scale * b[b_place + l]`` for each of a literal number of lanes."""
    width = lanes.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        c_type, _, _, b_type, _, _ = signature.args
        right = _load(context, builder, b_type, args[3], args[4], width)
        undefined = ir.Constant(ir.VectorType(args[2].type, width), ir.Undefined)
        first = builder.insert_element(undefined, args[2], context.get_constant(types.int32, 0))
        order = ir.Constant(ir.VectorType(ir.IntType(32), width), [0] * width)
        spread = builder.shuffle_vector(first, undefined, order)
        _add_to(context, builder, c_type, args[0], args[1], width, builder.fmul(spread, right))
        return context.get_dummy_value()

    return types.void(c, types.intp, scale, b, types.intp, lanes), generate


@intrinsic(prefer_literal=True)
def _multiply_by(typing_context, c, c_place, b, b_place, b_step, lanes):
    """``c[c_place + l] *= b[b_place + l * b_step]`` for each of a literal number of lanes; `b_step` is a literal."""
    width, is_shared = lanes.literal_value, not b_step.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        c_type, _, b_type, _, _, _ = signature.args
        left = _load(context, builder, c_type, args[0], args[1], width)
        right = _load(context, builder, b_type, args[2], args[3], 1 if is_shared else width)
        if is_shared:
            order = ir.Constant(ir.VectorType(ir.IntType(32), width), [0] * width)
            right = builder.shuffle_vector(right, ir.Constant(right.type, ir.Undefined), order)
        pointer, alignment = _place(context, builder, c_type, args[0], args[1], width)
        builder.store(builder.fmul(left, right), pointer).align = alignment
        return context.get_dummy_value()

    return types.void(c, types.intp, b, types.intp, b_step, lanes), generate


@intrinsic(prefer_literal=True)
def _copy(typing_context, c, c_place, b, b_place, lanes):
    """``c[c_place + l] = b[b_place + l]`` for each of a literal number of lanes."""
    width = lanes.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        c_type, _, b_type, _, _ = signature.args
        loaded = _load(context, builder, b_type, args[2], args[3], width)
        pointer, alignment = _place(context, builder, c_type, args[0], args[1], width)
        builder.store(loaded, pointer).align = alignment
        return context.get_dummy_value()

    return types.void(c, types.intp, b, types.intp, lanes), generate


@intrinsic(prefer_literal=True)
def _write_sums_of_scaled(
    typing_context, c, c_place, c_step, values, starts, first, last, b, shift, b_step, past_caches, lines, lanes
):  # fmt: skip
    """``c[c_place + i * c_step + l] = sum of values[t] * b[starts[t] + shift + i * b_step + l]``, for each line ``i``.

    The sum is over terms ``t`` from `first` to `last`, in order. The numbers of lines and lanes are literals: the sums
    stay in registers. Where `past_caches`, memory is written without reading it into caches first; then each vector has
    to begin at a multiple of the bytes of eight elements.
    """
    width, count = lanes.literal_value, lines.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        c_type, values_type, starts_type, b_type = (signature.args[place] for place in (0, 3, 4, 7))
        vector = ir.VectorType(context.get_data_type(b_type.dtype), width)
        zeros, order = (
            ir.Constant(vector, [0.0] * width),
            ir.Constant(ir.VectorType(ir.IntType(32), width), [0] * width),
        )
        sums = [cgutils.alloca_once(builder, vector) for _ in range(count)]
        for total in sums:
            builder.store(zeros, total)
        with cgutils.for_range(builder, args[6], start=args[5]) as term:
            value = _load(context, builder, values_type, args[3], term.index, 1)
            start = _load(context, builder, starts_type, args[4], term.index, 1)
            spread = builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), order)
            start = builder.extract_element(start, context.get_constant(types.int32, 0))
            place = builder.add(context.cast(builder, start, starts_type.dtype, types.intp), args[8])
            for total in sums:
                right = _load(context, builder, b_type, args[7], place, width)
                builder.store(builder.fadd(builder.load(total), builder.fmul(spread, right)), total)
                place = builder.add(place, args[9])

        def write(*, past_caches: bool) -> None:
            place = args[1]
            for total in sums:
                pointer, alignment = _place(context, builder, c_type, args[0], place, width)
                stored = builder.store(builder.load(total), pointer)
                stored.align = alignment * 8 if past_caches else alignment
                if past_caches:
                    one = ir.Constant(ir.IntType(32), 1)
                    stored.set_metadata("nontemporal", builder.module.add_metadata([one]))
                place = builder.add(place, args[2])

        with builder.if_else(context.cast(builder, args[10], past_caches, types.boolean)) as (past, through):
            with past:
                write(past_caches=True)
            with through:
                write(past_caches=False)
        return context.get_dummy_value()

    places = (types.intp, types.intp)
    arguments = (c, *places, values, starts, *places, b, *places, past_caches, lines, lanes)
    return types.void(*arguments), generate


@intrinsic
def finish_writes(typing_context):
    """Make what was written past the caches visible to other threads."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic(prefer_literal=True)
def write_row_times_vectors(typing_context, y, row, values, indices, begin, end, x, batch, shared):
    """``y[row * batch + s] = sum of values[e * batch + s] * x[indices[e] * batch + s]``, for each sample ``s``.

    The sum is over entries ``e`` from `begin` to `end`, whose indices are unsigned. `shared` is the literal name of the
    factor that all samples have in common, which has a batch of 1: "values", "x" or "". Each fourth term is added to
    one of four sums in registers, so that an addition need not wait for the one before it; samples all have one order.
    """
    arguments = (y, types.intp, values, indices, types.intp, types.intp, x, types.intp, shared)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = context.get_data_type(x.dtype)
        y_row, samples = builder.mul(args[1], args[7]), args[7]
        listed = context.make_array(indices)(context, builder, args[3])

        def number(value: int) -> Any:
            return context.get_constant(types.intp, value)

        def factor(name: str, array_type: Any, array: Any, place: Any, lane: Any, width: int) -> Any:
            if name != shared.literal_value:
                at = builder.add(builder.mul(place, samples), lane)
                return _load(context, builder, array_type, array, at, width)
            loaded = _load(context, builder, array_type, array, place, 1)
            order = ir.Constant(ir.VectorType(ir.IntType(32), width), [0] * width)
            return builder.shuffle_vector(loaded, ir.Constant(loaded.type, ir.Undefined), order)

        def add_term(total: Any, entry: Any, lane: Any, width: int) -> None:
            # Equal indices may be one number with a stride of 0.
            place = cgutils.get_item_pointer(context, builder, indices, listed, [entry], wraparound=False)
            index = context.cast(builder, builder.load(place), indices.dtype, types.intp)
            left = factor("values", values, args[2], entry, lane, width)
            right = factor("x", x, args[6], index, lane, width)
            builder.store(builder.fadd(builder.load(total), builder.fmul(left, right)), total)

        def write_sums(lane: Any, width: int) -> None:
            zeros = ir.Constant(ir.VectorType(element, width), [0.0] * width)
            totals = [cgutils.alloca_once(builder, zeros.type) for _ in range(4)]
            for total in totals:
                builder.store(zeros, total)
            groups = builder.udiv(builder.sub(args[5], args[4]), number(4))
            with cgutils.for_range(builder, groups) as group:
                first = builder.add(args[4], builder.mul(group.index, number(4)))
                for place, total in enumerate(totals):
                    add_term(total, builder.add(first, number(place)), lane, width)
            rest = builder.add(args[4], builder.mul(groups, number(4)))
            with cgutils.for_range(builder, args[5], start=rest) as entry:
                add_term(totals[0], entry.index, lane, width)
            one, two, three, four = map(builder.load, totals)
            pointer, alignment = _place(context, builder, y, args[0], builder.add(y_row, lane), width)
            total = builder.fadd(builder.fadd(one, two), builder.fadd(three, four))
            builder.store(total, pointer).align = alignment

        start, left = number(0), samples
        for width in (16, 4, 1):
            blocks = builder.udiv(left, number(width))
            with cgutils.for_range(builder, blocks) as block:
                write_sums(builder.add(start, builder.mul(block.index, number(width))), width)
            taken = builder.mul(blocks, number(width))
            start, left = builder.add(start, taken), builder.sub(left, taken)
        return context.get_dummy_value()

    return types.void(*arguments), generate


@inlined
def write_sum_of_rows(c, at_c, columns, values, starts, first, last, b, at_b, past_caches):
    """``c[at_c + q] = sum of values[t] * b[starts[t] + at_b + q]`` for each ``q`` of `columns` elements.

    The sum is over terms from `first` to `last`; `past_caches` as in `write_sums_of_lines`.
    """
    q = np.int64(0)
    while columns - q >= 64:
        _write_sums_of_scaled(c, at_c + q, 0, values, starts, first, last, b, at_b + q, 0, past_caches, 1, 64)
        q += 64
    if columns - q >= 32:
        _write_sums_of_scaled(c, at_c + q, 0, values, starts, first, last, b, at_b + q, 0, past_caches, 1, 32)
        q += 32
    if columns - q >= 16:
        _write_sums_of_scaled(c, at_c + q, 0, values, starts, first, last, b, at_b + q, 0, past_caches, 1, 16)
        q += 16
    if columns - q >= 8:
        _write_sums_of_scaled(c, at_c + q, 0, values, starts, first, last, b, at_b + q, 0, past_caches, 1, 8)
        q += 8
    if columns - q >= 4:
        _write_sums_of_scaled(c, at_c + q, 0, values, starts, first, last, b, at_b + q, 0, False, 1, 4)
        q += 4
    while columns - q >= 1:
        _write_sums_of_scaled(c, at_c + q, 0, values, starts, first, last, b, at_b + q, 0, False, 1, 1)
        q += 1


@inlined
def _write_columns(c, at_c, lines, size, values, starts, first, last, b, at_b, step, past_caches):
    """As `write_sums_of_lines`, eight elements of each line: of several lines side by side, to read weights once."""
    while lines >= 8:
        _write_sums_of_scaled(c, at_c, size, values, starts, first, last, b, at_b, step, past_caches, 8, 8)
        at_c, at_b, lines = at_c + 8 * size, at_b + 8 * step, lines - 8
    if lines == 7:
        _write_sums_of_scaled(c, at_c, size, values, starts, first, last, b, at_b, step, past_caches, 7, 8)
    elif lines == 6:
        _write_sums_of_scaled(c, at_c, size, values, starts, first, last, b, at_b, step, past_caches, 6, 8)
    else:
        if lines >= 4:
            _write_sums_of_scaled(c, at_c, size, values, starts, first, last, b, at_b, step, past_caches, 4, 8)
            at_c, at_b, lines = at_c + 4 * size, at_b + 4 * step, lines - 4
        if lines >= 2:
            _write_sums_of_scaled(c, at_c, size, values, starts, first, last, b, at_b, step, past_caches, 2, 8)
            at_c, at_b, lines = at_c + 2 * size, at_b + 2 * step, lines - 2
        if lines == 1:
            _write_sums_of_scaled(c, at_c, size, values, starts, first, last, b, at_b, step, past_caches, 1, 8)


@inlined
def write_sums_of_lines(c, at_c, lines, size, values, starts, first, last, b, at_b, step, past_caches):
    """``c[at_c + i * size + q] = sum of values[t] * b[starts[t] + at_b + i * step + q]``, for each ``i`` of `lines`.

    The sum is over terms from `first` to `last`, and ``q`` goes through a line's elements, a multiple of 8 or 4. Where
    `past_caches`, memory is written without reading it into caches first: `c` begins at a multiple of 64 bytes, `at_c`
    and `size` are multiples of 8, and `finish_writes` has to follow.
    """
    if size >= 32:
        for line in range(lines):
            at, place = at_c + line * size, at_b + line * step
            write_sum_of_rows(c, at, size, values, starts, first, last, b, place, past_caches)
    elif size > 8:
        for q in range(0, size, 8):
            _write_columns(c, at_c + q, lines, size, values, starts, first, last, b, at_b + q, step, past_caches)
    elif size == 8:
        _write_columns(c, at_c, lines, 8, values, starts, first, last, b, at_b, step, past_caches)
    else:
        for line in range(lines):
            at, place = at_c + line * size, at_b + line * step
            _write_sums_of_scaled(c, at, size, values, starts, first, last, b, place, step, False, 1, 4)


@inlined
def add_products(y, at_y, a, at_a, b, at_b, count):
    """``y[at_y + q] += a[at_a + q] * b[at_b + q]`` for each ``q`` of `count` elements."""
    q = np.int64(0)
    while count - q >= 64:
        _add_product(y, at_y + q, a, at_a + q, b, at_b + q, 64)
        q += 64
    if count - q >= 32:
        _add_product(y, at_y + q, a, at_a + q, b, at_b + q, 32)
        q += 32
    if count - q >= 16:
        _add_product(y, at_y + q, a, at_a + q, b, at_b + q, 16)
        q += 16
    if count - q >= 8:
        _add_product(y, at_y + q, a, at_a + q, b, at_b + q, 8)
        q += 8
    if count - q >= 4:
        _add_product(y, at_y + q, a, at_a + q, b, at_b + q, 4)
        q += 4
    while count - q >= 1:
        _add_product(y, at_y + q, a, at_a + q, b, at_b + q, 1)
        q += 1


@inlined
def multiply_by(c, at_c, b, at_b, count):
    """``c[at_c + q] *= b[at_b + q]`` for each ``q`` of `count` elements."""
    q = np.int64(0)
    while count - q >= 8:
        _multiply_by(c, at_c + q, b, at_b + q, 1, 8)
        q += 8
    if count - q >= 4:
        _multiply_by(c, at_c + q, b, at_b + q, 1, 4)
        q += 4
    while count - q >= 1:
        _multiply_by(c, at_c + q, b, at_b + q, 1, 1)
        q += 1


@inlined
def scale(c, at_c, b, at_b, count):
    """``c[at_c + q] *= b[at_b]`` for each ``q`` of `count` elements."""
    q = np.int64(0)
    while count - q >= 8:
        _multiply_by(c, at_c + q, b, at_b, 0, 8)
        q += 8
    if count - q >= 4:
        _multiply_by(c, at_c + q, b, at_b, 0, 4)
        q += 4
    while count - q >= 1:
        _multiply_by(c, at_c + q, b, at_b, 0, 1)
        q += 1


@inlined
def copy(c, at_c, b, at_b, count):
    """``c[at_c + q] = b[at_b + q]`` for each ``q`` of `count` elements."""
    q = np.int64(0)
    while count - q >= 8:
        _copy(c, at_c + q, b, at_b + q, 8)
        q += 8
    if count - q >= 4:
        _copy(c, at_c + q, b, at_b + q, 4)
        q += 4
    while count - q >= 1:
        _copy(c, at_c + q, b, at_b + q, 1)
        q += 1


@inlined
def block_width(left):
    """The number of samples in the next block, where `left` remain."""
    if left >= 16:
        return 16
    return 4 if left >= 4 else 1


@inlined
def accumulate_row(c, at_c, c_step, slots, first, last, a, at_a, a_batch, b, at_b, b_batch, width):
    """Add one entry of A times a row of B, for one block of samples; `slots` are unsigned.

    ``c[at_c + slots[q] * c_step] += a[at_a] * b[at_b + (q - first) * b_batch]`` for each ``q`` from `first` to `last`,
    at each of `width` samples from there; a factor with a batch of 1 is shared by all samples.
    """
    # Indices that count from 0 and are unsigned cannot be negative, which would cost a check for each multiply-add.
    row = slots[first:last]
    if width == 16:
        if a_batch == 1:
            for q in range(len(row)):
                _add_scaled(c, at_c + np.int64(row[q]) * c_step, a[at_a], b, at_b, 16)
                at_b += b_batch
        elif b_batch == 1:
            for q in range(len(row)):
                _add_scaled(c, at_c + np.int64(row[q]) * c_step, b[at_b], a, at_a, 16)
                at_b += b_batch
        else:
            for q in range(len(row)):
                _add_product(c, at_c + np.int64(row[q]) * c_step, a, at_a, b, at_b, 16)
                at_b += b_batch
    elif width == 4:
        if a_batch == 1:
            for q in range(len(row)):
                _add_scaled(c, at_c + np.int64(row[q]) * c_step, a[at_a], b, at_b, 4)
                at_b += b_batch
        elif b_batch == 1:
            for q in range(len(row)):
                _add_scaled(c, at_c + np.int64(row[q]) * c_step, b[at_b], a, at_a, 4)
                at_b += b_batch
        else:
            for q in range(len(row)):
                _add_product(c, at_c + np.int64(row[q]) * c_step, a, at_a, b, at_b, 4)
                at_b += b_batch
    else:
        value = a[at_a]
        for q in range(len(row)):
            _add_scaled(c, at_c + np.int64(row[q]) * c_step, value, b, at_b, 1)
            at_b += b_batch
