"""What recurrent kernels compute with: products of small matrices in registers, tanh and the sigmoid on vectors.

States lie in rows that are padded to whole vectors, so that no loop has a remainder. `multiply_rows` keeps a few rows'
sums in registers while it runs through their common matrix. `tanh` and `sigmoid` are written without branches, for LLVM
to vectorise; libm's are neither that nor the same on every system.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, overload

from ..runtime import inlined

#: Rows are padded to a multiple of as many elements.
LANES = 8
#: As many rows share one pass over their matrix, and their sums stay in registers; half as many almost as well.
ROWS = 8


def padded(size: int) -> int:
    """The next multiple of `LANES`.

    Examples
    --------
    >>> padded(20)
    24
    """
    return -(-size // LANES) * LANES


def as_elements(builder: Any, vector: Any, element: Any) -> Any:
    """While a kernel is compiled: a vector of float32 or float64 as one of `element`."""
    kind = ir.VectorType(element, vector.type.count)
    if vector.type == kind:
        return vector
    return (builder.fpext if isinstance(element, ir.DoubleType) else builder.fptrunc)(vector, kind)


@intrinsic(prefer_literal=True)
def _multiply_block(typing_context, out, at_out, out_step, w, at_w, w_step, x, at_x, x_step, depth, rows, lanes):
    """``out[at_out + r*out_step + l] += Σ_k w[at_w + k*w_step + l] * x[at_x + r*x_step + k]``.

    For a literal number of rows ``r`` and of lanes ``l``; the sums over ``k`` stay in registers. `out` and `x` have one
    dtype; weights are converted to it.
    """
    count, width = rows.literal_value, lanes.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array_types = (signature.args[0], signature.args[3], signature.args[6])
        out_data, w_data, x_data = (
            context.make_array(kind)(context, builder, args[place]).data
            for kind, place in zip(array_types, (0, 3, 6), strict=True)
        )
        _, at_out, out_step, _, at_w, w_step, _, at_x, x_step, depth_, _, _ = args
        element, weight = (context.get_data_type(kind.dtype) for kind in array_types[:2])
        alignment, weight_alignment = (context.get_abi_alignment(kind) for kind in (element, weight))
        vector, integer = ir.VectorType(element, width), at_out.type
        undefined = ir.Constant(vector, ir.Undefined)
        first_lane = ir.Constant(ir.VectorType(ir.IntType(32), width), [0] * width)

        def place_of(data: Any, place: Any, element: Any = element) -> Any:
            return builder.bitcast(builder.gep(data, [place]), ir.VectorType(element, width).as_pointer())

        def shifted(place: Any, step: Any, number: int) -> Any:
            return builder.add(place, builder.mul(step, ir.Constant(integer, number)))

        places = [place_of(out_data, shifted(at_out, out_step, row)) for row in range(count)]
        sums = []
        for place in places:
            total = cgutils.alloca_once(builder, vector)
            loaded = builder.load(place)
            loaded.align = alignment
            builder.store(loaded, total)
            sums.append(total)
        starts = [shifted(at_x, x_step, row) for row in range(count)]
        with cgutils.for_range(builder, depth_, intp=integer) as loop:
            weights = builder.load(place_of(w_data, builder.add(at_w, builder.mul(loop.index, w_step)), weight))
            weights.align = weight_alignment
            weights = as_elements(builder, weights, element)
            for start, total in zip(starts, sums, strict=True):
                factor = builder.load(builder.gep(x_data, [builder.add(start, loop.index)]))
                single = builder.insert_element(undefined, factor, ir.Constant(ir.IntType(32), 0))
                spread = builder.shuffle_vector(single, undefined, first_lane)
                term = builder.fmul(weights, spread, flags=("contract",))
                builder.store(builder.fadd(builder.load(total), term, flags=("contract",)), total)
        for place, total in zip(places, sums, strict=True):
            builder.store(builder.load(total), place).align = alignment
        return context.get_dummy_value()

    integer = types.intp
    arguments = (out, integer, integer, w, integer, integer, x, integer, integer, integer, rows, lanes)
    return types.void(*arguments), generate


@inlined
def multiply_rows(out, at_out, out_step, w, at_w, w_step, x, at_x, x_step, depth, width, rows):
    """Add to `rows` rows of `out` the products of as many rows of `x` with one matrix.

    ``out[at_out + r*out_step + j] += Σ_k w[at_w + k*w_step + j] * x[at_x + r*x_step + k]`` for `width` columns ``j``, a
    multiple of `LANES`, and `depth` terms ``k``. Sums run in the order of ``k``, however many rows there are.
    """
    row = 0
    while row < rows:
        left = rows - row
        to, source = at_out + row * out_step, at_x + row * x_step
        column = 0
        if x.itemsize == 4:
            while width - column >= 16:
                at = at_w + column
                if left >= 8:
                    _multiply_block(out, to + column, out_step, w, at, w_step, x, source, x_step, depth, 8, 16)
                elif left >= 4:
                    _multiply_block(out, to + column, out_step, w, at, w_step, x, source, x_step, depth, 4, 16)
                else:
                    _multiply_block(out, to + column, out_step, w, at, w_step, x, source, x_step, depth, 1, 16)
                column += 16
        while column < width:
            at = at_w + column
            if left >= 8:
                _multiply_block(out, to + column, out_step, w, at, w_step, x, source, x_step, depth, 8, 8)
            elif left >= 4:
                _multiply_block(out, to + column, out_step, w, at, w_step, x, source, x_step, depth, 4, 8)
            else:
                _multiply_block(out, to + column, out_step, w, at, w_step, x, source, x_step, depth, 1, 8)
            column += 8
        row += 8 if left >= 8 else 4 if left >= 4 else 1


@intrinsic
def _copy_lanes(typing_context, out, at_out, source, at_source):
    """``out[at_out + i] = source[at_source + i]`` for `LANES` elements of two contiguous arrays."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, to_place, from_, from_place = args

        def place_of(kind: Any, array: Any, place: Any) -> tuple[Any, Any]:
            element = context.get_data_type(kind.dtype)
            data = context.make_array(kind)(context, builder, array).data
            return element, builder.bitcast(builder.gep(data, [place]), ir.VectorType(element, LANES).as_pointer())

        (element, target), (kind, origin) = place_of(out, to, to_place), place_of(source, from_, from_place)
        loaded = builder.load(origin)
        loaded.align = context.get_abi_alignment(kind)
        copied = as_elements(builder, loaded, element)
        builder.store(copied, target).align = context.get_abi_alignment(element)
        return context.get_dummy_value()

    integer = types.intp
    return types.void(out, integer, source, integer), generate


