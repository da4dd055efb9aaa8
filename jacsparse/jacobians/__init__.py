"""Sparse Jacobians of modules, their patterns, and their comparison with autograd."""

from .evaluation import jacobian, jacobian_pattern
from .verification import Verification, VerificationError, verify

__all__ = ["Verification", "VerificationError", "jacobian", "jacobian_pattern", "verify"]
