"""A sparse Jacobian: a pattern and its values."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from operator import index
from typing import Any, ClassVar

import numpy as np
import scipy.sparse
import torch

from ..patterns import Diagonal, Full, Identity, Pattern, gathered
from ..runtime import a_type
from .operands import by_sample, check_outside_transforms, factor_of, same_batch
from .plan import plan_product
from .selection import diagonal, elements, places, submatrix
from .solvable import Solvable
from .sums import plan_sum
from .vectors import matvec


# It prints itself in one line, as `SparseMatrix` does.
@dataclass(frozen=True, eq=False, repr=False)
class SparseJacobian(Solvable):
    """The Jacobian of an operator at each sample of a batch: ``J[i, j] = ∂y_i/∂x_j``, flattened in C order.

    Attributes
    ----------
    pattern : Pattern
        The pattern of all samples, shape ``(out_size, in_size)``.
    values : Tensor, (nnz, batch)
        The values of the entries: float32 or float64, on the CPU or a CUDA device; ``(nnz, 1)`` where all samples share
        them.
    in_shape, out_shape : tuple of int, optional
        Shapes of one sample of the argument and of the output, in which `vjp` and `jvp` return vectors; flat ones where
        they are None, as where a function has several arguments. `jacobian` and prepared Jacobians know them;
        transposes, products and sums have those of their factors and terms.

    Raises
    ------
    TypeError, ValueError
        Where the values or the shapes do not fit the pattern.

    Examples
    --------
    >>> import torch, jacsparse
    >>> J = jacsparse.jacobian(torch.nn.ReLU(), torch.tensor([[1.0, -2.0], [3.0, 4.0]]))
    >>> J.batch, J.values.tolist()
    (2, [[1.0, 1.0], [0.0, 1.0]])
    >>> J.vjp(torch.ones(2, 2)).tolist()
    [[1.0, 0.0], [1.0, 1.0]]
    >>> (jacsparse.SparseJacobian.identity(2) - 0.5 * J).todense(1).tolist()
    [[0.5, 0.0], [0.0, 0.5]]

    Notes
    -----
    ``J + K``, ``J - K``, ``-J``, ``a * J`` and ``J / a`` are Jacobians too, where `a` is a number or a tensor
    ``(batch,)`` with a number for each sample. They keep all positions, whatever the values become. They and all
    products are part of autograd where the values require grad, and their plans are found again at later calls.

    ``J[2:5]`` and ``J[:, columns]`` are Jacobians of some rows or columns, and ``J[rows, columns]`` the elements at
    pairs, ``(pairs, batch)``, all as of SciPy's matrices. ``J @ v`` takes vectors of NumPy too, and ``np.asarray(J)``
    and ``torch.as_tensor(J)`` are the dense matrix where there is one sample.

    ``torch.load`` refuses a Jacobian, as it does any class whose file would run code. Save the pattern by
    `jacsparse.Pattern.save` and the values by ``torch.save``, and make it anew of what `jacsparse.Pattern.load` and
    ``torch.load`` return.
    """

    in_shape: tuple[int, ...] | None = None
    out_shape: tuple[int, ...] | None = None

    #: NumPy's scalars leave ``a * J`` to this class.
    __array_ufunc__: ClassVar[None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        rows, columns = self.pattern.shape
        for name, shape, size in (("in_shape", self.in_shape, columns), ("out_shape", self.out_shape, rows)):
            if shape is not None and math.prod(shape) != size:
                raise ValueError(f"{name} is {tuple(shape)}, and the Jacobian {rows} × {columns}")

    @classmethod
    def identity(cls, n: int, *, dtype: torch.dtype | None = None, device: Any = None) -> SparseJacobian:
        """The identity of size `n`, as in ``SparseJacobian.identity(n) - h * J``; the dtype is PyTorch's default one.

        Examples
        --------
        >>> SparseJacobian.identity(3, dtype=torch.float64)
        <SparseJacobian 3 × 3, nnz 3, sparsity 0.66667, Identity, batch 1, torch.float64>
        """
        if index(n) < 0:
            raise ValueError(f"n is {n}; expected a size of at least 0")
        return cls(Pattern.of(Identity(index(n))), torch.ones((index(n), 1), dtype=dtype, device=device))

    @classmethod
    def from_diagonal(cls, diagonal: torch.Tensor) -> SparseJacobian:
        """The diagonal matrix of each sample, from its diagonal: ``(n,)`` or ``(n, batch)``, as `diagonal` returns it.

        Examples
        --------
        >>> J = SparseJacobian(Pattern((2, 2), [0, 2, 3], [0, 1, 1]), torch.tensor([[1.0], [2.0], [3.0]]))
        >>> (J.gram() + SparseJacobian.from_diagonal(0.5 * J.gram_diagonal())).todense().tolist()
        [[1.5, 2.0], [2.0, 19.5]]
        """
        if not isinstance(diagonal, torch.Tensor):
            raise TypeError(f"diagonal is {a_type(diagonal)}; expected a torch.Tensor")
        if diagonal.ndim not in (1, 2):
            raise ValueError(f"diagonal has shape {tuple(diagonal.shape)}; expected (n,) or (n, batch)")
        return cls(Pattern.of(Diagonal(len(diagonal))), diagonal[:, None] if diagonal.ndim == 1 else diagonal)

    @classmethod
    def from_scipy(cls, matrix: Any) -> SparseJacobian:
        """A SciPy matrix of float32 or float64, the same for all samples: a mass matrix `M` in ``M - h * J``.

        Examples
        --------
        >>> SparseJacobian.from_scipy(scipy.sparse.diags_array([1.0, 2.0], offsets=1))
        <SparseJacobian 3 × 3, nnz 2, sparsity 0.77778, Csr, batch 1, torch.float64>
        """
        pattern = Pattern.from_scipy(matrix)
        matrix = scipy.sparse.csr_array(matrix, copy=True)
        matrix.sum_duplicates()
        return cls(pattern, torch.from_numpy(matrix.data)[:, None])

    @property
    def T(self) -> SparseJacobian:
        """The transposed Jacobian, its values in the transposed pattern's order."""
        if isinstance(self.pattern.structure, Full):
            # A full matrix is transposed without its indices.
            # PyTorch copies to a transposed matrix in blocks, but one of a batch element by element.
            sizes = self.shape if self.batch == 1 else (*self.shape, self.batch)
            transposed = self.values.reshape(sizes).transpose(0, 1)
            values = transposed.reshape(self.values.shape)
        else:
            values = gathered(self.values, self.pattern.transposition)
        return SparseJacobian(self.pattern.T, values, self.out_shape, self.in_shape)

    def __getitem__(self, key: Any) -> Any:
        """Rows and columns, or elements, as of SciPy's matrices: each sample's alike.

        An index of rows or columns is an integer, a slice, an array or a tensor of integers, also negative and repeated
        ones, or of as many truth values. Differentiable where the values are.

        ====================================  ==========================================================
        ``J[2:5]``, ``J[rows]``, ``J[3]``     a SparseJacobian of these rows; of one row, it is ``(1, n)``
        ``J[:, columns]``, ``J[2:5, 3]``      a SparseJacobian of these rows and columns
        ``J[np.ix_(rows, columns)]``          the same, for two arrays
        ``J[rows, columns]``, ``J[2, 3]``     the elements at pairs, a tensor ``(*shape of the pairs, batch)``
        ====================================  ==========================================================

        Examples
        --------
        >>> J = SparseJacobian(Pattern((2, 3), [0, 2, 3], [0, 2, 0]), torch.tensor([[5.0], [6.0], [7.0]]))
        >>> J[:, [2, 0]].todense().tolist()
        [[6.0, 5.0], [0.0, 7.0]]
        >>> J[[0, 1], [2, 2]].tolist()
        [[6.0], [0.0]]
        """
        rows, columns, are_pairs = places(key, self.shape)
        if are_pairs:
            return elements(self.pattern, self.values, rows, columns)
        pattern, values = submatrix(self.pattern, self.values, rows, columns)
        in_shape = self.in_shape if columns is None else None
        return SparseJacobian(pattern, values, in_shape, self.out_shape if rows is None else None)

    def __matmul__(self, other: Any) -> Any:
        """``J @ K`` for a SparseJacobian, or ``J @ v`` for dense vectors ``(n,)`` or ``(n, batch)``, the batch last.

        Vectors of NumPy have a product of NumPy, without gradients.
        """
        if isinstance(other, SparseJacobian):
            plan = plan_product(self.pattern, other.pattern)
            product = plan.multiply(self.values, other.values)
            return SparseJacobian(plan.pattern, product, other.in_shape, self.out_shape)
        values: Any = self.values
        if isinstance(other, np.ndarray):
            if not values.is_cpu:
                remedy = "J @ torch.from_numpy(v).to(J.device)"
                raise ValueError(f"the Jacobian is on {values.device} and the array on the CPU: {remedy}")
            values = check_outside_transforms("the Jacobian", values).numpy(force=True)
        elif not isinstance(other, torch.Tensor):
            return NotImplemented
        product = matvec(self.pattern, values, other)
        return product[:, 0] if other.ndim == 1 and self.batch == 1 else product

    def __add__(self, other: Any) -> SparseJacobian:
        if not isinstance(other, SparseJacobian):
            return NotImplemented
        plan = plan_sum([self.pattern, other.pattern])
        same_batch("the left term", self.values, "the right term", other.values)
        values = plan.add([self.values, other.values])
        in_shape, out_shape = _common(self.in_shape, other.in_shape), _common(self.out_shape, other.out_shape)
        return SparseJacobian(plan.pattern, values, in_shape, out_shape)

    def __sub__(self, other: Any) -> SparseJacobian:
        return self + -other if isinstance(other, SparseJacobian) else NotImplemented

    def __neg__(self) -> SparseJacobian:
        return self._scaled(-self.values)

    def __mul__(self, factor: Any) -> SparseJacobian:
        number = factor_of(factor, self.values)
        return NotImplemented if number is None else self._scaled(self.values * number)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> SparseJacobian:
        number = factor_of(divisor, self.values)
        return NotImplemented if number is None else self._scaled(self.values / number)

    def _scaled(self, values: torch.Tensor) -> SparseJacobian:
        """The Jacobian with other values at its entries."""
        return replace(self, pattern=self.pattern.scaled(), values=values)

    def diagonal(self) -> torch.Tensor:
        """The diagonal of each sample, ``(min(shape), batch)``; its ``sum(0)`` is the trace.

        Examples
        --------
        >>> SparseJacobian(Pattern((2, 3), [0, 2, 3], [0, 2, 0]), torch.tensor([[5.0], [6.0], [7.0]])).diagonal()
        tensor([[5.],
                [0.]])
        """
        return diagonal(self.pattern, self.values)

    def norm(self, order: float | str = "fro") -> torch.Tensor:
        """A norm of each sample, ``(batch,)``, part of autograd where the values are.

        Parameters
        ----------
        order : {"fro", 1, inf}
            The Frobenius norm, or the largest sum of magnitudes in a column or, for `math.inf`, in a row.

        Raises
        ------
        ValueError
            For another order, as 2: `scipy.sparse.linalg.svds` of ``J.to_scipy(sample)`` finds singular values.

        Examples
        --------
        >>> J = SparseJacobian(Pattern((2, 2), [0, 1, 3], [0, 0, 1]), torch.tensor([[3.0], [4.0], [-12.0]]))
        >>> J.norm().item(), J.norm(1).item(), J.norm(math.inf).item()
        (13.0, 12.0, 16.0)
        """
        if order == "fro":
            return torch.linalg.vector_norm(self.values, dim=0)
        if order not in (1, math.inf):
            raise ValueError(
                f'order is {order!r}; expected "fro", 1 or math.inf: singular values, as of order 2, are those of '
                "scipy.sparse.linalg.svds(J.to_scipy(sample))"
            )
        matrix = self.T if order == 1 else self
        sums = matrix._scaled(matrix.values.abs()) @ self.values.new_ones(matrix.shape[1], 1)
        # Of a matrix without rows, the largest sum is zero.
        return torch.cat([sums, sums.new_zeros(1, self.batch)]).amax(0)

    def gram(self, weights: torch.Tensor | None = None) -> SparseJacobian:
        """``Jᵀ D J`` of each sample, exactly symmetric.

        Parameters
        ----------
        weights : Tensor, (rows,) or (rows, batch), optional
            The diagonal of `D`, of any sign, with the dtype and device of the values; ones by default. A batch of 1 is
            shared by all samples, and may have the shape of a sample's output.

        Returns
        -------
        SparseJacobian
            The matrix, (columns, columns).

        Raises
        ------
        TypeError, ValueError
            Where the weights do not fit.

        Examples
        --------
        >>> J = SparseJacobian(Pattern((2, 2), [0, 2, 3], [0, 1, 1]), torch.tensor([[1.0], [2.0], [3.0]]))
        >>> J.gram().todense().tolist()
        [[1.0, 2.0], [2.0, 13.0]]
        >>> J.gram(torch.tensor([1.0, -1.0])).todense().tolist()
        [[1.0, 2.0], [2.0, -5.0]]
        >>> J.gram_diagonal().tolist()
        [[1.0], [13.0]]
        """
        return _symmetric_product(self.T, weights, self)

    def outer(self, weights: torch.Tensor | None = None) -> SparseJacobian:
        """``J D Jᵀ`` of each sample, exactly symmetric.

        It is `gram` of ``J.T``, with weights ``(columns,)`` or ``(columns, batch)``.

        Examples
        --------
        >>> J = SparseJacobian(Pattern((2, 2), [0, 2, 3], [0, 1, 1]), torch.tensor([[1.0], [2.0], [3.0]]))
        >>> J.outer().todense().tolist()
        [[5.0, 6.0], [6.0, 9.0]]
        """
        return _symmetric_product(self, weights, self.T)

    def gram_diagonal(self, weights: torch.Tensor | None = None) -> torch.Tensor:
        """The diagonal of ``gram(weights)``, ``(columns, batch)``, without that matrix; its ``sum(0)`` is the trace."""
        return self.T.outer_diagonal(weights)

    def outer_diagonal(self, weights: torch.Tensor | None = None) -> torch.Tensor:
        """The diagonal of ``outer(weights)``, ``(rows, batch)``, without that matrix; its ``sum(0)`` is the trace."""
        if weights is None:
            weights = self.values.new_ones(self.shape[1])
        # Row i of J D Jᵀ has the sum of J[i, k]² D[k] over k on the diagonal.
        return self._scaled(self.values.square()) @ _weights(weights, self).values

    def jvp(self, v: torch.Tensor) -> torch.Tensor:
        """``J v`` of each sample, ``(batch, *out_shape)``, for `v` of ``(batch, *in_shape)`` or ``(batch, in_size)``.

        Where the Jacobian has one sample, also ``out_shape`` for `v` of ``in_shape`` or ``(in_size,)``. Without an
        ``out_shape``, vectors are flat: ``(batch, out_size)``.

        Examples
        --------
        >>> J = SparseJacobian(Pattern((1, 4), [0, 3], [0, 1, 3]), torch.tensor([[1.0], [2.0], [3.0]]))
        >>> J.jvp(torch.ones(2, 2)), J.jvp(torch.ones(5, 2, 2)).shape
        (tensor([6.]), torch.Size([5, 1]))
        """
        return _times(self, "v", v)

    def vjp(self, g: torch.Tensor) -> torch.Tensor:
        """``Jᵀ g`` of each sample, ``(batch, *in_shape)``, for `g` of ``(batch, *out_shape)`` or ``(batch, out_size)``.

        Where the Jacobian has one sample, also ``in_shape`` for `g` of ``out_shape`` or ``(out_size,)``. Without an
        ``in_shape``, vectors are flat: ``(batch, in_size)``.

        Examples
        --------
        >>> import jacsparse
        >>> J = jacsparse.jacobian(torch.nn.Conv2d(3, 8, 3), torch.ones(16, 3, 5, 5))
        >>> J.vjp(torch.ones(16, 8, 3, 3)).shape, J.jvp(torch.ones(16, 3, 5, 5)).shape
        (torch.Size([16, 3, 5, 5]), torch.Size([16, 8, 3, 3]))
        """
        return _times(self.T, "g", g)


