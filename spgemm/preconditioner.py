"""Preconditioners for SciPy's iterative solvers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, spilu

from ..patterns import Pattern
from .factorization import factorize
from .lu import SYMMETRIC

_KINDS = ("jacobi", "block_jacobi", "ilu")


def preconditioner(
    pattern: Pattern, matrix: Any, kind: str, block_size: int | None, options: dict[str, Any]
) -> LinearOperator:
    """An approximate inverse of one sample's matrix of SciPy's; the others are `SparseJacobian.preconditioner`'s."""
    if kind not in _KINDS:
        raise ValueError(f"kind is {kind!r}; expected one of {', '.join(_KINDS)}")
    if pattern.shape[0] != pattern.shape[1]:
        raise ValueError(
            f"the Jacobian is {' × '.join(map(str, pattern.shape))}; only a square one has a preconditioner"
        )
    if (block_size is None) == (kind == "block_jacobi") or (block_size is not None and block_size < 1):
        raise ValueError(f"block_size is {block_size}; block_jacobi needs one of at least 1, and others take none")
    if options and kind != "ilu":
        raise TypeError(f"{kind} takes no {', '.join(options)}; options are those of scipy.sparse.linalg.spilu")
    if kind == "ilu":
        entries = matrix.astype(bool)
        is_symmetric = matrix.diagonal().all() and 2 * entries.multiply(entries.T).nnz >= entries.nnz
        if is_symmetric and not options.keys() & SYMMETRIC.keys():
            options = {**options, **SYMMETRIC}
        try:
            factors = spilu(matrix.tocsc(), **options)
        except RuntimeError as error:
            raise ValueError(
                f"the Jacobian has no incomplete factors ({error}); a smaller drop_tol or larger fill_factor keeps more"
            ) from error
        return _operator(matrix, factors.solve, lambda v: factors.solve(v, trans="T"))
    if kind == "jacobi":
        diagonal = matrix.diagonal()
        if not diagonal.all():
            raise ValueError(
                f"element {int((diagonal == 0).argmax())} of the Jacobian's diagonal is zero, by which jacobi divides"
            )
        return _operator(matrix, *[lambda v: (v.T / diagonal).T] * 2)
    rows, columns = pattern.rows, pattern.indices
    kept = rows // block_size == columns // block_size
    counts = np.bincount(rows[kept], minlength=len(matrix.indptr) - 1)
    blocks = Pattern(pattern.shape, np.concatenate([[0], counts.cumsum()]), columns[kept])
    try:
        inverse = factorize(blocks, torch.from_numpy(matrix.data[kept])[:, None], "block_diagonal")
    except ValueError as error:
        raise ValueError(f"blocks of {block_size} rows along the diagonal have no factors ({error})") from error

    def solve(v: np.ndarray, transpose: bool = False) -> np.ndarray:
        return inverse.solve(torch.from_numpy(v).reshape(1, len(v), -1), transpose).reshape(v.shape).numpy()

    return _operator(matrix, solve, lambda v: solve(v, True))


def _operator(matrix: Any, solve: Any, solve_transposed: Any) -> LinearOperator:
    return LinearOperator(matrix.shape, solve, solve_transposed, solve, matrix.dtype, solve_transposed)
