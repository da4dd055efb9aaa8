"""The methods on CUDA tensors: for each one which kernel, over which grid.

Operands are contiguous tensors ``(entries, batch)`` on one device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..patterns import Pattern
from ..runtime import INDEX, REAL, THREADS, KernelFile, blocks, c_type, frozen, index_type, instances, uploaded

if TYPE_CHECKING:
    from .methods import Product

_SLOT = ("unsigned char", "unsigned short", "unsigned int")
_PLAIN = (
    "scale_rows", "scale_columns", "merge", "merge_long", "rowwise", "rowwise_lanes", "select_right", "at_entries",
    "sparse_full", "full_sparse", "matvec", "matvec_lanes",
)  # fmt: skip
_FILE = KernelFile(
    Path(__file__).parent / "kernels" / "products.cu",
    tuple(
        instance
        for names, slots in ((_PLAIN, ()), (("slots", "slots_lanes", "select_left"), (_SLOT,)))
        for name in names
        for instance in instances(name, REAL, INDEX, *slots)
    ),
)
#: Warps of a block.
_WARPS = THREADS // 32
#: Samples from which on the threads of a warp are samples.
_LANES = 32
#: Elements of a row's sums in shared memory; a longer row takes several passes. Every device has 48 KiB of it.
_BINS, _SHARED = (256, 1024, 4096), 48 * 1024
#: Pairs per entry from which on a warp sums each entry's list.
_LONG = 32


def _index(*patterns: Pattern) -> torch.dtype:
    """The type of the indices of all these patterns."""
    return index_type(*(array for pattern in patterns for array in (pattern.indptr, pattern.indices)))


def _arrays(device: torch.device, dtype: torch.dtype, *patterns: Pattern) -> list[torch.Tensor]:
    """``indptr`` and ``indices`` of each pattern, on a device."""
    return [uploaded(array, device, dtype) for pattern in patterns for array in (pattern.indptr, pattern.indices)]


def _launch(
    kernel: str, types: Sequence[torch.dtype], grid: list[int], block: list[int], *arguments: Any, shared: int = 0
) -> None:
    """Run a kernel's instance for index and slot `types`; the last argument is the result, on whose device it runs."""
    result = arguments[-1]
    instance = f"{kernel}<{', '.join(map(c_type, (result.dtype, *types)))}>"
    _FILE.launch(instance, grid, block, *arguments, device=result.device, shared=shared)


def scale(other: Pattern, left: bool, diagonal: torch.Tensor, values: torch.Tensor, c: torch.Tensor) -> None:
    """Scale the rows of a matrix by a diagonal on its left, or its columns by one on its right."""
    dtype = _index(other)
    indptr, indices = _arrays(c.device, dtype, other)
    factors = (diagonal, diagonal.shape[1], values, values.shape[1])
    if left:
        rows = other.shape[0]
        _launch("scale_rows", [dtype], [blocks(rows, _WARPS)], [32, _WARPS], indptr, *factors, rows, c.shape[1], c)
    else:
        _launch("scale_columns", [dtype], [blocks(c.numel())], [THREADS], indices, *factors, other.nnz, c.shape[1], c)


