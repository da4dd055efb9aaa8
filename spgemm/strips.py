"""Products of several sparse matrices with a full one, strip by strip of its columns.

A strip of each product stays in the caches until the next product reads it, and no product is ever in memory as a
whole. The terms of each row, those whose factor is not zero, are listed once for all strips, and rows that no term of
the next product reads are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from ..patterns import Pattern
from ..runtime import MEMORY_POOL, SIMD, kernel, row_starts, run_rows, thread_count
from .lanes import write_sum_of_rows

#: Where the terms of each row of a product begin, and where they stop.
Lists = tuple[np.ndarray, np.ndarray]
#: Rows and columns that are transposed at once.
BLOCK = 16
#: The most bytes of a strip's row, and the least: those of a cache line.
WIDEST, NARROWEST = 256, 64


@kernel
def _list_terms(first, last, indptr, indices, a, bounds, values, inner_rows, begins, stops, row_bounds):
    count = np.uint64(indptr[first])
    for row in range(first, last):
        begin, bound = count, bounds.dtype.type(0)
        for entry in range(np.uint64(indptr[row]), np.uint64(indptr[row + 1])):
            value, inner = a[entry], indices[entry]
            values[count], inner_rows[count] = value, inner
            term = abs(value) * bounds[np.uint64(inner)]
            bound += term
            # Zero times a finite number adds nothing, not even a sign, to a sum that began with zero. It is left out
            # without a branch, which would be guessed wrongly for every other element.
            count += np.uint64(term != 0)
        begins[row], stops[row], row_bounds[row] = begin, count, bound


@kernel
def _mark_read(first, last, begins, stops, inner_rows, read):
    for row in range(first, last):
        for term in range(begins[row], stops[row]):
            inner = np.uint64(inner_rows[np.uint64(term)])
            # Threads that only read share a cache line.
            if not read[inner]:
                read[inner] = True


@kernel
def _take_places(first, last, begins, stops, inner_rows, places):
    for row in range(first, last):
        for term in range(begins[row], stops[row]):
            inner_rows[np.uint64(term)] = places[np.uint64(inner_rows[np.uint64(term)])]


@kernel
def _multiply(
    first, last, workers, width, right, columns, read, begins, stops, rows, values, places, scratch, out, down, across
):
    strips, room = (columns + width - 1) // width, len(scratch) // (2 * workers)
    for worker in range(first, last):
        for strip in range(worker, strips, workers):
            left, size = strip * width, min(width, columns - strip * width)
            source, target = 2 * worker * room, (2 * worker + 1) * room
            for row in range(len(read)):
                for q in range(size):
                    scratch[np.uint64(source + row * width + q)] = right[np.uint64(read[row] * columns + left + q)]
            begin = 0
            for factor in range(len(rows)):
                for row in range(begin, begin + rows[factor]):
                    at, start, stop = target + (row - begin) * width, begins[row], stops[row]
                    write_sum_of_rows(scratch, at, size, values, places, start, stop, scratch, source)
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
        self._largest = max(max(factor.shape) for factor in factors)
        self._begins = row_starts(np.array([factor.nnz for factor in factors]), np.int64).tolist()

    def width(self, itemsize: int) -> int:
        """The columns of a strip, of which each thread has one or more; 0 where strips do not pay."""
        threads, line = thread_count(), NARROWEST // itemsize
        # Lists of terms are not to take more memory than whole products; their places in a strip are int32.
        if self.columns < line * threads or 2 * self._begins[-1] > self._largest * self.columns:
            return 0
        width = min(WIDEST // itemsize, -(-self.columns // (threads * line)) * line)
        return width if self._largest * width < 2**31 else 0

    def multiply(
        self, values: Sequence[np.ndarray], right: np.ndarray, out: np.ndarray, steps: tuple[int, int]
    ) -> bool:
        """Write the product's element of row ``i`` and column ``j`` to ``out[i * steps[0] + j * steps[1]]``.

        Where the result is False, nothing is written: an element of a product is not finite, or may be too large, and
        zeros would have to be multiplied by it.
        """
        dtype, workers, width = right.dtype, thread_count(), self.width(right.itemsize)
        terms = MEMORY_POOL.empty((self._begins[-1],), dtype), MEMORY_POOL.empty((self._begins[-1],), np.int32)
        lists = self._listed(values, right.reshape(-1, self.columns), terms)
        if lists is None:
            return False
        read, lists = self._read_alone(lists, terms[1], width)
        begins, stops = (np.concatenate(each) for each in zip(*lists, strict=True))
        rows = np.array([len(each) for each, _ in lists])
        scratch = MEMORY_POOL.empty((workers * 2 * max(len(read), *rows.tolist()) * width,), dtype)
        work = np.arange(workers + 1) * (len(begins) * self.columns // SIMD)
        memory = (*terms, scratch, out, *steps)
        run_rows(_multiply, work, workers, width, right, self.columns, read, begins, stops, rows, *memory)
        return True

    def _listed(
        self, values: Sequence[np.ndarray], right: np.ndarray, terms: tuple[np.ndarray, np.ndarray]
    ) -> list[Lists] | None:
        """List the terms of all rows of the products; None where an element may not be finite.

        `terms` are what is written: their values, and their rows in the matrix on the right.
        """
        # The largest magnitude that an element of each row may have.
        bounds = np.maximum(right.max(1), -right.min(1))
        lists = []
        for factor, a, (begin, stop) in zip(self.factors, values, itertools.pairwise(self._begins), strict=True):
            begins, stops = np.empty((2, factor.shape[0]), np.int64)
            row_bounds = np.empty(factor.shape[0], right.dtype)
            of_factor = (each[begin:stop] for each in terms)
            indptr, indices = factor.indptr, factor.indices
            run_rows(_list_terms, indptr, indptr, indices, a, bounds, *of_factor, begins, stops, row_bounds)
            if not row_bounds.max(initial=0) < np.finfo(right.dtype).max / 2:
                return None
            lists.append((begins + begin, stops + begin))
            bounds = row_bounds
        return lists

    def _read_alone(self, lists: list[Lists], inner: np.ndarray, width: int) -> tuple[np.ndarray, list[Lists]]:
        """The rows of the full matrix that terms read, and the lists of those rows of each product that terms read.

        `inner`, the row that each term reads, becomes its place in a strip that has these rows alone.
        """
        lists, rows = list(lists), np.empty(0, np.int64)
        for number in range(len(lists) - 1, -1, -1):
            begins, stops = lists[number]
            work, size = row_starts(stops - begins, np.int64), self.factors[number].shape[1]
            read, places = np.zeros(size, np.bool_), np.empty(size, np.int32)
            run_rows(_mark_read, work, begins, stops, inner, read)
            rows = np.flatnonzero(read)
            places[rows] = np.arange(0, len(rows) * width, width)
            run_rows(_take_places, work, begins, stops, inner, places)
            if number:
                begins, stops = lists[number - 1]
                lists[number - 1] = begins[rows], stops[rows]
        return rows, lists
