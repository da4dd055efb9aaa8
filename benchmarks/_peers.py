"""Peers that multiply two sparse matrices: each one is prepared once, and then timed by its `multiply`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import scipy.sparse
import torch

from . import _mkl

__all__ = ["MKL_REUSE", "PEERS", "SCIPY", "Peer"]

SCIPY, MKL_REUSE = "SciPy A @ B", "MKL, structure reused (sp2m)"

Matrix: TypeAlias = scipy.sparse.csr_array


@dataclass(frozen=True)
class Peer:
    """A product that is ready to be timed.

    Attributes
    ----------
    multiply : callable
        Compute the product.
    to_scipy : callable
        What `multiply` returned, as a SciPy matrix.
    """

    multiply: Callable[[], Any]
    to_scipy: Callable[[Any], Matrix]


def _scipy(a: Matrix, b: Matrix, threads: int) -> Peer:
    return Peer(lambda: a @ b, lambda product: product)


def _torch(a: Matrix, b: Matrix, threads: int) -> Peer:
    left, right = _torch_csr(a), _torch_csr(b)

    def to_scipy(product: torch.Tensor) -> Matrix:
        arrays = (product.values(), product.col_indices(), product.crow_indices())
        return Matrix(tuple(array.numpy() for array in arrays), shape=tuple(product.shape))

    return Peer(lambda: left @ right, to_scipy)


def _torch_csr(matrix: Matrix) -> torch.Tensor:
    indptr, indices, values = (torch.from_numpy(array) for array in (matrix.indptr, matrix.indices, matrix.data))
    with warnings.catch_warnings():
        # That CSR tensors are in beta state, and that their invariants are not checked.
        warnings.simplefilter("ignore", UserWarning)
        return torch.sparse_csr_tensor(indptr, indices, values, size=matrix.shape)


def _graphblas(a: Matrix, b: Matrix, threads: int) -> Peer:
    try:
        import graphblas
    except ImportError as error:
        raise ImportError("python-graphblas is not installed: pip install 'python-graphblas[default]'") from error
    graphblas.ss.config["nthreads"] = threads
    left, right = graphblas.io.from_scipy_sparse(a), graphblas.io.from_scipy_sparse(b)
    return Peer(lambda: left.mxm(right).new(), lambda product: Matrix(graphblas.io.to_scipy_sparse(product)))


def _mkl_product(a: Matrix, b: Matrix, threads: int) -> Peer:
    # Where sparse_dot_mkl looks first; it does not know the wheel's folder.
    os.environ.setdefault("MKL_RT", str(_mkl.library_path()))
    try:
        import sparse_dot_mkl
    except ImportError as error:
        raise ImportError("sparse_dot_mkl is not installed: pip install sparse_dot_mkl") from error
    sparse_dot_mkl.mkl_set_num_threads(threads)
    return Peer(lambda: sparse_dot_mkl.dot_product_mkl(a, b), lambda product: Matrix(product))


def _mkl_reuse(a: Matrix, b: Matrix, threads: int) -> Peer:
    left, right = a.copy(), b.copy()
    # Planned on other values: what comes out right was computed from those written since.
    left.data[:], right.data[:] = 1, 1
    product = _mkl.Reuse(left, right, threads)
    np.copyto(left.data, a.data)
    np.copyto(right.data, b.data)
    return Peer(product.multiply, lambda _: product.to_scipy())


#: Each prepares a product of two float32 matrices with int32 indices, for a number of threads; ImportError where the
#: peer is not installed.
PEERS: dict[str, Callable[[Matrix, Matrix, int], Peer]] = {
    SCIPY: _scipy,
    "PyTorch CSR A @ B": _torch,
    "SuiteSparse:GraphBLAS mxm": _graphblas,
    "MKL (sparse_dot_mkl)": _mkl_product,
    MKL_REUSE: _mkl_reuse,
}
