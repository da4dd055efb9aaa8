"""A sparse matrix times dense vectors: one vector for each sample (SpMV), or several (SpMM)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..patterns import Diagonal, Full, Pattern, gathered
from ..runtime import kernel, run_rows, uncompiled, unsigned
from . import products_cuda
from .gradients import Form, differentiable_product, wants_gradient
from .lanes import write_row_times_vectors
from .operands import flat, result, same_batch, view


@kernel
def _matvec_one(first, last, indptr, indices, values, x, y):
    for row in range(first, last):
        places = indices[indptr[row] : indptr[row + 1]]
        entries = values[indptr[row] : indptr[row + 1]]
        # In the order of `write_row_times_vectors`, which takes longer for a sample alone.
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
        begin, end = indptr[row], indptr[row + 1]
        write_row_times_vectors(y, row, values, indices, begin, end, x, batch, values_batch, x_batch)


@uncompiled
def matvec(pattern: Pattern, values: Any, x: Any, *, out: Any = None) -> Any:
    """``y = A x`` for each sample, with a sparse matrix `A` and dense vectors `x`.

    Parameters
    ----------
    pattern : Pattern
        The pattern of `A`, shape ``(m, n)``.
    values : array or Tensor, (nnz,) or (nnz, batch)
        The values of `A`, float32 or float64; a batch of 1 is shared by all samples.
    x : array or Tensor, (n,) or (n, batch)
        One vector for each sample; a batch of 1 is shared. Where the batch of the values is 1, the "samples" may be the
        columns of a dense matrix: this is then SpMM.
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
    Where a tensor requires grad, the product is part of autograd, with gradients of any order of values and vectors.

    A sample's product has the same bits alone and in any batch, on any number of threads. Of a full matrix, the order
    of summation is BLAS's.

    Examples
    --------
    >>> pattern = Pattern((2, 3), [0, 2, 3], [0, 2, 1])
    >>> matvec(pattern, np.array([1.0, 2.0, 3.0]), np.array([1.0, 10.0, 100.0]))
    array([201.,  30.])
    """
    if wants_gradient(values, x):
        return differentiable_product(VectorForm(pattern), out, values=values, x=x)
    m, n = pattern.shape
    left, right = view("values", values, pattern.nnz), view("x", x, n, "columns")
    batch = same_batch("values", left, "x", right)
    returned, y = result("vectors of a product", out, (values, x), (left, right), m, batch, left)
    is_tensor, structure = isinstance(y, torch.Tensor), pattern.structure
    if isinstance(structure, Diagonal):
        multiply: Any = torch.mul if is_tensor else np.multiply
        multiply(left, right, out=y)
    elif isinstance(structure, Full):
        operands = (left.reshape(m, n, left.shape[1]), right, y)
        _multiply_full(*(operands if is_tensor else map(torch.from_numpy, operands)))
    elif is_tensor:
        products_cuda.matvec(pattern, left, right, y)
    elif batch == 1:
        one = (unsigned(pattern.indices), left.reshape(-1), right.reshape(-1), y.reshape(-1))
        run_rows(_matvec_one, pattern.indptr, pattern.indptr, *one)
    else:
        run_rows(_matvec, pattern.indptr, pattern.indptr, unsigned(pattern.indices), *flat(left, right, y), lanes=batch)
    return returned


def _multiply_full(matrices: torch.Tensor, vectors: torch.Tensor, out: torch.Tensor) -> None:
    """Write the products of dense matrices ``(m, n, batch)`` and vectors ``(n, batch)`` to `out`."""
    if matrices.shape[2] == 1:
        torch.matmul(matrices[:, :, 0], vectors, out=out)
    else:
        out.copy_(torch.einsum("mnb,nb->mb", matrices, vectors.expand(-1, matrices.shape[2])))


class VectorForm(Form):
    """The form of the product `y` of a matrix with `values` and a vector `x` for each sample."""

    names = ("values", "x", "y")

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern

    def evaluate(self, wanted: str, values: dict[str, torch.Tensor]) -> torch.Tensor:
        pattern = self.pattern
        if wanted == "y":
            return matvec(pattern, values["values"], values["x"])  # type: ignore[no-any-return]
        if wanted == "x":
            transposed = gathered(values["values"], pattern.transposition)
            return matvec(pattern.T, transposed, values["y"])  # type: ignore[no-any-return]
        return gathered(values["y"], pattern.rows) * gathered(values["x"], pattern.indices)