@inlined
def copy_elements(out, at_out, source, at_source, count):
    """``out[at_out + i] = source[at_source + i]`` for `count` elements of two contiguous arrays of floats."""
    if count < LANES:
        for i in range(count):
            out[at_out + i] = source[at_source + i]
        return
    for i in range(0, count - LANES + 1, LANES):
        _copy_lanes(out, at_out + i, source, at_source + i)
    if count % LANES:
        # The last ones, some of them again.
        _copy_lanes(out, at_out + count - LANES, source, at_source + count - LANES)


@intrinsic
def _any_lane(typing_context, x, at):
    """Whether any of `LANES` elements of a contiguous array of floats from a place on is not zero."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = context.get_data_type(x.dtype)
        vector = ir.VectorType(element, LANES)
        data = context.make_array(x)(context, builder, args[0]).data
        loaded = builder.load(builder.bitcast(builder.gep(data, [args[1]]), vector.as_pointer()))
        loaded.align = context.get_abi_alignment(element)
        lanes = builder.fcmp_unordered("!=", loaded, ir.Constant(vector, [0.0] * LANES))
        some = builder.bitcast(lanes, ir.IntType(LANES))
        return builder.icmp_unsigned("!=", some, ir.Constant(some.type, 0))

    return types.boolean(x, types.intp), generate


@inlined
def any_nonzero(x, at, count):
    """Whether any of `count` elements of a contiguous array of floats from a place on is nonzero; NaN counts."""
    nonzero = False
    if count < LANES:
        for i in range(count):
            nonzero |= x[at + i] != 0
    else:
        for i in range(0, count - LANES + 1, LANES):
            nonzero |= _any_lane(x, at + i)
        nonzero |= _any_lane(x, at + count - LANES)
    return nonzero


@intrinsic
def _bits(typing_context, x):
    """A float's bits as an unsigned integer."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(x.bitwidth))

    return (types.uint32 if x == types.float32 else types.uint64)(x), generate


