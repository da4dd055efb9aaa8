"""CPU kernels of compressed Jacobians: numbers at their places, and star colourings."""

from __future__ import annotations

import numpy as np

from ..runtime import kernel


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
