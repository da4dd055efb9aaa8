"""Solutions of linear systems as products with an inverse, whose derivatives are those of the solutions.

With ``X = A⁻¹ B`` and ``X₀``, the solution as a constant, ``A⁻¹ (B - A X₀)`` has the derivative of ``X``::

    dX = A⁻¹ (dB - dA X₀)

(Giles, "Collected matrix derivative results for forward and reverse mode algorithmic differentiation", section 2.3.1).
Only derivatives count: the values of such a product are not the solution's. PyTorch's backward passes solve systems in
place of multiplying by an inverse, so that they overflow at other matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _identity(like: torch.Tensor) -> torch.Tensor:
    """The identity of the size of one matrix."""
    return torch.eye(like.shape[-1], device=like.device).to(like)


def _inverse(matrix: torch.Tensor) -> torch.Tensor:
    """The inverse of a matrix as a constant."""
    factors, pivots, _ = torch.linalg.lu_factor_ex(matrix.detach())
    return torch.linalg.lu_solve(factors, pivots, _identity(matrix).expand(matrix.shape))


def _by_inverse(inverse: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, left: bool) -> torch.Tensor:
    """``A⁻¹ (B - A X₀)``, or ``(B - X₀ A) A⁻¹``."""
    if not left:
        return (b - b.detach() @ inverse @ a) @ inverse
    return inverse @ (b - a @ (inverse @ b.detach()))


def solve(a: torch.Tensor, b: torch.Tensor, *, left: bool = True, check_errors: bool = False) -> list[torch.Tensor]:
    """``torch.linalg.solve_ex``: the solution of ``A X = B``, or of ``X A = B``."""
    is_vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    if is_vector:
        return [_by_inverse(_inverse(a), a, b[..., None], left=left)[..., 0]]
    return [_by_inverse(_inverse(a), a, b, left=left)]


def solve_triangular(
    a: torch.Tensor, b: torch.Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> torch.Tensor:
    """``torch.linalg.solve_triangular``, which reads one triangle of the matrix, or takes its diagonal for ones."""
    triangle = torch.triu if upper else torch.tril
    a = triangle(a, (1 if upper else -1) if unitriangular else 0)
    if unitriangular:
        a = a + _identity(a)
    return _by_inverse(triangle(_inverse(a)), a, b, left=left)


def inverse(a: torch.Tensor, *, check_errors: bool = False) -> list[torch.Tensor]:
    """``torch.linalg.inv_ex``, where ``B`` is the identity."""
    constant = _inverse(a)
    return [-constant @ (a @ constant)]


def solve_by_triangle(b: torch.Tensor, a: torch.Tensor, upper: bool = False) -> torch.Tensor:
    """``torch.cholesky_solve``: the solution of ``L Lᵀ X = B``, or of ``Uᵀ U X = B``."""
    lower = a.mT if upper else a
    x = torch.linalg.solve_triangular(lower, b, upper=False)
    return torch.linalg.solve_triangular(lower.mT, x, upper=True)


def inverse_by_triangle(a: torch.Tensor, upper: bool = False) -> torch.Tensor:
    """``torch.cholesky_inverse``, where ``B`` is the identity."""
    return solve_by_triangle(_identity(a).expand(a.shape), a, upper)


def factors(a: torch.Tensor, *, pivot: bool = True) -> tuple[torch.Tensor, ...]:
    """``torch.linalg.lu``, by the operator that returns both triangles as one tensor."""
    both, pivots, _ = torch.linalg.lu_factor_ex(a, pivot=pivot)
    return torch.lu_unpack(both, pivots)


def least_squares(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> list[torch.Tensor]:
    """``torch.linalg.lstsq``, of a matrix of full rank."""
    return [torch.linalg.pinv(a) @ b]


aten: Any = torch.ops.aten
SOLVES: dict[Any, Callable[..., Any]] = {
    aten._linalg_solve_ex.default: solve,
    aten.linalg_solve_triangular.default: solve_triangular,
    aten.linalg_inv_ex.default: inverse,
    aten.cholesky_solve.default: solve_by_triangle,
    aten.cholesky_inverse.default: inverse_by_triangle,
    aten.linalg_lu.default: factors,
    aten.linalg_lstsq.default: least_squares,
}