@intrinsic
def _from_bits(typing_context, x):
    """The float that an unsigned integer holds the bits of."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType() if x.bitwidth == 32 else ir.DoubleType())

    return (types.float32 if x.bitwidth == 32 else types.float64)(x), generate


# exp(y) = 2^k (1 + q) with k = round(y / ln 2), and q = exp(r) - 1 for the rest r of at most ln(2)/2, by its series.
# Adding 1.5 · 2^(digits of the significand) rounds, and leaves k in the lowest bits. ln 2 is taken away in two parts.


@inlined
def _parts_single(y):
    shifted = y * np.float32(1.4426950408889634) + np.float32(12582912.0)
    k = shifted - np.float32(12582912.0)
    r = y - k * np.float32(0.693359375)
    r = r - k * np.float32(-2.12194440e-4)
    power = _from_bits(np.uint32((_bits(shifted) << np.uint32(23)) + np.uint32(0x3F800000)))
    q = np.float32(1 / 5040)
    q = q * r + np.float32(1 / 720)
    q = q * r + np.float32(1 / 120)
    q = q * r + np.float32(1 / 24)
    q = q * r + np.float32(1 / 6)
    q = q * r + np.float32(1 / 2)
    return q * r * r + r, power


@inlined
def _parts_double(y):
    shifted = y * 1.4426950408889634 + 6755399441055744.0
    k = shifted - 6755399441055744.0
    r = y - k * 6.93147180369123816490e-01
    r = r - k * 1.90821492927058770002e-10
    power = _from_bits(np.uint64((_bits(shifted) << np.uint64(52)) + np.uint64(0x3FF0000000000000)))
    q = 1 / 6227020800
    q = q * r + 1 / 479001600
    q = q * r + 1 / 39916800
    q = q * r + 1 / 3628800
    q = q * r + 1 / 362880
    q = q * r + 1 / 40320
    q = q * r + 1 / 5040
    q = q * r + 1 / 720
    q = q * r + 1 / 120
    q = q * r + 1 / 24
    q = q * r + 1 / 6
    q = q * r + 1 / 2
    return q * r * r + r, power


@inlined
def _tanh_single(x):
    size = abs(x)
    # Written so that a NaN stays one.
    size = np.float32(10) if size > np.float32(10) else size
    q, power = _parts_single(size + size)
    # exp(2|x|) - 1, without the digits that a subtraction would lose near zero.
    grown = power * q + (power - np.float32(1))
    value = grown / (grown + np.float32(2))
    return _from_bits(np.uint32(_bits(value) | (_bits(x) & np.uint32(0x80000000))))


@inlined
def _tanh_double(x):
    size = abs(x)
    size = 20.0 if size > 20.0 else size
    q, power = _parts_double(size + size)
    grown = power * q + (power - 1.0)
    value = grown / (grown + 2.0)
    return _from_bits(np.uint64(_bits(value) | (_bits(x) & np.uint64(0x8000000000000000))))


@inlined
def _sigmoid_single(x):
    size = abs(x)
    q, power = _parts_single(-(np.float32(87) if size > np.float32(87) else size))
    small = np.float32(0) if size > np.float32(87) else power * q + power
    one = np.float32(1)
    return (small if x < np.float32(0) else one) / (one + small)


@inlined
def _sigmoid_double(x):
    size = abs(x)
    q, power = _parts_double(-(708.0 if size > 708.0 else size))
    small = 0.0 if size > 708.0 else power * q + power
    return (small if x < 0.0 else 1.0) / (1.0 + small)


def tanh(x: float) -> float:
    """Hyperbolic tangent within 2 units in the last place; in kernels, of float32 or float64."""
    raise NotImplementedError("for kernels only")


def sigmoid(x: float) -> float:
    """``1 / (1 + exp(-x))`` within 2 units in the last place; in kernels, of float32 or float64."""
    raise NotImplementedError("for kernels only")


@overload(tanh, jit_options={"forceinline": True, "error_model": "numpy"})
def _tanh(x):
    if x == types.float32:
        return lambda x: _tanh_single(x)
    return lambda x: _tanh_double(x)


@overload(sigmoid, jit_options={"forceinline": True, "error_model": "numpy"})
def _sigmoid(x):
    if x == types.float32:
        return lambda x: _sigmoid_single(x)
    return lambda x: _sigmoid_double(x)
