"""Blocks of samples that are computed when they are read."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch


class Deferred(ABC):
    """Blocks that are not computed yet, so that what follows may become part of the kernel."""

    #: Another summand of it.
    other: torch.Tensor | None = None
    shape: tuple[int, ...]
    dtype: torch.dtype
    _parameters: Sequence[torch.Tensor] = ()
    _writes = 0
    _blocks: torch.Tensor | None = None

    @property
    def blocks(self) -> torch.Tensor:
        """The blocks, computed once."""
        if self._blocks is None:
            self.check()
            self._blocks = self.compute()
        return self._blocks

    def reading(self, *parameters: torch.Tensor | None) -> Self:
        """This one, which is computed from parameters as they are now."""
        self._parameters = [each for each in parameters if each is not None and not each.is_inference()]
        self._writes = sum([each._version for each in self._parameters])
        return self

    def check(self) -> None:
        """Refuse to compute from other parameters than the layer had when it ran."""
        if sum([each._version for each in self._parameters]) != self._writes:
            raise RuntimeError(
                "an activation of a sparse model is read after its layer's parameters were written to, as by an "
                "optimiser, and was not computed before; clone it in the forward pass where it is to be read later"
            )

    @abstractmethod
    def compute(self) -> torch.Tensor:
        """The blocks, anew."""

    def activated(self) -> Deferred | None:
        """They after ReLU; None where that cannot be part of the kernel."""
        return None

    def plus(self, other: torch.Tensor) -> Deferred | None:
        """They plus other blocks, or None."""
        return None

    def scaled(self, scale: torch.Tensor, shift: torch.Tensor) -> Deferred | None:
        """They times a number for each channel, plus another one; or None."""
        return None

    def pooled(self, pool: Any, keep: bool) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """The maximum of each window of a `Pool`, and the winners if they are to be kept; or None."""
        return None


class LayerOutput(Deferred):
    """A layer's output, to which a summand and ReLU may be added before it is computed."""

    #: Whether ReLU follows.
    relu = False

    def activated(self) -> Self:
        following = self._anew()
        following.relu = True
        return following

    def plus(self, other: torch.Tensor) -> Self | None:
        if self.other is not None or self.relu:
            return None
        following = self._anew()
        following.other = other
        return following

    def _anew(self) -> Self:
        following = copy.copy(self)
        following._blocks = None
        return following
