"""Affine maps of states, ``s → A s + b``: what steps of a recurrence or stages of a chain do, and their composition."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import ClassVar, Self

import torch

from .patterns import Identity, Pattern
from .spgemm import matvec, plan_product

__all__ = ["AffineMaps", "DenseMaps", "DiagonalMaps", "SparseMaps", "compose"]


class AffineMaps(ABC):
    """Affine maps of the states of a batch; the maps lie along `axis` of each tensor.

    Parameters
    ----------
    matrices : Tensor or None
        The matrices of the maps, or their values; None where the maps are constant.
    offsets : Tensor or None
        What the maps add, of the shape of the states; None where they add nothing.
    """

    axis: ClassVar[int] = 0

    def __init__(self, matrices: torch.Tensor | None, offsets: torch.Tensor | None) -> None:
        if matrices is None and offsets is None:
            raise ValueError("there are neither matrices nor offsets; pass one of them")
        self.matrices, self.offsets = matrices, offsets

    def __repr__(self) -> str:
        parts = (("matrices", self.matrices), ("offsets", self.offsets))
        shapes = (f"{name} {tuple(tensor.shape)}" for name, tensor in parts if tensor is not None)
        return f"<{type(self).__name__} {', '.join(shapes)}>"

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The matrices and the offsets, without those that are None."""
        return tuple(tensor for tensor in (self.matrices, self.offsets) if tensor is not None)

    def like(self, matrices: torch.Tensor | None, offsets: torch.Tensor | None) -> Self:
        """Maps of the same form."""
        return type(self)(matrices, offsets)

    def take(self, places: slice | torch.Tensor) -> Self:
        """Some of the maps."""
        at = (*(slice(None),) * self.axis, places)
        return self.like(*(tensor if tensor is None else tensor[at] for tensor in (self.matrices, self.offsets)))

    def split(self, samples: int) -> list[Self]:
        """The maps of at most so many samples at a time, all of which have offsets and matrices."""
        axis = self.axis + 1
        parts = zip(*(tensor.split(samples, axis) for tensor in self.tensors), strict=True)
        return [self.like(matrices, offsets) for matrices, offsets in parts]

    def composed(self) -> Self:
        """One map that does what all maps do one after another, by products of neighbours in ⌈log2⌉ levels."""
        maps, tail = self, None
        while (count := maps.tensors[0].shape[self.axis]) > 1:
            if count % 2:
                last, maps = maps.take(slice(count - 1, None)), maps.take(slice(count - 1))
                tail = last if tail is None else tail.after(last)
            maps = maps.take(slice(1, None, 2)).after(maps.take(slice(0, None, 2)))
        return maps if tail is None else tail.after(maps)

    def apply(self, states: torch.Tensor) -> torch.Tensor:
        """The states after the maps, from those before."""
        if self.matrices is None:
            assert self.offsets is not None
            return self.offsets
        product = self._product(states)
        return product if self.offsets is None else product + self.offsets

    def after(self, earlier: Self) -> Self:
        """The maps that do what `earlier` does and then what these do."""
        offsets = self.offsets if earlier.offsets is None else self.apply(earlier.offsets)
        if self.matrices is None or earlier.matrices is None:
            return self.like(None, offsets)
        return self._composed(earlier, offsets)

    @abstractmethod
    def identity(self) -> Self:
        """The map that changes nothing, of as many elements and samples, in as many places."""

    @abstractmethod
    def _product(self, states: torch.Tensor) -> torch.Tensor:
        """The products of the matrices and states."""

    @abstractmethod
    def _composed(self, earlier: Self, offsets: torch.Tensor | None) -> Self:
        """Maps with the products of these matrices and earlier ones."""


class DenseMaps(AffineMaps):
    """Maps ``s @ matrix + offset`` of rows: ``(maps, batch, n, n)`` and ``(maps, batch, n)``."""

    def identity(self) -> Self:
        like = self.tensors[0]
        *places, n = (self.tensors[-1] if self.offsets is not None else like[..., 0]).shape
        return self.like(torch.eye(n, dtype=like.dtype, device=like.device).expand(*places, n, n), None)

    def _product(self, states: torch.Tensor) -> torch.Tensor:
        assert self.matrices is not None
        return (states.unsqueeze(-2) @ self.matrices).squeeze(-2)

    def _composed(self, earlier: Self, offsets: torch.Tensor | None) -> Self:
        assert self.matrices is not None and earlier.matrices is not None
        return self.like(earlier.matrices @ self.matrices, offsets)


class DiagonalMaps(AffineMaps):
    """Maps ``s * diagonal + offset``: both ``(maps, batch, n)``."""

    def identity(self) -> Self:
        return self.like(torch.ones_like(self.tensors[0]), None)

    def _product(self, states: torch.Tensor) -> torch.Tensor:
        assert self.matrices is not None
        return states * self.matrices

    def _composed(self, earlier: Self, offsets: torch.Tensor | None) -> Self:
        assert self.matrices is not None and earlier.matrices is not None
        return self.like(earlier.matrices * self.matrices, offsets)


class SparseMaps(AffineMaps):
    """Maps ``A s + offset`` of columns, of one pattern: ``(nnz, maps, batch)`` and ``(rows, maps, batch)``.

    Parameters
    ----------
    pattern : Pattern
        Of the matrices; where the maps are constant, of those that made them so, or any with as many rows.
    matrices, offsets : Tensor or None
        As of `AffineMaps`. A batch of 1 is shared by all samples.
    """

    axis = 1

    def __init__(self, pattern: Pattern, matrices: torch.Tensor | None, offsets: torch.Tensor | None) -> None:
        super().__init__(matrices, offsets)
        self.pattern = pattern

    def like(self, matrices: torch.Tensor | None, offsets: torch.Tensor | None) -> Self:
        return type(self)(self.pattern, matrices, offsets)

    def identity(self) -> Self:
        """The map that changes nothing before these maps."""
        like, pattern = self.tensors[0], Pattern.of(Identity(self.pattern.shape[1]))
        return type(self)(pattern, like.new_ones(pattern.nnz, *like.shape[1:]), None)

    def _product(self, states: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor
        shape, (values, columns) = _columns(self.matrices, states)
        product = matvec(self.pattern, values, columns)
        return product.reshape(self.pattern.shape[0], *shape)

    def _composed(self, earlier: Self, offsets: torch.Tensor | None) -> Self:
        plan = _product_plan(self.pattern, earlier.pattern)
        shape, factors = _columns(self.matrices, earlier.matrices)
        return type(self)(plan.pattern, plan.multiply(*factors).reshape(plan.pattern.nnz, *shape), offsets)


#: A few patterns for each level of a scan.
_product_plan = functools.lru_cache(maxsize=64)(plan_product)


def _columns(*operands: torch.Tensor | None) -> tuple[torch.Size, list[torch.Tensor]]:
    """The maps and samples of operands together, and the operands with these as columns; one that all share has one."""
    tensors = [operand for operand in operands if operand is not None]
    shape = torch.broadcast_shapes(*(tensor.shape[1:] for tensor in tensors))
    shared = torch.Size([1] * len(shape))
    return shape, [
        (tensor if tensor.shape[1:] == shared else tensor.expand(-1, *shape)).flatten(1) for tensor in tensors
    ]


def compose(earlier: AffineMaps, later: AffineMaps) -> AffineMaps:
    """The maps that do what `earlier` does and then what `later` does, as scans take it."""
    return later.after(earlier)
