"""Products with sparse matrices as operators on their elements, so that patterns have the stored elements alone.

With ``S`` of elements ``v_e`` at ``(i_e, j_e)``, ``(S X)[i] = Σ_{e: i_e = i} v_e · X[j_e]``: rows are selected, scaled
and added. The indices are constants, as those of any selection; the elements ``v`` are a factor like another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..patterns import UnsupportedOperatorError

aten = torch.ops.aten
#: For each product, the places of its summand and of its factors among the arguments.
_FACTORS: dict[Any, tuple[int | None, int, int]] = {
    aten.mm.default: (None, 0, 1),
    aten.mv.default: (None, 0, 1),
    aten.addmm.default: (0, 1, 2),
    aten.addmv.default: (0, 1, 2),
    aten._sparse_addmm.default: (0, 1, 2),
}


class MadeMatrix(NamedTuple):
    """A sparse matrix that a run made: its indices, ``(2, elements)``, and values; with `swapped`, its transpose."""

    indices: torch.Tensor
    values: torch.Tensor
    shape: tuple[int, ...]
    swapped: bool = False

    @classmethod
    def by(
        cls, overload: Any, args: Sequence[Any], read: Callable[[Any], torch.Tensor], of: Callable[[Any], MadeMatrix]
    ) -> MadeMatrix:
        """The matrix that a call made of tensors, which `read` gives, or of another matrix, which `of` gives."""
        if overload is aten._sparse_coo_tensor_with_dims_and_tensors.default and list(args[:2]) == [2, 0]:
            return cls(read(args[3]), read(args[4]), tuple(args[2]))
        if overload in _SAME:
            return of(args[0])
        if overload in _SWAPS:
            matrix = of(args[0])
            return matrix._replace(swapped=matrix.swapped != _SWAPS[overload](*args[1:]))
        raise UnsupportedOperatorError(
            f"{overload} makes a sparse tensor of what depends on the input; make a matrix by torch.sparse_coo_tensor, "
            "of values that are computed before, and multiply by it with @, torch.mm, torch.mv or torch.sparse.mm"
        )


class StoredElements(NamedTuple):
    """A sparse matrix: row, column and value of each stored element."""

    rows: torch.Tensor
    columns: torch.Tensor
    values: torch.Tensor
    shape: tuple[int, ...]

    @classmethod
    def of(cls, matrix: torch.Tensor | MadeMatrix) -> StoredElements:
        """The elements of a matrix in one of PyTorch's sparse layouts, but for those of blocks."""
        shape = tuple(matrix.shape)
        if isinstance(matrix, MadeMatrix):
            rows, columns = matrix.indices.unbind(0)
            elements = cls(rows, columns, matrix.values, shape)
            return elements.T if matrix.swapped else elements
        if matrix.layout == torch.sparse_coo and matrix.sparse_dim() == 2 == len(shape):
            rows, columns = matrix._indices().unbind(0)
            return cls(rows, columns, matrix._values(), shape)
        if matrix.layout == torch.sparse_csr and len(shape) == 2:
            return cls(_lines(matrix.crow_indices()), matrix.col_indices(), matrix.values(), shape)
        if matrix.layout == torch.sparse_csc and len(shape) == 2:
            return cls(matrix.row_indices(), _lines(matrix.ccol_indices()), matrix.values(), shape)
        raise UnsupportedOperatorError(
            f"a sparse tensor of shape {shape} has the layout {matrix.layout}; make it a matrix in COO, CSR or CSC form"
        )

    @property
    def T(self) -> StoredElements:
        return StoredElements(self.columns, self.rows, self.values, self.shape[::-1])

    def dense(self) -> torch.Tensor:
        """The matrix as a dense tensor; elements at one place are added."""
        zeros = self.values.new_zeros(self.shape)
        return zeros.index_put((self.rows, self.columns), self.values, accumulate=True)

    def product(self, dense: torch.Tensor, axis: int) -> torch.Tensor:
        """The matrix times each line of a dense tensor along an axis, of the tensor's two at most."""
        selected = dense.index_select(axis, self.columns)
        scaled = selected * (self.values[:, None] if axis == 0 < dense.ndim - 1 else self.values)
        shape = [self.shape[0] if place == axis else size for place, size in enumerate(dense.shape)]
        return dense.new_zeros(shape).index_add(axis, self.rows, scaled)


def _lines(starts: torch.Tensor) -> torch.Tensor:
    """The line of each element, from the starts of the lines."""
    counts = starts.diff()
    return torch.arange(len(counts), device=starts.device).repeat_interleave(counts)


def is_sparse(value: Any) -> bool:
    """Whether a value is a tensor, or stands for one, that stores some of its elements."""
    return isinstance(value, (StoredElements, MadeMatrix)) or (
        isinstance(value, torch.Tensor) and value.layout != torch.strided
    )


def operator_on_elements(overload: Any, args: Sequence[Any]) -> Callable[..., Any]:
    """An operator on a sparse matrix, or on the elements of one, as operators on its elements.

    Raises
    ------
    UnsupportedOperatorError
        Where it is neither a product with a dense matrix, nor a transpose or the dense form of one.
    """
    if overload in _FACTORS:
        return _product(*_FACTORS[overload])
    if overload is aten._to_dense.default:
        return lambda matrix, *_, **__: StoredElements.of(matrix).dense()
    if overload in _SWAPS and isinstance(args[0], StoredElements):
        return lambda matrix, *axes: matrix.T if _SWAPS[overload](*axes) else matrix
    raise UnsupportedOperatorError(
        f"{overload} takes a sparse tensor; multiply by it with @, torch.mm, torch.mv or torch.sparse.mm, or work on "
        "its values as a dense tensor"
    )


#: What returns a matrix with the same elements; those at one place may have been added.
_SAME = (aten._coalesce.default, aten.alias.default, aten.clone.default)
#: Whether a transpose swaps the two axes.
_SWAPS: dict[Any, Callable[..., bool]] = {
    aten.t.default: lambda: True,
    aten.transpose.int: lambda first, second: first % 2 != second % 2,
    aten.permute.default: lambda axes: axes[0] % 2 == 1,
}


def _product(summand: int | None, left: int, right: int) -> Callable[..., torch.Tensor]:
    def product(*args: Any, beta: float = 1, alpha: float = 1) -> torch.Tensor:
        sparse, dense = (left, right) if is_sparse(args[left]) else (right, left)
        matrix = args[sparse] if isinstance(args[sparse], StoredElements) else StoredElements.of(args[sparse])
        result = matrix.product(args[dense], 0) if sparse == left else matrix.T.product(args[dense], 1)
        result = result if alpha == 1 else result * alpha
        if summand is None or beta == 0:
            return result
        return result + (args[summand] if beta == 1 else args[summand] * beta)

    return product


def indices_of(matrix: torch.Tensor) -> torch.Tensor:
    """The indices of a sparse tensor's elements, in one vector."""
    if matrix.layout == torch.sparse_coo:
        return matrix._indices().reshape(-1)
    by_rows = matrix.layout in (torch.sparse_csr, torch.sparse_bsr)
    starts, others = ("crow_indices", "col_indices") if by_rows else ("ccol_indices", "row_indices")
    return torch.cat([getattr(matrix, starts)().reshape(-1), getattr(matrix, others)().reshape(-1)])
