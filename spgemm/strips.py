"""Products of several sparse matrices with a full one, strip by strip of its columns.

A strip of each product stays in the caches until the next product reads it, and no product is ever in memory as a
whole. The terms of each row, those whose factor is not zero, are listed once for all strips.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from ..patterns import Pattern
from ..runtime import MEMORY_POOL, SIMD, kernel, row_starts, run_rows, thread_count, unsigned
from .lanes import write_sum_of_rows

#: Rows and columns that are transposed at once.
BLOCK = 16
#: The most bytes of a strip's row, and the least: those of a cache line.
WIDEST, NARROWEST = 256, 64


@kernel
def _list_terms(first, last, indptr, indices, a, live, width, values, places, begins, stops, live_rows):
    count, width = np.uint64(indptr[first]), np.uint64(width)
    for row in range(first, last):
        begin = count
        for entry in range(np.uint64(indptr[row]), np.uint64(indptr[row + 1])):
            value, inner = a[entry], np.uint64(indices[entry])
            values[count], places[count] = value, inner * width
            # Zero times a finite number adds nothing, not even a sign, to a sum that began with zero. It is left out
            # without a branch, which would be guessed wrongly for every other element.
            count += np.uint64(((value != 0) & live[inner]) | (value - value != 0))
        begins[row], stops[row], live_rows[row] = begin, count, count > begin


@kernel
def _multiply(
    first, last, workers, width, right, columns, begins, stops, rows, values, places,
    scratch, bits, magnitude, infinity, out, down, across, finite,
):  # fmt: skip
    strips, inner, room = (columns + width - 1) // width, len(right) // columns, len(scratch) // (2 * workers)
    for worker in range(first, last):
        largest = infinity & ~infinity
        for strip in range(worker, strips, workers):
            left, size = strip * width, min(width, columns - strip * width)
            source, target = 2 * worker * room, (2 * worker + 1) * room
            for row in range(inner):
                for q in range(size):
                    scratch[np.uint64(source + row * width + q)] = right[np.uint64(row * columns + left + q)]
            begin = 0
            for factor in range(len(rows)):
                for row in range(rows[factor]):
                    at, begin_of_row, stop = target + row * width, begins[begin + row], stops[begin + row]
                    write_sum_of_rows(scratch, at, size, values, places, begin_of_row, stop, scratch, source, False)
                    for q in range(size):
                        # Numbers without their signs are ordered as their bits are, which compare several at once.
                        number = bits[np.uint64(at + q)] & magnitude
                        largest = number if number > largest else largest
                begin += rows[factor]
                source, target = target, source
            # In blocks, as a transposition.
            for low in range(0, size, BLOCK):
                for top in range(0, rows[-1], BLOCK):
                    count = min(BLOCK, rows[-1] - top)
                    for q in range(low, min(low + BLOCK, size)):
                        at = source + q
                        place = (left + q) * across
                        for row in range(top, top + count):
                            out[np.uint64(place + row * down)] = scratch[np.uint64(at + row * width)]
        if largest >= infinity:
            finite[0] = False


class StripProduct:
    """``A_n ... A_1 B`` for sparse factors and a full matrix `B` of so many columns, on the CPU.

    Parameters
    ----------
    factors : sequence of Pattern
        The patterns of ``A_1`` to ``A_n``.
    columns : int
        The number of columns of `B`.
    """

    def __init__(self, factors: Sequence[Pattern], columns: int) -> None:
        self.factors, self.columns = tuple(factors), columns
        self._rows = np.array([factor.shape[0] for factor in factors], np.int64)
        self._largest = max(factors[0].shape[1], *self._rows.tolist())
        self._begins = row_starts(np.array([factor.nnz for factor in factors]), np.int64).tolist()

    def width(self, itemsize: int) -> int:
        """The columns of a strip, of which each thread has one or more; 0 where strips do not pay."""
        threads, line = thread_count(), NARROWEST // itemsize
        # Lists of terms are not to take more memory than whole products.
        if self.columns < line * threads or 2 * self._begins[-1] > self._largest * self.columns:
            return 0
        return min(WIDEST // itemsize, -(-self.columns // (threads * line)) * line)

    def multiply(
        self, values: Sequence[np.ndarray], right: np.ndarray, out: np.ndarray, steps: tuple[int, int]
    ) -> bool:
        """Write the product's element of row ``i`` and column ``j`` to ``out[i * steps[0] + j * steps[1]]``.

        Where the result is False, what was written is of no use: a number is not finite, and zeros are left out that
        would have to be multiplied by it.
        """
        dtype, workers = right.dtype, thread_count()
        width = self.width(right.itemsize)
        if not np.isfinite(right).all():
            return False
        terms, places = (MEMORY_POOL.empty((self._begins[-1] + 1,), kind) for kind in (dtype, np.int64))
        begins, stops = np.empty((2, int(self._rows.sum())), np.int64)
        live, row = (right.reshape(-1, self.columns) != 0).any(1), 0
        for factor, a, (begin, stop) in zip(self.factors, values, itertools.pairwise(self._begins), strict=True):
            indptr, of_rows = factor.indptr, slice(row, row + factor.shape[0])
            of_factor = terms[begin : stop + 1], places[begin : stop + 1], begins[of_rows], stops[of_rows]
            live_rows = np.empty(factor.shape[0], np.bool_)
            run_rows(_list_terms, indptr, indptr, unsigned(factor.indices), a, live, width, *of_factor, live_rows)
            begins[of_rows] += begin
            stops[of_rows] += begin
            live, row = live_rows, of_rows.stop
        scratch = MEMORY_POOL.empty((workers * 2 * self._largest * width,), dtype)
        finite, kind = np.ones(1, np.bool_), np.dtype(f"u{right.itemsize}").type
        sign, infinity = np.array([-0.0, np.inf], dtype).view(kind)
        work = np.arange(workers + 1) * (len(begins) * self.columns // SIMD)
        lists = (begins, stops, self._rows, terms, places)
        memory = (scratch, scratch.view(kind), ~sign, infinity, out, *steps, finite)
        run_rows(_multiply, work, workers, width, right, self.columns, *lists, *memory)
        return bool(finite[0])
