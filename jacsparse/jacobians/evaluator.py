"""What a way to the values of a Jacobian is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from ..patterns import Pattern
from ..tracing import Trace
from .fused_values import FusedValues


class Evaluator(ABC):
    """A way to the values of a Jacobian; `evaluator_of` chooses one.

    Attributes
    ----------
    name : str
        The method's name.
    pattern : Pattern
        The pattern of the values.
    fused : FusedValues or None
        The loops that compute the values in one call.
    uncompiled : str or None
        Why ``compile=True`` does not apply, and what to do, where that is so.
    """

    name: ClassVar[str]
    pattern: Pattern
    fused: FusedValues | None = None
    uncompiled: str | None = None

    @abstractmethod
    def computed(self, trace: Trace) -> torch.Tensor:
        """The values on the pattern in a run, where nothing is fused.

        Of shape ``(nnz, batch)``, or ``(nnz, 1)`` where all samples share them.
        """

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
