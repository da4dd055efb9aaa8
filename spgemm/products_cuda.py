"""The methods on CUDA tensors: for each one which kernel, over which grid.

Operands are contiguous tensors ``(entries, batch)`` on one device. Products are launches, made once for a device, an
element type and the batches of both factors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..patterns import Pattern
from ..runtime import (
    INDEX,
    REAL,
    THREADS,
    KernelFile,
    active_backend,
    blocks,
    c_type,
    index_type,
    instances,
    on_device,
    uploaded,
)

if TYPE_CHECKING:
    from .merge import Lists
    from .methods import BoundProduct, Product
    from .plan import ProductPlan

_PLAIN = (
    "scale_rows", "scale_columns", "rowwise", "at_entries", "sparse_full", "full_sparse", "matvec", "matvec_lanes",
)  # fmt: skip
#: The integers of lists of pairs, and of where they start.
_LISTS = (("unsigned char", "unsigned short"), ("int", "unsigned int"), ("long long", "unsigned int"))
_FILE = KernelFile(
    Path(__file__).parent / "kernels" / "products.cu",
    (
        *(instance for name in _PLAIN for instance in instances(name, REAL, INDEX)),
        *(
            f"{kernel}<{', '.join((real, *lists, *factors))}>"
            for real in REAL
            for lists in _LISTS
            for kernel, factors in (
                ("merge_long", ()),
                *(("merge", factors) for factors in ((real, real), ("int", real), (real, "int"))),
            )
        ),
    ),
)
#: Warps of a block.
_WARPS = THREADS // 32
#: Samples from which on the threads of a warp are samples.
_LANES = 32
#: Samples of a tile of entries that a block takes at once, and sums of each of its threads.
_WIDTH, _SUMS = 16, 4
#: Launches that a plan or a pattern keeps, for devices, dtypes and batches.
LAUNCHES = 16
#: Pairs per entry from which on a warp sums each entry's list.
_LONG = 32


def _index(*patterns: Pattern) -> torch.dtype:
    """The type of the indices of all these patterns."""
    return index_type(*(array for pattern in patterns for array in (pattern.indptr, pattern.indices)))


def _arrays(device: torch.device, dtype: torch.dtype, *patterns: Pattern) -> list[torch.Tensor]:
    """``indptr`` and ``indices`` of each pattern, on a device."""
    return [uploaded(array, device, dtype) for pattern in patterns for array in (pattern.indptr, pattern.indices)]


def _record(
    kernel: str,
    types: Sequence[torch.dtype],
    grid: int,
    block: list[int],
    device: torch.device,
    batches: tuple[int, int],
    **constants: Any,
) -> BoundProduct:
    """The launch of an instance for element types of values and arrays, on values with these batches.

    ValueError is raised where the device runs no kernels.
    """
    if not on_device(torch.empty(0, device=device)):
        raise ValueError(f"device is {device}; expected a CUDA device: on a CPU, call multiply")
    instance = f"{kernel}<{', '.join(map(c_type, types))}>"
    constants |= {"a_batch": batches[0], "b_batch": batches[1], "batch": max(batches)}
    return _FILE.record(instance, [grid], block, device=device, **constants)


def _across(batch: int) -> int:
    """Samples side by side in a warp: a power of two."""
    return min(32, 1 << (batch - 1).bit_length())


def scale_launch(
    other: Pattern, left: bool, device: torch.device, real: torch.dtype, batches: tuple[int, int]
) -> BoundProduct:
    """Scale the rows of a matrix by a diagonal on its left, or its columns by one on its right."""
    types = [real, _index(other)]
    indptr, indices = _arrays(device, types[1], other)
    if left:
        rows, block = other.shape[0], [32, _WARPS]
        return _record("scale_rows", types, blocks(rows, _WARPS), block, device, batches, indptr=indptr, rows=rows)
    grid = blocks(other.nnz * max(batches))
    return _record("scale_columns", types, grid, [THREADS], device, batches, indices=indices, nnz=other.nnz)


def merge_launch(
    lists: Lists,
    device: torch.device,
    real: torch.dtype,
    batches: tuple[int, int],
    selecting: tuple[np.ndarray, np.ndarray] | None = None,
    winners: str | None = None,
) -> BoundProduct:
    """Sum the lists of pairs.

    Where the values of a factor are `winners`, ``a`` or ``b``, `selecting` has the columns of A's entries, and the rows
    of these or the columns of C's.
    """
    left, right, starts = (uploaded(array, device, None) for array in (lists.left, lists.right, lists.starts))
    types = [real, left.dtype, starts.dtype]
    batch = max(batches)
    constants: dict[str, Any] = {
        "tiles": uploaded(lists.tiles, device), "starts": starts, "left": left, "right": right,
        "b_starts": uploaded(lists.b_starts, device, torch.int32),
    }  # fmt: skip
    count, entries = len(lists.tiles) - 1, len(lists.starts)
    if batch < _LANES and len(lists.left) >= _LONG * entries and winners is None:
        each = blocks(int(np.diff(lists.tiles[:, 0]).max(initial=0)), _WARPS)
        constants |= {"blocks": each, "across": _across(batch)}
        return _record("merge_long", types, count * each, [32, _WARPS], device, batches, **constants)
    width = min(batch, _WIDTH)
    threads = min(THREADS, 32 * blocks(entries * width, 32 * _SUMS * max(1, count)))
    inner, others = (uploaded(array, device, torch.int32) for array in selecting or 2 * (lists.b_starts,))
    types += [torch.int32 if factor == winners else real for factor in "ab"]
    constants |= {"inner": inner, "others": others, "count": count, "width": width}
    return _record("merge", types, count * blocks(batch, width), [threads], device, batches, **constants)


def rowwise_launch(product: Product, device: torch.device, real: torch.dtype, batches: tuple[int, int]) -> BoundProduct:
    """Sum rows of C at places that are searched."""
    types, names = [real, _index(product.a, product.b, product.c)], ("a", "b", "c")
    arrays = _arrays(device, types[1], product.a, product.b, product.c)
    rows, across = product.c.shape[0], _across(max(batches))
    grid = blocks(rows, _WARPS) * blocks(max(batches), across)
    parameters = (f"{name}_{array}" for name in names for array in ("indptr", "indices"))
    constants = dict(zip(parameters, arrays, strict=True))
    return _record("rowwise", types, grid, [32, _WARPS], device, batches, rows=rows, across=across, **constants)


def sparse_full_launch(
    a: Pattern, columns: int, c_indptr: np.ndarray, device: torch.device, real: torch.dtype, batches: tuple[int, int]
) -> BoundProduct:
    """A sparse matrix times a full one."""
    types, rows = [real, _index(a)], a.shape[0]
    indptr, indices = _arrays(device, types[1], a)
    constants = {"rows": rows, "indptr": indptr, "indices": indices, "columns": columns}
    grid = blocks(rows * columns * max(batches))
    starts = uploaded(c_indptr, device)
    return _record("sparse_full", types, grid, [THREADS], device, batches, c_indptr=starts, **constants)


def full_sparse_launch(
    shape: tuple[int, int],
    columns: tuple[np.ndarray, np.ndarray, np.ndarray],
    device: torch.device,
    real: torch.dtype,
    batches: tuple[int, int],
) -> BoundProduct:
    """A full matrix times a sparse one; `columns` has the starts, rows and places of the entries of its columns."""
    types, count = [real, index_type(*columns)], len(columns[0]) - 1
    starts, row_of, place = (uploaded(array, device, types[1]) for array in columns)
    constants = {"starts": starts, "row_of": row_of, "place": place, "columns": count}
    grid, (rows, inner) = blocks(shape[0] * count * max(batches)), shape
    return _record("full_sparse", types, grid, [THREADS], device, batches, rows=rows, inner=inner, **constants)


def at_entries(a: Pattern, b: Pattern, c: Pattern, g: torch.Tensor, b_values: torch.Tensor, out: torch.Tensor) -> None:
    """``G Bᵀ`` at A's entries, with G on C's pattern."""
    kept_launch(a, _at_entries_launch, out.device, out.dtype, (g.shape[1], b_values.shape[1]), b, c)(g, b_values, out)


def _at_entries_launch(
    a: Pattern, device: torch.device, real: torch.dtype, batches: tuple[int, int], b: Pattern, c: Pattern
) -> BoundProduct:
    types, names = [real, _index(a, b, c)], ("a", "b", "g")
    parameters = (f"{name}_{array}" for name in names for array in ("indptr", "indices"))
    constants = dict(zip(parameters, _arrays(device, types[1], a, b, c), strict=True))
    return _record("at_entries", types, a.shape[0], [THREADS], device, batches, **constants)


def matvec(pattern: Pattern, values: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
    """A sparse matrix times vectors."""
    if y.numel():
        kept_launch(pattern, _matvec_launch, y.device, y.dtype, (values.shape[1], x.shape[1]))(values, x, y)


def _matvec_launch(pattern: Pattern, device: torch.device, real: torch.dtype, batches: tuple[int, int]) -> BoundProduct:
    types, rows = [real, _index(pattern)], pattern.shape[0]
    indptr, indices = _arrays(device, types[1], pattern)
    count, constants = rows * max(batches), {"indptr": indptr, "indices": indices, "rows": rows}
    if max(batches) >= _LANES:
        return _record("matvec_lanes", types, blocks(count), [THREADS], device, batches, **constants)
    return _record("matvec", types, blocks(count, _WARPS), [32, _WARPS], device, batches, **constants)


def kept_launch(owner: ProductPlan | Pattern, make: Callable[..., BoundProduct], *key: Any) -> BoundProduct:
    """The launch that `make` makes of a plan or a pattern and of a key, which the first keeps."""
    launches, key_of_all = owner._launches, (active_backend(), make, *key)
    launch = launches.get(key_of_all)
    if launch is None:
        if len(launches) >= LAUNCHES:
            launches.clear()
        launch = launches[key_of_all] = make(owner, *key)
    return launch
