"""The methods on CUDA tensors: for each one which kernel, over which grid.

Operands are tensors ``(entries, batch)``, contiguous, on one device, as the methods' arrays are.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..patterns import Pattern
from ..patterns._cuda import INDEX, REAL, THREADS, KernelFile, blocks, c_type, index_type, instances, uploaded
from ..patterns._structure import frozen

if TYPE_CHECKING:
    from ._methods import Product

__all__ = [
    "Rows",
    "at_entries",
    "full_sparse",
    "matvec",
    "merge",
    "scale",
    "select_left",
    "select_right",
    "sparse_full",
]

_SLOT = ("unsigned char", "unsigned short", "unsigned int")
_FILE = KernelFile(
    Path(__file__).parent / "kernels" / "products.cu",
    tuple(
        instance
        for template, *more in (
            ("scale_rows",),
            ("scale_columns",),
            ("merge",),
            ("merge_long",),
            ("slots", _SLOT),
            ("slots_lanes", _SLOT),
            ("rowwise",),
            ("rowwise_lanes",),
            ("select_left", _SLOT),
            ("select_right",),
            ("at_entries",),
            ("sparse_full",),
            ("full_sparse",),
            ("matvec",),
            ("matvec_lanes",),
        )
        for instance in instances(template, REAL, INDEX, *more)
    ),
)
#: From so many samples on, the threads of a warp are samples.
_LANES = 32
#: Elements of a row's sums in shared memory; a longer row is gone through in parts. 48 KiB are there on every device.
_BINS, _SHARED = (256, 1024, 4096), 48 * 1024
#: From so many pairs an entry on, a warp takes each.
_LONG = 32


def _index(*patterns: Pattern) -> torch.dtype:
    """The type of the patterns' indices, all of them."""
    return index_type(*(array for pattern in patterns for array in (pattern.indptr, pattern.indices)))


