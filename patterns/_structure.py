"""Structures: what a pattern is known to be, before any index is written down.

A structure answers for its shape, its number of entries, the number in each row and column and its digest from its
description alone. Index arrays are made only when `csr` is called.
"""

from __future__ import annotations

import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import scipy.sparse

__all__ = [
    "Blocks",
    "Csr",
    "Diagonal",
    "Full",
    "Identity",
    "Structure",
    "check_size",
    "flag",
    "frozen",
    "index_dtype",
    "natural",
    "row_starts",
]

Arrays = tuple[np.ndarray, np.ndarray]


def index_dtype(nnz: int, rows: int, columns: int) -> type[np.signedinteger]:
    """int32, or int64 once a count or a dimension needs it."""
    return np.int32 if max(nnz, rows, columns) < 2**31 else np.int64


def frozen(array: np.ndarray) -> np.ndarray:
    """The same array, read-only from now on."""
    array.setflags(write=False)
    return array


def row_starts(counts: np.ndarray, dtype: Any) -> np.ndarray:
    """``indptr`` of rows with `counts` entries."""
    starts = np.zeros(len(counts) + 1, dtype=dtype)
    np.cumsum(counts, out=starts[1:])
    return starts


class Structure(ABC):
    """What is known of a pattern without its indices."""

    #: Structures by name, for files.
    known: ClassVar[dict[str, type[Structure]]] = {}

    def __init_subclass__(cls) -> None:
        Structure.known[cls.__name__] = cls

    @property
    def name(self) -> str:
        """What it is called where it is shown."""
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
        """What is known once a diagonal matrix has scaled the rows or columns: the same positions."""
        return self

    @abstractmethod
    def row_counts(self) -> np.ndarray:
        """Entries in each row, int64."""

    def column_counts(self) -> np.ndarray:
        """Entries in each column, int64."""
        return self.T.row_counts()

    @abstractmethod
    def csr(self) -> Arrays:
        """``indptr`` and ``indices``: sorted, without duplicates."""

    def parts(self, bounds: Sequence[int]) -> Iterator[Structure]:
        """The structures of the rows from each bound to the next one; no more indices than a part's are held."""
        indptr, indices = self.csr()
        return (_rows(self.shape[1], indptr[a : b + 1], indices[indptr[a] : indptr[b]]) for a, b in pairwise(bounds))

    @abstractmethod
    def describe(self) -> Mapping[str, Any]:
        """The description, as plain numbers, strings and arrays: `restore` makes the structure again from it."""

    @classmethod
    @abstractmethod
    def restore(cls, description: Mapping[str, Any]) -> Structure:
        """The structure that `describe` described; ValueError where it describes none."""

    @functools.cached_property
    def digest(self) -> str:
        """A digest of the description. Equal digests mean equal patterns, not the other way round."""
        digest = hashlib.blake2b(type(self).__name__.encode(), digest_size=16)
        for name, value in self.describe().items():
            digest.update(name.encode())
            if isinstance(value, np.ndarray):
                digest.update(f"{value.dtype.str}{value.shape}".encode())
                digest.update(np.ascontiguousarray(value).data)
            else:
                digest.update(repr(value).encode())
        return digest.hexdigest()


def _rows(columns: int, starts: np.ndarray, indices: np.ndarray) -> Csr:
    """Rows of a larger matrix, where `starts` says where each begins among all of its entries."""
    dtype = index_dtype(len(indices), len(starts), columns)
    indptr = (starts - starts[0]).astype(dtype)
    return Csr(len(starts) - 1, columns, frozen(indptr), frozen(indices.astype(dtype, copy=False)))


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

    def csr(self) -> Arrays:
        dtype = index_dtype(self.n, self.n, self.n)
        return np.arange(self.n + 1, dtype=dtype), np.arange(self.n, dtype=dtype)

    def describe(self) -> Mapping[str, Any]:
        return {"n": self.n}

    @classmethod
    def restore(cls, description: Mapping[str, Any]) -> Diagonal:
        structure = cls(natural(description, "n"))
        check_size(structure)
        return structure


@dataclass(frozen=True)
class Identity(Diagonal):
    """A diagonal whose values are known to be ones."""

    def scaled(self) -> Diagonal:
        return Diagonal(self.n)


