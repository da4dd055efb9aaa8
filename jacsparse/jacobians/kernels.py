"""CPU kernels of compressed Jacobians, of forward accumulation, and of products of matrices of terms."""

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
    # The vertex that may not have a colour, and the vertex that has several neighbours of a colour.
    forbidden = np.full(last - first + 1, -1, np.int64)
    repeated = forbidden.copy()
    for vertex in range(first, last):
        for entry in range(indptr[vertex], indptr[vertex + 1]):
            color = colors[indices[entry]]
            if color >= 0:
                if forbidden[color] == vertex:
                    repeated[color] = vertex
                forbidden[color] = vertex
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


@kernel
def reach(first, last, indptr, scaled, reached):
    # Each row waits for those before it, here and below: one range, on one thread.
    for row in range(first, last):
        for entry in range(indptr[row], indptr[row + 1]):
            for byte in range(reached.shape[1]):
                reached[row, byte] |= reached[scaled[entry], byte]


@kernel
def accumulate(first, last, indptr, scaled, coefficients, which, values, reached, products):
    for row in range(first, last):
        result = products[row]
        result[:] = 0
        for entry in range(indptr[row], indptr[row + 1]):
            weight, other = coefficients[entry] * values[which[entry]], products[scaled[entry]]
            if len(reached) == 0 or np.isfinite(weight):
                for color in range(len(result)):
                    result[color] += weight * other[color]
                continue
            # A guaranteed zero stays zero whatever scales it.
            for color in range(len(result)):
                if reached[scaled[entry], color >> 3] & (128 >> (color & 7)):
                    result[color] += weight * other[color]


@inlined
def _sort(begin, end, pairs, column, left, right, coefficient):
    """Sort terms by columns and variables; pairs of variables by columns, where a few of a column stay in order."""
    # Shell's sort: that of NumPy takes a process 0.1 s to load.
    gap = 1
    while SHORT * gap < end - begin:
        gap = 3 * gap + 1
    while gap:
        for p in range(begin + gap, end):
            key, x, y, factor, at = column[p], left[p], right[p], coefficient[p], p
            while at - gap >= begin:
                before = at - gap
                if column[before] < key or (column[before] == key and (pairs or left[before] <= x)):
                    break
                column[at], left[at], coefficient[at] = column[before], left[before], coefficient[before]
                if pairs:
                    right[at] = right[before]
                at = before
            if at != p:
                column[at], left[at], coefficient[at] = key, x, factor
                if pairs:
                    right[at] = y
        gap //= 3


@inlined
def _add_equal(begin, end, column, variable, coefficient):
    """Add equal terms, which lie next to each other; places that are left have column -1."""
    total = begin
    for p in range(begin, end):
        if total > begin and column[total - 1] == column[p] and variable[total - 1] == variable[p]:
            coefficient[total - 1] += coefficient[p]
            continue
        column[total], variable[total], coefficient[total] = column[p], variable[p], coefficient[p]
        total += 1
    for p in range(total, end):
        column[p] = -1


# Indices, but for rows, are unsigned: see `unsigned`.


@kernel
def multiply_terms(
    first, last,
    a_indptr, a_column, a_variable, a_coefficient,
    b_indptr, b_column, b_variable, b_coefficient,
    pairs, starts, column, left, right, coefficient,
):  # fmt: skip
    """The terms of rows of a product, or all pairs of terms, beside their second variables in the order of columns."""
    one = np.uint64(1)
    for row in range(first, last):
        end, a_begin, a_end = starts[row], a_indptr[row], a_indptr[row + 1]
        for p in range(a_begin, a_end):
            k, x, factor = a_column[p], a_variable[p], a_coefficient[p]
            for q in range(b_indptr[k], b_indptr[np.uint64(k) + one]):
                column[end], coefficient[end] = b_column[q], factor * b_coefficient[q]
                if pairs:
                    left[end], right[end] = x, b_variable[q]
                else:
                    left[end] = max(x, b_variable[q])
                end += one
        # A row of the other matrix is in order.
        if a_end - a_begin > one:
            begin = np.int64(starts[row])
            _sort(begin, np.int64(end), pairs, column, left, right, coefficient)
            if not pairs:
                _add_equal(begin, np.int64(end), column, left, coefficient)


