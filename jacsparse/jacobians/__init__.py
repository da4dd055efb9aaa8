"""Sparse Jacobians and Hessians of functions, their patterns, prepared ones, and their comparison with autograd."""

from .evaluation import jacobian, jacobian_pattern
from .hessians import PreparedHessian, hessian, hessian_pattern, prepare_hessian
from .prepared import PreparedJacobian, prepare_jacobian
from .verification import Verification, VerificationError, verify

__all__ = [
    "PreparedHessian",
    "PreparedJacobian",
    "Verification",
    "VerificationError",
    "hessian",
    "hessian_pattern",
    "jacobian",
    "jacobian_pattern",
    "prepare_hessian",
    "prepare_jacobian",
    "verify",
]