def _arrays(pattern: Pattern, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return uploaded(pattern.indptr, device, dtype), uploaded(pattern.indices, device, dtype)


def scale(other: Pattern, left: bool, diagonal: torch.Tensor, values: torch.Tensor, c: torch.Tensor) -> None:
    """Scale the rows of a matrix (the diagonal is on its left), or its columns."""
    batch, dtype, device = c.shape[1], _index(other), c.device
    types, factors = f"<{c_type(c.dtype)}, {c_type(dtype)}>", (diagonal, diagonal.shape[1], values, values.shape[1])
    indptr, indices = _arrays(other, device, dtype)
    if left:
        rows = other.shape[0]
        block = [32, THREADS // 32]
        _FILE.launch(
            f"scale_rows{types}", [blocks(rows, block[1])], block, indptr, *factors, rows, batch, c, device=device
        )
    else:
        grid = [blocks(c.numel())]
        _FILE.launch(f"scale_columns{types}", grid, [THREADS], indices, *factors, other.nnz, batch, c, device=device)


def merge(
    starts: np.ndarray, left: np.ndarray, right: np.ndarray, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> None:
    """Sum the lists of pairs."""
    nnz, batch = c.shape
    dtype = index_type(left)
    lists = (uploaded(starts, c.device), uploaded(left, c.device, dtype), uploaded(right, c.device, dtype))
    types = f"<{c_type(c.dtype)}, {c_type(dtype)}>"
    factors = (a, a.shape[1], b, b.shape[1], nnz, batch, c)
    if batch < _LANES and len(left) >= _LONG * nnz:
        block = [32, THREADS // 32]
        _FILE.launch(f"merge_long{types}", [blocks(c.numel(), block[1])], block, *lists, *factors, device=c.device)
    else:
        _FILE.launch(f"merge{types}", [blocks(c.numel())], [THREADS], *lists, *factors, device=c.device)


class Rows:
    """Products by rows of C, in bins of rows of about one length.

    Parameters
    ----------
    product : Product
        The patterns.
    slot : ndarray, optional
        For each multiply-add its place in C's row; searched where left out.
    """

    def __init__(self, product: Product, slot: np.ndarray | None) -> None:
        self.product, self.slot = product, slot

    @functools.cached_property
    def _bins(self) -> list[tuple[np.ndarray, int]]:
        """The rows of each bin, and how many sums they need at most."""
        counts = self.product.c.structure.row_counts()
        found, before = [], 0
        for size in (*_BINS, np.iinfo(np.int64).max):
            rows = np.flatnonzero((counts > before) & (counts <= size)).astype(np.int32)
            if len(rows):
                found.append((frozen(rows), int(counts[rows].max())))
            before = size
        return found

    def multiply(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        """Write all of `c`."""
        product, device, batch = self.product, c.device, c.shape[1]
        dtype = _index(product.a, product.b, product.c)
        patterns = (
            *_arrays(product.a, device, dtype),
            *_arrays(product.b, device, dtype),
            *_arrays(product.c, device, dtype),
        )
        place, types = patterns[5], f"{c_type(c.dtype)}, {c_type(dtype)}"
        name = "rowwise"
        if self.slot is not None:
            place, name = uploaded(self.slot, device, None), "slots"
            types = f"{types}, {c_type(place.dtype)}"
        factors = (a, a.shape[1], b, b.shape[1], batch)
        work = uploaded(product.work, device)
        if batch >= _LANES:
            rows, block = product.c.shape[0], [_LANES, THREADS // _LANES]
            grid = [blocks(rows, block[1]) * blocks(batch, _LANES)]
            arrays = (rows, work, *patterns[:5], place, *factors, c)
            _FILE.launch(f"{name}_lanes<{types}>", grid, block, *arrays, device=device)
            return
        # All of them before a kernel runs: where they do not fit, nothing is written.
        bins = [(uploaded(chosen, device, torch.int32), longest) for chosen, longest in self._bins]
        for chosen, longest in bins:
            capacity = min(longest, _SHARED // c.element_size())
            warps = max(1, min(THREADS // 32, _SHARED // (capacity * c.element_size())))
            _FILE.launch(
                f"{name}<{types}>",
                [blocks(len(chosen) * batch, warps)],
                [32, warps],
                chosen,
                len(chosen),
                work,
                *patterns[:5],
                place,
                *factors,
                capacity,
                c,
                shared=warps * capacity * c.element_size(),
                device=device,
            )


def select_left(product: Product, slot: np.ndarray, winner: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    """The left factor selects rows of the right one."""
    device, dtype = c.device, _index(product.a, product.b, product.c)
    slots = uploaded(slot, device, None)
    _FILE.launch(
        f"select_left<{c_type(c.dtype)}, {c_type(dtype)}, {c_type(slots.dtype)}>",
        [product.c.shape[0]],
        [THREADS],
        uploaded(product.work, device),
        *_arrays(product.a, device, dtype),
        uploaded(product.b.indptr, device, dtype),
        uploaded(product.c.indptr, device, dtype),
        slots,
        winner,
        b,
        b.shape[1],
        c.shape[1],
        c,
        device=device,
    )


def select_right(product: Product, a: torch.Tensor, winner: torch.Tensor, c: torch.Tensor) -> None:
    """The right factor selects columns of the left one."""
    device, dtype = c.device, _index(product.a, product.b, product.c)
    _FILE.launch(
        f"select_right<{c_type(c.dtype)}, {c_type(dtype)}>",
        [product.c.shape[0]],
        [THREADS],
        *_arrays(product.a, device, dtype),
        *_arrays(product.c, device, dtype),
        a,
        a.shape[1],
        winner,
        *_arrays(product.b, device, dtype),
        product.b.shape[0],
        c.shape[1],
        c,
        device=device,
    )


def at_entries(
    a: Pattern, b: Pattern, c: Pattern, g_values: torch.Tensor, b_values: torch.Tensor, out: torch.Tensor
) -> None:
    """``G Bᵀ`` at A's entries, with G on C's pattern."""
    device, dtype = out.device, _index(a, b, c)
    patterns = (array for pattern in (a, b, c) for array in _arrays(pattern, device, dtype))
    factors = (g_values, g_values.shape[1], b_values, b_values.shape[1], out.shape[1], out)
    types = f"<{c_type(out.dtype)}, {c_type(dtype)}>"
    _FILE.launch(f"at_entries{types}", [a.shape[0]], [THREADS], *patterns, *factors, device=device)


def sparse_full(
    a_pattern: Pattern, columns: int, c_indptr: np.ndarray, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> None:
    """A sparse matrix times a full one."""
    device, dtype, batch, rows = c.device, _index(a_pattern), c.shape[1], a_pattern.shape[0]
    _FILE.launch(
        f"sparse_full<{c_type(c.dtype)}, {c_type(dtype)}>",
        [blocks(rows * columns * batch)],
        [THREADS],
        rows,
        *_arrays(a_pattern, device, dtype),
        columns,
        uploaded(c_indptr, device),
        a,
        a.shape[1],
        b,
        b.shape[1],
        batch,
        c,
        device=device,
    )


def full_sparse(
    inner: int, columns: tuple[np.ndarray, np.ndarray, np.ndarray], a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> None:
    """A full matrix times a sparse one, which is given by its columns: starts, rows and places of their entries."""
    device, batch = c.device, c.shape[1]
    dtype = index_type(*columns)
    count = len(columns[0]) - 1
    _FILE.launch(
        f"full_sparse<{c_type(c.dtype)}, {c_type(dtype)}>",
        [blocks(c.numel())],
        [THREADS],
        len(c) // max(1, count),
        inner,
        *(uploaded(array, device, dtype) for array in columns),
        count,
        a,
        a.shape[1],
        b,
        b.shape[1],
        batch,
        c,
        device=device,
    )


def matvec(pattern: Pattern, values: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
    """A sparse matrix times vectors."""
    device, dtype = y.device, _index(pattern)
    rows, batch = y.shape
    arguments = (*_arrays(pattern, device, dtype), values, values.shape[1], x, x.shape[1], rows, batch, y)
    types = f"<{c_type(y.dtype)}, {c_type(dtype)}>"
    if batch >= _LANES:
        _FILE.launch(f"matvec_lanes{types}", [blocks(y.numel())], [THREADS], *arguments, device=device)
    else:
        block = [32, THREADS // 32]
        _FILE.launch(f"matvec{types}", [blocks(y.numel(), block[1])], block, *arguments, device=device)
