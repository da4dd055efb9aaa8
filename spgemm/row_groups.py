"""Products of many sparse matrices, group by group of the product's rows.

Rows of ``A_1 ... A_s`` with the same columns have the same columns in ``A_1 ... A_s A_(s+1)``, too. In a convolutional
decoder they are many: all pixels of a patch depend on the same window of the input. The rows of a group are a small
full matrix, and its product with the next factor reads each entry of that once for all of them. So one group after the
other goes through all factors in the caches, and no product but the last one is ever in memory as a whole. What is to
be done is planned once for all groups that differ in their places alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..patterns import Csr, Identity, Pattern
from ..runtime import MEMORY_POOL, SIMD, inlined, kernel, row_starts, run_rows, thread_count, within_rows
from .lanes import write_sum_of_rows
from .symbolic import product_pattern, row_work

#: Elements that lie side by side where groups are small: of several samples.
LANES = 64
#: The most bytes of a group's matrix, for several samples at once.
MOST_BYTES = 2**18


@kernel
def _multiply(
    first, last, workers, blocks, samples, batch, scaled, templates, row_begins, rows, entries, counts, place_begins, places,
    line_begins, line_starts, widths, stops, term_begins, elements, term_starts, values, scales,
    scratch, weights, starts, out,
):  # fmt: skip
    steps = (len(line_begins) - 1) // (len(term_begins) - 1)
    room, terms, padded = len(scratch) // (2 * workers), len(weights) // workers, blocks * samples
    for worker in range(first, last):
        template, begin = np.int64(-1), worker * terms
        for item in range(worker, len(templates) * blocks, workers):
            group, sample = item // blocks, item % blocks * samples
            if template != templates[group]:
                template = np.int64(templates[group])
                at = term_begins[template]
                for term in range(term_begins[template + 1] - at):
                    weights[np.uint64(begin + term)] = values[np.uint64(elements[np.uint64(at + term)])]
                    starts[np.uint64(begin + term)] = term_starts[np.uint64(at + term)]
            source, target = 2 * worker * room, (2 * worker + 1) * room
            top, size = row_begins[group], row_begins[group + 1] - row_begins[group]
            for row in range(size):
                for lane in range(samples):
                    scale = scales[rows[top + row] * padded + sample + lane] if scaled else scratch.dtype.type(1)
                    scratch[np.uint64(source + row * samples + lane)] = scale
            place, term = place_begins[group], begin
            for step in range(template * steps, (template + 1) * steps):
                for line in range(line_begins[step], line_begins[step + 1]):
                    at, width, stop = target + line_starts[line], np.int64(widths[line]), begin + stops[line]
                    write_sum_of_rows(scratch, at, width, weights, starts, term, stop, scratch, source, False)
                    if places[place] >= 0:
                        _scale(scratch, at, at + width, scales, places[place] * padded + sample, samples)
                    place, term = place + 1, stop
                source, target = target, source
            count = min(samples, batch - sample)
            for row in range(size):
                at = source + row * samples
                for entry in range(entries[top + row], entries[top + row] + counts[top + row]):
                    to = entry * batch + sample
                    for lane in range(count):
                        out[np.uint64(to + lane)] = scratch[np.uint64(at + lane)]
                    at += size * samples


@inlined
def _scale(values, first, last, scales, at, samples):
    """Multiply elements, of so many samples side by side, by the scale of each sample."""
    for lane in range(samples):
        scale = scales[np.uint64(at + lane)]
        for place in range(first + lane, last, samples):
            values[np.uint64(place)] *= scale


def equal_rows(pattern: Pattern) -> tuple[np.ndarray, np.ndarray]:
    """The first row of each set of rows with the same columns, and for each row the number of its set.

    Examples
    --------
    >>> firsts, sets = equal_rows(Pattern((3, 2), [0, 1, 3, 4], [1, 0, 1, 1]))
    >>> sorted(firsts.tolist()), bool(sets[0] == sets[2] != sets[1])
    ([0, 1], True)
    """
    # Sums of random numbers tell sets of columns apart, but for one pair in 2**64.
    keys = np.random.default_rng(0).integers(2**64, size=pattern.shape[1], dtype=np.uint64)
    sums = np.append(np.uint64(0), np.cumsum(keys[pattern.indices], dtype=np.uint64))[pattern.indptr]
    _, firsts, sets = np.unique(np.diff(sums), return_index=True, return_inverse=True)
    of_sets = _rows_at(pattern, firsts[sets])
    if np.array_equal(of_sets.indptr, pattern.indptr) and np.array_equal(of_sets.indices, pattern.indices):
        return firsts, sets
    return np.arange(pattern.shape[0]), np.arange(pattern.shape[0])


def _entries(pattern: Pattern, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The entries of some rows, one row after the other; and the place of each one's row among these."""
    counts = np.diff(pattern.indptr)[rows]
    begins = np.repeat(pattern.indptr[rows].astype(np.int64), counts)
    return begins + within_rows(counts), np.repeat(np.arange(len(rows)), counts)


