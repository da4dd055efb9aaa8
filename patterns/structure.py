"""Structures: descriptions of patterns by a few numbers, without indices.

A structure answers for its shape, its number of entries, the number in each row and column and its digest from its
description alone. Index arrays are made only when `csr` is called.
"""

from __future__ import annotations

import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
import scipy.sparse

from ..runtime import frozen, index_dtype, kernel, row_starts, run_rows

Arrays = tuple[np.ndarray, np.ndarray]


@kernel
def _sum_rows(first, last, indptr, indices, weights, sums):
    for row in range(first, last):
        total = 0
        for entry in range(indptr[row], indptr[row + 1]):
            total += weights[indices[entry]]
        sums[row] = total


def row_sums(indptr: np.ndarray, indices: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The sum of the columns' weights, integers or flags, over the entries of each row: int64."""
    sums = np.empty(len(indptr) - 1, dtype=np.int64)
    run_rows(_sum_rows, indptr, indptr, indices, weights, sums)
    return sums


@dataclass(frozen=True, eq=False)
class Structure(ABC):
    """The description of a pattern, from which its indices can be made."""

    #: All structures by name, for files.
    by_name: ClassVar[dict[str, type[Structure]]] = {}

    def __init_subclass__(cls) -> None:
        Structure.by_name[cls.__name__] = cls

    @property
    def name(self) -> str:
        """The name that printed patterns show."""
        return type(self).__name__

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""

    @property
    @abstractmethod
    def nnz(self) -> int:
        """Number of entries."""

    @property
    @abstractmethod
    def T(self) -> Structure:
        """The structure of the transpose."""

    def scaled(self) -> Structure:
        """The structure after a diagonal matrix has scaled the rows or columns: the same positions."""
        return self

    @abstractmethod
    def row_counts(self) -> np.ndarray:
        """Entries in each row, int64."""

    def column_counts(self) -> np.ndarray:
        """Entries in each column, int64."""
        return self.T.row_counts()

    @abstractmethod
    def meeting(self, occupied: np.ndarray) -> np.ndarray:
        """Entries of each row in the columns that are flagged: int64, without making the indices."""

    @abstractmethod
    def csr(self) -> Arrays:
        """``indptr`` and ``indices``: sorted, without duplicates."""

    def describe(self) -> Mapping[str, Any]:
        """The description as plain numbers, strings and arrays; `restore` makes the structure again from it."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @classmethod
    def restore(cls, description: Mapping[str, Any]) -> Structure:
        """The structure that `describe` described; ValueError where it describes none."""
        structure = cls(*(natural(description, item.name) for item in fields(cls)))
        check_size(structure)
        return structure

    @functools.cached_property
    def digest(self) -> str:
        """A digest of the description. Equal digests mean equal patterns; equal patterns may have different digests."""
        digest = hashlib.blake2b(type(self).__name__.encode(), digest_size=16)
        for name, value in self.describe().items():
            digest.update(name.encode())
            if isinstance(value, np.ndarray):
                digest.update(f"{value.dtype.str}{value.shape}".encode())
                digest.update(np.ascontiguousarray(value).data)
            else:
                digest.update(repr(value).encode())
        return digest.hexdigest()


def csr_of_transpose(indptr: np.ndarray, indices: np.ndarray, shape: tuple[int, int]) -> Arrays:
    """``indptr`` and ``indices`` of the transpose of a pattern of that shape."""
    ones = np.ones(len(indices), dtype=np.bool_)
    transpose = scipy.sparse.csr_array((ones, indices, indptr), shape=shape).tocsc()
    return transpose.indptr, transpose.indices


def natural(description: Mapping[str, Any], name: str) -> int:
    value = description.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} is {value!r}; expected an integer of at least 0")
    return value


def flag(description: Mapping[str, Any], name: str) -> bool:
    value = description.get(name)
    if value is not True and value is not False:
        raise ValueError(f"{name} is {value!r}; expected true or false")
    return value


def byte_array(description: Mapping[str, Any], name: str) -> np.ndarray:
    value = description.get(name)
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or value.ndim != 1:
        raise ValueError(f"{name} is not an array of bytes")
    return value


def axes_table(description: Mapping[str, Any], columns: int) -> np.ndarray:
    """The table ``axes`` of a description, which has a row of numbers for each axis."""
    axes = description.get("axes")
    if not isinstance(axes, np.ndarray) or axes.dtype != np.int64 or axes.ndim != 2 or axes.shape[1] != columns:
        raise ValueError(f"axes is not an int64 array with {columns} columns")
    return axes


def check_size(structure: Structure, *others: int) -> None:
    """Raise ValueError where a description from outside is of a matrix that 64-bit integers cannot count."""
    largest = max(*structure.shape, *others)
    if largest >= 2**62 or structure.nnz >= 2**62:
        raise ValueError(f"{structure.shape[0]} × {structure.shape[1]} is too large for any matrix")


@dataclass(frozen=True)
class Diagonal(Structure):
    """The diagonal of an n × n matrix: what an elementwise operator's Jacobian may fill."""

    n: int

    @property
    def shape(self) -> tuple[int, int]:
        return (self.n, self.n)

    @property
    def nnz(self) -> int:
        return self.n

    @property
    def T(self) -> Diagonal:
        return self

    def row_counts(self) -> np.ndarray:
        return np.ones(self.n, dtype=np.int64)

    def meeting(self, occupied: np.ndarray) -> np.ndarray:
        return occupied.astype(np.int64)

    def csr(self) -> Arrays:
        dtype = index_dtype(self.n, self.n, self.n)
        return np.arange(self.n + 1, dtype=dtype), np.arange(self.n, dtype=dtype)


@dataclass(frozen=True)
class Identity(Diagonal):
    """A diagonal whose values are all ones."""

    def scaled(self) -> Diagonal:
        return Diagonal(self.n)


@dataclass(frozen=True)
class Full(Structure):
    """Every position of an m × n matrix. No kernel needs its indices; only `csr` makes them."""

    m: int
    n: int

    @property
    def shape(self) -> tuple[int, int]:
        return (self.m, self.n)

    @property
    def nnz(self) -> int:
        return self.m * self.n

    @property
    def T(self) -> Full:
        return Full(self.n, self.m)

    def row_counts(self) -> np.ndarray:
        return np.full(self.m, self.n, dtype=np.int64)

    def meeting(self, occupied: np.ndarray) -> np.ndarray:
        return np.full(self.m, np.count_nonzero(occupied), dtype=np.int64)

    def csr(self) -> Arrays:
        dtype = index_dtype(self.nnz, self.m, self.n)
        return np.arange(self.m + 1, dtype=dtype) * dtype(self.n), np.tile(np.arange(self.n, dtype=dtype), self.m)


@dataclass(frozen=True)
class Blocks(Structure):
    """Full blocks along the diagonal: ``I_outer ⊗ full(rows, columns) ⊗ I_inner``.

    The Jacobian of an operator that works along one axis, so that each output depends on all of its line, is of this
    form: softmax, normalisation, a matrix times each of many vectors.

    Attributes
    ----------
    outer, inner : int
        Positions before and after the axis.
    rows, columns : int
        Sizes of the axis in the output and in the input.
    """

    outer: int
    rows: int
    columns: int
    inner: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        return (self.outer * self.rows * self.inner, self.outer * self.columns * self.inner)

    @property
    def nnz(self) -> int:
        return self.outer * self.rows * self.columns * self.inner

    @property
    def T(self) -> Blocks:
        return Blocks(self.outer, self.columns, self.rows, self.inner)

    def row_counts(self) -> np.ndarray:
        return np.full(self.shape[0], self.columns, dtype=np.int64)

    def meeting(self, occupied: np.ndarray) -> np.ndarray:
        # All rows of a block meet the same columns.
        met = np.count_nonzero(occupied.reshape(self.outer, self.columns, 1, self.inner), axis=1)
        return np.broadcast_to(met, (self.outer, self.rows, self.inner)).reshape(-1)

    def csr(self) -> Arrays:
        dtype = index_dtype(self.nnz, *self.shape)
        line = np.arange(self.columns, dtype=dtype) * dtype(self.inner)
        inner = np.arange(self.inner, dtype=dtype)[:, None]
        first = np.arange(self.outer, dtype=dtype)[:, None, None, None] * dtype(self.columns * self.inner)
        indices = np.broadcast_to(first + inner + line, (self.outer, self.rows, self.inner, self.columns))
        return np.arange(self.shape[0] + 1, dtype=dtype) * dtype(self.columns), indices.reshape(-1)


@dataclass(frozen=True, eq=False)
class Csr(Structure):
    """The positions themselves, in compressed sparse rows."""

    rows: int
    columns: int
    indptr: np.ndarray = field(repr=False)
    indices: np.ndarray = field(repr=False)

    @property
    def shape(self) -> tuple[int, int]:
        return (self.rows, self.columns)

    @property
    def nnz(self) -> int:
        return len(self.indices)

    @functools.cached_property
    def T(self) -> Csr:
        arrays = csr_of_transpose(self.indptr, self.indices, self.shape)
        return Csr(self.columns, self.rows, *(frozen(array.astype(self.indices.dtype)) for array in arrays))

    def row_counts(self) -> np.ndarray:
        return np.diff(self.indptr).astype(np.int64)

    def meeting(self, occupied: np.ndarray) -> np.ndarray:
        return row_sums(self.indptr, self.indices, occupied)

    def column_counts(self) -> np.ndarray:
        return np.bincount(self.indices, minlength=self.columns)

    def csr(self) -> Arrays:
        return self.indptr, self.indices

    @classmethod
    def from_sources(cls, sources: np.ndarray, columns: int) -> Csr:
        """At most one entry in each row: in the column that `sources` names, none where that is negative."""
        outside = np.flatnonzero(sources >= columns)
        if len(outside):
            place = int(outside[0])
            raise ValueError(f"sources[{place}] is {sources[place]}; columns run from 0 to {columns - 1}")
        filled = sources >= 0
        dtype = index_dtype(0, len(sources), columns)
        return cls(len(sources), columns, frozen(row_starts(filled, dtype)), frozen(sources[filled].astype(dtype)))

    @classmethod
    def restore(cls, description: Mapping[str, Any]) -> Csr:
        rows, columns = natural(description, "rows"), natural(description, "columns")
        return cls.checked((rows, columns), description.get("indptr"), description.get("indices"))

    @classmethod
    def checked(cls, shape: Any, indptr: Any, indices: Any) -> Csr:
        """A structure from arrays of unknown origin, copied and checked: indices drive raw memory access.

        Raises
        ------
        TypeError
            Where an array does not hold integers.
        ValueError
            Where the arrays are no CSR pattern of that shape with sorted, distinct indices; it names the place.
        """
        rows, columns = _checked_shape(shape)
        indptr, indices = _integers("indptr", indptr), _integers("indices", indices)
        if len(indptr) != rows + 1:
            raise ValueError(f"indptr has {len(indptr)} elements; a matrix of {rows} rows needs {rows + 1}")
        if indptr[0] != 0:
            raise ValueError(f"indptr starts at {indptr[0]}; it must start at 0")
        # Compared rather than subtracted: a difference could overflow.
        falls = np.flatnonzero(indptr[1:] < indptr[:-1])
        if len(falls):
            row = int(falls[0])
            raise ValueError(f"indptr falls from {indptr[row]} to {indptr[row + 1]} at row {row}; it must not decrease")
        if indptr[-1] != len(indices):
            raise ValueError(f"indptr ends at {indptr[-1]}, but indices has {len(indices)} elements; they must agree")
        outside = np.flatnonzero((indices < 0) | (indices >= columns))
        if len(outside):
            place = int(outside[0])
            raise ValueError(f"indices[{place}] is {indices[place]}; columns run from 0 to {columns - 1}")
        unsorted = indices[1:] <= indices[:-1]
        starts = indptr[1:-1]
        unsorted[starts[(starts > 0) & (starts < len(indices))] - 1] = False
        if unsorted.any():
            place = int(np.argmax(unsorted)) + 1
            raise ValueError(
                f"indices[{place}] is {indices[place]} after {indices[place - 1]} in the same row; "
                "sort each row and remove duplicates first"
            )
        dtype = index_dtype(len(indices), rows, columns)
        return cls(rows, columns, frozen(indptr.astype(dtype)), frozen(indices.astype(dtype)))


def _checked_shape(shape: Any) -> tuple[int, int]:
    """`shape` as a pair of natural numbers."""
    try:
        rows, columns = shape
        whole = int(rows) == rows >= 0 and int(columns) == columns >= 0
    except (TypeError, ValueError, OverflowError):
        whole = False
    if not whole:
        raise ValueError(f"shape is {shape!r}; expected a pair (rows, columns) of integers of at least 0")
    return int(rows), int(columns)


def _integers(name: str, values: Any) -> np.ndarray:
    if values is None:
        raise ValueError(f"{name} is missing")
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}; expected one dimension")
    if array.size == 0 and array.dtype.kind == "f":
        # An empty list comes as floats.
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}; expected integers")
    if array.dtype == np.uint64 and array.size and array.max() >= 2**63:
        raise ValueError(f"{name} holds {array.max()}, which no index reaches")
    return array.astype(np.int64)
