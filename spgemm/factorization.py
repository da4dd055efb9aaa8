"""A Jacobian's factors, kept for many solutions, and their derivatives."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from ..patterns import Full, Pattern, gathered
from ..runtime import a_type, has_tangent, uncompiled
from .factors import FACTORIZATIONS, FactorPlan, Factors
from .gradients import wants_gradient
from .operands import by_sample, check_outside_transforms, same_device, view
from .plan_cache import PLAN_CACHE

#: Solutions that a kept factorisation is chosen for.
_SOLUTIONS = 20
#: Columns of the inverse that the gradient of a determinant takes together.
_COLUMNS = 64


class _Solution(torch.autograd.Function):
    """``x`` with ``J x = b``, or ``Jᵀ x = b``, for `b` of ``(samples, n, columns)``.

    From ``J dx + dJ x = db`` follow, for a gradient g of x, that of b, which solves ``Jᵀ a = g``, and that of J, which
    is ``-a xᵀ`` at its entries.
    """

    @staticmethod
    def forward(
        ctx: Any, pattern: Pattern, factors: Factors, transposed: bool, values: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        x = factors.solve(b.detach().contiguous(), transposed)
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
        if isinstance(ctx.pattern.structure, Full):
            slopes = (left @ right.mT).movedim(0, 2).flatten(0, 1)
        else:
            rows, columns = (
                gathered(left.movedim(1, 0), ctx.pattern.rows),
                gathered(right.movedim(1, 0), ctx.pattern.indices),
            )
            slopes = (rows * columns).sum(2)
        return None, None, None, -slopes, adjoint


class _LogDeterminant(torch.autograd.Function):
    """The logarithm of ``|det J|``, whose gradient is the transposed inverse at the entries of J."""

    @staticmethod
    def forward(ctx: Any, pattern: Pattern, factors: Factors, values: torch.Tensor) -> torch.Tensor:
        ctx.pattern, ctx.factors = pattern, factors
        ctx.save_for_backward(values)
        return factors.logdet().to(values.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (values,) = ctx.saved_tensors
        by_columns, n, samples = ctx.pattern.T, ctx.pattern.shape[0], values.shape[1]
        slopes = []
        for first in range(0, n, _COLUMNS):
            width = min(_COLUMNS, n - first)
            unit = values.new_zeros((samples, n, width))
            unit[:, first : first + width] = torch.eye(width, dtype=values.dtype)
            inverse = _Solution.apply(ctx.pattern, ctx.factors, True, values, unit)
            entries = slice(by_columns.indptr[first], by_columns.indptr[first + width])
            places = by_columns.indices[entries].astype(np.int64) * width + by_columns.rows[entries] - first
            slopes.append(gathered(inverse.flatten(1).T, places))
        if not slopes:
            return None, None, torch.zeros_like(values)
        return None, None, gathered(torch.cat(slopes), by_columns.transposition) * gradient


class Factorization:
    """The factors of a square Jacobian in each sample, which solve as many systems as are asked for.

    `SparseJacobian.factorize` makes it.

    Attributes
    ----------
    pattern, values
        Those of the Jacobian.

    Examples
    --------
    >>> import torch, jacsparse
    >>> J = jacsparse.jacobian(lambda x: x**2 + x.roll(1), torch.arange(1.0, 101.0, dtype=torch.float64))
    >>> factors = J.factorize()
    >>> factors
    <Factorization 100 × 100, banded (2 below and 2 above the diagonal), batch 1, torch.float64>
    >>> b = torch.ones(100, dtype=torch.float64)
    >>> torch.allclose(J.jvp(factors.solve(b)), b), torch.allclose(J.vjp(factors.solve(b, transpose=True)), b)
    (True, True)
    >>> factors.refactorize(2 * J.values).solve(b)[:3] / factors.solve(b)[:3]
    tensor([0.5000, 0.5000, 0.5000], dtype=torch.float64)
    >>> torch.allclose(factors.logdet(), torch.linalg.slogdet(J.todense())[1])
    True

    Notes
    -----
    ``method="auto"`` takes the way of the least predicted cost of a factorisation and 20 solutions, of one in
    `SparseJacobian.solve`, by the pattern and the number of samples:

    ``"banded"``
        A narrow band, after reverse Cuthill–McKee where that is narrower: LAPACK's ``gbtrf`` for a few samples, for
        many a kernel that factors 16 together.
    ``"block_diagonal"``
        Groups of rows and columns that do not meet, as dense blocks: LAPACK's ``getrf`` by PyTorch, for all samples.
    ``"dense"``
        The whole matrix in the same way.
    ``"superlu"``
        Sparse LU factors by SciPy's SuperLU, one sample after the other on one thread. The factors have more entries
        than the matrix, at worst n²; an order of elimination limits them. It is COLAMD's or, where the pattern is
        symmetric and no element of the diagonal is small after scaling, that of minimum degree, with pivots on the
        diagonal unless others are 10 times larger: implicit time steps and normal equations have far fewer entries so.
    ``"cholesky"``
        Where it is asked for: as ``"block_diagonal"``, of symmetric positive definite matrices, at half the operations.

    All but the last exchange rows. What a pattern decides is kept for later factorisations of any Jacobian with it.
    """

    @uncompiled
    def __init__(self, pattern: Pattern, values: torch.Tensor, plan: FactorPlan) -> None:
        check_outside_transforms("the Jacobian", values)
        if values.device.type != "cpu":
            raise ValueError(f'the Jacobian is on {values.device}; it is factored on the CPU: move it with J.to("cpu")')
        self.pattern, self.values, self._plan = pattern, values, plan
        detached = values.detach().contiguous()
        # A sum tells in one pass that all are finite.
        if not detached.sum().isfinite() and not (finite := detached.isfinite().all(0)).all():
            raise ValueError(f"sample {int(finite.logical_not().nonzero()[0])} of the Jacobian is not finite")
        self._factors = self._plan.factors(detached)

    @property
    def method(self) -> str:
        """The name of the way that was taken."""
        return self._plan.name

    @uncompiled
    def solve(self, b: torch.Tensor, transpose: bool = False) -> torch.Tensor:
        """``x`` with ``J x = b`` in each sample, or ``Jᵀ x = b``: two substitutions for each right-hand side.

        Shapes, errors and derivatives are those of `SparseJacobian.solve`.
        """
        return self._solved(_systems(b, self.pattern.shape[0], self.values), transpose).reshape(b.shape)

    def _solved(self, systems: torch.Tensor, transpose: bool) -> torch.Tensor:
        samples, n, columns = systems.shape
        # A matrix that all samples share has their right-hand sides as columns of one system.
        is_shared = self.values.shape[1] == 1 != samples
        if is_shared:
            systems = systems.movedim(1, 0).reshape(1, n, samples * columns)
        if wants_gradient(self.values, systems) or has_tangent(self.values) or has_tangent(systems):
            x = _Solution.apply(self.pattern, self._factors, bool(transpose), self.values, systems)
        else:
            x = self._factors.solve(systems.detach().contiguous(), bool(transpose))
        return x.reshape(n, samples, columns).movedim(0, 1) if is_shared else x

    def refactorize(self, values: torch.Tensor) -> Factorization:
        """The factors of other values, ``(nnz, batch)`` for any batch, by the same method and order."""
        check_outside_transforms("values", values)
        if values.ndim != 2:
            raise ValueError(f"values has shape {tuple(values.shape)}; expected ({self.pattern.nnz}, batch)")
        view("values", values, self.pattern.nnz)
        return Factorization(self.pattern, values, self._plan)

    @uncompiled
    def logdet(self) -> torch.Tensor:
        """The logarithm of ``|det J|`` of each sample, ``(batch,)``, in autograd; its gradient solves n systems."""
        return _LogDeterminant.apply(self.pattern, self._factors, self.values)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        size, batch = self.pattern.shape[0], self.values.shape[1]
        return f"<Factorization {size} × {size}, {self._plan}, batch {batch}, {self.values.dtype}>"


def factorize(pattern: Pattern, values: torch.Tensor, method: str = "auto") -> Factorization:
    """The factors for many solutions; the arguments are those of `SparseJacobian.factorize`."""
    return Factorization(pattern, values, _planned(pattern, values, method, _SOLUTIONS))


@uncompiled
def solve(pattern: Pattern, values: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``x`` with ``J x = b``, as of `SparseJacobian.solve`; arguments are checked before factors are made."""
    plan = _planned(pattern, values, "auto", 1)
    systems = _systems(b, pattern.shape[0], values)
    return Factorization(pattern, values, plan)._solved(systems, False).reshape(b.shape)