def _symmetric_product(left: SparseJacobian, weights: torch.Tensor | None, right: SparseJacobian) -> SparseJacobian:
    """``left D right`` of a matrix and its transpose."""
    product: SparseJacobian = left @ (right if weights is None else _weights(weights, left) @ right)
    if weights is None and not isinstance(product.pattern.structure, Full):
        # Both halves add the same numbers in the same order; those of full factors are added as BLAS likes.
        return product
    # The two halves are rounded differently: (J[k, i] d) J[k, j] is not (J[k, j] d) J[k, i].
    return replace(product, values=(product.values + product.T.values).div_(2))


def _weights(weights: torch.Tensor, matrix: SparseJacobian) -> SparseJacobian:
    """The diagonal matrix of weights, for products with a matrix on its left."""
    size = matrix.shape[1]
    if not isinstance(weights, torch.Tensor):
        raise TypeError(f"weights is {a_type(weights)}; expected a torch.Tensor")
    if weights.numel() == size and weights.shape[:1] != (size,):
        weights = weights.reshape(size)
    if weights.ndim not in (1, 2) or weights.shape[0] != size:
        raise ValueError(f"weights has shape {tuple(weights.shape)}; expected ({size},) or ({size}, batch)")
    diagonal = SparseJacobian.from_diagonal(weights)
    same_batch("weights", diagonal.values, "the Jacobian", matrix.values)
    return diagonal


