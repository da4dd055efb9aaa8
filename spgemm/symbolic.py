"""The symbolic phase: which entries a product has, and how many multiply-adds it takes. It sees no values.

Each thread marks the columns of one row in a bitmap, 64 to a word. Marking a column again costs nothing, and the bitmap
has the columns in order.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np

from ..codegen import lowest_bit, population
from ..patterns import Csr, Diagonal, Full, Identity, Pattern, row_sums
from ..runtime import cached_arrays, frozen, index_dtype, inlined, inlined_with_arrays, kernel, row_starts, run_rows

#: Multiply-adds that take about as long as a read from disk.
SLOW_WORK = 1_000_000
#: Columns for each entry of B up to which its rows are merged as packed words.
PACKED = 32
#: Columns of a row up to which each is put in its place: fewer than a call of a sort takes the time for.
SHORT = 32


@inlined
def _mark(row, a_indptr, a_indices, b_indptr, b_indices, bits):
    """Set the bits of the columns of a row of the product; return the range of words that has them."""
    one = np.uint64(1)
    low, high = len(bits), 0
    for p in range(a_indptr[row], a_indptr[row + 1]):
        k = a_indices[p]
        begin, end = b_indptr[k], b_indptr[k + 1]
        if begin < end:
            # A row's columns are sorted.
            low, high = min(low, b_indices[begin] >> 6), max(high, (b_indices[end - 1] >> 6) + 1)
        for q in range(begin, end):
            column = b_indices[q]
            bits[column >> 6] |= one << np.uint64(column & 63)
    return low, high


@inlined
def _pairs(row, a_indptr, a_indices, b_indptr):
    """The number of entries that meet in a row of the product."""
    pairs = 0
    for p in range(a_indptr[row], a_indptr[row + 1]):
        pairs += b_indptr[a_indices[p] + 1] - b_indptr[a_indices[p]]
    return pairs


@inlined
def _write(word, left, c_indices, entry):
    """Write the columns of a word's bits, in order, from `entry` on; return where others follow."""
    one = np.uint64(1)
    while left:
        c_indices[entry] = (word << 6) + np.int64(lowest_bit(left))
        entry += 1
        left &= left - one
    return entry


@inlined_with_arrays
def _take_scattered(row, a_indptr, a_indices, b_indptr, b_indices, bits, c_indices, entry):
    """Clear the words that a row has marked, one by one; write their columns, in order, from `entry` on."""
    begin = entry
    for p in range(a_indptr[row], a_indptr[row + 1]):
        k = a_indices[p]
        for q in range(b_indptr[k], b_indptr[k + 1]):
            word = b_indices[q] >> 6
            entry = _write(word, bits[word], c_indices, entry)
            bits[word] = 0
    if entry - begin > SHORT:
        c_indices[begin:entry].sort()
        return
    for place in range(begin + 1, entry):
        column = c_indices[place]
        while place > begin and c_indices[place - 1] > column:
            c_indices[place] = c_indices[place - 1]
            place -= 1
        c_indices[place] = column


@kernel
def _count(first, last, a_indptr, a_indices, b_indptr, b_indices, columns, occupied, counts, pairs):
    # `pairs` is empty, or tells how many of a row's columns are among those of the bitmap `occupied`.
    bits = np.zeros((columns + 63) >> 6, np.uint64)
    for row in range(first, last):
        low, high = _mark(row, a_indptr, a_indices, b_indptr, b_indices, bits)
        total = np.uint64(0)
        met = np.uint64(0)
        if _pairs(row, a_indptr, a_indices, b_indptr) < high - low:
            # A few columns far apart: as those of a difference across a periodic boundary.
            for p in range(a_indptr[row], a_indptr[row + 1]):
                k = a_indices[p]
                for q in range(b_indptr[k], b_indptr[k + 1]):
                    word = b_indices[q] >> 6
                    total += population(bits[word])
                    if len(pairs) > 0:
                        met += population(bits[word] & occupied[word])
                    bits[word] = 0
        else:
            for word in range(low, high):
                total += population(bits[word])
                if len(pairs) > 0:
                    met += population(bits[word] & occupied[word])
                bits[word] = 0
        counts[row] = total
        if len(pairs) > 0:
            pairs[row] = met