def _planned(pattern: Pattern, values: torch.Tensor, method: str, solutions: int) -> FactorPlan:
    """The plan of a method for a pattern, found again where there was one."""
    rows, columns = pattern.shape
    if rows != columns:
        raise ValueError(
            f"the Jacobian is {rows} × {columns}; only a square one can be solved. For least squares, pass "
            "as_linear_operator() to scipy.sparse.linalg.lsqr"
        )
    if method not in (names := ("auto", *FACTORIZATIONS)):
        raise ValueError(f"method is {method!r}; expected one of {', '.join(names)}")
    ways = [way for way in FACTORIZATIONS.values() if method == way.name or (method == "auto" and way.automatic)]
    plans = [PLAN_CACHE.get(("factors", pattern.digest, way.name), functools.partial(way, pattern)) for way in ways]
    samples = values.shape[1]
    return min(plans, key=lambda plan: plan.cost(samples, solutions))


def _systems(b: torch.Tensor, size: int, values: torch.Tensor) -> torch.Tensor:
    """Right-hand sides as ``(samples, n, columns)``."""
    if not isinstance(b, torch.Tensor):
        raise TypeError(f"b is {a_type(b)}; expected a torch.Tensor")
    same_device("the Jacobian", values, "b", b)
    if b.dtype != values.dtype:
        raise TypeError(f"b is {b.dtype} and the Jacobian is {values.dtype}; convert one of them")
    batch = values.shape[1]
    if b.ndim == 2 and b.shape[0] == size and batch == 1:
        if b.shape[1] == size > 1:
            raise ValueError(
                f"b has shape ({size}, {size}), which may be {size} columns or {size} samples; pass b[None] for "
                "columns, and b[:, :, None] for samples"
            )
        return check_outside_transforms("b", b)[None]
    if b.ndim == 3 and b.shape[1] == size:
        systems = check_outside_transforms("b", b)
    else:
        columns = f", or (batch, {size}, columns)" + (f", or ({size}, columns)" if batch == 1 else "")
        systems = by_sample("b", b, size, columns)[0][:, :, None]
    if batch not in (1, len(systems)):
        raise ValueError(f"b has a batch of {len(systems)}, the Jacobian one of {batch}")
    return systems
