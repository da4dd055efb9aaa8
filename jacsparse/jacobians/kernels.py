"""CPU kernels: the sums of scaled numbers and of scaled products that make up folded Jacobians, and star colourings."""

from __future__ import annotations

import numpy as np

from ..runtime import kernel


@kernel
def weighted_sums(first, last, indptr, source, weight, constant, numbers, out):
    for row in range(first, last):
        total = constant[row]
        for term in range(indptr[row], indptr[row + 1]):
            total += weight[term] * numbers[source[term]]
        out[row] = total


@kernel
def weighted_sums_batch(first, last, indptr, source, weight, constant, numbers, out):
    for row in range(first, last):
        for sample in range(out.shape[1]):
            out[row, sample] = constant[row]
        for term in range(indptr[row], indptr[row + 1]):
            factor, place = weight[term], source[term]
            for sample in range(out.shape[1]):
                out[row, sample] += factor * numbers[place, sample]


@kernel
def weighted_products(first, last, indptr, left, right, weight, numbers, out):
    for row in range(first, last):
        total = out.dtype.type(0)
        for term in range(indptr[row], indptr[row + 1]):
            total += weight[term] * numbers[left[term]] * numbers[right[term]]
        out[row] = total


@kernel
def weighted_products_batch(first, last, indptr, left, right, weight, numbers, out):
    for row in range(first, last):
        for sample in range(out.shape[1]):
            out[row, sample] = 0
        for term in range(indptr[row], indptr[row + 1]):
            factor, a, b = weight[term], left[term], right[term]
            for sample in range(out.shape[1]):
                out[row, sample] += factor * numbers[a, sample] * numbers[b, sample]


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
