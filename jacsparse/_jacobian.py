"""`SparseJacobian`: a pattern, and values for each sample of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any

import scipy.sparse
import scipy.sparse.linalg
import torch

from .patterns import Full, Pattern, _cuda
from .patterns._values import gathered
from .spgemm import matvec, plan_product

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from ._stages import Record

__all__ = ["SparseJacobian", "jacobian", "jacobian_pattern"]


@dataclass(frozen=True, eq=False)
class SparseJacobian:
    """The Jacobian of an operator at each sample of a batch: ``J[i, j] = ∂y_i/∂x_j``, flattened in C order.

    Attributes
    ----------
    pattern : Pattern
        Shape ``(out_size, in_size)``, the same for all samples.
    values : Tensor, (nnz, batch)
        float32 or float64, on the CPU or a CUDA device; ``(nnz, 1)`` where all samples share them.

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
        """Samples; 1 where all share their values."""
        return int(self.values.shape[1])

    @property
    def T(self) -> SparseJacobian:
        """The transposed Jacobian, its values in the transposed pattern's order."""
        if isinstance(self.pattern.structure, Full):
            # Without an index.
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
        """``J v`` for each sample: ``(batch, in_size)``, or a shape with as many elements, to ``(batch, out_size)``."""
        return _applied(self, "v", v)

    def vjp(self, g: torch.Tensor) -> torch.Tensor:
        """``Jᵀ g`` of each sample: ``(batch, out_size)``, or a shape with as many elements, to ``(batch, in_size)``."""
        return _applied(self.T, "g", g)

    def as_linear_operator(self, sample: int | None = None) -> scipy.sparse.linalg.LinearOperator:
        """One sample's Jacobian for SciPy's solvers."""
        return scipy.sparse.linalg.aslinearoperator(self.to_scipy(sample))

    def to(self, *args: Any, **options: Any) -> SparseJacobian:
        """The same Jacobian with values of another dtype, or on another device: as `torch.Tensor.to` is told."""
        return SparseJacobian(self.pattern, self.values.to(*args, **options))

    def to_scipy(self, sample: int | None = None) -> scipy.sparse.csr_array:
        """One sample's Jacobian as a SciPy matrix; `sample` may be left out where there is one."""
        return self.pattern.to_scipy(self._sample(sample).cpu().numpy())

    def to_torch(self, sample: int | None = None) -> torch.Tensor:
        """One sample's Jacobian as a PyTorch CSR tensor."""
        values = self._sample(sample)
        indptr, indices = (
            torch.from_numpy(array.copy()).to(values.device) for array in (self.pattern.indptr, self.pattern.indices)
        )
        return torch.sparse_csr_tensor(indptr, indices, values, size=self.shape)

    def to_cupy(self, sample: int | None = None) -> Any:
        """One sample's Jacobian as a CuPy matrix of its own memory, on the device of the values, or CuPy's current one.

        It is made on PyTorch's current stream.

        Raises
        ------
        ImportError
            Where CuPy is not installed.
        """
        try:
            import cupy
            import cupyx.scipy.sparse
        except ImportError as error:
            raise ImportError(f"to_cupy needs CuPy: {_cuda.extra()}") from error
        values = self._sample(sample)
        if not values.is_cuda:
            return cupyx.scipy.sparse.csr_matrix(scipy.sparse.csr_matrix(self.to_scipy(sample)))
        number = values.device.index
        with cupy.cuda.Device(number), _cuda._stream(torch.cuda.current_stream(number).cuda_stream, number):
            arrays = (cupy.array(part) for part in (values, self.pattern.indices, self.pattern.indptr))
            return cupyx.scipy.sparse.csr_matrix(tuple(arrays), shape=self.shape)

    def todense(self, sample: int | None = None) -> torch.Tensor:
        """One sample's Jacobian as a dense tensor, ``(out_size, in_size)``."""
        return torch.from_numpy(self.to_scipy(sample).toarray()).to(self.values.device)

    def _sample(self, sample: int | None) -> torch.Tensor:
        values = self.values.detach()
        if sample is None:
            if self.batch != 1:
                some = f"say which one: sample=0 to {self.batch - 1}" if self.batch else "there is none to be had"
                raise ValueError(f"this Jacobian has {self.batch} samples; {some}")
            return values[:, 0].contiguous()
        try:
            number = index(sample)
        except TypeError:
            raise TypeError(f"sample is {sample!r}; expected an integer, or None where there is one sample") from None
        # Values that all samples share are every sample's.
        if self.batch != 1 and not -self.batch <= number < self.batch:
            raise IndexError(f"sample is {number}; this Jacobian has {self.batch}")
        return values[:, 0 if self.batch == 1 else number].contiguous()

    def __repr__(self) -> str:
        return f"<SparseJacobian {self.pattern.summary()}, batch {self.batch}, {self.values.dtype}>"

    def __str__(self) -> str:
        return f"{self!r}\n{str(self.pattern).split(chr(10), 1)[1]}"


