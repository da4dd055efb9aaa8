"""MKL's sparse products through ``ctypes``: the library of the ``mkl`` wheel, with 32-bit indices (LP64).

The symbolic phase runs once (``SPARSE_STAGE_FULL_MULT_NO_VAL``); each later call of ``SPARSE_STAGE_FINALIZE_MULT``
computes the product's values from the factors' present values.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

_GENERAL, _LOWER, _NON_UNIT, _NON_TRANSPOSE = 20, 40, 50, 10
_FINALIZE, _FULL_WITHOUT_VALUES = 92, 93


class _Descriptor(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("mode", ctypes.c_int), ("diagonal", ctypes.c_int))


def library_path() -> Path:
    """The path of the ``mkl`` wheel's runtime library; ImportError if there is no wheel, or no library in it."""
    try:
        distribution = importlib.metadata.distribution("mkl")
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError("mkl is not installed: pip install mkl") from error
    for file in distribution.files or ():
        if file.name.startswith("libmkl_rt.so"):
            return Path(str(distribution.locate_file(file))).resolve()
    raise ImportError("the mkl wheel holds no libmkl_rt.so")


class MklProduct:
    """``C = A B`` in float32, planned once; each `multiply` computes the values anew, on `threads` threads of MKL.

    `a` and `b` have int32 indices. MKL reads their value arrays, so that later values count.
    """

    def __init__(self, a: scipy.sparse.csr_array, b: scipy.sparse.csr_array, threads: int) -> None:
        self._library: Any = ctypes.CDLL(str(library_path()))
        self._library.MKL_Set_Num_Threads(threads)
        self._operands = (a, b)
        self._shape = (a.shape[0], b.shape[1])
        self._a, self._b, self._c = self._created(a), self._created(b), ctypes.c_void_p()
        self._request(_FULL_WITHOUT_VALUES)
        self._release_later(self._c)

    def _created(self, matrix: scipy.sparse.csr_array) -> ctypes.c_void_p:
        if matrix.data.dtype != np.float32 or matrix.indices.dtype != np.int32 or matrix.indptr.dtype != np.int32:
            raise TypeError(
                f"expected float32 values and int32 indices, not {matrix.data.dtype} and {matrix.indices.dtype}"
            )
        handle = ctypes.c_void_p()
        starts = matrix.indptr.ctypes.data
        arrays = (starts, starts + matrix.indptr.itemsize, matrix.indices.ctypes.data, matrix.data.ctypes.data)
        self._check(
            self._library.mkl_sparse_s_create_csr(
                ctypes.byref(handle), 0, *matrix.shape, *(ctypes.c_void_p(address) for address in arrays)
            )
        )
        self._release_later(handle)
        return handle

    def _release_later(self, handle: ctypes.c_void_p) -> None:
        # The finalizer has a copy of the address, as it must not refer to the object itself.
        weakref.finalize(self, self._library.mkl_sparse_destroy, ctypes.c_void_p(handle.value))

    def _request(self, stage: int) -> None:
        descriptor = _Descriptor(_GENERAL, _LOWER, _NON_UNIT)
        left, right = (_NON_TRANSPOSE, descriptor, self._a), (_NON_TRANSPOSE, descriptor, self._b)
        self._check(self._library.mkl_sparse_sp2m(*left, *right, stage, ctypes.byref(self._c)))

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise RuntimeError(f"MKL answers with {status}, which its sparse_status_t explains")

    def multiply(self) -> None:
        """Compute the values of `C` from the present values of `A` and `B`."""
        self._request(_FINALIZE)

    def to_scipy(self) -> scipy.sparse.csr_array:
        """A copy of `C`, with its entries in MKL's order."""
        base, rows, columns = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        starts, ends, indices = (ctypes.POINTER(ctypes.c_int)() for _ in range(3))
        values = ctypes.POINTER(ctypes.c_float)()
        outputs = (base, rows, columns, starts, ends, indices, values)
        self._check(self._library.mkl_sparse_s_export_csr(self._c, *map(ctypes.byref, outputs)))
        indptr = np.append(0, np.ctypeslib.as_array(ends, (rows.value,)))
        nnz = int(indptr[-1])
        arrays = (np.ctypeslib.as_array(values, (nnz,)), np.ctypeslib.as_array(indices, (nnz,)), indptr)
        return scipy.sparse.csr_array(arrays, shape=self._shape, copy=True)
