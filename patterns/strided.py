"""Operators that move data in steps: slices, permutations, concatenations, padding, broadcasting.

Each row of such a pattern has at most one entry. With the row's places ``i_1, i_2, ...`` along the axes of the output,
its column is ``offset + Σ i_k · stride_k``, like the address of an element of a strided tensor; rows outside of a box
of places have no entry. So a few numbers replace index arrays as large as the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ..runtime import frozen, index_dtype, row_starts
from .pattern import Pattern
from .structure import Arrays, Csr, Structure, axes_table, check_size, csr_of_transpose, flag, natural


class Steps(NamedTuple):
    """One axis of the rows: places from `first` to ``last - 1`` have an entry, `stride` columns apart."""

    size: int
    first: int
    last: int
    stride: int


@dataclass(frozen=True)
class Strided(Structure):
    """At most one entry in each row, in columns that lie in steps; or the transpose."""

    #: Columns of the matrix before the transpose.
    columns: int
    #: The column at the place 0 of all axes, whether that is in the box or not.
    offset: int
    #: The rows' axes, the slowest first.
    axes: tuple[Steps, ...]
    transposed: bool = False

    @classmethod
    def from_sources(cls, sources: np.ndarray, columns: int) -> Strided | None:
        """The structure with an entry in each row's column, or None where the columns do not lie in such steps.

        The rows are the elements of `sources`, of any shape, in C order; each names its column, or is negative for no
        entry.

        Examples
        --------
        >>> Strided.from_sources(np.arange(12).reshape(3, 4)[:, 1:3], 12).axes
        (Steps(size=3, first=0, last=3, stride=4), Steps(size=2, first=0, last=2, stride=1))
        >>> Strided.from_sources(np.array([0, 1, 3]), 4) is None
        True
        """
        filled = sources >= 0
        entries = int(np.count_nonzero(filled))
        if not entries:
            return None
        corner = [int(place) for place in np.unravel_index(int(filled.argmax()), sources.shape)]
        if entries == 1:
            steps = (Steps(size, first, first + 1, 0) for size, first in zip(sources.shape, corner, strict=True))
            return cls(columns, int(sources[tuple(corner)]), _merged([*steps]))
        lasts = []
        for axis, first in enumerate(corner):
            index: tuple[Any, ...] = (*corner[:axis], slice(first, None), *corner[axis + 1 :])
            line = filled[index]
            lasts.append(first + (len(line) if line.all() else int(line.argmin())))
        box = sources[tuple(slice(first, last) for first, last in zip(corner, lasts, strict=True))]
        if box.size != entries:
            return None
        start = int(box.flat[0])
        strides = [
            int(box[(*[0] * axis, 1, *[0] * (box.ndim - axis - 1))]) - start if size > 1 else 0
            for axis, size in enumerate(box.shape)
        ]
        axes = [Steps(*axis) for axis in zip(sources.shape, corner, lasts, strides, strict=True)]
        structure = cls(columns, start - sum(axis.first * axis.stride for axis in axes), tuple(axes))
        return cls.from_steps(columns, structure.offset, axes) if np.array_equal(structure._columns(), box) else None

    @classmethod
    def from_steps(cls, columns: int, offset: int, axes: Sequence[Steps]) -> Strided:
        """The structure with these steps, by as few axes as possible; an axis with one place has the stride 0."""
        return cls(columns, offset, _merged(axes))

    @property
    def shape(self) -> tuple[int, int]:
        rows = math.prod(axis.size for axis in self.axes)
        return (self.columns, rows) if self.transposed else (rows, self.columns)

    @property
    def nnz(self) -> int:
        return math.prod(axis.last - axis.first for axis in self.axes)

    @property
    def T(self) -> Strided:
        return replace(self, transposed=not self.transposed)

    def sources(self) -> np.ndarray:
        """The column of each row's entry before the transpose, -1 for none; int64."""
        places, box = np.full([axis.size for axis in self.axes], -1), self._columns()
        places[self._box] = box
        return places.reshape(-1)

    def _columns(self) -> np.ndarray:
        """The column of each entry, by its places within the box."""
        columns = np.full((1,) * len(self.axes), self.offset)
        for number, axis in enumerate(self.axes):
            steps = np.arange(axis.first, axis.last) * axis.stride
            columns = columns + steps.reshape(-1, *[1] * (len(self.axes) - number - 1))
        return columns

    @property
    def _box(self) -> tuple[slice, ...]:
        """The places that have an entry."""
        return tuple(slice(axis.first, axis.last) for axis in self.axes)

    def row_counts(self) -> np.ndarray:
        return self.meeting(np.ones(self.shape[1], dtype=np.bool_))

    def meeting(self, occupied: np.ndarray) -> np.ndarray:
        sizes, columns = [axis.size for axis in self.axes], self._columns()
        if self.transposed:
            return np.bincount(columns[occupied.reshape(sizes)[self._box]], minlength=self.columns)
        counts = np.zeros(sizes, dtype=np.int64)
        counts[self._box] = occupied[columns]
        return counts.reshape(-1)

    def csr(self) -> Arrays:
        dtype = index_dtype(self.nnz, *self.shape)
        indptr = row_starts(replace(self, transposed=False).row_counts(), dtype)
        indices = self._columns().reshape(-1).astype(dtype)
        if self.transposed:
            indptr, indices = csr_of_transpose(indptr, indices, self.shape[::-1])
        return frozen(indptr.astype(dtype, copy=False)), frozen(indices.astype(dtype, copy=False))

    def adjoint_product(self, values: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor | None:
        """The products of the transposed matrix and vectors, ``(many, rows)``, without an index for each entry.

        `values` are those of the entries in the order of the rows before the transpose. None where entries lie
        backwards, or where one column has several in a way that is no broadcast.
        """
        sizes = [axis.last - axis.first for axis in self.axes]
        strides = [axis.stride if size > 1 else 0 for axis, size in zip(self.axes, sizes, strict=True)]
        begin = self.offset + sum(axis.first * axis.stride for axis in self.axes)
        if min(strides, default=0) < 0:
            return None
        many, whole = len(vectors), [axis.size for axis in self.axes]
        box = (slice(None), *self._box)
        if self.transposed:
            vectors = vectors.contiguous()
            places = (many, *sizes), (self.columns, *strides), vectors.storage_offset() + begin
            product = vectors.as_strided(*places) * values.reshape(sizes)
            if sizes != whole:
                product, inner = vectors.new_zeros((many, *whole)), product
                product[box] = inner
            return product.reshape(many, self.shape[1])
        if not _is_injective(sizes, strides):
            return None
        product = vectors.reshape(many, *whole)[box] * values.reshape(sizes)
        repeated = [place for place, (size, stride) in enumerate(zip(sizes, strides, strict=True)) if size > 1 > stride]
        if repeated:
            product = product.sum([place + 1 for place in repeated], keepdim=True)
        result = vectors.new_zeros((many, self.columns))
        result.as_strided(product.shape, (self.columns, *strides), begin).copy_(product)
        return result

    def describe(self) -> Mapping[str, Any]:
        axes = np.array(self.axes, dtype=np.int64).reshape(len(self.axes), 4)
        return {"columns": self.columns, "offset": self.offset, "axes": axes, "transposed": self.transposed}

    @classmethod
    def restore(cls, description: Mapping[str, Any]) -> Strided:
        offset = description.get("offset")
        if not isinstance(offset, int) or isinstance(offset, bool) or abs(offset) >= 2**62:
            raise ValueError(f"offset is {offset!r}; expected an integer that 64 bits hold")
        steps = tuple(Steps(*row) for row in axes_table(description, 4).tolist())
        structure = cls(natural(description, "columns"), offset, steps, flag(description, "transposed"))
        for axis in steps:
            if not 0 <= axis.first < axis.last <= axis.size:
                raise ValueError(f"axes holds {list(axis)}: places run from 0 to {axis.size}")
        check_size(structure)
        ends = [sorted((axis.first * axis.stride, (axis.last - 1) * axis.stride)) for axis in steps]
        least, most = (offset + sum(end[side] for end in ends) for side in (0, 1))
        if least < 0 or most >= structure.columns:
            raise ValueError(f"its columns run from {least} to {most}; expected 0 to {structure.columns - 1}")
        return structure


def pattern_from_sources(sources: np.ndarray, columns: int) -> Pattern:
    """At most one entry in each row: in the column that `sources`, of any shape, names; none where it is negative."""
    strided = Strided.from_sources(sources, columns) if sources.size and sources.max() < columns else None
    return Pattern.of(Csr.from_sources(sources.reshape(-1), columns) if strided is None else strided)


def _is_injective(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether places along axes of positive strides lead to different columns."""
    reached = 0
    for stride, size in sorted((stride, size) for stride, size in zip(strides, sizes, strict=True) if stride):
        if stride <= reached:
            return False
        reached += (size - 1) * stride
    return True


def _merged(axes: Sequence[Steps]) -> tuple[Steps, ...]:
    """The same steps by as few axes as possible."""
    merged: list[Steps] = []
    for axis in axes:
        before = merged[-1] if merged else None
        whole = axis.first == 0 and axis.last == axis.size
        if axis.size == 1 and before is not None:
            continue
        if before is not None and before.size == 1:
            merged[-1] = axis
        elif before is not None and whole and before.stride == axis.size * axis.stride:
            size, first, last = (axis.size * count for count in before[:3])
            merged[-1] = Steps(size, first, last, axis.stride)
        else:
            merged.append(axis)
    return tuple(merged)
