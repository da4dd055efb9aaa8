"""What recurrent kernels compute with: products of small matrices in registers, tanh and the sigmoid on vectors.

States lie in rows that are padded to whole vectors, so that no loop has a remainder. `multiply_rows` keeps a few rows'
sums in registers while it runs through their common matrix. `tanh` and `sigmoid` are written without branches, for LLVM
to vectorise; libm's are neither that nor the same on every system.
"""

from __future__ import annotations

import math

from ..codegen import INT32, INT64, SINGLE, Emitter, Value, Variable, emitted

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
def multiply_rows(e, out, at_out, out_step, w, at_w, w_step, x, at_x, x_step, depth, width, rows):
    """Add to `rows` rows of `out` the products of as many rows of `x` with one matrix, whose weights are converted.

    ``out[at_out + r*out_step + j] += Σ_k w[at_w + k*w_step + j] * x[at_x + r*x_step + k]`` for `width` columns ``j``, a
    multiple of `LANES`, and `depth` terms ``k``. Sums run in the order of ``k``, however many rows there are.
    """
    for row, count in e.blocks(rows, (ROWS, 4, 1)):
        to = [at_out + (row + number) * out_step for number in range(count)]
        source = [at_x + (row + number) * x_step for number in range(count)]
        for column, lanes in e.blocks(width, (16, LANES) if x.element == SINGLE else (LANES,)):
            sums = [Variable(out[at + column, lanes]) for at in to]
            with e.each(0, depth) as k:
                weights = w[at_w + k * w_step + column, lanes].to(x.element)
                for at, total in zip(source, sums, strict=True):
                    total.value = e.multiply_add(weights, x[at + k].spread(lanes), total.value)
            for at, total in zip(to, sums, strict=True):
                out[at + column] = total.value


def _exponential(e: Emitter, y: Value) -> tuple[Value, Value]:
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
def tanh(e: Emitter, x: Value) -> Value:
    """Hyperbolic tangent within 2 units in the last place, of float32 or float64."""
    size, most = e.apply("fabs", x), 10.0 if x.element == SINGLE else 20.0
    # Written so that a NaN stays one.
    size = e.select(size > most, most, size)
    q, power = _exponential(e, size + size)
    grown = power * q + (power - 1.0)
    return e.apply("copysign", grown / (grown + 2.0), x)


@emitted(returns="x")
def sigmoid(e: Emitter, x: Value) -> Value:
    """``1 / (1 + exp(-x))`` within 2 units in the last place, of float32 or float64."""
    size, most = e.apply("fabs", x), 87.0 if x.element == SINGLE else 708.0
    beyond = size > most
    q, power = _exponential(e, -e.select(beyond, most, size))
    small = e.select(beyond, 0.0, power * q + power)
    return e.select(x < 0.0, small, 1.0) / (small + 1.0)
