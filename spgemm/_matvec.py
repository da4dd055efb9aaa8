"""A sparse matrix times dense vectors: one for each sample (SpMV), or several (SpMM)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..patterns import Diagonal, Full, Pattern
from ..patterns._runtime import kernel, run_rows, uncompiled
from . import _cuda
from ._gradients import VectorForm, differentiable, graph_operands, wants_gradient
from ._lanes import unsigned
from ._operands import result, same_batch, view

__all__ = ["matvec"]


@kernel
def _matvec_one(first, last, indptr, indices, values, x, y):
    for row in range(first, last):
        places = indices[indptr[row] : indptr[row + 1]]
        entries = values[indptr[row] : indptr[row + 1]]
        # Four sums, so that an addition need not wait for the one before it.
        one, two, three, four = y.dtype.type(0), y.dtype.type(0), y.dtype.type(0), y.dtype.type(0)
        for group in range(len(places) // 4):
            at = 4 * group
            one += entries[at] * x[places[at]]
            two += entries[at + 1] * x[places[at + 1]]
            three += entries[at + 2] * x[places[at + 2]]
            four += entries[at + 3] * x[places[at + 3]]
        for at in range(len(places) // 4 * 4, len(places)):
            one += entries[at] * x[places[at]]
        y[row] = (one + two) + (three + four)


@kernel
def _matvec(first, last, indptr, indices, values, values_batch, x, x_batch, y, batch):
    for row in range(first, last):
        at = np.int64(row) * batch
        y[at : at + batch] = 0
        for entry in range(indptr[row], indptr[row + 1]):
            at_values = np.int64(entry) * values_batch
            at_x = np.int64(indices[entry]) * x_batch
            for sample in range(batch):
                value = values[at_values + (sample if values_batch > 1 else 0)]
                y[at + sample] += value * x[at_x + (sample if x_batch > 1 else 0)]


@kernel
def _matvec_shared(first, last, indptr, indices, values, x, y, batch):
    for row in range(first, last):
        places = indices[indptr[row] : indptr[row + 1]]
        entries = values[indptr[row] : indptr[row + 1]]
        at = np.int64(row) * batch
        zero = y.dtype.type(0)
        lane = 0
        # Eight sums in registers, so that indices and values are read once for all of them.
        while lane + 8 <= batch:
            a, b, c, d, e, f, g, h = zero, zero, zero, zero, zero, zero, zero, zero
            for entry in range(len(places)):
                value, start = entries[entry], np.int64(places[entry]) * batch + lane
                own = x[start : start + 8]
                a += value * own[0]
                b += value * own[1]
                c += value * own[2]
                d += value * own[3]
                e += value * own[4]
                f += value * own[5]
                g += value * own[6]
                h += value * own[7]
            out = y[at + lane : at + lane + 8]
            out[0], out[1], out[2], out[3], out[4], out[5], out[6], out[7] = a, b, c, d, e, f, g, h
            lane += 8
        for rest in range(lane, batch):
            total = zero
            for entry in range(len(places)):
                total += entries[entry] * x[np.int64(places[entry]) * batch + rest]
            y[at + rest] = total


@uncompiled
def matvec(pattern: Pattern, values: Any, x: Any, *, out: Any = None) -> Any:
    """``y = A x`` for each sample: `A` given by pattern and values, `x` dense.

    Parameters
    ----------
    pattern : Pattern
        Of `A`, shape ``(m, n)``.
    values : array or Tensor, (nnz,) or (nnz, batch)
        float32 or float64; a batch of 1 is shared by all samples.
    x : array or Tensor, (n,) or (n, batch)
        One vector for each sample; a batch of 1 is shared. With one sample of values, a "sample" here may be any column
        of a dense matrix: this is then SpMM.
    out : array or Tensor, optional
        Memory for the result.

    Returns
    -------
    array or Tensor, (m, batch), or (m,) where both operands have one dimension

    Raises
    ------
    TypeError, ValueError
        Where an operand's kind, dtype, shape or device does not fit.

    Notes
    -----
    Part of autograd where a tensor requires grad: gradients of values and vectors, of any order.

    Examples
    --------
    >>> pattern = Pattern((2, 3), [0, 2, 3], [0, 2, 1])
    >>> matvec(pattern, np.array([1.0, 2.0, 3.0]), np.array([1.0, 10.0, 100.0]))
    array([201.,  30.])
    """
    if wants_gradient(values, x):
        own = graph_operands(out, values=values, x=x)
        product = differentiable(VectorForm(pattern), "y", dict(zip(("values", "x"), own, strict=True)))
        return product[:, 0] if values.ndim == x.ndim == 1 else product
    m, n = pattern.shape
    left, right = view("values", values, pattern.nnz), view("x", x, n, "columns")
    batch = same_batch("values", left, "x", right)
    returned, y = result("vectors of a product", out, (values, x), m, batch, left)
    if isinstance(y, torch.Tensor):
        _on_device(pattern, left, right, y)
    elif isinstance(pattern.structure, Diagonal):
        np.multiply(left, right, out=y)
    elif isinstance(pattern.structure, Full):
        _full(*map(torch.from_numpy, (left.reshape(m, n, left.shape[1]), right, y)))
    elif batch == 1:
        indices = unsigned(pattern.indices)
        run_rows(
            _matvec_one, pattern.indptr, pattern.indptr, indices, left.reshape(-1), right.reshape(-1), y.reshape(-1)
        )
    elif left.shape[1] == 1:
        shared = (unsigned(pattern.indices), left.reshape(-1), right.reshape(-1), y.reshape(-1), batch)
        run_rows(_matvec_shared, pattern.indptr, pattern.indptr, *shared, lanes=batch)
    else:
        flat = (left.reshape(-1), left.shape[1], right.reshape(-1), right.shape[1], y.reshape(-1), batch)
        run_rows(_matvec, pattern.indptr, pattern.indptr, pattern.indices, *flat, lanes=batch)
    return returned


def _on_device(pattern: Pattern, values: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
    if isinstance(pattern.structure, Diagonal):
        torch.mul(values, x, out=y)
    elif isinstance(pattern.structure, Full):
        _full(values.reshape(*pattern.shape, values.shape[1]), x, y)
    else:
        _cuda.matvec(pattern, values, x, y)


def _full(matrices: torch.Tensor, vectors: torch.Tensor, out: torch.Tensor) -> None:
    if matrices.shape[2] == 1:
        torch.matmul(matrices[:, :, 0], vectors, out=out)
    else:
        out.copy_(torch.einsum("mnb,nb->mb", matrices, vectors.expand(-1, matrices.shape[2])))
