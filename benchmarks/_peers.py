"""Peers that multiply two sparse matrices; each is prepared once, and then its `multiply` is timed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import scipy.sparse
import torch

from . import _cusparse, _mkl
from ._context import Context
from ._programs import package

SCIPY, MKL_REUSE = "SciPy A @ B", "MKL, structure reused (sp2m)"
CUSPARSE, CUSPARSE_REUSE = "cuSPARSE SpGEMM (cupyx A @ B)", "cuSPARSE, structure reused (SpGEMMreuse)"
_TORCH = "PyTorch CSR A @ B"

Matrix: TypeAlias = scipy.sparse.csr_array


@dataclass(frozen=True)
class Peer:
    """A product that is ready to be timed."""

    multiply: Callable[[], Any]
    #: Converts the result of `multiply` to a SciPy matrix.
    to_scipy: Callable[[Any], Matrix]
    #: Whether `multiply` only runs kernels, which a CUDA graph can replay.
    capturable: bool = False


@dataclass(frozen=True)
class Goal:
    """A peer that jacsparse is compared with."""

    label: str
    #: The peer's short name in ratios.
    name: str
    #: How many times as fast as the peer jacsparse should compute one product.
    at_least: float


#: By device, the peer of all products, and the peer that reuses the structure.
GOALS = {
    "cpu": (Goal(SCIPY, "SciPy", 10.0), Goal(MKL_REUSE, "MKL reuse", 1.3)),
    "cuda": (Goal(CUSPARSE, "cuSPARSE", 5.0), Goal(CUSPARSE_REUSE, "SpGEMMreuse", 2.0)),
}


def _scipy(a: Matrix, b: Matrix, context: Context) -> Peer:
    return Peer(lambda: a @ b, lambda product: product)


def _torch(a: Matrix, b: Matrix, context: Context) -> Peer:
    left, right = _torch_csr(a, context), _torch_csr(b, context)
    return Peer(lambda: left @ right, _from_torch)


def _torch_csr(matrix: Matrix, context: Context) -> torch.Tensor:
    arrays = (matrix.indptr, matrix.indices, matrix.data)
    indptr, indices, values = (torch.from_numpy(array).to(context.place) for array in arrays)
    with warnings.catch_warnings():
        # PyTorch warns that CSR tensors are in beta state, and that it does not check their invariants.
        warnings.simplefilter("ignore", UserWarning)
        return torch.sparse_csr_tensor(indptr, indices, values, size=matrix.shape)


def _from_torch(product: torch.Tensor) -> Matrix:
    arrays = (product.values(), product.col_indices(), product.crow_indices())
    return Matrix(tuple(array.cpu().numpy() for array in arrays), shape=tuple(product.shape))


def _graphblas(a: Matrix, b: Matrix, context: Context) -> Peer:
    graphblas = package("graphblas", "python-graphblas", "pip install 'python-graphblas[default]'")
    graphblas.ss.config["nthreads"] = context.threads
    left, right = graphblas.io.from_scipy_sparse(a), graphblas.io.from_scipy_sparse(b)
    return Peer(lambda: left.mxm(right).new(), lambda product: Matrix(graphblas.io.to_scipy_sparse(product)))


def _mkl_reuse(a: Matrix, b: Matrix, context: Context) -> Peer:
    left, right = a.copy(), b.copy()
    # The plan is made with other values, so that a right result proves that `multiply` reads the present ones.
    left.data[:], right.data[:] = 1, 1
    product = _mkl.MklProduct(left, right, context.threads)
    np.copyto(left.data, a.data)
    np.copyto(right.data, b.data)
    return Peer(product.multiply, lambda _: product.to_scipy())


def _cupy(a: Matrix, b: Matrix, context: Context) -> Peer:
    from cupyx.scipy.sparse import csr_matrix

    left, right = (csr_matrix(scipy.sparse.csr_matrix(matrix)) for matrix in (a, b))
    return Peer(lambda: left @ right, lambda product: Matrix(product.get()))


def _cusparse_reuse(a: Matrix, b: Matrix, context: Context) -> Peer:
    # The plan is made with other values, as MKL's is.
    left, right = (_torch_csr(Matrix((np.ones_like(m.data), m.indices, m.indptr), m.shape), context) for m in (a, b))
    product = _cusparse.CusparseProduct(left, right)
    left.values().copy_(torch.from_numpy(a.data))
    right.values().copy_(torch.from_numpy(b.data))
    return Peer(product.multiply, lambda _: _from_torch(product.product()), capturable=True)


#: By device and label, functions that prepare a product of two float32 matrices with int32 indices, or raise
#: ImportError if the peer is not installed.
PEERS: dict[str, dict[str, Callable[[Matrix, Matrix, Context], Peer]]] = {
    "cpu": {
        SCIPY: _scipy,
        _TORCH: _torch,
        "SuiteSparse:GraphBLAS mxm": _graphblas,
        MKL_REUSE: _mkl_reuse,
    },
    "cuda": {
        CUSPARSE: _cupy,
        _TORCH: _torch,
        CUSPARSE_REUSE: _cusparse_reuse,
    },
}
