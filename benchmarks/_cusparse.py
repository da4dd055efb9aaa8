"""cuSPARSE's SpGEMMreuse through nvmath-python's bindings: the symbolic phase runs once."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch

from ._programs import package

_FLOAT32 = 0  # CUDA_R_32F


class CusparseProduct:
    """``C = A B`` in float32 on a CUDA device, planned once; each `multiply` computes the values anew.

    `a` and `b` are sparse CSR tensors with int32 indices. They are not copied, so that later values count.
    """

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        remedy = f"pip install 'nvmath-python[cu{(torch.version.cuda or '12').partition('.')[0]}]'"
        self._cusparse = cusparse = package("nvmath.bindings.cusparse", "nvmath-python", remedy)
        self._device, self._shape = a.device, (a.shape[0], b.shape[1])
        self._handle = self._destroyed_later(cusparse.create(), cusparse.destroy)
        plain, method = int(cusparse.Operation.NON_TRANSPOSE), int(cusparse.SpGEMMAlg.DEFAULT)
        descriptor = self._destroyed_later(cusparse.sp_gemm_create_descr(), cusparse.sp_gemm_destroy_descr)
        # The arrays that cuSPARSE has pointers to.
        self._starts = torch.zeros(self._shape[0] + 1, dtype=torch.int32, device=self._device)
        self._references: list[Any] = [a, b]
        left, right = (self._matrix(m.shape, m.crow_indices(), m.col_indices(), m.values()) for m in (a, b))
        product = self._matrix(self._shape, self._starts, None, None)
        operands = (self._handle, plain, plain, left, right, product, method, descriptor)
        self._use_current_stream()
        size = cusparse.sp_gemm_reuse_work_estimation(*operands, 0)
        cusparse.sp_gemm_reuse_work_estimation(*operands, *self._buffers(size))
        sizes = cusparse.sp_gemm_reuse_nnz(*operands, 0, 0, 0)
        cusparse.sp_gemm_reuse_nnz(*operands, *self._buffers(*sizes))
        nnz = cusparse.sp_mat_get_size(product)[2]
        self._indices = torch.zeros(nnz, dtype=torch.int32, device=self._device)
        self._values = torch.zeros(nnz, device=self._device)
        pointers = (array.data_ptr() for array in (self._starts, self._indices, self._values))
        cusparse.csr_set_pointers(product, *pointers)
        size = cusparse.sp_gemm_reuse_copy(*operands, 0)
        cusparse.sp_gemm_reuse_copy(*operands, *self._buffers(size))
        # cuSPARSE reads the factors from host memory by default.
        self._factors = np.array([1, 0], dtype=np.float32)
        one = self._factors.ctypes.data
        zero = one + self._factors.itemsize
        factors = (self._handle, plain, plain, one, left, right)
        self._arguments = (*factors, zero, product, _FLOAT32, method, descriptor)

    def _destroyed_later(self, handle: int, destroy: Any) -> int:
        weakref.finalize(self, destroy, handle)
        return handle

    def _matrix(self, shape: Any, starts: torch.Tensor, indices: Any, values: Any) -> int:
        """A descriptor of a CSR matrix, which has no entries if `indices` is None."""
        cusparse, index = self._cusparse, int(self._cusparse.IndexType.INDEX_32I)
        if starts.dtype != torch.int32 or (values is not None and values.dtype != torch.float32):
            raise TypeError(f"expected float32 values and int32 indices, not {values.dtype} and {starts.dtype}")
        self._references += [starts, indices, values]
        addresses = [0 if array is None else array.data_ptr() for array in (starts, indices, values)]
        nnz = 0 if values is None else len(values)
        base = int(cusparse.IndexBase.ZERO)
        descriptor = cusparse.create_csr(*shape, nnz, *addresses, index, index, base, _FLOAT32)
        return self._destroyed_later(descriptor, cusparse.destroy_sp_mat)

    def _buffers(self, *sizes: int) -> list[int]:
        """Addresses of new memory; never 0, which asks cuSPARSE for the sizes instead."""
        buffers = [torch.empty(max(1, size), dtype=torch.uint8, device=self._device) for size in sizes]
        self._references += buffers
        return [buffer.data_ptr() for buffer in buffers]

    def _use_current_stream(self) -> None:
        self._cusparse.set_stream(self._handle, torch.cuda.current_stream(self._device).cuda_stream)

    def multiply(self) -> None:
        """Compute the values of `C` from the present values of `A` and `B`, on PyTorch's current stream."""
        self._use_current_stream()
        self._cusparse.sp_gemm_reuse_compute(*self._arguments)

    def product(self) -> torch.Tensor:
        """`C`, with its entries in cuSPARSE's order."""
        return torch.sparse_csr_tensor(self._starts, self._indices, self._values, size=self._shape)
