"""Products with sparse matrices as operators on their stored elements, so that patterns have these positions alone.

With ``S`` of elements ``v_e`` at ``(i_e, j_e)``, ``(S X)[i] = Σ_{e: i_e = i} v_e · X[j_e]``: rows are selected, scaled
and added. The indices are constants, as those of any selection; the elements ``v`` are a factor like another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten
#: For each product, the places of its summand and of its factors among the arguments.
_FACTORS: dict[Any, tuple[int | None, int, int]] = {
    aten.mm.default: (None, 0, 1),
    aten.mv.default: (None, 0, 1),
    aten.addmm.default: (0, 1, 2),
    aten.addmv.default: (0, 1, 2),
    aten._sparse_addmm.default: (0, 1, 2),
}
_LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)


def is_sparse(value: Any) -> bool:
    """Whether a value is a tensor that stores some of its elements."""
    return isinstance(value, torch.Tensor) and value.layout != torch.strided


def product_of_elements(overload: Any, args: Sequence[Any]) -> Callable[..., torch.Tensor] | None:
    """The product that a call takes of a sparse and a dense matrix, by its elements; None for any other call."""
    places = _FACTORS.get(overload)
    if places is None or not any(map(is_sparse, args)):
        return None
    summand, left, right = places
    sparse, dense = (left, right) if is_sparse(args[left]) else (right, left)
    if args[sparse].layout not in _LAYOUTS or is_sparse(args[dense]):
        return None

    def product(*args: Any, beta: float = 1, alpha: float = 1) -> torch.Tensor:
        rows, columns, values = _elements(args[sparse])
        into, out, axis = (columns, rows, 0) if sparse == left else (rows, columns, 1)
        selected = args[dense].index_select(axis, into)
        scaled = selected * (values[:, None] if axis == 0 and selected.ndim == 2 else values)
        shape = list(selected.shape)
        shape[axis] = args[sparse].shape[axis]
        result = selected.new_zeros(shape).index_add(axis, out, scaled)
        result = result if alpha == 1 else result * alpha
        return result if summand is None or beta == 0 else result + (args[summand] if beta == 1 else args[summand] * beta)

    return product


def _elements(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row, column and value of each stored element."""
    if matrix.layout == torch.sparse_coo:
        rows, columns = matrix._indices().unbind(0)
        return rows, columns, matrix._values()
    if matrix.layout == torch.sparse_csr:
        return _repeated(matrix.crow_indices()), matrix.col_indices(), matrix.values()
    return matrix.row_indices(), _repeated(matrix.ccol_indices()), matrix.values()


def _repeated(starts: torch.Tensor) -> torch.Tensor:
    """The line of each element, from the starts of the lines."""
    counts = starts.diff()
    return torch.arange(len(counts), device=starts.device).repeat_interleave(counts)


def indices_of(matrix: torch.Tensor) -> torch.Tensor:
    """The indices of a sparse tensor's elements, in one vector."""
    if matrix.layout == torch.sparse_coo:
        return matrix._indices().reshape(-1)
    by_rows = matrix.layout in (torch.sparse_csr, torch.sparse_bsr)
    starts, others = ("crow_indices", "col_indices") if by_rows else ("ccol_indices", "row_indices")
    return torch.cat([getattr(matrix, starts)().reshape(-1), getattr(matrix, others)().reshape(-1)])
