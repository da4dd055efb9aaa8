"""What a way to the values of a Jacobian is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from ..patterns import Pattern
from ..stages import all_finite, with_backward_passes
from ..tracing import Trace
from .fused_values import FusedValues
from .traced_function import TracedFunction


class Evaluator(ABC):
    """A way to the values of a Jacobian; `evaluator_of` chooses one.

    Attributes
    ----------
    name : str
        The method's name, as a user asks for it; several ways have the name ``products``.
    function : TracedFunction
        The function.
    pattern : Pattern
        The pattern of the values.
    fused : FusedValues or None
        The loops that compute the values in one call.
    uncompiled : str
        Why ``compile=True`` compiles nothing, where nothing is fused.
    remedy : str or None
        What to do where it then does not apply.
    details : str
        What the method took, in words.
    flop, nbytes : int
        Operations of one call, and bytes of its arrays.
    """

    name: ClassVar[str]
    function: TracedFunction
    pattern: Pattern
    fused: FusedValues | None = None
    uncompiled: str
    remedy: str | None = None
    details: str
    flop: int
    nbytes: int

    @property
    def compiled(self) -> str:
        """What ``compile=True`` has compiled, in words."""
        if self.fused is None:
            return f"nothing, since {self.uncompiled}"
        left = self.fused.calls_of_pytorch
        return f"all but {left} calls of PyTorch's" if left else "the whole call"

    def values(self, trace: Trace) -> torch.Tensor:
        """The values on the pattern, ``(nnz, batch)`` or ``(nnz, 1)``, in a run of the function's graph or a replay.

        Those that are not finite as products are computed by backward passes, unless they were registered.
        """
        if self.fused is not None:
            values, are_finite = self.fused.of(trace)
        else:
            values = self.computed(trace)
            # A function may return coarser numbers, as under ``torch.autocast``.
            values = values.to(trace.input.dtype)
            are_finite = bool(self.function.chain.registered_values) or all_finite(values)
        return values if are_finite else self.mended(values, trace)

    def mended(self, values: torch.Tensor, trace: Trace) -> torch.Tensor:
        """Values of which those that are not finite as products are those of backward passes."""
        values = with_backward_passes(values, self.pattern, len(trace.input), self.function.backward_pass(trace))
        return values[:, :1] if self.function.shared else values

    @abstractmethod
    def computed(self, trace: Trace) -> torch.Tensor:
        """The values on the pattern in a run, where nothing is fused.

        Of shape ``(nnz, batch)``, or ``(nnz, 1)`` where all samples share them.
        """
