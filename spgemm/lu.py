"""Square systems by sparse LU factors: SciPy's SuperLU, on the CPU.

SuperLU factors compressed columns, and the CSR arrays of `J` are the columns of Jᵀ. So it factors Jᵀ, and solves with
`J` by the transposed factors. The order of its columns, which are the rows of `J`, decides how many entries the factors
have. COLAMD finds it from the pattern alone, so that all samples and later calls share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse
import torch
from scipy.sparse.linalg import SuperLU, splu

from ..patterns import Pattern, gathered
from ..runtime import frozen, uncompiled
from .operands import same_device
from .plan_cache import PLAN_CACHE


class Ordering:
    """The rows of a square pattern in the order of their elimination; SuperLU tells it after a first factorisation.

    Attributes
    ----------
    patterns : tuple of Pattern
        The pattern alone, (n, n).
    rows : ndarray of int, (n,)
        The rows in their order.
    """

    def __init__(self, pattern: Pattern, values: np.ndarray) -> None:
        self.patterns = (pattern,)
        factors = splu(_columns(values, pattern.indices, pattern.indptr), permc_spec="COLAMD")
        self.rows = frozen(np.argsort(factors.perm_c))
        ordered = pattern.to_scipy(np.arange(pattern.nnz))[self.rows]
        self._places, self._indices, self._indptr = map(frozen, (ordered.data, ordered.indices, ordered.indptr))

    @property
    def nbytes(self) -> int:
        """Bytes of the index arrays, without those of the pattern."""
        return sum(array.nbytes for array in (self.rows, self._places, self._indices, self._indptr))

    def factors(self, values: np.ndarray) -> SuperLU:
        """The factors of the transposed matrix with these values ``(nnz,)``, its columns in this order."""
        return splu(_columns(values[self._places], self._indices, self._indptr), permc_spec="NATURAL")


def _columns(*arrays: np.ndarray) -> scipy.sparse.csc_array:
    size = len(arrays[2]) - 1
    return scipy.sparse.csc_array(arrays, shape=(size, size))


class Factors:
    """The LU factors of one sample's Jacobian."""

    def __init__(self, pattern: Pattern, values: np.ndarray, sample: int) -> None:
        try:
            ordering = PLAN_CACHE.get(("elimination", pattern.digest), lambda: Ordering(pattern, values))
            self._rows, self._factors = ordering.rows, ordering.factors(values)
        except RuntimeError as error:
            problem = "singular" if np.isfinite(values).all() else "not finite"
            raise ValueError(
                f"sample {sample} of the Jacobian is {problem}, so that it has no LU factors ({error}); "
                "J + a * SparseJacobian.identity(n) shifts a singular one"
            ) from error

    def solve(self, b: np.ndarray, transposed: bool) -> np.ndarray:
        """``x`` with ``J x = b``, or ``Jᵀ x = b``, for each column of `b` ``(n, columns)``."""
        if not transposed:
            return self._factors.solve(b[self._rows], trans="T")  # type: ignore[no-any-return]
        x = np.empty_like(b)
        x[self._rows] = self._factors.solve(b)
        return x


class _Solution(torch.autograd.Function):
    """``x`` with ``J x = b``, or ``Jᵀ x = b``, for `b` of ``(n, samples, columns)``.

    From ``J dx + dJ x = db`` follow, for a gradient g of x, that of b, which solves ``Jᵀ a = g``, and that of J, which
    is ``-a xᵀ`` at its entries.
    """

    @staticmethod
    def forward(
        ctx: Any, pattern: Pattern, factors: Sequence[Factors], transposed: bool, values: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        x = torch.empty_like(b)
        for sample, each in enumerate(factors):
            x[:, sample] = torch.from_numpy(each.solve(b[:, sample].detach().numpy(), transposed))
        ctx.pattern, ctx.factors, ctx.transposed = pattern, factors, transposed
        ctx.save_for_backward(values, x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, x = ctx.saved_tensors
        adjoint = _Solution.apply(ctx.pattern, ctx.factors, not ctx.transposed, values, gradient)
        if not ctx.needs_input_grad[3]:
            return None, None, None, None, adjoint
        left, right = (x, adjoint) if ctx.transposed else (adjoint, x)
        slopes = gathered(left, ctx.pattern.rows) * gathered(right, ctx.pattern.indices)
        return None, None, None, -slopes.sum(2), adjoint


@uncompiled
def solve(pattern: Pattern, values: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``x`` with ``J x = b`` in each sample; the arguments are those of `SparseJacobian.solve`."""
    size, batch = pattern.shape[0], values.shape[1]
    if pattern.shape[0] != pattern.shape[1]:
        raise ValueError(
            f"the Jacobian is {size} × {pattern.shape[1]}; only a square one can be solved. For least squares, pass "
            "as_linear_operator() to scipy.sparse.linalg.lsqr"
        )
    if not isinstance(b, torch.Tensor):
        raise TypeError(f"b is a {type(b).__name__}; expected a torch.Tensor")
    if values.device.type != "cpu":
        raise ValueError(f'the Jacobian is on {values.device}; SuperLU runs on the CPU: move it with J.to("cpu")')
    same_device("the Jacobian", values, "b", b)
    if b.dtype != values.dtype:
        raise TypeError(f"b is {b.dtype} and the Jacobian is {values.dtype}; convert one of them")
    sides = torch.atleast_3d(b)
    if not 1 <= b.ndim <= 3 or sides.shape[1] != size:
        raise ValueError(
            f"b has shape {tuple(b.shape)}; expected ({size},), (batch, {size}) or (batch, {size}, columns)"
        )
    if batch not in (1, len(sides)):
        raise ValueError(f"b has a batch of {len(sides)}, the Jacobian one of {batch}")
    rows_first = sides.movedim(1, 0)
    # A matrix that all samples share is factored once, and their right-hand sides are columns of one system.
    systems = rows_first.flatten(1)[:, None] if batch == 1 else rows_first
    samples = np.ascontiguousarray(values.detach().numpy().T)
    factors = [Factors(pattern, sample, number) for number, sample in enumerate(samples)]
    x = _Solution.apply(pattern, factors, False, values, systems.contiguous())
    return x.reshape(rows_first.shape).movedim(0, 1).reshape(b.shape)  # type: ignore[no-any-return]
