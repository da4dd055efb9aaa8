"""CPU kernels of compressed Jacobians, and of products of matrices of terms."""

from __future__ import annotations

import numpy as np

from ..runtime import inlined, kernel

#: Terms of a row up to which each is moved to its place step by step.
SHORT = 64


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


@inlined
def _longest(first, last, starts):
    """The most terms of a row."""
    most = 0
    for row in range(first, last):
        most = max(most, starts[row + 1] - starts[row])
    return most


@inlined
def _sort(keys, places, count):
    """Sort some keys, and what lies beside them; equal ones of a few stay in their order."""
    # Shell's sort: that of NumPy takes a process 0.1 s to load.
    gap = 1
    while SHORT * gap < count:
        gap = 3 * gap + 1
    while gap:
        for p in range(gap, count):
            key, place, at = keys[p], places[p], p
            while at >= gap and keys[at - gap] > key:
                keys[at], places[at] = keys[at - gap], places[at - gap]
                at -= gap
            keys[at], places[at] = key, place
        gap //= 3


@kernel
def multiply_terms(
    first, last,
    a_indptr, a_column, a_variable, a_coefficient,
    b_indptr, b_column, b_variable, b_coefficient,
    variables, starts, column, left, right, coefficient,
):  # fmt: skip
    """The terms of rows of a product, before places with column -1; where `variables` is 0, all pairs by columns."""
    longest = _longest(first, last, starts)
    keys, places, ps, qs = np.empty((4, longest), np.int64)
    for row in range(first, last):
        count = 0
        for p in range(a_indptr[row], a_indptr[row + 1]):
            k, x = a_column[p], a_variable[p]
            for q in range(b_indptr[k], b_indptr[k + 1]):
                key = np.int64(b_column[q])
                if variables:
                    key = key * variables + max(x, b_variable[q]) + 1
                keys[count], places[count], ps[count], qs[count] = key, count, p, q
                count += 1
        _sort(keys, places, count)
        end, before = starts[row], np.int64(-1)
        for n in range(count):
            p, q = ps[places[n]], qs[places[n]]
            product = a_coefficient[p] * b_coefficient[q]
            if variables and keys[n] == before:
                coefficient[end - 1] += product
                continue
            column[end], coefficient[end] = b_column[q], product
            if variables:
                left[end] = max(a_variable[p], b_variable[q])
            else:
                left[end], right[end] = a_variable[p], b_variable[q]
            before = keys[n]
            end += 1
        column[end : starts[row + 1]] = -1


@kernel
def add_terms(
    first, last,
    begins, ends, column, variable, coefficient,
    variables, starts, out_column, out_variable, out_coefficient,
):  # fmt: skip
    """The terms of rows of a sum, before places with column -1; each row of a matrix begins and ends somewhere."""
    longest = _longest(first, last, starts)
    keys, places = np.empty((2, longest), np.int64)
    for row in range(first, last):
        count = 0
        for part in range(len(begins)):
            for p in range(begins[part, row], ends[part, row]):
                keys[count], places[count] = np.int64(column[p]) * variables + variable[p] + 1, p
                count += 1
        _sort(keys, places, count)
        end, before = starts[row], np.int64(-1)
        for n in range(count):
            p = places[n]
            if keys[n] == before:
                out_coefficient[end - 1] += coefficient[p]
                continue
            out_column[end], out_variable[end], out_coefficient[end] = column[p], variable[p], coefficient[p]
            before = keys[n]
            end += 1
        out_column[end : starts[row + 1]] = -1


@kernel
def select_terms(
    first, last, indptr, selected, column, variable, coefficient, out_indptr, out_column, out_variable, out_coefficient
):  # fmt: skip
    """The terms where a mask is true; for all rows at once."""
    end = 0
    for row in range(first, last):
        for p in range(indptr[row], indptr[row + 1]):
            if selected[p]:
                out_column[end], out_variable[end], out_coefficient[end] = column[p], variable[p], coefficient[p]
                end += 1
        out_indptr[row + 1] = end


@kernel
def find_entries(first, last, indptr, column, entries, begins):
    """Where the entries of each row begin, and the terms of each entry; for all rows at once."""
    entry = 0
    for row in range(first, last):
        for p in range(indptr[row], indptr[row + 1]):
            if p == indptr[row] or column[p] != column[p - 1]:
                begins[entry] = p
                entry += 1
        entries[row + 1] = entry


@kernel
def number_entries(first, last, entries, begins, following, numbers, counts):
    """Numbers of entries, consecutive ones for the first entries of all rows, then for the second ones; serially."""
    for row in range(first, last):
        for entry in range(entries[row], entries[row + 1]):
            place = entry - entries[row]
            numbers[entry] = following[place]
            counts[following[place]] = begins[entry + 1] - begins[entry]
            following[place] += 1


@kernel
def order_terms(first, last, begins, numbers, starts, left, right, coefficient, out_left, out_right, out_coefficient):
    """The terms of entries in the order of their numbers."""
    for entry in range(first, last):
        at = starts[numbers[entry]]
        for p in range(begins[entry], begins[entry + 1]):
            out_left[at], out_coefficient[at] = left[p], coefficient[p]
            if len(right):
                out_right[at] = right[p]
            at += 1
