"""A traced function beside the chain of its local Jacobians."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..patterns import Pattern, gradient_of, holds_numbers
from ..stages import Chain, pulled_by_autograd
from ..tracing import Graph, Node, Scalar, Trace, Values, name_of


@dataclass(eq=False)
class TracedFunction:
    """A function's trace, and the chain of its graph.

    The trace is that of the run from which all is decided. What is decided holds for other runs of its graph, and for
    replays of it; then `forget` lets go of the run's elements.
    """

    trace: Trace
    chain: Chain
    #: The pattern that a user gave, where the operators' rules are not asked.
    given: Pattern | None = None
    #: The values that replays are to leave in their traces: what the function returns, where that is asked for.
    kept: tuple[int, ...] = ()
    #: Whether later traces are replays, which begin with `inputs` alone, and whose numbers are constants; else they are
    #: runs, whose calls are computed, and whose factors and terms may be other numbers.
    replays: bool = False

    @classmethod
    def with_pattern(cls, trace: Trace, pattern: Pattern) -> TracedFunction:
        """A function, to be replayed, whose operators may have no rules, by a chain without stages."""
        in_shape, out_shape = tuple(trace.input.shape[1:]), tuple(trace.output.shape[1:])
        expected = math.prod(out_shape), math.prod(in_shape)
        if pattern.shape != expected:
            raise ValueError(
                f"pattern has shape {pattern.shape}; expected {expected}: a row for each element of what "
                f"{name_of(trace.module)} returns, a column for each of its arguments"
            )
        return cls(trace, Chain(name_of(trace.module), (), in_shape, out_shape), pattern, replays=True)

    @property
    def graph(self) -> Graph:
        """The function's calls."""
        return self.trace.graph

    @property
    def pattern(self) -> Pattern:
        """The pattern of the Jacobian."""
        return self.chain.pattern if self.given is None else self.given

    @property
    def x(self) -> torch.Tensor:
        """The input, ``(batch, *shape)``."""
        return self.trace.input

    @property
    def batch(self) -> int:
        """The number of samples."""
        return len(self.trace.input)

    @functools.cached_property
    def shared(self) -> bool:
        """Whether all samples share the Jacobian's values."""
        return self.given is None and all(stage.shared for stage in self.chain)

    @functools.cached_property
    def nodes(self) -> list[Node]:
        """The calls through which a derivative passes, as replays make them."""
        nodes = [node for node in self.graph.replayed if any(operand.active for operand in node.operands)]
        # Parts of a call may compute what the call does: the last one of them has the derivative.
        last = {value: node for node in nodes for value in node.results}
        return [node for node in nodes if any(last[n] is node and self.is_differentiable(n) for n in node.results)]

    def is_differentiable(self, value: int) -> bool:
        """Whether a value may have a derivative."""
        return holds_numbers(self.trace.tensor(value))

    def _is_sparse(self, value: int) -> bool:
        return self.trace.tensor(value).layout != torch.strided

    @functools.cached_property
    def inputs(self) -> list[int]:
        """The values that a replay begins with: the input, captures, and what is computed of sparse ones."""
        sparse = {value for value in self.graph.captures if self._is_sparse(value)}
        inputs = [value for value in (0, *self.graph.captures) if value not in sparse]
        for value, info in enumerate(self.graph.infos):
            node = None if info.dependent else info.replayed
            if node is not None and any(each in sparse for _, each in node.tensors):
                (sparse.add if self._is_sparse(value) else inputs.append)(value)
        return inputs

    @functools.cached_property
    def scalar_dtypes(self) -> dict[int, torch.dtype]:
        """By their places, the dtypes in which operators work on factors and terms."""
        pairs = ((node, argument) for node in self.graph.nodes for argument in node.arguments.values())
        # Of these alone an integer may take the place.
        places = ((node, each.place) for node, each in pairs if type(each) is Scalar and int in each.types)
        return {place: self.trace.tensor(node.results[0]).dtype for node, place in places}

    def scalars(self, trace: Trace) -> list[Any]:
        """The numbers of a run: factors and terms as tensors without axes, the others as they are."""
        dtypes, device = self.scalar_dtypes, trace.input.device
        return [
            torch.tensor(number, dtype=dtypes[place], device=device) if place in dtypes else number
            for place, number in enumerate(trace.scalars)
        ]

    def varies(self, place: int) -> bool:
        """Whether the number at a place may be another in later runs."""
        return not self.replays and place in self.scalar_dtypes

    def element_count(self, node: Node) -> int:
        """The number of elements that a call computes."""
        return sum(self.trace.tensor(value).numel() for value in node.results)

    def backward_pass(self, trace: Trace) -> Callable[[torch.Tensor], torch.Tensor]:
        """What takes a gradient of the output back to the input, by autograd's graph of a run or of another replay."""
        if not self.replays:
            return pulled_by_autograd(self.chain.records(trace), len(trace.input))
        x = trace.input.detach().requires_grad_()
        known = {value: trace.elements(value).detach() for value in self.inputs}
        with torch.enable_grad():
            y, _ = self.connected_output(trace, known | {0: x})
        return lambda gradient: gradient_of(y, x, gradient, retain_graph=True).reshape(len(x), -1)

    def connected_output(
        self, trace: Trace, known: Mapping[int, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """The output, and the values to keep, computed from `inputs` with the derivatives of the run."""
        output = self.graph.last
        values = _ConnectedValues(self.graph, known, self.scalars(trace))
        y = values[output.value]
        return y if output.active else y.detach(), {value: values[value] for value in self.kept}

    def forget(self, *, module: bool = False) -> None:
        """Let go of the run's elements, and on request of the module; what replays ask for then are forms."""
        # These ask for forms of what the run did not compute itself.
        _ = self.nodes, self.inputs, self.scalar_dtypes
        self.trace = self.trace.without_elements()
        if module:
            self.trace.module = nn.Module()


class _ConnectedValues(Values):
    """Values with the derivatives that autograd saw in the run, if captures had some."""

    def results(self, node: Node) -> list[torch.Tensor]:
        arguments = self.arguments(node.arguments)
        active = {operand.name: operand.active for operand in node.operands}
        for (name, _), differentiable in zip(node.tensors, node.differentiable, strict=True):
            if not active.get(name, differentiable):
                arguments[name] = arguments[name].detach()
        return node.computed(arguments)
