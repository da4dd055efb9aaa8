"""The family of methods: ways to compute ``C = A B`` when all three patterns are known.

A method is built once from the patterns (the symbolic phase) and then only moves numbers. All methods have one shape,
so that a test runs over `METHODS`, which ``spgemm/__init__.py`` lists. Values are C-contiguous arrays
``(nnz, batch)``, or ``(nnz, 1)`` where all samples share them. Kernels work on rows of `C`, add in the order of A's and
B's entries and hold no lock, so that results have the same bits on any number of threads and by any method. For two
full factors the order is BLAS's.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch

from ..patterns import Pattern
from .symbolic import row_work

#: A product of values on a device: called with those of both factors and of the product, it checks nothing.
BoundProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]


class Product:
    """The patterns of a product, its multiply-adds, and their running total over C's rows."""

    def __init__(self, a: Pattern, b: Pattern, c: Pattern, multiply_adds: int, work: np.ndarray | None) -> None:
        self.a, self.b, self.c = a, b, c
        self.multiply_adds = multiply_adds
        if work is not None:
            self.__dict__["work"] = work

    @property
    def row_nbytes(self) -> int:
        """Bytes of an int64 array ``(rows + 1,)``."""
        return 8 * (self.a.shape[0] + 1)

    @functools.cached_property
    def work(self) -> np.ndarray:
        """Running total of the multiply-adds over C's rows: int64, ``(rows + 1,)``."""
        return row_work(self.a, self.b)

    @functools.cached_property
    def transposed_work(self) -> np.ndarray:
        """`work` of the transposed product ``Cᵀ = Bᵀ Aᵀ``."""
        return row_work(self.b.T, self.a.T)


class Method(ABC):
    """One way to multiply."""

    name: ClassVar[str]
    #: Whether ``auto`` tries it, in the order of `METHODS`.
    automatic: ClassVar[bool] = False
    #: The name of the method that multiplies in its place on CUDA devices, where that one's index arrays fit.
    device_substitute: ClassVar[str | None] = None
    #: Whether one factor is passed as winners, which are row numbers; `winners` names that factor.
    selects: ClassVar[bool] = False

    @classmethod
    def obstacle(cls, product: Product) -> str | None:
        """Why this method cannot compute this product; None where it can."""
        return None

    @classmethod
    @abstractmethod
    def index_nbytes(cls, product: Product) -> int:
        """Bytes of the method's index arrays, without those of the patterns."""

    @abstractmethod
    def __init__(self, product: Product) -> None:
        """The symbolic phase; index arrays that only a CPU needs may be made at the first product there."""

    @abstractmethod
    def multiply(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        """The numeric phase: write all of `c`, which is not empty."""

    def bind(self, device: torch.device, dtype: torch.dtype, batches: tuple[int, int]) -> BoundProduct:
        """The numeric phase on a CUDA device, for factors with these batches: writes all of `c`, which is not empty."""
        raise ValueError(f"the method {self.name} has no kernels for CUDA devices; plan with another method")

    @property
    def winners(self) -> str | None:
        """The factor whose values are winners, ``a`` or ``b``; None where both are ordinary."""
        return None


#: The methods by name; the package lists them.
METHODS: dict[str, type[Method]] = {}
