"""What kernels of several rooms do with rows of contiguous elements: they copy, scale, sum and ask.

Each takes vectors as wide as the rest of a row allows, and rounds each product and each sum by itself.
"""

from __future__ import annotations

from numba.core import types

from .emitter import TRUTH, Array, Emitter, Register, Variable, emitted

#: Lanes of vectors, and of those where several are under way at once.
_WIDTHS, WIDE = (8, 4, 2, 1), (64, 32, 16, 8, 4, 2, 1)


def copy_row(e: Emitter, c: Array, at_c: Register, b: Array, at_b: Register, count: Register) -> None:
    """``c[at_c + q] = b[at_b + q]`` for each ``q`` of `count` floats, which may be converted."""
    for q, lanes in e.blocks(count, _WIDTHS):
        c[at_c + q] = b[at_b + q, lanes].to(c.element)


#: As `copy_row`, for kernels.
copy_elements = emitted()(copy_row)


@emitted()
def multiply_by(e: Emitter, c: Array, at_c: Register, b: Array, at_b: Register, count: Register) -> None:
    """``c[at_c + q] *= b[at_b + q]`` for each ``q`` of `count` elements."""
    for q, lanes in e.blocks(count, _WIDTHS):
        c[at_c + q, lanes] *= b[at_b + q, lanes]


@emitted()
def scale(e: Emitter, c: Array, at_c: Register, b: Array, at_b: Register, count: Register) -> None:
    """``c[at_c + q] *= b[at_b]`` for each ``q`` of `count` elements."""
    factor = b[at_b]
    for q, lanes in e.blocks(count, _WIDTHS):
        c[at_c + q, lanes] *= factor.spread(lanes)


@emitted(returns="b")
def dot(e: Emitter, a: Array, at_a: Register, b: Array, at_b: Register, count: Register) -> Register:
    """``Σ_q a[at_a + q] * b[at_b + q]`` in the dtype of `b`: sums of lanes side by side, added in a fixed order."""
    total = Variable(e.value(0.0, b.element))
    sums = Variable(e.value(0.0, b.element).spread(_WIDTHS[0]))
    for q, lanes in e.blocks(count, (_WIDTHS[0], 1)):
        part = total if lanes == 1 else sums
        part.value += a[at_a + q, lanes].to(b.element) * b[at_b + q, lanes]
    return total.value + sums.value.sum()


@emitted(returns=types.boolean)
def any_nonzero(e: Emitter, x: Array, at: Register, count: Register) -> Register:
    """Whether any of `count` floats is nonzero; NaN counts."""
    found = Variable(e.value(False, TRUTH))
    for q, lanes in e.blocks(count, (_WIDTHS[0], 1)):
        found.value |= x[at + q, lanes].differs(0.0).any()
    return found.value


@emitted(returns="word")
def population(e: Emitter, word: Register) -> Register:
    """The number of set bits of a word."""
    return Register(e, e.builder.ctpop(word.register))


@emitted(returns="word")
def lowest_bit(e: Emitter, word: Register) -> Register:
    """The place of the lowest set bit of a word that is not zero."""
    return Register(e, e.builder.cttz(word.register, e.constant(True, TRUTH)))
