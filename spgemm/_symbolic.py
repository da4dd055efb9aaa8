"""The symbolic phase: which entries a product has, and how many multiply-adds it takes. No value is seen here.

Each thread marks the columns of one row in a bitmap, 64 to a word, which a column's repetitions cost nothing and from
which the columns come out sorted.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from ..patterns import Csr, Diagonal, Full, Identity, Pattern
from ..patterns._runtime import inlined, kernel, run_rows
from ..patterns._store import remembered
from ..patterns._structure import frozen, index_dtype, row_starts

__all__ = [
    "check_shapes",
    "meeting",
    "multiply_adds",
    "product_digest",
    "product_meeting",
    "product_pattern",
    "row_work",
]


#: Multiply-adds that take about as long as asking the disk.
SLOW_WORK = 1_000_000
#: A row is merged as packed words from an entry for so many columns on.
PACKED = 32


@intrinsic
def _population(typing_context, word):
    """Number of set bits of a word."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), generate


@intrinsic
def _lowest(typing_context, word):
    """Place of the lowest set bit of a word that is not zero."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@kernel
def _row_work(first, last, a_indptr, a_indices, b_counts, work):
    for row in range(first, last):
        total = 0
        for p in range(a_indptr[row], a_indptr[row + 1]):
            total += b_counts[a_indices[p]]
        work[row] = total


@inlined
def _mark(row, a_indptr, a_indices, b_indptr, b_indices, bits):
    """Set the bits of the columns of a row of the product; the words between which they lie."""
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


@kernel
def _count(first, last, a_indptr, a_indices, b_indptr, b_indices, columns, counts):
    bits = np.zeros((columns + 63) >> 6, np.uint64)
    for row in range(first, last):
        low, high = _mark(row, a_indptr, a_indices, b_indptr, b_indices, bits)
        total = np.uint64(0)
        for word in range(low, high):
            total += _population(bits[word])
            bits[word] = 0
        counts[row] = total


@kernel
def _fill(first, last, a_indptr, a_indices, b_indptr, b_indices, columns, c_indptr, c_indices):
    one = np.uint64(1)
    bits = np.zeros((columns + 63) >> 6, np.uint64)
    for row in range(first, last):
        low, high = _mark(row, a_indptr, a_indices, b_indptr, b_indices, bits)
        entry = c_indptr[row]
        for word in range(low, high):
            left = bits[word]
            bits[word] = 0
            while left:
                c_indices[entry] = (word << 6) + np.int64(_lowest(left))
                entry += 1
                left &= left - one


@kernel
def _pack(first, last, indptr, indices, words):
    one = np.uint64(1)
    for row in range(first, last):
        for entry in range(indptr[row], indptr[row + 1]):
            column = indices[entry]
            words[row, column >> 6] |= one << np.uint64(column & 63)


@inlined
def _merge(row, a_indptr, a_indices, words, bits):
    """The union of the packed rows that a row of `a` names."""
    bits[:] = 0
    for p in range(a_indptr[row], a_indptr[row + 1]):
        own = words[a_indices[p]]
        for word in range(len(bits)):
            bits[word] |= own[word]


@kernel
def _count_packed(first, last, a_indptr, a_indices, words, counts):
    bits = np.zeros(words.shape[1], np.uint64)
    for row in range(first, last):
        _merge(row, a_indptr, a_indices, words, bits)
        total = np.uint64(0)
        for word in range(len(bits)):
            total += _population(bits[word])
        counts[row] = total


@kernel
def _fill_packed(first, last, a_indptr, a_indices, words, c_indptr, c_indices):
    one = np.uint64(1)
    bits = np.zeros(words.shape[1], np.uint64)
    for row in range(first, last):
        _merge(row, a_indptr, a_indices, words, bits)
        entry = c_indptr[row]
        for word in range(len(bits)):
            left = bits[word]
            while left:
                c_indices[entry] = (word << 6) + np.int64(_lowest(left))
                entry += 1
                left &= left - one


@kernel
def _meet(first, last, indptr, indices, held, pairs):
    for row in range(first, last):
        total = 0
        for entry in range(indptr[row], indptr[row + 1]):
            total += held[indices[entry]]
        pairs[row] = total


@kernel
def _count_and_meet(first, last, a_indptr, a_indices, b_indptr, b_indices, columns, held, counts, pairs):
    bits = np.zeros((columns + 63) >> 6, np.uint64)
    for row in range(first, last):
        low, high = _mark(row, a_indptr, a_indices, b_indptr, b_indices, bits)
        total = np.uint64(0)
        met = np.uint64(0)
        for word in range(low, high):
            total += _population(bits[word])
            met += _population(bits[word] & held[word])
            bits[word] = 0
        counts[row] = total
        pairs[row] = met


def check_shapes(a: Pattern, b: Pattern) -> None:
    """Raise ValueError where ``a @ b`` does not exist."""
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"a is {a.shape[0]} × {a.shape[1]} and b is {b.shape[0]} × {b.shape[1]}: "
            "a's columns must be as many as b's rows"
        )


def multiply_adds(a: Pattern, b: Pattern) -> int:
    """Pairs of stored entries that meet in ``a @ b``; needs no index of a structured factor."""
    if isinstance(a.structure, Full) or isinstance(b.structure, Full):
        return a.shape[0] * b.nnz if isinstance(a.structure, Full) else a.nnz * b.shape[1]
    if isinstance(a.structure, Csr):
        # Its columns would have to be counted, which one thread does; its rows are looked through by all.
        return int(row_work(a, b)[-1])
    return int(a.structure.column_counts() @ b.structure.row_counts())


def row_work(a: Pattern, b: Pattern) -> np.ndarray:
    """Running total over the rows of ``a @ b`` of the multiply-adds, int64, shape ``(rows + 1,)``."""
    work = np.empty(a.shape[0], dtype=np.int64)
    run_rows(_row_work, a.indptr, a.indptr, a.indices, b.structure.row_counts(), work)
    return frozen(row_starts(work, np.int64))


def product_pattern(a: Pattern, b: Pattern, work: np.ndarray | None = None, *, cache: bool = True) -> Pattern:
    """The pattern of ``a @ b``: where at least one pair of entries meets; of an earlier run where that is faster."""
    for diagonal, other in ((a, b), (b, a)):
        if isinstance(diagonal.structure, Diagonal):
            return other if isinstance(diagonal.structure, Identity) else _scaled(other)
    (rows, _), (_, columns) = a.shape, b.shape
    if isinstance(a.structure, Full) or isinstance(b.structure, Full):
        return _full_product(a, b)
    running = row_work(a, b) if work is None else work

    def make() -> dict[str, np.ndarray]:
        return _product_arrays(a, b, running)

    slow = cache and running[-1] > SLOW_WORK
    found = remembered(f"product {product_digest(a, b)}", make) if slow else make()
    if not found:
        return Pattern.of(Full(rows, columns))
    return _derived(a, b, found["indptr"], found["indices"])


def product_digest(a: Pattern, b: Pattern) -> str:
    """Of a product that is worked out, before it is."""
    return hashlib.blake2b(f"product {a.digest} {b.digest}".encode(), digest_size=16).hexdigest()


def _product_arrays(a: Pattern, b: Pattern, work: np.ndarray) -> dict[str, np.ndarray]:
    """``indptr`` and ``indices`` of a product; none where it is full."""
    rows, columns = a.shape[0], b.shape[1]
    counts = np.empty(rows, dtype=np.int64)
    factors: tuple[Any, ...] = (a.indptr, a.indices, b.indptr, b.indices, columns)
    # Rows of b with several columns to a word are merged a word at a time.
    packed = b.nnz * PACKED > b.shape[0] * columns
    if packed:
        words = np.zeros((b.shape[0], -(-columns // 64)), dtype=np.uint64)
        run_rows(_pack, b.indptr, b.indptr, b.indices, words)
        factors = (a.indptr, a.indices, words)
    run_rows(_count_packed if packed else _count, work, *factors, counts)
    nnz = int(counts.sum())
    if nnz == rows * columns:
        return {}
    dtype = index_dtype(nnz, rows, columns)
    indptr, indices = row_starts(counts, dtype), np.empty(nnz, dtype=dtype)
    run_rows(_fill_packed if packed else _fill, work, *factors, indptr, indices)
    return {"indptr": indptr, "indices": indices}


def _scaled(pattern: Pattern) -> Pattern:
    """The same positions, where values that were known to be ones are so no more."""
    structure = pattern.structure.scaled()
    return pattern if structure is pattern.structure else Pattern.of(structure)


def _full_product(a: Pattern, b: Pattern) -> Pattern:
    """A factor is full: an entry wherever a's row and b's column hold anything at all."""
    rows, columns = a.shape[0], b.shape[1]
    held_rows = a.structure.row_counts() > 0
    held_columns = np.flatnonzero(b.structure.column_counts() > 0)
    if held_rows.all() and len(held_columns) == columns:
        return Pattern.of(Full(rows, columns))
    nnz = int(held_rows.sum()) * len(held_columns)
    dtype = index_dtype(nnz, rows, columns)
    indptr = row_starts(held_rows * len(held_columns), dtype)
    return _derived(a, b, indptr, np.tile(held_columns.astype(dtype), int(held_rows.sum())))


def _derived(a: Pattern, b: Pattern, indptr: np.ndarray, indices: np.ndarray) -> Pattern:
    structure = Csr(a.shape[0], b.shape[1], frozen(indptr), frozen(indices))
    # The factors determine the product: no need to read all its indices for a digest.
    structure.__dict__["digest"] = product_digest(a, b)
    return Pattern.of(structure)


def meeting(a: Pattern, held: np.ndarray) -> np.ndarray:
    """How many entries of each row of `a` meet one of the vector `v`, of which `held` says which rows hold one.

    Parameters
    ----------
    a : Pattern
        ``(m, n)``.
    held : ndarray of bool, (n,)
        Of the vector.

    Returns
    -------
    ndarray of int64, (m,)
        Their sum is the multiply-adds of ``a @ v``; the result holds an entry where it is not zero.
    """
    _check_held(a.shape[1], held)
    if isinstance(a.structure, Diagonal):
        return held.astype(np.int64)
    if isinstance(a.structure, Full):
        return np.full(a.shape[0], np.count_nonzero(held))
    if held.all():
        # No need for the indices.
        return a.structure.row_counts()
    pairs = np.empty(a.shape[0], dtype=np.int64)
    run_rows(_meet, a.indptr, a.indptr, a.indices, held, pairs)
    return pairs


def product_meeting(a: Pattern, b: Pattern, held: np.ndarray) -> tuple[int, np.ndarray]:
    """The entries of ``a @ b``, and `meeting` of that product, without writing its pattern down."""
    check_shapes(a, b)
    _check_held(b.shape[1], held)
    if any(isinstance(factor.structure, (Diagonal, Full)) for factor in (a, b)):
        product = product_pattern(a, b)
        return product.nnz, meeting(product, held)
    columns = b.shape[1]
    words = np.zeros(-(-columns // 64) * 8, dtype=np.uint8)
    packed = np.packbits(held, bitorder="little")
    words[: len(packed)] = packed
    counts, pairs = np.empty(a.shape[0], dtype=np.int64), np.empty(a.shape[0], dtype=np.int64)
    factors = (a.indptr, a.indices, b.indptr, b.indices, columns)
    run_rows(_count_and_meet, row_work(a, b), *factors, words.view(np.uint64), counts, pairs)
    return int(counts.sum()), pairs


def _check_held(columns: int, held: np.ndarray) -> None:
    if held.shape != (columns,) or held.dtype != np.bool_:
        raise ValueError(f"held has shape {held.shape}, dtype {held.dtype}; expected ({columns},) of bool")
