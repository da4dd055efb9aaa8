"""Kernels of max-pooling; rows are planes of a block, and addresses are in bytes."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from ..runtime import kernel
from .vectors import Tile, VectorWriter


def _on_vectors(write_body: Callable[..., None]) -> Any:
    """Decorator: an intrinsic of a tile, and of three addresses and a number; the body is given a writer and these."""

    @intrinsic(prefer_literal=True)
    def compiled(context, tile, x, y, winners, number):
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            write = VectorWriter(builder, Tile(*ast.literal_eval(tile.literal_value)))
            _, x, y, winners, number = args
            lanes = write.repeated(builder.trunc(number, ir.IntType(8)), write.bytes)
            write_body(write, x, y, winners, lanes)
            return context.get_dummy_value()

        return types.void(tile, *[types.int64] * 4), generate

    return compiled


@_on_vectors
def _begin(write, x, y, winners, number):
    write.store(write.load(x), y)
    write.store(number, winners)


@_on_vectors
def _take_larger(write, x, y, winners, number):
    best, winner = write.larger(write.load(y), write.load(winners, write.bytes), write.load(x), number)
    write.store(best, y)
    write.store(winner, winners)


@_on_vectors
def _add_won(write, x, y, winners, number):
    won = write.builder.icmp_unsigned("==", write.load(winners, write.bytes), number)
    write.store(write.builder.fadd(write.load(x), write.builder.select(won, write.load(y), write.zero)), x)


@_on_vectors
def _set_won(write, x, y, winners, number):
    won = write.builder.icmp_unsigned("==", write.load(winners, write.bytes), number)
    write.store(write.builder.select(won, write.load(y), write.zero), x)


@_on_vectors
def _take_won(write, x, y, winners, number):
    won = write.builder.icmp_unsigned("==", write.load(winners, write.bytes), number)
    write.store(write.builder.select(won, write.load(x), write.load(y)), y)


@functools.cache
def winners_kernel(itemsize: int, lanes: int) -> Callable[..., None]:
    """The kernel that sets `y` to each window's maximum, and `winners` to its number there."""
    tile, width = repr((itemsize, lanes, 1, 1, 1, ())), itemsize * lanes

    @kernel
    def take_winners(first, last, x, y, winners, sizes, window):
        for plane in range(first, last):
            for position in range(sizes[2] * sizes[3]):
                top = position // sizes[3] * window[2] - window[4]
                left = position % sizes[3] * window[3] - window[5]
                at = plane * sizes[2] * sizes[3] + position
                begun = False
                for i in range(window[0]):
                    for j in range(window[1]):
                        row, column = top + i * window[6], left + j * window[7]
                        if row < 0 or row >= sizes[0] or column < 0 or column >= sizes[1]:
                            continue
                        source = x + ((plane * sizes[0] + row) * sizes[1] + column) * width
                        if begun:
                            _take_larger(tile, source, y + at * width, winners + at * lanes, i * window[1] + j)
                        else:
                            _begin(tile, source, y + at * width, winners + at * lanes, i * window[1] + j)
                        begun = True

    return take_winners


@functools.cache
def scatter_kernel(itemsize: int, lanes: int) -> Callable[..., None]:
    """The kernel that sets `x` to the sums of the gradients `y` of the windows that each position won.

    Where the windows cover each position once, `apart`, it is set, and else added to what `x` holds.
    """
    tile, width = repr((itemsize, lanes, 1, 1, 1, ())), itemsize * lanes

    @kernel
    def scatter(first, last, x, y, winners, sizes, window, apart):
        for plane in range(first, last):
            for position in range(sizes[2] * sizes[3]):
                top = position // sizes[3] * window[2] - window[4]
                left = position % sizes[3] * window[3] - window[5]
                at = plane * sizes[2] * sizes[3] + position
                for i in range(window[0]):
                    for j in range(window[1]):
                        row, column = top + i * window[6], left + j * window[7]
                        if row < 0 or row >= sizes[0] or column < 0 or column >= sizes[1]:
                            continue
                        target = x + ((plane * sizes[0] + row) * sizes[1] + column) * width
                        if apart:
                            _set_won(tile, target, y + at * width, winners + at * lanes, i * window[1] + j)
                        else:
                            _add_won(tile, target, y + at * width, winners + at * lanes, i * window[1] + j)

    return scatter


@functools.cache
def gather_kernel(itemsize: int, lanes: int) -> Callable[..., None]:
    """The kernel that sets `y` to what `x` holds where each window's winner stands; others are left as they are."""
    tile, width = repr((itemsize, lanes, 1, 1, 1, ())), itemsize * lanes

    @kernel
    def gather(first, last, x, y, winners, sizes, window):
        for plane in range(first, last):
            for position in range(sizes[2] * sizes[3]):
                top = position // sizes[3] * window[2] - window[4]
                left = position % sizes[3] * window[3] - window[5]
                at = plane * sizes[2] * sizes[3] + position
                for i in range(window[0]):
                    for j in range(window[1]):
                        row, column = top + i * window[6], left + j * window[7]
                        if row < 0 or row >= sizes[0] or column < 0 or column >= sizes[1]:
                            continue
                        source = x + ((plane * sizes[0] + row) * sizes[1] + column) * width
                        _take_won(tile, source, y + at * width, winners + at * lanes, i * window[1] + j)

    return gather