def _applied(matrix: SparseJacobian, name: str, vectors: torch.Tensor) -> torch.Tensor:
    columns = matrix.shape[1]
    if not isinstance(vectors, torch.Tensor):
        raise TypeError(f"{name} is a {type(vectors).__name__}; expected a torch.Tensor")
    if vectors.ndim < 2 or vectors[:1].numel() != columns * min(1, len(vectors)):
        raise ValueError(
            f"{name} has shape {tuple(vectors.shape)}; expected (batch, *shape) with {columns} elements a sample"
        )
    flat = vectors.reshape(len(vectors), columns)
    if matrix.batch not in (1, len(vectors)):
        raise ValueError(f"{name} has a batch of {len(vectors)}, the Jacobian one of {matrix.batch}")
    return matvec(matrix.pattern, matrix.values, flat.T.contiguous()).T.contiguous()


def jacobian_pattern(module: nn.Module, input_shape: tuple[int, ...], *, pruned: bool = True) -> Pattern:
    """The positions of a module's Jacobian that are not guaranteed zeros, from its architecture alone.

    Parameters
    ----------
    module : Module
        Any that works on each sample by itself. It is run once, on random samples; what that changes in it is undone.
    input_shape : tuple of int
        Without the batch axis.
    pruned : bool
        Whether pruned weights leave no entry: by a mask of ``torch.nn.utils.prune``, else where exactly zero.

    Returns
    -------
    Pattern
        Shape ``(out_size, in_size)``.

    Raises
    ------
    UnsupportedOperatorError
        Where an operator has no rule; the message begins with its path.
    ValueError
        Where the input shape does not fit.

    Notes
    -----
    Thesis, section 3.3 and Table 3.1.

    Examples
    --------
    >>> import torch
    >>> round(jacobian_pattern(torch.nn.Conv2d(3, 64, 3, padding=1), (3, 32, 32)).sparsity, 5)
    0.99157
    """
    from ._chain import chain

    return chain(module, input_shape, pruned=pruned).pattern.T


def _is_in_use(values: torch.Tensor, records: Sequence[Record]) -> bool:
    """Whether values lie in the memory of a weight, or of what a forward pass made."""
    memory = values.untyped_storage().data_ptr()
    return any(tensor.untyped_storage().data_ptr() == memory for record in records for tensor in record.tensors)


def jacobian(module: nn.Module, x: torch.Tensor, *, pruned: bool = True) -> SparseJacobian:
    """The Jacobian of a module at each sample of a batch.

    Parameters
    ----------
    module : Module
        Any that works on each sample by itself. It is run once; what that changes in it is undone, and what it draws is
        what it would draw next.
    x : Tensor, (batch, *input_shape)
        float32 or float64, on the CPU or a CUDA device, where the module's parameters must be, and of the same dtype.
    pruned : bool
        As in `jacobian_pattern`.

    Returns
    -------
    SparseJacobian
        Its batch is 1 where all samples share the values, as for a convolution.

    Raises
    ------
    TypeError, ValueError, UnsupportedOperatorError
        Where the input does not fit, or an operator has no rule.

    Notes
    -----
    Thesis, section 3.4.

    Where an operator's derivative is infinite, as that of a root at 0, its product with a 0 is NaN, as floating-point
    numbers have it; autograd may give 0 there, as its backward passes of ReLU and of masks do not multiply.

    Examples
    --------
    >>> import torch
    >>> jacobian(torch.nn.MaxPool2d(2), torch.randn(8, 3, 4, 4))
    <SparseJacobian 12 × 48, nnz 48, sparsity 0.91667, Pooling, batch 8, torch.float32>
    """
    from ._chain import check_input, recent_chains
    from ._modules import check_module, undisturbed, without_autocast

    check_input("x", x)
    # One sample says what there is to be said of none.
    given = x if len(x) else x.new_zeros((1, *x.shape[1:]))
    with undisturbed(check_module(module)):
        # Until the values are there: they are made of what the module had when it ran.
        chain, (_, records) = recent_chains(module, pruned=pruned).of(given)
        with without_autocast(given.device):
            found = chain.jacobian(records, given)
            if _is_in_use(found.values, records):
                # What is returned is the caller's, and stays what it is.
                found = SparseJacobian(found.pattern, found.values.clone())
    if len(x) or all(record.stage.shared for record in records):
        return found
    return SparseJacobian(found.pattern, found.values[:, :0])