def _rows_at(pattern: Pattern, rows: np.ndarray) -> Pattern:
    """The pattern of some rows of another one."""
    indptr = row_starts(np.diff(pattern.indptr)[rows], pattern.indptr.dtype)
    return Pattern.of(Csr(len(rows), pattern.shape[1], indptr, pattern.indices[_entries(pattern, rows)[0]]))


class RowGroups:
    """The groups of rows with the same columns in the products ``A_1``, ``A_1 A_2`` and so on.

    Parameters
    ----------
    factors : sequence of Pattern
        The patterns of ``A_1`` to ``A_n``, one or more.
    most : int, optional
        The most terms; ValueError where there are more.

    Attributes
    ----------
    multiply_adds : int
        Those of all products.
    terms : int
        The entries of factors that they read, once for all rows of a group.
    """

    def __init__(self, factors: Sequence[Pattern], most: int | None = None) -> None:
        rows = factors[0].shape[0]
        self._factors, self._products = tuple(factors), list[Pattern]()
        #: Before each product and after the last one, the columns of each group, and the group of each row.
        self._columns, self._of_rows = [Pattern.of(Identity(rows))], [np.arange(rows)]
        self.multiply_adds = self.terms = 0
        for factor in factors:
            work = row_work(self._columns[-1], factor)
            self.multiply_adds += int(np.diff(work)[self._of_rows[-1]].sum())
            self.terms += int(work[-1])
            if most is not None and self.terms > most:
                raise ValueError(f"groups of rows take more than {most:,} terms")
            products = product_pattern(self._columns[-1], factor, work, cache=False)
            firsts, groups = equal_rows(products)
            self._products.append(products)
            self._columns.append(_rows_at(products, firsts))
            self._of_rows.append(groups[self._of_rows[-1]])

    @property
    def count(self) -> int:
        """The number of groups of the last product."""
        return self._columns[-1].shape[0]

    @property
    def pattern(self) -> Pattern:
        """The pattern of the last product."""
        return _rows_at(self._columns[-1], self._of_rows[-1])

    def plan(self, elements: Sequence[np.ndarray], scales: Sequence[int | None], batch: int) -> GroupedProduct:
        """The plan of the products.

        Parameters
        ----------
        elements : sequence of ndarray of int
            For each factor, the place of each entry's value among the values of all factors.
        scales : sequence of int or None
            Of the identity on the left of all factors, and of the product with each of them: where the scales of its
            columns begin among all scales, and None where it has none. Those of the identity begin at 0.
        batch : int
            The number of samples, one or more.
        """
        rows = np.lexsort(self._of_rows)
        last = np.flatnonzero(np.diff(self._of_rows[-1][rows], prepend=-1))
        levels = [_Level(groups[rows], of, last) for groups, of in zip(self._of_rows, self._columns, strict=True)]
        room = max(level.room for level in levels)
        at_once = max(1, min(LANES // int(levels[-1].sizes.max()), MOST_BYTES // (8 * max(1, room))))
        samples = -(-batch // -(-batch // at_once))
        lines = [
            _Lines(*step)
            for step in zip(
                levels[:-1], levels[1:], self._columns[:-1], self._factors, self._products, elements, strict=True
            )
        ]
        return GroupedProduct(rows, last, lines, scales, self.pattern, room, samples, batch, self.multiply_adds)


class _Level:
    """The groups before or after a product, in the order of their rows, and where their matrices lie.

    Those whose rows are in one group at the end go through all products together, and their matrices lie side by side.
    """

    def __init__(self, of_rows: np.ndarray, columns: Pattern, last: np.ndarray) -> None:
        #: The first row of each group, its number, its rows, and the group of its rows at the end.
        self.firsts = np.flatnonzero(np.diff(of_rows, prepend=-1))
        self.groups = of_rows[self.firsts]
        self.sizes = np.diff(self.firsts, append=len(of_rows))
        self.last = np.searchsorted(last, self.firsts, "right") - 1
        ends = row_starts(self.sizes * np.diff(columns.indptr)[self.groups], np.int64)
        begins = ends[np.searchsorted(self.firsts, [*last, len(of_rows)])]
        #: Where each group's matrix begins in the memory of those that go together; and the largest such memory.
        self.starts, self.room = ends[:-1] - begins[self.last], int(np.diff(begins).max(initial=0))


class _Lines:
    """The columns that the products of groups and a factor have: each is a sum of the group's columns, with weights."""

    def __init__(
        self, before: _Level, after: _Level, groups: Pattern, factor: Pattern, products: Pattern, elements: np.ndarray
    ) -> None:
        parents = np.searchsorted(after.firsts, before.firsts, "right") - 1
        entries, of_lines = _entries(products, before.groups)
        self.columns = products.indices[entries].astype(np.int64)
        within = within_rows(np.diff(products.indptr)[before.groups])
        begins = after.starts[parents] + before.firsts - after.firsts[parents]
        self.starts = begins[of_lines] + within * after.sizes[parents[of_lines]]
        self.widths, self.last = before.sizes[of_lines], before.last[of_lines]
        inner, of_inner = _entries(groups, before.groups)
        within = within_rows(np.diff(groups.indptr)[before.groups])
        starts = before.starts[of_inner] + within * before.sizes[of_inner]
        terms, of_terms = _entries(factor, groups.indices[inner])
        keys, width = of_inner[of_terms] * factor.shape[1] + factor.indices[terms], factor.shape[1]
        lines = np.searchsorted(of_lines * width + self.columns, keys)
        order = np.argsort(lines, kind="stable")
        #: The terms of all lines, one after the other: where a line's end, their weights, and the columns they scale.
        self.stops = np.cumsum(np.bincount(lines, minlength=len(of_lines)))
        self.elements, self.term_starts = elements[terms][order], starts[of_terms][order]

    def of(self, group: int) -> tuple[np.ndarray, ...]:
        """What is done for a group at the end: places of lines, their widths, numbers of terms, and these."""
        first, stop = np.searchsorted(self.last, (group, group + 1))
        counts = np.diff(self.stops[first:stop], prepend=self._term(first))
        terms = slice(self._term(first), self._term(stop))
        lines = slice(first, stop)
        return self.starts[lines], self.widths[lines], counts, self.elements[terms], self.term_starts[terms]

    def _term(self, line: int) -> int:
        return int(self.stops[line - 1]) if line else 0


class GroupedProduct:
    """The products of the factors of `RowGroups`, planned for a number of samples.

    Attributes
    ----------
    padded : int
        The samples for which it reads scales: a multiple of those that it takes at once.
    """

    def __init__(
        self,
        rows: np.ndarray,
        last: np.ndarray,
        lines: Sequence[_Lines],
        scales: Sequence[int | None],
        pattern: Pattern,
        room: int,
        samples: int,
        batch: int,
        multiply_adds: int,
    ) -> None:
        self._samples, self._batch, self._room, self._scaled = samples, batch, room * samples, scales[0] is not None
        self._blocks = -(-batch // samples)
        self.padded = self._blocks * samples
        programs = dict[tuple[bytes, ...], int]()
        parts = list[list[tuple[np.ndarray, ...]]]()
        sizes, templates = np.diff(last, append=len(rows)), np.empty(len(last), np.int32)
        for group, size in enumerate(sizes.tolist()):
            steps = [each.of(group) for each in lines]
            key = (size.to_bytes(8, "little"), *(array.tobytes() for step in steps for array in step))
            templates[group] = programs.setdefault(key, len(programs))
            if len(programs) > len(parts):
                parts.append(steps)
        # Groups of a template follow one another.
        order = np.argsort(templates, kind="stable")
        begins = np.repeat(last[order], sizes[order])
        rows = rows[begins + within_rows(sizes[order])]
        ranks = np.argsort(order)
        of_lines = np.concatenate([ranks[each.last] for each in lines])
        places = np.concatenate(
            [
                np.full(len(each.columns), -1) if begin is None else begin + each.columns
                for each, begin in zip(lines, scales[1:], strict=True)
            ]
        )
        line_counts = [[len(starts) for starts, *_ in steps] for steps in parts]
        of_steps = [np.concatenate(arrays) for arrays in zip(*itertools.chain(*parts), strict=True)]
        starts, widths, counts, elements, term_starts = of_steps
        line_begins = row_starts(np.concatenate(line_counts), np.int64)
        terms = row_starts(counts, np.int64)
        term_begins = terms[line_begins[:: len(lines)]]
        stops = terms[1:] - np.repeat(term_begins[:-1], np.diff(line_begins[:: len(lines)]))
        #: The arguments of the kernel, and the most terms of a template.
        self._plan = (
            templates[order],
            row_starts(sizes[order], np.int64),
            rows.astype(np.int64),
            pattern.indptr[rows].astype(np.int64),
            np.diff(pattern.indptr)[rows].astype(np.int64),
            row_starts(np.bincount(of_lines, minlength=len(last)), np.int64),
            places[np.argsort(of_lines, kind="stable")].astype(np.int32),
            line_begins,
            (starts * samples).astype(np.int32),
            (widths * samples).astype(np.int32),
            stops.astype(np.int32),
            term_begins,
            elements.astype(np.int32),
            (term_starts * samples).astype(np.int32),
        )
        self._terms = int(np.diff(term_begins).max(initial=0))
        self._work = multiply_adds * batch

    @property
    def cost(self) -> float:
        return 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(array.nbytes for array in self._plan)

    def multiply(self, values: np.ndarray, scales: np.ndarray, out: np.ndarray) -> None:
        """Write the values of the last product, ``(nnz, batch)``.

        Parameters
        ----------
        values : ndarray
            Those of all factors, which all samples share.
        scales : ndarray, (columns, padded)
            All scales.
        """
        dtype, workers = out.dtype, thread_count()
        scratch = MEMORY_POOL.empty((workers * 2 * self._room,), dtype)
        weights = MEMORY_POOL.empty((workers * self._terms,), dtype)
        starts = MEMORY_POOL.empty((workers * self._terms,), np.int32)
        work = np.arange(workers + 1) * (self._work // (workers * SIMD))
        fixed = workers, self._blocks, self._samples, self._batch, self._scaled
        memory = values, scales.reshape(-1), scratch, weights, starts, out.reshape(-1)
        run_rows(_multiply, work, *fixed, *self._plan, *memory)
