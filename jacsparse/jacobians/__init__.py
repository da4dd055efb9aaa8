"""Sparse Jacobians and Hessians of functions, their patterns, prepared ones, and their comparison with autograd."""

from .evaluation import jacobian
from .hessians import PreparedHessian, hessian, prepare_hessian
from .prepared import PreparedJacobian, prepare_jacobian
from .sparsity import hessian_pattern, jacobian_pattern
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
