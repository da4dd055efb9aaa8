"""A sparse Jacobian: a pattern and its values."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import Any

import scipy.sparse
import scipy.sparse.linalg
import torch

from ..patterns import Full, Pattern, gathered
from ..runtime import cupy_stream, gpu_extra
from .plan import plan_product
from .vectors import matvec


@dataclass(frozen=True, eq=False)
class SparseJacobian:
    """The Jacobian of an operator at each sample of a batch: ``J[i, j] = ∂y_i/∂x_j``, flattened in C order.

    Attributes
    ----------
    pattern : Pattern
        The pattern of all samples, shape ``(out_size, in_size)``.
    values : Tensor, (nnz, batch)
        The values of the entries: float32 or float64, on the CPU or a CUDA device; ``(nnz, 1)`` where all samples share
        them.

    Raises
    ------
    TypeError, ValueError
        Where the values do not fit the pattern.

    Examples
    --------
    >>> import torch, jacsparse
    >>> J = jacsparse.jacobian(torch.nn.ReLU(), torch.tensor([[1.0, -2.0], [3.0, 4.0]]))
    >>> J.batch, J.values.tolist()
    (2, [[1.0, 1.0], [0.0, 1.0]])
    >>> J.vjp(torch.ones(2, 2)).tolist()
    [[1.0, 0.0], [1.0, 1.0]]
    """

    pattern: Pattern
    values: torch.Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.values, torch.Tensor):
            raise TypeError(f"values is a {type(self.values).__name__}; expected a torch.Tensor")
        if self.values.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"values has dtype {self.values.dtype}; expected float32 or float64")
        if self.values.device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"values is on {self.values.device}; this runs on CPUs and CUDA: move it with values.cpu()"
            )
        if self.values.ndim != 2 or self.values.shape[0] != self.pattern.nnz:
            raise ValueError(f"values has shape {tuple(self.values.shape)}; expected ({self.pattern.nnz}, batch)")

    @property
    def shape(self) -> tuple[int, int]:
        """Rows (outputs) and columns (inputs)."""
        return self.pattern.shape

    @property
    def batch(self) -> int:
        """The number of samples; 1 where all samples share their values."""
        return int(self.values.shape[1])

    @property
    def T(self) -> SparseJacobian:
        """The transposed Jacobian, its values in the transposed pattern's order."""
        if isinstance(self.pattern.structure, Full):
            # A full matrix is transposed without its indices.
            matrix = self.values.reshape(*self.shape, self.batch)
            return SparseJacobian(self.pattern.T, matrix.transpose(0, 1).reshape(self.values.shape))
        return SparseJacobian(self.pattern.T, gathered(self.values, self.pattern.transposition))

    def __matmul__(self, other: Any) -> Any:
        """``J @ K`` for a SparseJacobian, or ``J @ v`` for dense vectors ``(n,)`` or ``(n, batch)``, the batch last."""
        if isinstance(other, SparseJacobian):
            plan = plan_product(self.pattern, other.pattern)
            return SparseJacobian(plan.pattern, plan.multiply(self.values, other.values))
        if not isinstance(other, torch.Tensor):
            return NotImplemented
        product = matvec(self.pattern, self.values, other)
        return product[:, 0] if other.ndim == 1 and self.batch == 1 else product

    def jvp(self, v: torch.Tensor) -> torch.Tensor:
        """``J v`` of each sample, ``(batch, out_size)``, for `v` of ``(batch, in_size)`` or ``(batch, *shape)``."""
        return _times(self, "v", v)

    def vjp(self, g: torch.Tensor) -> torch.Tensor:
        """``Jᵀ g`` of each sample, ``(batch, in_size)``, for `g` of ``(batch, out_size)`` or ``(batch, *shape)``."""
        return _times(self.T, "g", g)

    def as_linear_operator(self, sample: int | None = None) -> scipy.sparse.linalg.LinearOperator:
        """One sample's Jacobian for SciPy's solvers."""
        return scipy.sparse.linalg.aslinearoperator(self.to_scipy(sample))

    def to(self, *args: Any, **options: Any) -> SparseJacobian:
        """The same Jacobian with another dtype or on another device; the arguments are those of `torch.Tensor.to`."""
        return SparseJacobian(self.pattern, self.values.to(*args, **options))

    def to_scipy(self, sample: int | None = None) -> scipy.sparse.csr_array:
        """One sample's Jacobian as a SciPy matrix; `sample` is optional where there is only one."""
        return self.pattern.to_scipy(self._sample(sample).cpu().numpy())

    def to_torch(self, sample: int | None = None) -> torch.Tensor:
        """One sample's Jacobian as a PyTorch CSR tensor."""
        values = self._sample(sample)
        indptr, indices = (
            torch.from_numpy(array.copy()).to(values.device) for array in (self.pattern.indptr, self.pattern.indices)
        )
        return torch.sparse_csr_tensor(indptr, indices, values, size=self.shape)

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
        values = self._sample(sample)
        if not values.is_cuda:
            return cupyx.scipy.sparse.csr_matrix(scipy.sparse.csr_matrix(self.to_scipy(sample)))
        number = values.device.index
        with cupy.cuda.Device(number), cupy_stream(torch.cuda.current_stream(number).cuda_stream, number):
            arrays = (cupy.array(part) for part in (values, self.pattern.indices, self.pattern.indptr))
            return cupyx.scipy.sparse.csr_matrix(tuple(arrays), shape=self.shape)

    def todense(self, sample: int | None = None) -> torch.Tensor:
        """One sample's Jacobian as a dense tensor, ``(out_size, in_size)``."""
        return torch.from_numpy(self.to_scipy(sample).toarray()).to(self.values.device)

    def _sample(self, sample: int | None) -> torch.Tensor:
        values = self.values.detach()
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
        return f"<SparseJacobian {self.pattern.summary()}, batch {self.batch}, {self.values.dtype}>"

    def __str__(self) -> str:
        return f"{self!r}\n{str(self.pattern).split(chr(10), 1)[1]}"


def _times(matrix: SparseJacobian, name: str, vectors: torch.Tensor) -> torch.Tensor:
    """The matrix of each sample times its vector."""
    columns = matrix.shape[1]
    if not isinstance(vectors, torch.Tensor):
        raise TypeError(f"{name} is a {type(vectors).__name__}; expected a torch.Tensor")
    if vectors.ndim < 2 or vectors[:1].numel() != columns * min(1, len(vectors)):
        raise ValueError(
            f"{name} has shape {tuple(vectors.shape)}; expected (batch, *shape) with {columns} elements a sample"
        )
    if matrix.batch not in (1, len(vectors)):
        raise ValueError(f"{name} has a batch of {len(vectors)}, the Jacobian one of {matrix.batch}")
    x = vectors.reshape(len(vectors), columns).T.contiguous()
    return matvec(matrix.pattern, matrix.values, x).T.contiguous()
