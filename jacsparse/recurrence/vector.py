"""What recurrent kernels compute with: products of small matrices in registers, tanh and the sigmoid on vectors.

States lie in rows that are padded to whole vectors, so that no loop has a remainder. `multiply_rows` keeps a few rows'
sums in registers while it runs through their common matrix. `tanh` and `sigmoid` are written without branches, for LLVM
to vectorise; libm's are neither that nor the same on every system.
"""

from __future__ import annotations

import math

from ..codegen import INT32, INT64, SINGLE, Emitter, Register, Variable, copy_row, emitted

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


@emitted()
def split_row(e, vectors, at, source, at_source, size):
    """``vectors[n][at + i] = source[at_source + n * size + i]`` for each vector ``n``, and `size` elements ``i``."""
    for n, vector in enumerate(vectors):
        copy_row(e, vector, at, source, at_source + size * n, size)


@emitted()
def join_row(e, out, at_out, vectors, at, size):
    """``out[at_out + n * size + i] = vectors[n][at + i]`` for each vector ``n``, and `size` elements ``i``."""
    for n, vector in enumerate(vectors):
        copy_row(e, out, at_out + size * n, vector, at, size)


@emitted()
def multiply_rows(e, outs, w, w_shift, w_step, xs, depth, width, rows):
    """Add to rows of `outs` the products of rows of `xs` with one matrix each, whose weights are converted.

    ``outs[n][r*width + j] += Σ_k w[n*w_shift + k*w_step + j] * xs[n][r*width + k]`` for `rows` rows ``r``, `width`
    columns ``j``, a multiple of `LANES`, and `depth` terms ``k``. Sums run in the order of ``k``, however many rows
    there are. Either of `outs` and `xs` may be one array, which all products have in common.
    """
    count = max(len(each) if isinstance(each, tuple) else 1 for each in (outs, xs))
    for n in range(count):
        out, x = (each[n] if isinstance(each, tuple) else each for each in (outs, xs))
        for row, together in e.blocks(rows, (ROWS, 4, 1)):
            starts = [(row + number) * width for number in range(together)]
            for column, lanes in e.blocks(width, (16, LANES) if x.element == SINGLE else (LANES,)):
                sums = [Variable(out[start + column, lanes]) for start in starts]
                with e.each(0, depth) as k:
                    weights = w[w_shift * n + k * w_step + column, lanes].to(x.element)
                    for start, total in zip(starts, sums, strict=True):
                        total.value = e.multiply_add(weights, x[start + k].spread(lanes), total.value)
                for start, total in zip(starts, sums, strict=True):
                    out[start + column] = total.value


def _exponential(e: Emitter, y: Register) -> tuple[Register, Register]:
    """``exp(y) - 1 = power * q + (power - 1)``, without the digits that a subtraction would lose near zero.

    ``exp(y) = 2^k (1 + q)`` with ``k = round(y / ln 2)``, and ``q = exp(r) - 1`` for the rest ``r`` of at most
    ``ln(2)/2``, by its series. Adding 1.5 · 2^(digits of the significand) rounds, and leaves ``k`` in the lowest bits.
    ln 2 is taken away in two parts.
    """
    single = y.element == SINGLE
    rounding, digits, bias, terms = (12582912.0, 23, 127, 7) if single else (6755399441055744.0, 52, 1023, 13)
    high, low = (0.693359375, -2.12194440e-4) if single else (6.93147180369123816490e-01, 1.90821492927058770002e-10)
    shifted = y * 1.4426950408889634 + rounding
    k = shifted - rounding
    r = y - k * high - k * low
    power = (shifted.bits_as(INT32 if single else INT64) * 2**digits + (bias << digits)).bits_as(y.type)
    q = e.value(1 / math.factorial(terms), y.type)
    for term in range(terms - 1, 1, -1):
        q = q * r + 1 / math.factorial(term)
    return q * r * r + r, power


@emitted(returns="x")
def tanh(e: Emitter, x: Register) -> Register:
    """Hyperbolic tangent within 2 units in the last place, of float32 or float64."""
    size, most = e.apply("fabs", x), 10.0 if x.element == SINGLE else 20.0
    # Written so that a NaN stays one.
    size = e.select(size > most, most, size)
    q, power = _exponential(e, size + size)
    grown = power * q + (power - 1.0)
    return e.apply("copysign", grown / (grown + 2.0), x)


@emitted(returns="x")
def sigmoid(e: Emitter, x: Register) -> Register:
    """``1 / (1 + exp(-x))`` within 2 units in the last place, of float32 or float64."""
    size, most = e.apply("fabs", x), 87.0 if x.element == SINGLE else 708.0
    beyond = size > most
    q, power = _exponential(e, -e.select(beyond, most, size))
    small = e.select(beyond, 0.0, power * q + power)
    return e.select(x < 0.0, small, 1.0) / (small + 1.0)