@kernel
def add_terms(
    first, last,
    a_indptr, a_column, a_variable, a_coefficient,
    b_indptr, b_column, b_variable, b_coefficient,
    starts, column, variable, coefficient,
):  # fmt: skip
    """The terms of rows of a sum of two matrices; places that are left have column -1."""
    one = np.uint64(1)
    for row in range(first, last):
        p, a_end, q, b_end, end = a_indptr[row], a_indptr[row + 1], b_indptr[row], b_indptr[row + 1], starts[row]
        while p < a_end or q < b_end:
            # Behind the last term of a row comes the other row's.
            difference = np.int64(q == b_end) - np.int64(p == a_end)
            if not difference:
                difference = np.int64(b_column[q]) - np.int64(a_column[p])
            if not difference:
                difference = np.int64(b_variable[q]) - np.int64(a_variable[p])
            if difference >= 0:
                column[end], variable[end], coefficient[end] = a_column[p], a_variable[p], a_coefficient[p]
                p += one
            if not difference:
                coefficient[end] += b_coefficient[q]
                q += one
            if difference < 0:
                column[end], variable[end], coefficient[end] = b_column[q], b_variable[q], b_coefficient[q]
                q += one
            end += one
        for place in range(end, starts[row + 1]):
            column[place] = -1


@kernel
def select_terms(
    first, last, indptr, selected, column, variable, coefficient, starts, out_column, out_variable, out_coefficient
):  # fmt: skip
    """The terms of rows where a mask is true, and where those of each row begin."""
    count = 0
    for row in range(first, last):
        starts[row] = count
        for term in range(indptr[row], indptr[row + 1]):
            if selected[term]:
                out_column[count], out_variable[count] = column[term], variable[term]
                out_coefficient[count] = coefficient[term]
                count += 1
    starts[last] = count


@kernel
def find_entries(first, last, indptr, column, entries, begins):
    """Where the entries of rows begin, and their terms, which lie next to each other."""
    count = 0
    for row in range(first, last):
        entries[row], before = count, np.int64(-1)
        for term in range(indptr[row], indptr[row + 1]):
            if np.int64(column[term]) != before:
                begins[count], before = term, np.int64(column[term])
                count += 1
    entries[last], begins[count] = count, indptr[last]


@kernel
def order_entries(
    first, last, indptr, begins, left, right, coefficient, numbers, starts, out_left, out_right, out_coefficient
):  # fmt: skip
    """Number the entries of a matrix, the first ones of all rows first, then the second ones; their terms likewise."""
    one, most = np.uint64(1), np.uint64(0)
    for row in range(first, last):
        most = max(most, indptr[row + 1] - indptr[row])
    # Where the next entry, and its terms, of each place in rows come to lie.
    entries, terms = np.zeros(most + one, np.uint64), np.zeros(most + one, np.uint64)
    for row in range(first, last):
        for place, entry in enumerate(range(indptr[row], indptr[row + 1])):
            entries[place + 1] += one
            terms[place + 1] += begins[entry + one] - begins[entry]
    for place in range(most):
        entries[place + one] += entries[place]
        terms[place + one] += terms[place]
    for row in range(first, last):
        for place, entry in enumerate(range(indptr[row], indptr[row + 1])):
            number, at = entries[place], terms[place]
            numbers[entry], starts[number] = number, at
            for term in range(begins[entry], begins[entry + one]):
                out_left[at], out_coefficient[at] = left[term], coefficient[term]
                if len(right):
                    out_right[at] = right[term]
                at += one
            entries[place], terms[place] = number + one, at
    starts[-1] = len(out_left)