@dataclass(frozen=True)
class Full(Structure):
    """Every position of an m × n matrix. Its indices are never needed, and made only on request."""

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

    def csr(self) -> Arrays:
        dtype = index_dtype(self.nnz, self.m, self.n)
        return np.arange(self.m + 1, dtype=dtype) * dtype(self.n), np.tile(np.arange(self.n, dtype=dtype), self.m)

    def parts(self, bounds: Sequence[int]) -> Iterator[Structure]:
        return (Full(last - first, self.n) for first, last in pairwise(bounds))

    def describe(self) -> Mapping[str, Any]:
        return {"m": self.m, "n": self.n}

    @classmethod
    def restore(cls, description: Mapping[str, Any]) -> Full:
        structure = cls(natural(description, "m"), natural(description, "n"))
        check_size(structure)
        return structure


@dataclass(frozen=True)
class Blocks(Structure):
    """Full blocks along the diagonal: ``I_outer ⊗ full(rows, columns) ⊗ I_inner``.

    What an operator fills that works along one axis, each output of which depends on all of its own line: softmax,
    normalisation, a matrix times each of many vectors.

    Attributes
    ----------
    outer, inner : int
        Positions before and after the axis.
    rows, columns : int
        Sizes of the axis, of the output and of the input.
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

    def csr(self) -> Arrays:
        dtype = index_dtype(self.nnz, *self.shape)
        line = np.arange(self.columns, dtype=dtype) * dtype(self.inner)
        inner = np.arange(self.inner, dtype=dtype)[:, None]
        first = np.arange(self.outer, dtype=dtype)[:, None, None, None] * dtype(self.columns * self.inner)
        indices = np.broadcast_to(first + inner + line, (self.outer, self.rows, self.inner, self.columns))
        return np.arange(self.shape[0] + 1, dtype=dtype) * dtype(self.columns), indices.reshape(-1)

    def parts(self, bounds: Sequence[int]) -> Iterator[Structure]:
        dtype = index_dtype(0, *self.shape)
        line = np.arange(self.columns, dtype=dtype) * dtype(self.inner)
        for first, last in pairwise(bounds):
            row = np.arange(first, last)
            begin = row // max(1, self.rows * self.inner) * (self.columns * self.inner) + row % max(1, self.inner)
            indices = (begin.astype(dtype)[:, None] + line).reshape(-1)
            yield _rows(self.shape[1], np.arange(last - first + 1) * self.columns, indices)

    def describe(self) -> Mapping[str, Any]:
        return {"outer": self.outer, "rows": self.rows, "columns": self.columns, "inner": self.inner}

    @classmethod
    def restore(cls, description: Mapping[str, Any]) -> Blocks:
        structure = cls(*(natural(description, name) for name in ("outer", "rows", "columns", "inner")))
        check_size(structure)
        return structure


@dataclass(frozen=True, eq=False)
class Csr(Structure):
    """No structure beyond the positions themselves."""

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
        transpose = scipy.sparse.csr_array(
            (np.ones(self.nnz, dtype=np.bool_), self.indices, self.indptr), shape=self.shape
        ).tocsc()
        dtype = self.indices.dtype
        return Csr(
            self.columns, self.rows, frozen(transpose.indptr.astype(dtype)), frozen(transpose.indices.astype(dtype))
        )

    def row_counts(self) -> np.ndarray:
        return np.diff(self.indptr).astype(np.int64)

    def column_counts(self) -> np.ndarray:
        return np.bincount(self.indices, minlength=self.columns)

    def csr(self) -> Arrays:
        return self.indptr, self.indices

    def describe(self) -> Mapping[str, Any]:
        return {"rows": self.rows, "columns": self.columns, "indptr": self.indptr, "indices": self.indices}

    @classmethod
    def picking(cls, sources: np.ndarray, columns: int) -> Csr:
        """At most one entry in each row: in the column that `sources` names, none where that is negative."""
        outside = np.flatnonzero(sources >= columns)
        if len(outside):
            place = int(outside[0])
            raise ValueError(f"sources[{place}] is {sources[place]}; columns run from 0 to {columns - 1}")
        held = sources >= 0
        dtype = index_dtype(0, len(sources), columns)
        return cls(len(sources), columns, frozen(row_starts(held, dtype)), frozen(sources[held].astype(dtype)))

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
        if len(indices):
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
