"""Operators that move data in steps: slices, permutations, concatenations, padding, broadcasting.

Each row of such a pattern has at most one entry. With the row's places ``i_1, i_2, ...`` along the axes of the output,
its column is ``offset + Σ i_k · stride_k``, as an element of a strided tensor lies in memory; rows outside of a box of
places have none. A few numbers say all that index arrays as large as the tensor would.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse

from ._pattern import Pattern
from ._structure import Arrays, Csr, Structure, check_size, flag, frozen, index_dtype, natural, row_starts

__all__ = ["Steps", "Strided", "picking"]


class Steps(NamedTuple):
    """One axis of the rows.

    Attributes
    ----------
    size : int
        Places.
    first, last : int
        The places that have an entry: from `first` to ``last - 1``.
    stride : int
        By how much the column grows from one place to the next.
    """

    size: int
    first: int
    last: int
    stride: int


@dataclass(frozen=True)
class Strided(Structure):
    """At most one entry in each row, in columns that lie in steps; or the transpose.

    Attributes
    ----------
    columns : int
        Of the matrix that is not transposed.
    offset : int
        The column at the place 0 of all axes, whether that is in the box or not.
    axes : tuple of Steps
        The rows' axes, the slowest first.
    transposed : bool
        Whether this is the structure of the transpose.
    """

    columns: int
    offset: int
    axes: tuple[Steps, ...]
    transposed: bool = False

    @classmethod
    def found(cls, sources: np.ndarray, columns: int) -> Strided | None:
        """The structure with an entry in each row's column of `sources`, none where that is negative.

        Parameters
        ----------
        sources : ndarray of int
            Of any shape; its elements are the rows, in C order.
        columns : int
            Of the matrix.

        Returns
        -------
        Strided or None
            None where the columns lie in no such steps.

        Examples
        --------
        >>> Strided.found(np.arange(12).reshape(3, 4)[:, 1:3], 12).axes
        (Steps(size=3, first=0, last=3, stride=4), Steps(size=2, first=0, last=2, stride=1))
        >>> Strided.found(np.array([0, 1, 3]), 4) is None
        True
        """
        held = sources >= 0
        entries = int(np.count_nonzero(held))
        if not entries:
            return None
        corner = np.unravel_index(int(held.argmax()), sources.shape)
        lasts = []
        for axis, first in enumerate(corner):
            line = held[(*corner[:axis], slice(first, None), *corner[axis + 1 :])]
            lasts.append(int(first) + (len(line) if line.all() else int(line.argmin())))
        box = sources[tuple(slice(int(first), last) for first, last in zip(corner, lasts, strict=True))]
        if box.size != entries:
            return None
        start = int(box.flat[0])
        strides = [
            int(box[(*[0] * axis, 1, *[0] * (box.ndim - axis - 1))]) - start if size > 1 else 0
            for axis, size in enumerate(box.shape)
        ]
        expected = np.full((1,) * box.ndim, start)
        for axis, (size, stride) in enumerate(zip(box.shape, strides, strict=True)):
            expected = expected + (np.arange(size) * stride).reshape(-1, *[1] * (box.ndim - axis - 1))
        if not np.array_equal(expected, box):
            return None
        axes = [Steps(*axis) for axis in zip(sources.shape, map(int, corner), lasts, strides, strict=True)]
        return cls(columns, start - sum(axis.first * axis.stride for axis in axes), _merged(axes))

    @property
    def _rows(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    @property
    def shape(self) -> tuple[int, int]:
        return (self.columns, self._rows) if self.transposed else (self._rows, self.columns)

    @property
    def nnz(self) -> int:
        return math.prod(axis.last - axis.first for axis in self.axes)

    @property
    def T(self) -> Strided:
        return replace(self, transposed=not self.transposed)

    def sources(self) -> np.ndarray:
        """The column of each row's entry before the transpose, -1 for none; int64."""
        places, box = np.full([axis.size for axis in self.axes], -1), self._columns()
        places[tuple(slice(axis.first, axis.last) for axis in self.axes)] = box
        return places.reshape(-1)

    def _columns(self) -> np.ndarray:
        """The column of each entry, by its places within the box."""
        columns = np.full((1,) * len(self.axes), self.offset)
        for number, axis in enumerate(self.axes):
            steps = np.arange(axis.first, axis.last) * axis.stride
            columns = columns + steps.reshape(-1, *[1] * (len(self.axes) - number - 1))
        return columns

    def row_counts(self) -> np.ndarray:
        if self.transposed:
            return np.bincount(self._columns().reshape(-1), minlength=self.columns)
        counts = np.zeros([axis.size for axis in self.axes], dtype=np.int64)
        counts[tuple(slice(axis.first, axis.last) for axis in self.axes)] = 1
        return counts.reshape(-1)

    def csr(self) -> Arrays:
        dtype = index_dtype(self.nnz, *self.shape)
        starts = row_starts(replace(self, transposed=False).row_counts(), dtype)
        indices = self._columns().reshape(-1).astype(dtype)
        if not self.transposed:
            return frozen(starts), frozen(indices)
        ones = np.ones(self.nnz, dtype=np.bool_)
        transpose = scipy.sparse.csr_array((ones, indices, starts), shape=(self._rows, self.columns)).tocsc()
        return frozen(transpose.indptr.astype(dtype)), frozen(transpose.indices.astype(dtype))

    def describe(self) -> Mapping[str, Any]:
        axes = np.array(self.axes, dtype=np.int64).reshape(len(self.axes), 4)
        return {"columns": self.columns, "offset": self.offset, "axes": axes, "transposed": self.transposed}

    @classmethod
    def restore(cls, description: Mapping[str, Any]) -> Strided:
        axes, offset = description.get("axes"), _integer(description, "offset")
        if not isinstance(axes, np.ndarray) or axes.dtype != np.int64 or axes.ndim != 2 or axes.shape[1] != 4:
            raise ValueError("axes is not an int64 array with 4 columns")
        steps = tuple(Steps(*row) for row in axes.tolist())
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


def picking(sources: np.ndarray, columns: int) -> Pattern:
    """At most one entry in each row: in the column that `sources`, of any shape, names; none where it is negative."""
    strided = Strided.found(sources, columns) if sources.size and sources.max() < columns else None
    return Pattern.of(Csr.picking(sources.reshape(-1), columns) if strided is None else strided)


def _integer(description: Mapping[str, Any], name: str) -> int:
    value = description.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 2**62:
        raise ValueError(f"{name} is {value!r}; expected an integer that 64 bits hold")
    return value


def _merged(axes: Sequence[Steps]) -> tuple[Steps, ...]:
    """The same steps by as few axes as can be."""
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
