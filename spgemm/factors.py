"""The family of factorisations: ways to solve square systems whose pattern is known.

A way is planned once from the pattern (the symbolic phase), and then factors values of all samples. All have one shape,
so that a test runs over `FACTORIZATIONS`, which ``spgemm/__init__.py`` lists. Right-hand sides and solutions are
contiguous tensors ``(samples, n, columns)``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from ..patterns import Pattern


class Factors(ABC):
    """The factors of each sample's matrix."""

    @abstractmethod
    def solve(self, b: torch.Tensor, transposed: bool) -> torch.Tensor:
        """``x`` with ``J x = b``, or ``Jᵀ x = b``."""

    @abstractmethod
    def logdet(self) -> torch.Tensor:
        """The logarithm of ``|det J|``, (samples,)."""


class FactorPlan(ABC):
    """What a pattern decides of one way to factor its matrices.

    Attributes
    ----------
    patterns : tuple of Pattern
        The square pattern alone.
    nbytes : int
        Bytes of index arrays, without those of the pattern.
    """

    name: ClassVar[str]
    #: Whether ``auto`` compares it.
    automatic: ClassVar[bool] = True
    patterns: tuple[Pattern]
    nbytes: int

    @abstractmethod
    def __init__(self, pattern: Pattern) -> None:
        """The symbolic phase."""

    @abstractmethod
    def cost(self, samples: int, solutions: int) -> float:
        """Predicted microseconds on one thread of a factorisation and `solutions`, by which ``auto`` chooses."""

    @abstractmethod
    def factors(self, values: torch.Tensor) -> Factors:
        """The numeric phase, of finite values ``(nnz, samples)``; ValueError where a sample is singular."""

    def __str__(self) -> str:
        return self.name


def singular(sample: int, why: str = "a pivot is zero") -> ValueError:
    """The error of a matrix without factors."""
    return ValueError(
        f"sample {sample} of the Jacobian is singular, so that it has no LU factors ({why}); "
        "J + a * SparseJacobian.identity(n) shifts a singular one"
    )


#: The ways by name, in the order in which ``auto`` compares them; the package lists them.
FACTORIZATIONS: dict[str, type[FactorPlan]] = {}
