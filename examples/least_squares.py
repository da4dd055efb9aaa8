"""Nonlinear least squares by Levenberg and Marquardt, with sparse Jacobians and normal equations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

import jacsparse


def levenberg_marquardt(
    residuals: Callable[..., torch.Tensor],
    start: Sequence[torch.Tensor],
    jacobian: jacsparse.PreparedJacobian | None = None,
    *,
    iterations: int = 100,
    tolerance: float = 1e-10,
) -> tuple[list[torch.Tensor], list[float]]:
    """The arguments of least squares, and half the sum of squares at the start and after each step that lowered it.

    Each step solves ``(JᵀJ + λ D) step = -Jᵀr``, which is regular though JᵀJ may be singular; `D` is the largest
    diagonal of JᵀJ so far (Moré, "The Levenberg-Marquardt algorithm", 1978). A step that lowers the sum by less than
    `tolerance` of it is the last. The Jacobian, by all arguments, is prepared where it is left out.
    """
    if jacobian is None:
        jacobian = jacsparse.prepare_jacobian(residuals, *start, argnums=tuple(range(len(start))))
    x, r, damping = list(start), residuals(*start).flatten(), 1e-3
    J, costs = jacobian(*x), [0.5 * float(r @ r)]
    scales = J.gram_diagonal()
    for _ in range(iterations):
        scales = torch.maximum(scales, J.gram_diagonal())
        step = -(J.gram() + damping * jacsparse.SparseJacobian.from_diagonal(scales)).solve(J.vjp(r))
        parts = zip(x, step.split([each.numel() for each in x]), strict=True)
        trial = [each + part.reshape(each.shape) for each, part in parts]
        r_trial = residuals(*trial).flatten()
        cost = 0.5 * float(r_trial @ r_trial)
        if not cost < costs[-1]:
            damping *= 4
            continue
        # Less would be lost in the rounding of JᵀJ.
        x, r, damping = trial, r_trial, max(damping / 4, 1e-10)
        costs.append(cost)
        if costs[-2] - cost <= tolerance * cost:
            break
        J = jacobian(*x)
    return x, costs
