"""What a sparse matrix is, how it shows itself, and what it is to other libraries."""

from __future__ import annotations

import functools
import math
import os
import warnings
from dataclasses import dataclass, replace
from operator import index
from typing import Any, Self

import numpy as np
import scipy.sparse
import scipy.sparse.linalg
import torch

from ..patterns import Full, Pattern, as_html, plot_pattern
from ..runtime import a_type, cupy_stream, gpu_extra
from .operands import check_outside_transforms


@dataclass(frozen=True, eq=False)
class SparseMatrix:
    """A pattern, and the values of its entries in each sample of a batch; `SparseJacobian` computes with both."""

    pattern: Pattern
    values: torch.Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, Pattern):
            raise TypeError(f"pattern is {a_type(self.pattern)}; expected a Pattern, as Pattern.from_scipy makes")
        if not isinstance(self.values, torch.Tensor):
            raise TypeError(f"values is {a_type(self.values)}; expected a torch.Tensor")
        if self.values.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"values has dtype {self.values.dtype}; expected float32 or float64, in which kernels compute: convert "
                "it with .float()"
            )
        if not (self.values.is_cpu or self.values.is_cuda):
            raise ValueError(
                f"values is on {self.values.device}; this runs on CPUs and CUDA: move it with values.cpu()"
            )
        if self.values.ndim != 2 or self.values.shape[0] != self.pattern.nnz:
            expected = f"({self.pattern.nnz}, batch): values[:, None] for one sample"
            raise ValueError(f"values has shape {tuple(self.values.shape)}; expected {expected}")

    @property
    def shape(self) -> tuple[int, int]:
        """Rows (outputs) and columns (inputs)."""
        return self.pattern.shape

    @property
    def batch(self) -> int:
        """The number of samples; 1 where all samples share their values."""
        return int(self.values.shape[1])

    @property
    def nnz(self) -> int:
        """The number of entries of a sample."""
        return self.pattern.nnz

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """The device of the values."""
        return self.values.device

    def to(self, *args: Any, **options: Any) -> Self:
        """The same Jacobian with another dtype or on another device; the arguments are those of `torch.Tensor.to`."""
        return replace(self, values=self.values.to(*args, **options))

    def as_linear_operator(self, sample: int | None = None) -> scipy.sparse.linalg.LinearOperator:
        """One sample's Jacobian for SciPy's solvers."""
        return scipy.sparse.linalg.aslinearoperator(self.to_scipy(sample))

    def to_scipy(self, sample: int | None = None) -> scipy.sparse.csr_array:
        """One sample's Jacobian as a SciPy matrix; `sample` is optional where there is only one."""
        check_outside_transforms("the Jacobian", self.values)
        return self.pattern.to_scipy(self._sample(sample).detach().cpu().numpy())

    def to_torch(self, sample: int | None = None) -> torch.Tensor:
        """One sample's Jacobian as a PyTorch CSR tensor, part of autograd where the values are."""
        values = self._sample(sample)
        check_outside_transforms("the Jacobian", values)
        indptr, indices = (
            torch.from_numpy(array.copy()).to(values.device) for array in (self.pattern.indptr, self.pattern.indices)
        )
        _warn_of_csr_unseen()
        return torch.sparse_csr_tensor(indptr, indices, values, size=self.shape, check_invariants=False)

    def to_cupy(self, sample: int | None = None) -> Any:
        """A copy of one sample's Jacobian as a CuPy matrix, made on PyTorch's current stream.

        It is on the device of the values; for values on the CPU, on CuPy's current device.

        Raises
        ------
        ImportError
            Where CuPy is not installed.
        """
        try:
            import cupy
            import cupyx.scipy.sparse
        except ImportError as error:
            raise ImportError(f"to_cupy needs CuPy: {gpu_extra()}") from error
        values = self._sample(sample).detach()
        if not values.is_cuda:
            return cupyx.scipy.sparse.csr_matrix(scipy.sparse.csr_matrix(self.to_scipy(sample)))
        number = values.device.index
        with cupy.cuda.Device(number), cupy_stream(torch.cuda.current_stream(number).cuda_stream, number):
            arrays = (cupy.array(part) for part in (values, self.pattern.indices, self.pattern.indptr))
            return cupyx.scipy.sparse.csr_matrix(tuple(arrays), shape=self.shape)

    def todense(self, sample: int | None = None) -> torch.Tensor:
        """One sample's Jacobian as a dense tensor, ``(out_size, in_size)``, part of autograd where the values are."""
        values = self._sample(sample)
        if isinstance(self.pattern.structure, Full):
            return values.reshape(self.shape).clone()
        places = torch.from_numpy(self.pattern.places.copy()).to(values.device)
        return values.new_zeros(math.prod(self.shape)).index_copy(0, places, values).view(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """``np.asarray(J)`` of a Jacobian with one sample: the dense matrix, as of ``J.todense()``."""
        if copy is False:
            raise ValueError("a Jacobian is no array in memory, so that copy=False is impossible: leave it out")
        if self.batch != 1:
            raise ValueError(f"this Jacobian has {self.batch} samples, and an array one: np.asarray(J.todense(sample))")
        dense = check_outside_transforms("the Jacobian", self.todense()).numpy(force=True)
        return dense.astype(dense.dtype if dtype is None else dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:
        """``torch.as_tensor(J)`` of a Jacobian with one sample: a copy of the dense matrix, as of ``J.todense()``."""
        if self.batch != 1:
            raise ValueError(f"this Jacobian has {self.batch} samples, and a tensor one matrix: take J.todense(sample)")
        if self.values.requires_grad:
            raise ValueError("this Jacobian is part of autograd, which a copy leaves: take J.todense()")
        return self.todense().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        """The device of `__dlpack__`."""
        return self.values.__dlpack_device__()

    def plot(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        ax: Any = None,
        sample: int | None = None,
        title: str = "",
        axes: tuple[str, str] = ("input", "output"),
    ) -> Any:
        """Draw one sample's magnitudes, in colours of a logarithmic scale, of each cell's largest entry.

        Positions without entries are white, entries that are zero grey, and those that are not finite red. What is
        smaller than the largest magnitude by more than 15 decades counts as zero.

        Parameters
        ----------
        path, ax, title, axes
            As in `Pattern.plot`.
        sample : int, optional
            The sample; optional where there is only one.

        Returns
        -------
        matplotlib.axes.Axes
            What it is drawn on.

        Raises
        ------
        ImportError, ValueError
            As `Pattern.plot`.
        """
        values = check_outside_transforms("the Jacobian", self._sample(sample)).numpy(force=True)
        return plot_pattern(self.pattern, path, ax, title, axes, values)

    def _sample(self, sample: int | None) -> torch.Tensor:
        values = self.values
        if sample is None:
            if self.batch != 1:
                remedy = f"say which one: sample=0 to {self.batch - 1}" if self.batch else "there is none to be had"
                raise ValueError(f"this Jacobian has {self.batch} samples; {remedy}")
            return values[:, 0].contiguous()
        try:
            number = index(sample)
        except TypeError:
            raise TypeError(f"sample is {sample!r}; expected an integer, or None where there is one sample") from None
        # Where all samples share their values, any number is a sample's.
        if self.batch != 1 and not -self.batch <= number < self.batch:
            raise IndexError(f"sample is {number}; this Jacobian has {self.batch}")
        return values[:, 0 if self.batch == 1 else number].contiguous()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.pattern.summary()}, batch {self.batch}, {self.values.dtype}>"

    def __str__(self) -> str:
        return f"{self!r}\n{str(self.pattern).split(chr(10), 1)[1]}"

    def _repr_html_(self) -> str:
        """What a notebook shows: the line of ``repr``, and a picture of the pattern."""
        return as_html(repr(self), self.pattern)


@functools.cache
def _warn_of_csr_unseen() -> None:
    """Let PyTorch give its one warning that CSR tensors are in beta, of which callers need not know."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.sparse_csr_tensor([0, 0], [], [], size=(1, 1), check_invariants=False)