def merge(
    starts: np.ndarray, left: np.ndarray, right: np.ndarray, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> None:
    """Sum the lists of pairs."""
    nnz, batch = c.shape
    dtype = index_type(left)
    lists = (uploaded(starts, c.device), uploaded(left, c.device, dtype), uploaded(right, c.device, dtype))
    factors = (a, a.shape[1], b, b.shape[1])
    if batch < _LANES and len(left) >= _LONG * nnz:
        grid, block = [blocks(c.numel(), _WARPS)], [32, _WARPS]
        _launch("merge_long", [dtype], grid, block, *lists, *factors, nnz, batch, c)
    else:
        _launch("merge", [dtype], [blocks(c.numel())], [THREADS], *lists, *factors, nnz, batch, c)


class RowKernels:
    """Products by rows of C, in bins of rows of about one length; without `slot`, places in a row are searched."""

    def __init__(self, product: Product, slot: np.ndarray | None) -> None:
        self.product, self.slot = product, slot

    @functools.cached_property
    def _bins(self) -> list[tuple[np.ndarray, int]]:
        """The rows of each bin, and the length of its longest row."""
        counts = self.product.c.structure.row_counts()
        bins, shortest = [], 0
        for longest in (*_BINS, np.iinfo(np.int64).max):
            rows = np.flatnonzero((counts > shortest) & (counts <= longest)).astype(np.int32)
            if len(rows):
                bins.append((frozen(rows), int(counts[rows].max())))
            shortest = longest
        return bins

    def multiply(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        """Write all of `c`."""
        product, device, batch = self.product, c.device, c.shape[1]
        dtype = _index(product.a, product.b, product.c)
        *arrays, place = _arrays(device, dtype, product.a, product.b, product.c)
        name, types = "rowwise", [dtype]
        if self.slot is not None:
            place = uploaded(self.slot, device, None)
            name, types = "slots", [dtype, place.dtype]
        work = uploaded(product.work, device)
        arguments = (work, *arrays, place, a, a.shape[1], b, b.shape[1], batch)
        if batch >= _LANES:
            rows = product.c.shape[0]
            grid = [blocks(rows, _WARPS) * blocks(batch, _LANES)]
            _launch(f"{name}_lanes", types, grid, [_LANES, _WARPS], rows, *arguments, c)
            return
        # All bins are uploaded before a kernel runs: where they do not fit, nothing is written.
        bins = [(uploaded(indices, device, torch.int32), longest) for indices, longest in self._bins]
        for bin_rows, longest in bins:
            capacity = min(longest, _SHARED // c.element_size())
            nbytes = capacity * c.element_size()
            warps = max(1, min(_WARPS, _SHARED // nbytes))
            grid = [blocks(len(bin_rows) * batch, warps)]
            shared = warps * nbytes
            _launch(name, types, grid, [32, warps], bin_rows, len(bin_rows), *arguments, capacity, c, shared=shared)


def select_left(product: Product, slot: np.ndarray, winner: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    """The left factor selects rows of the right one."""
    device, dtype = c.device, _index(product.a, product.b, product.c)
    slots = uploaded(slot, device, None)
    arrays = (
        uploaded(product.work, device),
        *_arrays(device, dtype, product.a),
        uploaded(product.b.indptr, device, dtype),
        uploaded(product.c.indptr, device, dtype),
        slots,
    )
    grid = [product.c.shape[0]]
    _launch("select_left", [dtype, slots.dtype], grid, [THREADS], *arrays, winner, b, b.shape[1], c.shape[1], c)


def select_right(product: Product, a: torch.Tensor, winner: torch.Tensor, c: torch.Tensor) -> None:
    """The right factor selects columns of the left one."""
    dtype = _index(product.a, product.b, product.c)
    arrays = _arrays(c.device, dtype, product.a, product.c)
    b = _arrays(c.device, dtype, product.b)
    factors = (a, a.shape[1], winner, *b, product.b.shape[0])
    _launch("select_right", [dtype], [product.c.shape[0]], [THREADS], *arrays, *factors, c.shape[1], c)


def at_entries(a: Pattern, b: Pattern, c: Pattern, g: torch.Tensor, b_values: torch.Tensor, out: torch.Tensor) -> None:
    """``G Bᵀ`` at A's entries, with G on C's pattern."""
    dtype = _index(a, b, c)
    arguments = (*_arrays(out.device, dtype, a, b, c), g, g.shape[1], b_values, b_values.shape[1], out.shape[1], out)
    _launch("at_entries", [dtype], [a.shape[0]], [THREADS], *arguments)


def sparse_full(
    a_pattern: Pattern, columns: int, c_indptr: np.ndarray, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> None:
    """A sparse matrix times a full one."""
    dtype, rows, batch = _index(a_pattern), a_pattern.shape[0], c.shape[1]
    arrays = (*_arrays(c.device, dtype, a_pattern), columns, uploaded(c_indptr, c.device))
    factors = (a, a.shape[1], b, b.shape[1], batch)
    _launch("sparse_full", [dtype], [blocks(rows * columns * batch)], [THREADS], rows, *arrays, *factors, c)


def full_sparse(
    inner: int, columns: tuple[np.ndarray, np.ndarray, np.ndarray], a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> None:
    """A full matrix times a sparse one; `columns` has the starts, rows and places of the entries of its columns."""
    dtype, count = index_type(*columns), len(columns[0]) - 1
    arrays = [uploaded(array, c.device, dtype) for array in columns]
    factors = (count, a, a.shape[1], b, b.shape[1], c.shape[1])
    rows = len(c) // max(1, count)
    _launch("full_sparse", [dtype], [blocks(c.numel())], [THREADS], rows, inner, *arrays, *factors, c)


def matvec(pattern: Pattern, values: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
    """A sparse matrix times vectors."""
    dtype, (rows, batch) = _index(pattern), y.shape
    arguments = (*_arrays(y.device, dtype, pattern), values, values.shape[1], x, x.shape[1], rows, batch, y)
    if batch >= _LANES:
        _launch("matvec_lanes", [dtype], [blocks(y.numel())], [THREADS], *arguments)
    else:
        _launch("matvec", [dtype], [blocks(y.numel(), _WARPS)], [32, _WARPS], *arguments)
