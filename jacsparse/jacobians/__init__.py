"""Sparse Jacobians of functions, their patterns, prepared ones, and their comparison with autograd."""

from .evaluation import jacobian, jacobian_pattern
from .prepared import PreparedJacobian, prepare_jacobian
from .verification import Verification, VerificationError, verify

__all__ = [
    "PreparedJacobian",
    "Verification",
    "VerificationError",
    "jacobian",
    "jacobian_pattern",
    "prepare_jacobian",
    "verify",
]