def _common(one: tuple[int, ...] | None, other: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The shape that two terms have, or the one of them that has one; None where they differ."""
    if one is None or other is None:
        return one if other is None else other
    return one if one == other else None


def _times(matrix: SparseJacobian, name: str, vectors: torch.Tensor) -> torch.Tensor:
    """The matrix of each sample times its vector."""
    x, is_one = by_sample(name, vectors, matrix.shape[1], shape=matrix.in_shape)
    if matrix.batch not in (1, len(x)):
        raise ValueError(f"{name} has a batch of {len(x)}, the Jacobian one of {matrix.batch}")
    product = matvec(matrix.pattern, matrix.values, x.T.contiguous()).T.contiguous()
    shape = matrix.shape[:1] if matrix.out_shape is None else matrix.out_shape
    return product.reshape(shape if is_one else (len(x), *shape))


def unchecked_jacobian(
    pattern: Pattern, values: torch.Tensor, in_shape: tuple[int, ...] | None, out_shape: tuple[int, ...] | None
) -> SparseJacobian:
    """A Jacobian of values that surely are the pattern's, for calls that take microseconds."""
    jacobian = object.__new__(SparseJacobian)
    jacobian.__dict__.update(pattern=pattern, values=values, in_shape=in_shape, out_shape=out_shape)
    return jacobian
