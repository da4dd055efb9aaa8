"""The matrices of an accumulation: what each kind is computed from, and how."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..patterns import Full, Pattern
from ..spgemm import ProductPlan, SumPlan, planned

#: Multiply-adds of a sparse matrix times a full one, from which on the samples of a batch are taken one by one.
LARGE_PRODUCT = 500_000

#: The values of a leaf, by its key.
LeafValues = Callable[[Any], torch.Tensor]
#: The product of an interval of stages, by its key, and a matrix ``(rows, columns, batch)``.
PullBack = Callable[[Any, torch.Tensor], torch.Tensor]


@dataclass
class Matrix(ABC):
    """A matrix of an `Accumulation`."""

    pattern: Pattern
    #: The positions that have values: those of the pattern, or all.
    stored: Pattern
    #: The numbers of the matrices that it is computed from.
    operands: tuple[int, ...]

    #: Of one sample.
    multiply_adds = 0
    #: Whether one sample alone may be computed.
    takes_one_sample = True
    #: Whether it is the product of a sparse and a full matrix; whether that takes many multiply-adds; and whether it is
    #: a product that mostly moves and scales values, and many.
    multiplies_full = is_large = moves = False

    @abstractmethod
    def values(self, operands: Sequence[torch.Tensor], leaf: LeafValues, pull: PullBack | None) -> torch.Tensor:
        """The values on the stored positions, from those of the operands."""

    def count(self, batch: int, counts: Sequence[int], is_shared: Callable[[Any], bool]) -> int:
        """For how many of so many samples it is computed, from how many its operands are: 1 where all share them."""
        return max(counts)


@dataclass
class Leaf(Matrix):
    """A matrix whose values the caller computes for its key."""

    key: Hashable

    def values(self, operands: Sequence[torch.Tensor], leaf: LeafValues, pull: PullBack | None) -> torch.Tensor:
        return leaf(self.key)

    def count(self, batch: int, counts: Sequence[int], is_shared: Callable[[Any], bool]) -> int:
        return 1 if is_shared(self.key) else batch


@dataclass
class MatrixProduct(Matrix):
    """The product of two matrices; `factors` are the positions that they are stored on."""

    factors: tuple[Pattern, Pattern]
    multiply_adds: int

    @property
    def multiplies_full(self) -> bool:  # type: ignore[override]
        left, right = self.factors
        return isinstance(right.structure, Full) and not isinstance(left.structure, Full)

    @property
    def is_large(self) -> bool:  # type: ignore[override]
        left, right = self.factors
        return self.multiplies_full and left.nnz * right.shape[1] >= LARGE_PRODUCT

    @property
    def moves(self) -> bool:  # type: ignore[override]
        return 10 * self.stored.nnz >= LARGE_PRODUCT and self.multiply_adds <= 2 * self.stored.nnz

    @cached_property
    def plan(self) -> ProductPlan:
        return planned(*self.factors, self.stored)

    def values(self, operands: Sequence[torch.Tensor], leaf: LeafValues, pull: PullBack | None) -> torch.Tensor:
        return self.plan.multiply(*operands)


@dataclass
class Sum(Matrix):
    """The sum of matrices; `terms` are the positions that they are stored on."""

    terms: tuple[Pattern, ...]

    @cached_property
    def plan(self) -> SumPlan:
        return SumPlan(self.terms, self.stored)

    def values(self, operands: Sequence[torch.Tensor], leaf: LeafValues, pull: PullBack | None) -> torch.Tensor:
        return self.plan.add(operands)


@dataclass
class Pulled(Matrix):
    """The product of an interval of stages and a full matrix, computed by the operators' own backward."""

    #: The first and the last stage, and the shape of the full matrix.
    key: tuple[int, int]
    shape: tuple[int, int]

    takes_one_sample = False

    def values(self, operands: Sequence[torch.Tensor], leaf: LeafValues, pull: PullBack | None) -> torch.Tensor:
        assert pull is not None
        (right,) = operands
        return pull(self.key, right.reshape(*self.shape, right.shape[1])).flatten(0, 1)

    def count(self, batch: int, counts: Sequence[int], is_shared: Callable[[Any], bool]) -> int:
        return batch
