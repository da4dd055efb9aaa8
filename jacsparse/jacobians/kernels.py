"""CPU kernels: the sums of scaled numbers and of scaled products that make up folded Jacobians, and star colourings."""

from __future__ import annotations

import numpy as np

from ..runtime import inlined, kernel

#: The most rows of a run.
LONGEST = 1024

# Indices are unsigned.


@kernel
def write_numbers(first, last, places, source, numbers, out):
    for place in range(first, last):
        out[places[place]] = numbers[source[place]]


@kernel
def write_numbers_batch(first, last, places, source, numbers, out):
    for place in range(first, last):
        row, number = places[place], source[place]
        for sample in range(out.shape[1]):
            out[row, sample] = numbers[number, sample]


@kernel
def add_weighted_sums(first, last, rows, indptr, source, weight, numbers, out):
    for place in range(first, last):
        row = rows[place]
        total = out[row]
        for term in range(indptr[row], indptr[row + 1]):
            total += weight[term] * numbers[source[term]]
        out[row] = total


@kernel
def add_weighted_sums_batch(first, last, rows, indptr, source, weight, numbers, out):
    for place in range(first, last):
        row = rows[place]
        for term in range(indptr[row], indptr[row + 1]):
            factor, number = weight[term], source[term]
            for sample in range(out.shape[1]):
                out[row, sample] += factor * numbers[number, sample]


@kernel
def weighted_products(first, last, left, right, weight, numbers, out):
    for row in range(first, last):
        out[row] = weight[row] * numbers[left[row]] * numbers[right[row]]


@kernel
def weighted_products_batch(first, last, left, right, weight, numbers, out):
    for row in range(first, last):
        factor, a, b = weight[row], left[row], right[row]
        for sample in range(out.shape[1]):
            out[row, sample] = factor * numbers[a, sample] * numbers[b, sample]


@kernel
def add_weighted_products(first, last, rows, indptr, left, right, weight, numbers, out):
    for place in range(first, last):
        row = rows[place]
        total = out[row]
        for term in range(indptr[row], indptr[row + 1]):
            total += weight[term] * numbers[left[term]] * numbers[right[term]]
        out[row] = total


@kernel
def add_weighted_products_batch(first, last, rows, indptr, left, right, weight, numbers, out):
    for place in range(first, last):
        row = rows[place]
        for term in range(indptr[row], indptr[row + 1]):
            factor, a, b = weight[term], left[term], right[term]
            for sample in range(out.shape[1]):
                out[row, sample] += factor * numbers[a, sample] * numbers[b, sample]


@inlined
def _add_run(totals, out, start, stride):
    if stride == 1:
        values = out[start : start + len(totals)]
        for place in range(len(totals)):
            values[place] += totals[place]
    else:
        row, step = np.uint64(start), np.uint64(stride)
        for place in range(len(totals)):
            out[row] += totals[place]
            row += step


# A run has the terms of its first row. Those of the next row tell how far the factors move from row to row: a distance
# may be negative, so that places along runs are signed.


@kernel
def add_sums_of_runs(first, last, stride, start, length, indptr, source, weight, numbers, out):
    memory = np.empty(LONGEST, out.dtype)
    for run in range(first, last):
        row, rows = start[run], length[run]
        totals = memory[:rows]
        totals[:] = 0
        next_terms = indptr[row + stride] - indptr[row]
        for term in range(indptr[row], indptr[row + 1]):
            factor, at = weight[term], np.int64(source[term])
            step = np.int64(source[term + next_terms]) - at
            if step == 1:
                values = numbers[at : at + rows]
                for place in range(len(totals)):
                    totals[place] += factor * values[place]
            else:
                for place in range(len(totals)):
                    totals[place] += factor * numbers[at + place * step]
        _add_run(totals, out, row, stride)


@kernel
def add_products_of_runs(first, last, stride, start, length, indptr, left, right, weight, numbers, out):
    memory = np.empty(LONGEST, out.dtype)
    for run in range(first, last):
        row, rows = start[run], length[run]
        totals = memory[:rows]
        totals[:] = 0
        next_terms = indptr[row + stride] - indptr[row]
        for term in range(indptr[row], indptr[row + 1]):
            factor, a, b = weight[term], np.int64(left[term]), np.int64(right[term])
            a_step, b_step = np.int64(left[term + next_terms]) - a, np.int64(right[term + next_terms]) - b
            if a_step == 1 and b_step == 1:
                lefts, rights = numbers[a : a + rows], numbers[b : b + rows]
                for place in range(len(totals)):
                    totals[place] += factor * lefts[place] * rights[place]
            else:
                for place in range(len(totals)):
                    totals[place] += factor * numbers[a + place * a_step] * numbers[b + place * b_step]
        _add_run(totals, out, row, stride)


@kernel
def star_colors(first, last, indptr, indices, colors):
    # The vertex that may not have a colour, and the vertex that has several neighbours of a colour, or one.
    forbidden = np.full(last - first + 1, -1, np.int64)
    repeated, seen = forbidden.copy(), forbidden.copy()
    for vertex in range(first, last):
        for entry in range(indptr[vertex], indptr[vertex + 1]):
            color = colors[indices[entry]]
            if color >= 0:
                if seen[color] == vertex:
                    repeated[color] = vertex
                forbidden[color] = seen[color] = vertex
        for entry in range(indptr[vertex], indptr[vertex + 1]):
            middle = indices[entry]
            color = colors[middle]
            for next_entry in range(indptr[middle], indptr[middle + 1]):
                end = indices[next_entry]
                if middle == vertex or colors[end] < 0 or forbidden[colors[end]] == vertex:
                    continue
                if color < 0 or repeated[color] == vertex:
                    forbidden[colors[end]] = vertex
                    continue
                for last_entry in range(indptr[end], indptr[end + 1]):
                    if indices[last_entry] != middle and colors[indices[last_entry]] == color:
                        forbidden[colors[end]] = vertex
        color = 0
        while forbidden[color] == vertex:
            color += 1
        colors[vertex] = color
