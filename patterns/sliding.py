"""Windows that slide along the axes of an image: which input position lies under each output position and tap."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..runtime import index_dtype
from .structure import axes_table

#: The most positions times taps along one axis that a file may describe: no memory has room for more.
LARGEST_TABLE = 2**28


@dataclass(frozen=True)
class Sliding:
    """One axis along which a kernel slides.

    Attributes
    ----------
    size : int
        Input positions.
    kernel, stride, dilation : int
        As in ``torch.nn.Conv2d``.
    before, after : int
        Padding on either side; `after` is negative where no window begins at the end.
    ceil_mode : bool
        Whether the number of windows is rounded up, as pooling may do.
    """

    size: int
    kernel: int
    stride: int = 1
    before: int = 0
    after: int = 0
    dilation: int = 1
    ceil_mode: bool = False

    @functools.cached_property
    def windows(self) -> int:
        """Output positions."""
        room = self.size + self.before + self.after - self.dilation * (self.kernel - 1) - 1
        if not self.ceil_mode:
            return max(0, room // self.stride + 1)
        windows = -(-room // self.stride) + 1
        # PyTorch drops a last window that would begin in the padding on the right.
        return max(0, windows - ((windows - 1) * self.stride >= self.size + self.before))

    @functools.cached_property
    def sources(self) -> np.ndarray:
        """Input position under each output position and tap, -1 outside; shape ``(windows, kernel)``."""
        first = np.arange(self.windows)[:, None] * self.stride - self.before
        positions = first + np.arange(self.kernel) * self.dilation
        return np.where((positions >= 0) & (positions < self.size), positions, -1)

    @functools.cached_property
    def targets(self) -> np.ndarray:
        """Output position that meets each input position under each tap, -1 for none; shape ``(size, kernel)``."""
        reach = np.arange(self.size)[:, None] + self.before - np.arange(self.kernel) * self.dilation
        inside = (reach >= 0) & (reach % self.stride == 0) & (reach // self.stride < self.windows)
        return np.where(inside, reach // self.stride, -1)


def joined(tables: list[np.ndarray], sizes: list[int]) -> np.ndarray:
    """Tables of single axes as one table over flattened positions and flattened taps, -1 where any axis has -1.

    Examples
    --------
    >>> joined([np.array([[0, 1]]), np.array([[-1, 2]])], [2, 3])
    array([[-1,  2, -1,  5]], dtype=int32)
    """
    table = np.zeros((1, 1), dtype=np.int64)
    for axis, size in zip(tables, sizes, strict=True):
        outer, inner = table[:, None, :, None], axis[None, :, None, :]
        table = np.where((outer < 0) | (inner < 0), -1, outer * size + inner)
        table = table.reshape(outer.shape[0] * axis.shape[0], outer.shape[2] * axis.shape[1])
    return table.astype(index_dtype(0, 0, math.prod(sizes)))


def described_axes(axes: tuple[Sliding, ...]) -> np.ndarray:
    """A row of numbers for each axis, in the order of `Sliding`."""
    rows = [(a.size, a.kernel, a.stride, a.before, a.after, a.dilation, a.ceil_mode) for a in axes]
    return np.array(rows, dtype=np.int64).reshape(len(rows), 7)


def restored_axes(description: Mapping[str, Any]) -> tuple[Sliding, ...]:
    """The axes that `described_axes` described, checked."""
    axes = axes_table(description, 7)
    size, taps, stride, before, after, dilation, ceil_mode = axes.T
    fine = (size >= 0) & (taps >= 1) & (stride >= 1) & (before >= 0) & (after > -(2**31)) & (dilation >= 1)
    fine &= (axes < 2**31).all(axis=1) & (ceil_mode >= 0) & (ceil_mode <= 1)
    if not fine.all():
        raise ValueError(f"axes holds {axes[np.argmin(fine)].tolist()}, which describes no sliding window")
    restored = tuple(Sliding(*row) for row in zip(*axes[:, :6].T.tolist(), (ceil_mode != 0).tolist(), strict=True))
    tables = [max(axis.size, axis.windows) * axis.kernel for axis in restored]
    if max(tables, default=0) > LARGEST_TABLE:
        raise ValueError(f"axes holds {axes[np.argmax(tables)].tolist()}, which is too large for any tensor")
    return restored


def pairs(values: Any, count: int) -> tuple[int, ...]:
    """A number for each of `count` axes, from one number for all or a sequence of one or of `count` numbers."""
    values = tuple(values) if isinstance(values, (list, tuple)) else (values,)
    return tuple(itertools.islice(itertools.cycle(values), count))
