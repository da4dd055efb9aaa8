"""Roots by Newton's method, with factors that are kept as long as they bring corrections down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..runtime import a_type
from ..spgemm import Factorization, SparseJacobian
from ..tracing import name_of
from .gradients import Gradient
from .prepared import PreparedJacobian, prepare_jacobian

#: Factors are kept where a correction is at most this share of the one before.
_FAST = 0.1
#: The shortest part of a step.
_SHORTEST = 2.0**-20


def newton(
    f: Callable[..., Any],
    u: torch.Tensor,
    *args: Any,
    batched: bool | None = None,
    tolerance: float | None = None,
    iterations: int = 100,
) -> torch.Tensor:
    """A root: ``u`` with ``f(u, *args) = 0``, by Newton's method from a first guess, part of autograd.

    Parameters
    ----------
    f : callable, PreparedJacobian or PreparedHessian
        A function of `u`, whose result has the shape of `u`. A function is prepared at each call: for many, pass what
        ``prepare_jacobian(f, u, *args)`` returns. With ``prepare_hessian(f, u, *args)`` the gradient of `f` is zero at
        the result, as it is at a minimum; so it is at a maximum or a saddle, too.
    u : Tensor
        The first guess, on the CPU. It gets no gradient.
    *args
        Further arguments of `f`.
    batched : bool, optional
        As in `prepare_jacobian`: whether `u` has samples along its first axis, each with a root of its own.
    tolerance : float, optional
        A sample has settled where its next correction is at most this share of its largest element; by default the
        root of the dtype's precision, 1.5e-8 in float64. That correction is made too, and leaves a tenth of itself at
        most.
    iterations : int
        The most evaluations of `f`.

    Returns
    -------
    Tensor
        The root, in the shape of `u`. Where `args`, parameters of `f` or other tensors that it reads require grad, the
        root has their gradients, to the first order: the adjoint system is solved with the Jacobian's factors at the
        root.

    Raises
    ------
    ArithmeticError
        Where a sample does not settle.
    TypeError, ValueError
        Where `u` or the result of `f` does not fit, or a Jacobian is singular or not finite. Also as `prepare_jacobian`
        raises.

    Notes
    -----
    A step solves ``J d = f(u)`` and, with the same factors, ``J e = f(u - d)``. Where `e` is not shorter than `d`, by
    the largest element, the sample tries half of the step; where it is at most a tenth of it, `e` is the next step,
    without new factors. This test and the end of the iteration do not depend on units of `f`. Source: P. Deuflhard,
    Newton Methods for Nonlinear Problems, 2004, sections 2.1 and 3.3.

    Examples
    --------
    >>> import torch
    >>> def f(u, p):
    ...     return u**3 + u - p
    >>> p = torch.tensor([2.0, 10.0], dtype=torch.float64, requires_grad=True)
    >>> u = newton(f, torch.ones_like(p), p)
    >>> torch.allclose(u, torch.tensor([1.0, 2.0], dtype=u.dtype))
    True
    >>> torch.autograd.grad(u.sum(), p)[0]                       # 1 / (3 u² + 1)
    tensor([0.2500, 0.0769], dtype=torch.float64)
    """
    if not isinstance(u, torch.Tensor):
        raise TypeError(f"u is {a_type(u)}; expected a torch.Tensor")
    u = u.detach()
    if not isinstance(f, PreparedJacobian):
        f = prepare_jacobian(f, u, *args, batched=batched)
    elif batched is not None:
        raise TypeError(f"batched is {batched}, and the Jacobian is prepared already: leave it out")
    problem = _Problem(f, u, args)
    with torch.no_grad():
        eps = torch.finfo(u.dtype).eps
        root = _settled(problem, eps**0.5 if tolerance is None else tolerance, iterations)
    r = problem.residual(root)
    if not r.requires_grad:
        return root.reshape(u.shape)
    with torch.no_grad():
        factors = problem.factors(root)
    connected: torch.Tensor = _Root.apply(factors, root, r)
    return connected.reshape(u.shape)


class _Root(torch.autograd.Function):
    """The root as a function of the residual at it: from ``J du + dr = 0`` follows ``du = -J⁻¹ dr``."""

    @staticmethod
    def forward(ctx: Any, factors: Factorization, root: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        ctx.factors = factors
        return root

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        if torch.is_grad_enabled():
            raise NotImplementedError("a root of jacsparse.newton is differentiated once; leave out create_graph=True")
        return None, None, -_solved(ctx.factors, gradient, transpose=True)


class _Problem:
    """The function of which a root is asked for, at its other arguments, and factors of its Jacobian.

    Points, residuals and steps are ``(samples, elements)``.
    """

    def __init__(self, prepared: PreparedJacobian[Any], u: torch.Tensor, args: tuple[Any, ...]) -> None:
        self._prepared, self._args, self._shape = prepared, args, u.shape
        self._factors: Factorization | None = None
        self.name = name_of(prepared._f)
        self.start = u.reshape(len(u) if prepared._arguments.batched else 1, -1)

    def residual(self, u: torch.Tensor) -> torch.Tensor:
        """What the function returns at a point."""
        f, u = self._prepared._f, u.reshape(self._shape)
        if isinstance(f, Gradient):
            # It is differentiated once more where the function's value has a gradient by other tensors than this.
            (r, _), with_gradient = f(u.requires_grad_(), *self._args), f.f(u.detach(), *self._args).requires_grad
            r = r if with_gradient else r.detach()
        else:
            r = f(u, *self._args)
        what = f"{r.dtype} of {tuple(r.shape)}" if isinstance(r, torch.Tensor) else a_type(r)
        if what != (expected := f"{u.dtype} of {tuple(self._shape)}"):
            raise ValueError(f"{self.name} returns {what}; Newton's method needs one as the guess, {expected}")
        return r.reshape(self.start.shape)

    def factors(self, u: torch.Tensor) -> Factorization:
        """The factors at a point; their order of elimination is that of earlier ones."""
        values = self._prepared.values(u.reshape(self._shape), *self._args)
        if self._factors is None:
            self._factors = SparseJacobian(self._prepared.pattern, values).factorize()
        else:
            self._factors = self._factors.refactorize(values)
        return self._factors


def _solved(factors: Factorization, r: torch.Tensor, transpose: bool = False) -> torch.Tensor:
    return factors.solve(r[:, :, None], transpose)[:, :, 0]


def _largest(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax(1, keepdim=True)


def _settled(problem: _Problem, tolerance: float, iterations: int) -> torch.Tensor:
    """The point at which all samples have settled."""
    u = problem.start
    r = problem.residual(u)
    if not (finite := r.isfinite().all(1)).all():
        raise ValueError(f"{problem.name} is not finite at the first guess of sample {int(finite.int().argmin())}")
    factors = problem.factors(u)
    step = _solved(factors, r)
    length = torch.ones_like(u[:, :1])
    is_fresh, is_settled = torch.ones_like(length, dtype=torch.bool), torch.zeros_like(length, dtype=torch.bool)
    # No correction is small beside a root of zero.
    least = torch.finfo(u.dtype).eps * _largest(step)
    for _ in range(iterations):
        trial = u - length * step
        r_trial = problem.residual(trial)
        correction = _solved(factors, r_trial)
        before, after = _largest(step), _largest(correction)
        is_small = after <= tolerance * torch.maximum(_largest(trial), least)
        is_whole = length == 1
        is_taken = is_small | (after <= (1 - length / 4) * before)
        is_fast = is_taken & is_whole & (after <= _FAST * before)
        settles = is_small & is_whole
        u = torch.where(is_taken, torch.where(settles, trial - correction, trial), u)
        r = torch.where(is_taken, r_trial, r)
        is_settled |= settles
        if is_settled.all():
            return u
        halves = ~is_taken & is_fresh
        length = torch.where(halves, length / 2, torch.where(is_taken, 2 * length, 1).clamp(max=1))
        if (length < _SHORTEST).any():
            break
        is_fresh &= ~is_taken
        if (~is_fast & ~halves & ~is_settled).any():
            factors = problem.factors(u)
            step, is_fresh = _solved(factors, r), torch.ones_like(is_fresh)
        else:
            step = torch.where(is_fast, correction, step)
        step = torch.where(is_settled, 0, step)
    sample = int(is_settled.int().argmin())
    left, element = float(after[sample]), float(_largest(u)[sample])
    raise ArithmeticError(
        f"Newton's method does not settle in sample {sample}: its largest element is {element:.1e}, and the next "
        f"correction {left:.1e}; begin nearer to a root, as by smaller steps of time or load. Where the "
        f"correction is small already, rounding does not allow a tolerance of {tolerance:.1e}: pass a larger one"
    )