@kernel
def _fill(first, last, a_indptr, a_indices, b_indptr, b_indices, columns, c_indptr, c_indices):
    bits = np.zeros((columns + 63) >> 6, np.uint64)
    for row in range(first, last):
        low, high = _mark(row, a_indptr, a_indices, b_indptr, b_indices, bits)
        entry = c_indptr[row]
        if _pairs(row, a_indptr, a_indices, b_indptr) < high - low:
            _take_scattered(row, a_indptr, a_indices, b_indptr, b_indices, bits, c_indices, entry)
        else:
            for word in range(low, high):
                entry = _write(word, bits[word], c_indices, entry)
                bits[word] = 0


@kernel
def _pack(first, last, indptr, indices, words):
    one = np.uint64(1)
    for row in range(first, last):
        for entry in range(indptr[row], indptr[row + 1]):
            column = indices[entry]
            words[row, column >> 6] |= one << np.uint64(column & 63)


@inlined
def _merge(row, a_indptr, a_indices, words, bits):
    """Write the union of the packed rows that a row of `a` names to `bits`."""
    bits[:] = 0
    for p in range(a_indptr[row], a_indptr[row + 1]):
        b_row = words[a_indices[p]]
        for word in range(len(bits)):
            bits[word] |= b_row[word]


@kernel
def _count_packed(first, last, a_indptr, a_indices, words, counts):
    bits = np.zeros(words.shape[1], np.uint64)
    for row in range(first, last):
        _merge(row, a_indptr, a_indices, words, bits)
        total = np.uint64(0)
        for word in range(len(bits)):
            total += population(bits[word])
        counts[row] = total


@kernel
def _fill_packed(first, last, a_indptr, a_indices, words, c_indptr, c_indices):
    bits = np.zeros(words.shape[1], np.uint64)
    for row in range(first, last):
        _merge(row, a_indptr, a_indices, words, bits)
        entry = c_indptr[row]
        for word in range(len(bits)):
            entry = _write(word, bits[word], c_indices, entry)


def check_shapes(a: Pattern, b: Pattern) -> None:
    """Raise ValueError where ``a @ b`` does not exist."""
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"a is {a.shape[0]} × {a.shape[1]} and b is {b.shape[0]} × {b.shape[1]}: "
            "a's columns must be as many as b's rows"
        )


def multiply_adds(a: Pattern, b: Pattern) -> int:
    """The number of pairs of stored entries that meet in ``a @ b``; it needs no index of a structured factor."""
    if isinstance(a.structure, Full) or isinstance(b.structure, Full):
        return a.shape[0] * b.nnz if isinstance(a.structure, Full) else a.nnz * b.shape[1]
    if isinstance(a.structure, Csr):
        # All threads read rows, but only one would count columns.
        return int(row_work(a, b)[-1])
    return int(a.structure.column_counts() @ b.structure.row_counts())


def row_work(a: Pattern, b: Pattern) -> np.ndarray:
    """Running total of the multiply-adds over the rows of ``a @ b``: int64, ``(rows + 1,)``."""
    return frozen(row_starts(row_sums(a.indptr, a.indices, b.structure.row_counts()), np.int64))


def product_pattern(a: Pattern, b: Pattern, work: np.ndarray | None = None, *, cache: bool = True) -> Pattern:
    """The pattern of ``a @ b``, where at least one pair of entries meets; from the disk cache where that is faster."""
    for diagonal, other in ((a, b), (b, a)):
        if isinstance(diagonal.structure, Diagonal):
            # The values of a scaled matrix are no longer known to be ones.
            return other if isinstance(diagonal.structure, Identity) else other.scaled()
    if isinstance(a.structure, Full) or isinstance(b.structure, Full):
        return _full_product(a, b)
    if work is None:
        work = row_work(a, b)
    make = functools.partial(_product_arrays, a, b, work)
    if cache and work[-1] > SLOW_WORK:
        packages = ("jacsparse.patterns", "jacsparse.spgemm")
        arrays = cached_arrays(f"product {product_digest(a, b)}", make, packages=packages)
    else:
        arrays = make()
    return _derived(a, b, arrays["indptr"], arrays["indices"]) if arrays else Pattern.of(Full(a.shape[0], b.shape[1]))


def product_digest(a: Pattern, b: Pattern) -> str:
    """A digest of a product's pattern, from its factors alone."""
    return hashlib.blake2b(f"product {a.digest} {b.digest}".encode(), digest_size=16).hexdigest()


