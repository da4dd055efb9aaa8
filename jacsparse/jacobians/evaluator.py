"""What a way to the values of a Jacobian is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch

from ..patterns import Pattern
from ..tracing import Trace
from .fused_values import FusedValues
from .traced_function import TracedFunction


class Evaluator(ABC):
    """A way to the values of a Jacobian; `evaluator_of` chooses one, and a prepared Jacobian's file names its class.

    Attributes
    ----------
    name : str
        The method's name.
    pattern : Pattern
        The pattern of the values.
    fused : FusedValues or None
        The loops that compute the values from inputs alone, compiled or, without ``compile``, interpreted; None where
        `computed` does.
    uncompiled : str or None
        Why ``compile=True`` does not apply, and what to do, where that is so.
    """

    name: ClassVar[str]
    pattern: Pattern
    fused: FusedValues | None = None
    uncompiled: str | None = None

    def values(self, trace: Trace) -> torch.Tensor:
        """The values on the pattern in a run, ``(nnz, batch)``, or ``(nnz, 1)`` where all samples share them."""
        return self.computed(trace) if self.fused is None else self.fused.of_replay(trace)

    @abstractmethod
    def computed(self, trace: Trace) -> torch.Tensor:
        """The same values without fused loops: by PyTorch's calls and kernels."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """All that was decided beside the pattern, as plain numbers and arrays."""

    @classmethod
    @abstractmethod
    def restore(cls, content: Mapping[str, Any], pattern: Pattern, function: TracedFunction, *, compile: bool) -> Self:
        """The way that `describe` described, for replays; ValueError where it does not fit the function."""

    @property
    @abstractmethod
    def details(self) -> str:
        """What the method took, in words."""

    @property
    @abstractmethod
    def flop(self) -> int:
        """Operations of one call."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of its arrays."""
