"""PyTorch's derivative of one call in a run: by the run's own node of autograd's graph, or by the call run again."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import BackwardCFunction

from ..patterns import Layout, gradient_of
from ..tracing import Operation, Value, apply_node, with_all_gradients
from .stage import Edge

if TYPE_CHECKING:
    from .record import Record


@dataclass(eq=False)
class CallDerivative:
    """An operator's own derivative with respect to one operand, at the numbers of one run."""

    record: Record
    edge: Edge
    samples: slice

    @property
    def operation(self) -> Operation:
        """The call."""
        return self.edge.operation

    @functools.cached_property
    def node(self) -> Any:
        """Autograd's node, with the tensors that the forward pass saved; None where it is not of this call alone."""
        trace, call = self.record.trace, self.operation.node
        edge = trace.edge(self.edge.target)
        if edge is None or edge.node is None or call.shift is None:
            return None
        same = edge.node._sequence_nr() == trace.sequences[call.place] + call.shift  # type: ignore[attr-defined]
        return edge.node if same and not isinstance(edge.node, BackwardCFunction) else None

    @functools.cached_property
    def _place(self) -> int | None:
        """The index of the operand's gradient among the node's results; None where it cannot be told."""
        source = self.record.trace.edge(self.edge.source)
        node = self.node
        if node is None or source is None:
            return None
        places = [place for place, edge in enumerate(node.next_functions) if edge == source[:2]]
        # A tensor that is several operands has several gradients, in the order of the arguments.
        same = [name for name, value in self.operation.operands.items() if value == self.edge.source]
        return places[same.index(self.edge.call.argument)] if len(places) == len(same) else None

    def vjp(self, gradient: torch.Tensor) -> torch.Tensor:
        """``Jᵀ g``, ``(batch, *out_shape)`` to ``(batch, *in_shape)``."""
        batch = self.record.batch
        whole = len(range(batch)[self.samples]) == batch
        place = self._place
        # An operator that draws does not run again; a node has not saved what was overwritten since.
        if place is None or not (self.operation.random or (whole and self._is_intact)):
            return self.vjps(gradient[None])[0]
        into, out = self._layouts
        number, trace = self.operation.number, self.record.trace
        result, x = trace.tensor(self.edge.target), trace.tensor(self.edge.source)
        gradient = gradient.to(result.dtype)
        if not whole:
            # Samples do not mix, so any gradient of the other ones will do.
            of_all = out.split(torch.zeros_like(result))
            of_all[self.samples] = gradient.reshape(of_all[self.samples].shape)
            gradient = of_all
        node = self.node
        gradients: list[torch.Tensor | None] = [None] * len(node._input_metadata)
        gradients[number if len(gradients) > 1 else 0] = out.join(gradient.reshape(out.split(result).shape))
        pulled = with_all_gradients(lambda: apply_node(node, gradients))[place]
        pulled = torch.zeros_like(x) if pulled is None else pulled.sum_to_size(x.shape)
        return self.record.in_input_dtype(into.split(pulled)[self.samples])

    @property
    def _is_intact(self) -> bool:
        """Whether nothing that the call took or returned was overwritten."""
        node, trace = self.operation.node, self.record.trace
        return all(map(trace.is_intact, (*node.results, *(value for _, value in node.tensors))))

    @property
    def _layouts(self) -> tuple[Layout, Layout]:
        """The layouts of the operand and of the result."""
        out = self.operation.layout
        assert out is not None
        return self.operation.layouts[self.edge.call.argument], out

    @functools.cached_property
    def _x(self) -> torch.Tensor:
        """The operand, ``(batch, *shape)``."""
        into, _ = self._layouts
        return into.split(self._elements(self.edge.source, self.edge.call.argument).detach())[self.samples]

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        """The operator's result on these samples for another operand."""
        into, out = self._layouts
        arguments: dict[str, Any] = {}
        for name, value in self.operation.referenced.items():
            layout = self.operation.layouts.get(name)
            if name == self.edge.call.argument:
                arguments[name] = into.join(x)
            elif type(value) is Value:
                tensor = self._elements(value.number, name).detach()
                arguments[name] = tensor if layout is None else layout.join(layout.split(tensor)[self.samples])
            else:
                arguments[name] = self.record.trace.read(value)
        return out.split(self.operation.evaluate(arguments))

    def _elements(self, value: int, name: str) -> torch.Tensor:
        """The elements of an argument."""
        trace = self.record.trace
        # No derivative of an operator that only moves elements depends on its arguments' elements.
        if self.operation.sources and trace.is_stale(value):
            return trace.tensor(value)
        return self.record.elements(value, f"{self.operation.node.path}.{name}")

    def vjps(self, gradients: torch.Tensor) -> torch.Tensor:
        """``Jᵀ g`` for many gradients, ``(many, batch, *shape)``."""
        count = len(gradients)
        with torch.enable_grad():
            x = self._x.clone().requires_grad_()
            y = self._run(x)
        if not y.requires_grad:
            return self.record.in_input_dtype(torch.zeros_like(x)).expand(count, *x.shape)
        gradients = gradients.reshape(count, *y.shape).to(y.dtype)
        if count == 1:
            return self.record.in_input_dtype(gradient_of(y, x, gradients[0]))[None]
        (pulled,) = torch.autograd.grad(y, x, gradients, is_grads_batched=True, allow_unused=True)
        return self.record.in_input_dtype(torch.zeros_like(x).expand(count, *x.shape) if pulled is None else pulled)

    def jvp(self, tangent: torch.Tensor) -> torch.Tensor:
        """``J v``, ``(batch, *in_shape)`` to ``(batch, *out_shape)``."""
        # Two backward passes: forward mode silently takes an operator without a forward derivative for a constant.
        with torch.enable_grad():
            x = self._x.clone().requires_grad_()
            y = self._run(x)
            gradient = torch.zeros_like(y, requires_grad=True)
            (pulled,) = torch.autograd.grad(y, x, gradient, create_graph=True, materialize_grads=True)
        if not pulled.requires_grad:
            return self.record.in_input_dtype(torch.zeros_like(y))
        tangent = tangent.reshape(x.shape).to(x.dtype)
        (pushed,) = torch.autograd.grad(pulled, gradient, tangent, materialize_grads=True)
        return self.record.in_input_dtype(pushed)