def _product_arrays(a: Pattern, b: Pattern, work: np.ndarray) -> dict[str, np.ndarray]:
    """``indptr`` and ``indices`` of a product; an empty mapping where it is full."""
    rows, columns = a.shape[0], b.shape[1]
    counts = np.empty(rows, dtype=np.int64)
    factors: tuple[Any, ...] = (a.indptr, a.indices, b.indptr, b.indices, columns)
    # Rows of b that have several columns in a word are merged word by word.
    packed = b.nnz * PACKED > b.shape[0] * columns
    if packed:
        words = np.zeros((b.shape[0], -(-columns // 64)), dtype=np.uint64)
        run_rows(_pack, b.indptr, b.indptr, b.indices, words)
        factors = (a.indptr, a.indices, words)
    if packed:
        run_rows(_count_packed, work, *factors, counts)
    else:
        run_rows(_count, work, *factors, np.zeros(0, np.uint64), counts, counts[:0])
    nnz = int(counts.sum())
    if nnz == rows * columns:
        return {}
    dtype = index_dtype(nnz, rows, columns)
    indptr, indices = row_starts(counts, dtype), np.empty(nnz, dtype=dtype)
    run_rows(_fill_packed if packed else _fill, work, *factors, indptr, indices)
    return {"indptr": indptr, "indices": indices}


def _full_product(a: Pattern, b: Pattern) -> Pattern:
    """The product with a full factor: an entry wherever a's row and b's column have any."""
    m, n = a.shape[0], b.shape[1]
    rows = a.structure.row_counts() > 0
    columns = np.flatnonzero(b.structure.column_counts() > 0)
    count = int(rows.sum())
    if count == m and len(columns) == n:
        return Pattern.of(Full(m, n))
    dtype = index_dtype(count * len(columns), m, n)
    return _derived(a, b, row_starts(rows * len(columns), dtype), np.tile(columns.astype(dtype), count))


def _derived(a: Pattern, b: Pattern, indptr: np.ndarray, indices: np.ndarray) -> Pattern:
    structure = Csr(a.shape[0], b.shape[1], frozen(indptr), frozen(indices))
    # The factors determine the product, so its digest needs none of its indices.
    structure.__dict__["digest"] = product_digest(a, b)
    return Pattern.of(structure)


def meeting(a: Pattern, occupied: np.ndarray) -> np.ndarray:
    """The number of entries of each row of `a` that meet an entry of a vector `v`.

    Parameters
    ----------
    a : Pattern
        A matrix' pattern, ``(m, n)``.
    occupied : ndarray of bool, (n,)
        Whether each row of the vector has an entry.

    Returns
    -------
    ndarray of int64, (m,)
        Their sum is the multiply-adds of ``a @ v``; the result has an entry where it is not zero.

    Raises
    ------
    ValueError
        Where `occupied` has another shape or dtype.
    """
    _check_occupied(a.shape[1], occupied)
    # Where all meet, the description alone has the counts.
    return a.structure.row_counts() if occupied.all() else a.structure.meeting(occupied)


def product_meeting(a: Pattern, b: Pattern, occupied: np.ndarray) -> tuple[int, np.ndarray]:
    """The number of entries of ``a @ b``, and `meeting` of that product, without making its pattern."""
    check_shapes(a, b)
    _check_occupied(b.shape[1], occupied)
    if any(isinstance(factor.structure, (Diagonal, Full)) for factor in (a, b)):
        product = product_pattern(a, b)
        return product.nnz, meeting(product, occupied)
    rows, columns = a.shape[0], b.shape[1]
    words = np.zeros(-(-columns // 64) * 8, dtype=np.uint8)
    packed = np.packbits(occupied, bitorder="little")
    words[: len(packed)] = packed
    counts, pairs = np.empty(rows, dtype=np.int64), np.empty(rows, dtype=np.int64)
    factors = (a.indptr, a.indices, b.indptr, b.indices, columns)
    run_rows(_count, row_work(a, b), *factors, words.view(np.uint64), counts, pairs)
    return int(counts.sum()), pairs


def _check_occupied(columns: int, occupied: np.ndarray) -> None:
    if occupied.shape != (columns,) or occupied.dtype != np.bool_:
        raise ValueError(f"occupied has shape {occupied.shape}, dtype {occupied.dtype}; expected ({columns},) of bool")
