"""A function's tape with the way from what the function reads to the values of its Jacobian."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..patterns import Pattern
from ..stages import all_finite, with_backward_passes
from ..tracing import (
    Arithmetic,
    Reads,
    Tape,
    followed,
    graph_of_tape,
    number_tensors,
    numbers_followed,
    recorded_tape,
    same_numbers,
    tensors_of_externals,
    undisturbed,
    without_autocast,
)
from .arguments import Arguments, FlatFunction
from .products import ChainProducts
from .watched_weights import FilledWeightError, WatchedWeights


class Evaluator(Protocol):
    """A way to the values of a Jacobian."""

    #: The method's name, and what it took, for printing.
    name: str
    pattern: Pattern

    def describe(self) -> dict[str, Any]:
        """All that was decided, as plain numbers and arrays."""

    @property
    def details(self) -> str:
        """What the method took, in words."""

    @property
    def results(self) -> tuple[int, ...]:
        """The slots of the results of a run that `values` takes."""

    @property
    def flop(self) -> int:
        """Operations of one call."""

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""

    def take_results(self, tape: Tape) -> None:
        """Take results of the tape's calls from now on, where it would compute them."""

    def values(
        self, inputs: list[torch.Tensor], numbers: tuple[float, ...], results: tuple[torch.Tensor, ...] = ()
    ) -> torch.Tensor:
        """The values on the pattern from the inputs of the tape's graph, ``(nnz, batch)`` or ``(nnz, 1)``."""


@dataclass(eq=False)
class TapedJacobian:
    """The program of a function's Jacobian: it holds neither the function nor a tensor that the function reads."""

    form: tuple[Any, ...]
    tape: Tape
    evaluator: Evaluator
    #: The externals that have no zeros, which a pattern would leave out.
    weights: tuple[int, ...] = ()
    #: The weights whose zeros the pattern leaves out, if any.
    watched: WatchedWeights | None = None
    #: The numbers of the last run as tensors. Replaced as a whole, so that threads take all of one run.
    _number_tensors: tuple[tuple[float, ...], list[torch.Tensor]] = field(default=((), []), repr=False)

    @property
    def default_dtype(self) -> torch.dtype:
        """PyTorch's default dtype when it was made."""
        return self.form[3]  # type: ignore[no-any-return]

    def followed(self, f: Callable[..., Any], arguments: Arguments) -> Reads | None:
        """What a function reads now; it runs. None where its calls are not the tape's, or a weight has zeros."""
        if arguments.form != self.form:
            return None
        function = FlatFunction(f, arguments)
        with undisturbed(function):
            reads = followed(self.tape, function, _input(arguments), self.evaluator.results)
        if reads is None or any(has_zeros(reads.externals[place]) for place in self.weights):
            return None
        return reads

    def followed_numbers(self, f: Callable[..., Any], arguments: Arguments, arithmetic: Arithmetic) -> Reads | None:
        """As `followed`, of arguments with numbers of an arithmetic; None also where these cannot be followed."""
        function = FlatFunction(f, arguments)
        with undisturbed(function):
            return numbers_followed(self.tape, function, _input(arguments), arithmetic)

    def values(self, x: torch.Tensor, reads: Reads) -> torch.Tensor:
        """The values at a flat tensor and at what the function reads."""
        numbers = self._number_tensors
        if not same_numbers(numbers[0], reads.numbers):
            numbers = self._number_tensors = reads.numbers, number_tensors(self.tape, reads.numbers, x.device, numbers)
        with torch.no_grad(), without_autocast(x.device):
            inputs = [x, *tensors_of_externals(reads), *numbers[1]]
            if self.watched is not None and not isinstance(self.evaluator, ChainProducts):
                self.watched.check(inputs)
            try:
                values = self.evaluator.values(inputs, reads.numbers, reads.results)
            except FilledWeightError:
                if self.watched is not None:
                    # The error that tells which weight it is.
                    self.watched.check(inputs)
                raise
            # A function may return coarser numbers, as under ``torch.autocast``.
            values = values if values.dtype is x.dtype else values.to(x.dtype)
            # A chain has done so, but for registered values.
            if not isinstance(self.evaluator, ChainProducts) and not all_finite(values):
                values = with_backward_passes(values, self.evaluator.pattern, len(x), self._pull_back(inputs))
            return values

    def _pull_back(self, inputs: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """The pull-back of the function at the inputs of the tape's graph, by autograd of a run of that."""
        x = inputs[0].detach().requires_grad_()
        with torch.enable_grad():
            y = graph_of_tape(self.tape, inputs)(x, *inputs[1:])

        def pull_back(gradient: torch.Tensor) -> torch.Tensor:
            if not y.requires_grad:
                return torch.zeros_like(x)
            gradient = gradient.reshape(y.shape).to(y.dtype)
            (pulled,) = torch.autograd.grad(y, x, gradient, retain_graph=True, materialize_grads=True)
            return pulled.reshape(len(x), -1)

        return pull_back


def has_zeros(tensor: torch.Tensor) -> bool:
    """Whether an element is zero."""
    return int(tensor.count_nonzero()) < tensor.numel()


def taped(f: Callable[..., Any], arguments: Arguments) -> tuple[Tape, Reads]:
    """The tape of a function's run, and what the run read."""
    function = FlatFunction(f, arguments)
    with undisturbed(function):
        return recorded_tape(function, _input(arguments))


def _input(arguments: Arguments) -> torch.Tensor:
    """A flat copy of the arguments that requires a gradient; it is no leaf, so that it may be written to."""
    with torch.enable_grad():
        return arguments.flat().requires_grad_().clone()
