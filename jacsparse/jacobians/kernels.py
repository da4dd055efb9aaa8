"""CPU kernels of compressed Jacobians, and of products of matrices of terms."""

from __future__ import annotations

import numpy as np

from ..runtime import kernel

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


@kernel
def multiply_terms(
    first, last,
    a_indptr, a_column, a_variable, a_coefficient,
    b_indptr, b_column, b_variable, b_coefficient,
    variables, starts, column, left, right, coefficient, counts,
):  # fmt: skip
    """The terms of rows of a product; where `variables` is 0, all pairs in the order of their columns."""
    for row in range(first, last):
        begin = end = starts[row]
        for p in range(a_indptr[row], a_indptr[row + 1]):
            k, x = a_column[p], a_variable[p]
            for q in range(b_indptr[k], b_indptr[k + 1]):
                y, key = b_variable[q], b_column[q]
                if variables:
                    key = key * variables + max(x, y) + 1
                else:
                    left[end], right[end] = x, y
                column[end], coefficient[end] = key, a_coefficient[p] * b_coefficient[q]
                end += 1
        # Shell's sort: that of NumPy takes a process 0.1 s to load.
        gap = 1
        while SHORT * gap < end - begin:
            gap = 3 * gap + 1
        while gap:
            for p in range(begin + gap, end):
                key, factor = column[p], coefficient[p]
                if column[p - gap] <= key:
                    continue
                if not variables:
                    x, y = left[p], right[p]
                at = p
                while at - gap >= begin and column[at - gap] > key:
                    column[at], coefficient[at] = column[at - gap], coefficient[at - gap]
                    if not variables:
                        left[at], right[at] = left[at - gap], right[at - gap]
                    at -= gap
                column[at], coefficient[at] = key, factor
                if not variables:
                    left[at], right[at] = x, y
            gap //= 3
        if variables:
            # Equal terms are added where they come next to each other.
            total, before = begin, np.int64(-1)
            for p in range(begin, end):
                key = column[p]
                if key == before:
                    coefficient[total - 1] += coefficient[p]
                    continue
                before = key
                column[total], coefficient[total] = key // variables, coefficient[p]
                left[total] = key - column[total] * variables - 1
                total += 1
            end = total
        counts[row] = end - begin
