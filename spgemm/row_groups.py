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
from functools import cached_property

import numpy as np

from ..codegen import copy_elements, multiply_by, scale
from ..patterns import Identity, Pattern, entries_of_rows, pattern_of_rows, rows_alike
from ..runtime import MEMORY_POOL, SIMD, inlined, kernel, row_starts, run_rows, thread_count, within_rows
from .lanes import write_sum_of_rows
from .symbolic import product_pattern, row_work

#: Elements that lie side by side where groups are small: of several samples.
LANES = 256
#: The most bytes of a group's matrix, for several samples at once.
MOST_BYTES = 2**18
#: Measured on CPUs, in multiply-adds of other sparse products: a term; and how many of its own take the time of one.
TERM, FASTER = 6, 8


@kernel
def _multiply(
    first, last, workers, blocks, samples, batch, templates, row_begins, entries, entry_stops, place_begins, places,
    column_begins, column_widths, line_begins, line_starts, line_widths, line_stops, term_begins, elements, term_starts,
    values, scales, scratch, weights, starts, out,
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
            scratch[target : target + size * samples] = 1
            place, term = place_begins[group], begin
            for step in range(template * steps, (template + 1) * steps):
                for line in range(line_begins[step], line_begins[step + 1]):
                    at, width, stop = target + line_starts[line], np.int64(line_widths[line]), begin + line_stops[line]
                    write_sum_of_rows(scratch, at, width, weights, starts, term, stop, scratch, source)
                    term = stop
                source, target, at = target, source, target
                for column in range(column_begins[step], column_begins[step + 1]):
                    stop = at + column_widths[column]
                    _scale(scratch, at, stop, scales, places[place] * padded + sample, samples)
                    at, place = stop, place + 1
            count = min(samples, batch - sample)
            for row in range(size):
                at = source + row * samples
                for entry in range(entries[top + row], entry_stops[top + row]):
                    copy_elements(out, entry * batch + sample, scratch, at, count)
                    at += size * samples


@inlined
def _scale(values, first, last, scales, at, samples):
    """Multiply elements, of so many samples side by side, by the scale of each sample."""
    if samples == 1:
        scale(values, first, scales, at, last - first)
        return
    for place in range(first, last, samples):
        multiply_by(values, place, scales, at, samples)


def _cost(terms: int, multiply_adds: int) -> float:
    """The cost of groups' products, in multiply-adds of other sparse products."""
    return TERM * terms + multiply_adds / FASTER


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
            firsts, groups = rows_alike(products)
            self._products.append(products)
            self._columns.append(pattern_of_rows(products, firsts))
            self._of_rows.append(groups[self._of_rows[-1]])

    @property
    def count(self) -> int:
        """The number of groups of the last product."""
        return self._columns[-1].shape[0]

    @property
    def pattern(self) -> Pattern:
        """The pattern of the last product."""
        return pattern_of_rows(self._columns[-1], self._of_rows[-1])

    @cached_property
    def room(self) -> int:
        """The most elements that the matrices of a group have together, before or after a product."""
        counts = (np.diff(columns.indptr)[rows] for columns, rows in zip(self._columns, self._of_rows, strict=True))
        return max(int(np.bincount(self._of_rows[-1], each).max(initial=0)) for each in counts)

    @property
    def fit_in_caches(self) -> bool:
        """Whether the matrices of each group do."""
        return 8 * self.room <= MOST_BYTES

    def least_cost(self, batch: int) -> float:
        """What so many samples cost at least, as `GroupedProduct.cost`."""
        return _cost(self.terms, self.multiply_adds * batch)

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

        Raises
        ------
        ValueError
            Where a group's matrix is larger than the caches, in which the products are to stay.
        """
        if not self.fit_in_caches:
            raise ValueError(
                f"a group of rows takes {8 * self.room:,} bytes; at most {MOST_BYTES:,} stay in the caches"
            )
        rows = np.lexsort(self._of_rows)
        last = np.flatnonzero(np.diff(self._of_rows[-1][rows], prepend=-1))
        levels = [
            _Level(groups[rows], columns, last, begin)
            for groups, columns, begin in zip(self._of_rows, self._columns, scales, strict=True)
        ]
        factors = zip(self._columns[:-1], self._factors, self._products, elements, strict=True)
        lines = [
            _RowLines(before, after, *each)
            for (before, after), each in zip(itertools.pairwise(levels), factors, strict=True)
        ]
        return GroupedProduct(rows, self, levels, lines, batch)


class _Level:
    """The groups before or after a product in the order of their rows, and where their matrices lie.

    Those whose rows are in one group at the end go through all products together. Their matrices lie one behind the
    other, each a column after the other.
    """

    def __init__(self, of_rows: np.ndarray, columns: Pattern, last: np.ndarray, scales: int | None) -> None:
        #: The first row of each group, its number, its rows, and the group of these at the end.
        self.firsts = np.flatnonzero(np.diff(of_rows, prepend=-1))
        self.groups = of_rows[self.firsts]
        self.sizes = np.diff(self.firsts, append=len(of_rows))
        self.last = np.searchsorted(last, self.firsts, "right") - 1
        entries, of_entries = entries_of_rows(columns, self.groups)
        ends = row_starts(self.sizes * np.diff(columns.indptr)[self.groups], np.int64)
        begins = ends[np.searchsorted(self.firsts, [*last, len(of_rows)])]
        #: Where each group's matrix begins in the memory of those that go together.
        self.starts = ends[:-1] - begins[self.last]
        #: For each column that is scaled, its group at the end, its rows, and the place of its scales.
        scaled = slice(0, 0 if scales is None else None)
        self.of_columns, self.widths = self.last[of_entries][scaled], self.sizes[of_entries][scaled]
        self.places = columns.indices[entries][scaled] + np.int64(scales or 0)

    def of(self, group: int) -> np.ndarray:
        """The rows of each column that is scaled, of a group at the end."""
        return self.widths[slice(*np.searchsorted(self.of_columns, (group, group + 1)))]


class _RowLines:
    """The products of groups' matrices with a factor, by columns: sums of the matrices' columns with weights."""

    def __init__(
        self, before: _Level, after: _Level, groups: Pattern, factor: Pattern, products: Pattern, elements: np.ndarray
    ) -> None:
        parents = np.searchsorted(after.firsts, before.firsts, "right") - 1
        entries, of_lines = entries_of_rows(products, before.groups)
        within = within_rows(np.diff(products.indptr)[before.groups])
        begins = after.starts[parents] + before.firsts - after.firsts[parents]
        self._starts = begins[of_lines] + within * after.sizes[parents[of_lines]]
        self._widths, self._of_lines = before.sizes[of_lines], before.last[of_lines]
        inner, of_inner = entries_of_rows(groups, before.groups)
        within = within_rows(np.diff(groups.indptr)[before.groups])
        starts = before.starts[of_inner] + within * before.sizes[of_inner]
        terms, of_terms = entries_of_rows(factor, groups.indices[inner])
        width = np.int64(factor.shape[1])
        lines = np.searchsorted(
            of_lines * width + products.indices[entries], of_inner[of_terms] * width + factor.indices[terms]
        )
        order = np.argsort(lines, kind="stable")
        #: By line, where its terms begin; and by term, the place of its weight and where the column begins.
        self._begins = row_starts(np.bincount(lines, minlength=len(of_lines)), np.int64)
        self._elements, self._term_starts = elements[terms][order], starts[of_terms][order]

    def of(self, group: int) -> tuple[np.ndarray, ...]:
        """The lines of a group at the end: where they begin, their rows, the numbers of their terms, and these."""
        first, stop = np.searchsorted(self._of_lines, (group, group + 1))
        lines, terms = slice(first, stop), slice(self._begins[first], self._begins[stop])
        counts = np.diff(self._begins[first : stop + 1])
        return self._starts[lines], self._widths[lines], counts, self._elements[terms], self._term_starts[terms]


#: What is done where there is no factor yet.
_NO_LINES = (np.empty(0, np.int64),) * 5


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
        groups: RowGroups,
        levels: Sequence[_Level],
        lines: Sequence[_RowLines],
        batch: int,
    ) -> None:
        last, sizes, pattern, room = levels[-1].firsts, levels[-1].sizes, groups.pattern, groups.room
        at_once = max(1, min(LANES // int(sizes.max(initial=1)), MOST_BYTES // (8 * max(1, room))))
        self._samples = samples = -(-batch // -(-batch // at_once))
        self.padded = -(-batch // samples) * samples
        self._batch, self._room = batch, room * samples
        self._multiply_adds, self._terms = groups.multiply_adds * batch, groups.terms
        #: Groups that are done alike have one template.
        numbers, programs = dict[tuple[bytes, ...], int](), list[list[tuple[np.ndarray, ...]]]()
        templates = np.empty(len(last), np.int64)
        for group in range(len(last)):
            of_lines = [_NO_LINES, *(each.of(group) for each in lines)]
            steps = [(level.of(group), *of_step) for level, of_step in zip(levels, of_lines, strict=True)]
            key = tuple(array.tobytes() for step in steps for array in step)
            templates[group] = numbers.setdefault(key, len(numbers))
            if len(numbers) > len(programs):
                programs.append(steps)
        order = np.argsort(templates, kind="stable")
        ranks = np.argsort(order)
        of_places = np.concatenate([ranks[level.of_columns] for level in levels])
        places = np.concatenate([level.places for level in levels])
        rows = rows[np.repeat(last[order], sizes[order]) + within_rows(sizes[order])]
        widths, starts, line_widths, counts, elements, term_starts = [
            np.concatenate(arrays) for arrays in zip(*itertools.chain(*programs), strict=True)
        ]
        column_begins, line_begins = (
            row_starts(np.array([len(step[place]) for steps in programs for step in steps]), np.int64)
            for place in (0, 1)
        )
        term_begins, of_templates = row_starts(counts, np.int64), line_begins[:: len(levels)]
        stops = term_begins[1:] - np.repeat(term_begins[of_templates[:-1]], np.diff(of_templates))
        term_begins = term_begins[of_templates]
        self._most_terms = int(np.diff(term_begins).max(initial=0))
        wide = templates[order], row_starts(sizes[order], np.int64), pattern.indptr[rows], pattern.indptr[rows + 1]
        of_groups = row_starts(np.bincount(of_places, minlength=len(last)), np.int64)
        self._arrays = (
            *(each.astype(np.int64) for each in wide),
            of_groups,
            places[np.argsort(of_places, kind="stable")].astype(np.int32),
            column_begins,
            (widths * samples).astype(np.int32),
            line_begins,
            (starts * samples).astype(np.int32),
            (line_widths * samples).astype(np.int32),
            stops.astype(np.int32),
            term_begins,
            elements.astype(np.int32),
            (term_starts * samples).astype(np.int32),
        )

    @property
    def cost(self) -> float:
        """The cost of all samples, in multiply-adds of other sparse products."""
        return _cost(self._terms * (self.padded // self._samples), self._multiply_adds)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(array.nbytes for array in self._arrays)

    def multiply(self, values: np.ndarray, scales: np.ndarray, out: np.ndarray) -> None:
        """Write the values of the last product, ``(nnz, batch)``.

        Parameters
        ----------
        values : ndarray
            Those of all factors, which all samples share.
        scales : ndarray, (columns, padded)
            All scales.
        out : ndarray, (nnz, batch)
            What is written.
        """
        workers, terms = thread_count(), self._most_terms
        scratch = MEMORY_POOL.empty((workers * 2 * self._room,), out.dtype)
        weights, starts = (MEMORY_POOL.empty((workers * terms,), dtype) for dtype in (out.dtype, np.int32))
        work = np.arange(workers + 1) * (self._multiply_adds // (workers * SIMD))
        fixed = workers, self.padded // self._samples, self._samples, self._batch
        memory = values, scales.reshape(-1), scratch, weights, starts, out.reshape(-1)
        run_rows(_multiply, work, *fixed, *self._arrays, *memory)
