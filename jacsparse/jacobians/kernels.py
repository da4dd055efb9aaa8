"""CPU kernels of folded Jacobians: sums of scaled numbers, and of scaled products of two numbers, over a batch."""

from __future__ import annotations

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
