"""One operator's Jacobian in a run, by its rule, and PyTorch's derivative of it.

The derivative is that of the run's own node of autograd's graph, or of the call run again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from ..patterns import Call, Layout, UnsupportedOperatorError, gradient_of
from ..tracing import Scalar, StaleError, Trace, Value, apply_node, with_all_gradients
from .stage import Edge


class _Arguments(Mapping[str, Any]):
    """Arguments of a call; ``read(name, argument)`` gives each one that is a reference where it is asked for."""

    def __init__(self, arguments: Mapping[str, Any], read: Callable[[str, Any], Any]) -> None:
        self._arguments, self._read = arguments, read

    def __getitem__(self, name: str) -> Any:
        argument = self._arguments[name]
        return self._read(name, argument) if type(argument) in (Value, Scalar) else argument

    def __iter__(self) -> Iterator[str]:
        return iter(self._arguments)

    def __len__(self) -> int:
        return len(self._arguments)

    def __repr__(self) -> str:
        return repr(dict(self))


@dataclass(eq=False)
class LocalJacobian:
    """The Jacobian of an operator by one operand at the numbers of a run, for a slice of the samples."""

    edge: Edge
    trace: Trace
    samples: slice = field(default_factory=lambda: slice(None))

    def __post_init__(self) -> None:
        self._operation, out = self.edge.operation, self.edge.operation.layout
        assert out is not None
        #: Where the samples are in the operand and in the result.
        self._into, self._out = self._operation.layouts[self.edge.call.argument], out
        self._count = len(range(len(self.trace.input))[self.samples])
        self._whole = self._count == len(self.trace.input)

    @property
    def transposed_values(self) -> torch.Tensor:
        """Values of the transposed Jacobian, ``(nnz, batch)``, or ``(nnz, 1)`` where all samples share them."""
        edge = self.edge
        if not edge.transposed_pattern.nnz:
            return self.trace.input.detach().new_empty((0, 1 if edge.shared else self._count))
        return edge.rule.transposed_values(self.call, edge.transposed_pattern)

    @property
    def call(self) -> Call:
        """The operator's call with its tensors."""
        edge, operation, path = self.edge, self._operation, self.edge.call.path
        arguments = {**edge.call.arguments, **operation.referenced}
        arguments.pop(edge.call.argument, None)
        reads = edge.rule.reads_of(edge.call)
        x = self._elements(edge.source, f"{path}.{edge.call.argument}", read="input" in reads)
        result = self._elements(edge.target, f"{path}: what {operation.name} gave", read="output" in reads)
        return edge.call.with_tensors(
            arguments=_Arguments(arguments, self._argument),
            input=self._of_samples(x, self._into),
            output=self._of_samples(result, self._out),
            node=(lambda: self.node) if self._whole else None,
            vjp=self.vjp,
            vjps=None if operation.random else self.vjps,
            jvp=None if operation.random else self.jvp,
            sources=None if edge.call.sources is None else replace(edge.call.sources, samples=self.samples),
        )

    def _elements(self, value: int, what: str, *, read: bool = True) -> torch.Tensor:
        """The elements that a value had in the run or, where they are not read, any; an error names what it is."""
        try:
            return self.trace.elements(value) if read else self.trace.tensor(value)
        except StaleError:
            raise RuntimeError(
                f"{what} was changed in place between forward and backward; run the forward again"
            ) from None

    def _of_samples(self, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
        split = layout.split(tensor.detach())
        return self._in_input_dtype(split if self._whole else split[self.samples])

    def _in_input_dtype(self, tensor: torch.Tensor) -> torch.Tensor:
        """A floating-point tensor in the input's dtype, in which Jacobians are; another tensor as it is."""
        dtype = self.trace.input.dtype
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    def _argument(self, name: str, argument: Any) -> Any:
        """An argument as the rule reads it: ``(batch, *shape)`` where it has samples."""
        if type(argument) is not Value:
            return self.trace.read(argument)
        tensor = self._elements(argument.number, f"{self.edge.call.path}.{name}")
        layout = self._operation.layouts.get(name)
        if layout is None:
            return self._in_input_dtype(tensor)
        if name in self._operation.alike:
            return self._in_input_dtype(layout.split(tensor.detach())[0])
        return self._of_samples(tensor, layout)

    # PyTorch's derivative.

    @functools.cached_property
    def node(self) -> Any:
        """Autograd's node, with the tensors that the forward pass saved; None where it is not of this call alone."""
        edge, node = self.trace.gradient_edge(self.edge.target), self._operation.node
        by_hooks = self.trace.run.saved_by_hooks and not self._operation.random
        if edge is None or edge.node is None or node.shift is None or by_hooks:
            # Hooks may have kept nothing for a call of one node alone, as those of a checkpoint.
            return None
        same = edge.node._sequence_nr() == self.trace.sequences[node.place] + node.shift  # type: ignore[attr-defined]
        return edge.node if same and not isinstance(edge.node, BackwardCFunction) else None

    @functools.cached_property
    def _place(self) -> int | None:
        """The index of the operand's gradient among the node's results; None where it cannot be told."""
        source, node = self.trace.gradient_edge(self.edge.source), self.node
        if node is None or source is None:
            return None
        places = [place for place, edge in enumerate(node.next_functions) if edge == source[:2]]
        # A tensor that is several operands has several gradients, in the order of the arguments.
        same = [name for name, value in self._operation.operands.items() if value == self.edge.source]
        return places[same.index(self.edge.call.argument)] if len(places) == len(same) else None

    def vjp(self, gradient: torch.Tensor) -> torch.Tensor:
        """``Jᵀ g``, ``(batch, *out_shape)`` to ``(batch, *in_shape)``."""
        place, trace = self._place, self.trace
        # An operator that draws does not run again; a node has not saved what was overwritten since.
        if place is None or not (self._operation.random or (self._whole and self._is_intact)):
            return self.vjps(gradient[None])[0]
        number = self._operation.number
        result, x = trace.tensor(self.edge.target), trace.tensor(self.edge.source)
        gradient = gradient.to(result.dtype)
        if not self._whole:
            # Samples do not mix, so any gradient of the other ones will do.
            of_all = self._out.split(torch.zeros_like(result))
            of_all[self.samples] = gradient.reshape(of_all[self.samples].shape)
            gradient = of_all
        node = self.node
        gradients: list[torch.Tensor | None] = [None] * len(node._input_metadata)
        of_result = self._out.join(gradient.reshape(self._out.split(result).shape))
        gradients[number if len(gradients) > 1 else 0] = of_result
        pulled = with_all_gradients(lambda: apply_node(node, gradients))[place]
        pulled = torch.zeros_like(x) if pulled is None else pulled.sum_to_size(x.shape)
        return self._in_input_dtype(self._into.split(pulled)[self.samples])

    @property
    def _is_intact(self) -> bool:
        """Whether nothing that the call took or returned was overwritten."""
        node = self._operation.node
        return all(map(self.trace.is_intact, (*node.results, *(value for _, value in node.tensors))))

    def _again(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The operand, ``(batch, *shape)``, and the result of the operator run again on these samples, with a graph."""
        if self._operation.node.draws:
            raise UnsupportedOperatorError(
                f"{self.edge.call.path}: {self._operation.name} draws random numbers, and autograd does not tell its "
                f"derivative apart{self._operation.node.source}; let it work on a clone, as of a view"
            )
        arguments: dict[str, Any] = {}
        with torch.enable_grad():
            for name, argument in self._operation.referenced.items():
                if type(argument) is not Value:
                    arguments[name] = self.trace.read(argument)
                    continue
                # No derivative of an operator that only moves elements depends on its arguments' elements.
                read = self.edge.call.sources is None or not self.trace.is_stale(argument.number)
                tensor = self._elements(argument.number, f"{self.edge.call.path}.{name}", read=read).detach()
                layout = self._operation.layouts.get(name)
                if name == self.edge.call.argument:
                    x = self._into.split(tensor)[self.samples].clone().requires_grad_()
                    tensor = self._into.join(x)
                elif layout is not None:
                    tensor = layout.join(layout.split(tensor)[self.samples])
                arguments[name] = tensor
            return x, self._out.split(self._operation.evaluate(arguments))

    def vjps(self, gradients: torch.Tensor) -> torch.Tensor:
        """``Jᵀ g`` for many gradients, ``(many, batch, *shape)``."""
        count, (x, y) = len(gradients), self._again()
        if not y.requires_grad:
            return self._in_input_dtype(torch.zeros_like(x)).expand(count, *x.shape)
        gradients = gradients.reshape(count, *y.shape).to(y.dtype)
        if count == 1:
            return self._in_input_dtype(gradient_of(y, x, gradients[0]))[None]
        (pulled,) = torch.autograd.grad(y, x, gradients, is_grads_batched=True, allow_unused=True)
        return self._in_input_dtype(torch.zeros_like(x).expand(count, *x.shape) if pulled is None else pulled)

    def jvp(self, tangent: torch.Tensor) -> torch.Tensor:
        """``J v``, ``(batch, *in_shape)`` to ``(batch, *out_shape)``."""
        # Two backward passes: forward mode silently takes an operator without a forward derivative for a constant.
        with torch.enable_grad():
            x, y = self._again()
            gradient = torch.zeros_like(y, requires_grad=True)
            (pulled,) = torch.autograd.grad(y, x, gradient, create_graph=True, materialize_grads=True)
        if not pulled.requires_grad:
            return self._in_input_dtype(torch.zeros_like(y))
        tangent = tangent.reshape(x.shape).to(x.dtype)
        (pushed,) = torch.autograd.grad(pulled, gradient, tangent, materialize_grads=True)
        return self._in_input_dtype(pushed)
