"""Records: what one forward pass computed in each stage."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from ..patterns import Call, Diagonal, Identity, Layout, Pattern, gradient_of
from ..spgemm import SparseJacobian, matvec
from ..tracing import Invocation, Operation, PrunedWeight, Recording, apply_node, with_all_gradients
from .stage import Edge, Stage


class _Arguments(Mapping[str, Any]):
    """Arguments of a call; ``tensor(name, argument)`` converts each tensor where it is read."""

    def __init__(self, arguments: Mapping[str, Any], tensor: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        self._arguments, self._tensor = arguments, tensor

    def __getitem__(self, name: str) -> Any:
        value = self._arguments[name]
        return self._tensor(name, value) if isinstance(value, torch.Tensor) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._arguments)

    def __len__(self) -> int:
        return len(self._arguments)


def _changed(what: str) -> RuntimeError:
    return RuntimeError(f"{what} was changed in place between forward and backward; run the forward again")


@dataclass(eq=False)
class Record:
    """What a stage computed for one batch."""

    stage: Stage
    #: The forward pass of the whole module.
    recording: Recording = field(repr=False)
    #: Whether the elements that the patterns omit are known to be zero in this forward's weights.
    _fits: bool = field(default=False, repr=False)

    def invocation(self, target: int) -> Invocation:
        """The call that computed a vertex."""
        return self.recording.invocations[self.stage.program.operations[target].place]

    def adapted(self) -> Record:
        """The same record with patterns that omit only elements that are zero in this forward's weights."""
        replaced: dict[Edge, Edge] = {}
        for edge in self.stage.edges:
            invocation = self.invocation(edge.target)
            # A tensor that was overwritten after the call does not tell which elements were zero.
            stale = {weight.name for weight in edge.pruned_weights if invocation.is_stale(weight.name)}
            if stale or not all(weight.holds(self.weight(edge, weight.name)) for weight in edge.pruned_weights):
                # Elements had been zero by chance, not by a mask: the zeros of this forward decide.
                names = [name for name in edge.rule.pruned_arguments(edge.call) if name not in stale]
                replaced[edge] = edge.without([PrunedWeight(name, self.weight(edge, name), None) for name in names])
        if not replaced:
            self._fits = True
            return self
        edges = tuple(replaced.get(edge, edge) for edge in self.stage.edges)
        return Record(replace(self.stage, edges=edges), self.recording, True)

    def weight(self, edge: Edge, name: str) -> torch.Tensor:
        """A weight of an edge in this forward."""
        arguments = self.invocation(edge.target).arguments
        return edge.weight(name, self.stage.program.operations[edge.target].of_sample(name, arguments[name]))

    @property
    def batch(self) -> int:
        """The number of samples."""
        return self.stage.program.batch

    @property
    def input(self) -> torch.Tensor:
        """The stage's input."""
        return self._tensor(self.stage.start)

    @property
    def output(self) -> torch.Tensor:
        """The stage's output."""
        return self._tensor(self.stage.stop)

    def _tensor(self, vertex: int) -> torch.Tensor:
        invocation = self.recording.makers[vertex]
        if invocation is None:
            return self.recording.input
        return invocation.results[vertex - invocation.first]

    @functools.cached_property
    def externals(self) -> set[int]:
        """The places of the externals that the stage reads, or that constants which it reads were computed from."""
        recording, maker = self.recording, self.recording.makers[self.stage.stop]
        if not self.stage.edges:
            return set() if maker is None else recording.externals_of(maker)
        externals: set[int] = set()
        for operation in self.stage.operations:
            externals |= recording.externals_of(recording.invocations[operation.place], operation.operands)
        return externals

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """All arguments and results of its operators."""
        for operation in self.stage.operations:
            invocation = self.recording.invocations[operation.place]
            yield from (invocation.arguments[name] for name in invocation.versions)
            yield from invocation.results

    def jacobian(self) -> SparseJacobian:
        """``J`` for the whole batch."""
        operator = self.stage.operator
        if operator is None:
            return self.transposed_jacobian().T
        pattern = self.stage.pattern.T
        if not pattern.nnz:
            return self.transposed_jacobian().T
        call = self.call(operator)
        return self._jacobian(pattern, lambda: operator.rule.values(call, pattern))

    def transposed_jacobian(self, samples: slice = slice(None)) -> SparseJacobian:
        """``J.T`` for a slice of the batch."""
        operator, pattern = self.stage.operator, self.stage.pattern
        if operator is not None:
            return self._jacobian(pattern, lambda: self.values(operator, samples))
        accumulation, result = self.stage._accumulated
        if result is None:
            count = len(range(self.batch)[samples])
            return SparseJacobian(pattern, self.recording.input.detach().new_empty((0, count)))
        return self._jacobian(pattern, lambda: accumulation.run(result, lambda edge: self.values(edge, samples)))

    def _jacobian(self, pattern: Pattern, values: Callable[[], torch.Tensor]) -> SparseJacobian:
        try:
            return SparseJacobian(pattern, values())
        except torch.OutOfMemoryError as error:
            rows, columns = pattern.shape
            raise torch.OutOfMemoryError(f"{self.stage.path}, {rows:,} × {columns:,}: {error}") from error

    def operand(self, edge: Edge) -> torch.Tensor:
        """The operand of an edge, ``(batch, *in_shape)``."""
        x = self.call(edge).input
        assert x is not None
        return x

    def values(self, edge: Edge, samples: slice = slice(None)) -> torch.Tensor:
        """Values of one operator's transposed Jacobian, ``(nnz, batch)`` or ``(nnz, 1)``."""
        if not edge.pattern.nnz:
            return self.recording.input.detach().new_empty((0, 1 if edge.shared else len(range(self.batch)[samples])))
        return edge.rule.transposed_values(self.call(edge, samples), edge.pattern)

    def pull_back_sparse(self, vectors: torch.Tensor, samples: slice = slice(None)) -> torch.Tensor:
        """``Jᵀ g``, ``(elements, batch)``, for a slice of the batch, by the operators' sparse Jacobians one by one."""
        gradients = {self.stage.stop: vectors}
        for edge in reversed(self.stage.edges):
            if edge.target in gradients:
                product = matvec(edge.pattern, self.values(edge, samples), gradients[edge.target])
                gradients[edge.source] = gradients[edge.source] + product if edge.source in gradients else product
        if self.stage.start not in gradients:
            return vectors.new_zeros((math.prod(self.stage.in_shape), vectors.shape[1]))
        return gradients[self.stage.start]

    def pull_back_columns(self, gradients: Scaled) -> Scaled:
        """``Jᵀ g`` for many gradients of each sample, by the operators' own backward."""
        columns = gradients.gradients.shape[:2]
        of_vertices = {self.stage.stop: gradients}
        for edge in reversed(self.stage.edges):
            if edge.target not in of_vertices:
                continue
            gradient = of_vertices[edge.target]
            if isinstance(edge.pattern.structure, Identity):
                pass
            elif isinstance(edge.pattern.structure, Diagonal):
                gradient = gradient.times(self.values(edge).T)
            elif edge.rule.has_registered_values:
                values, of_output = self.values(edge), gradient.product()
                vectors = of_output.reshape(math.prod(columns), -1).T.contiguous()
                if values.shape[1] > 1:
                    values = values.repeat(1, columns[0])
                gradient = Scaled(matvec(edge.pattern, values, vectors).T.reshape(*columns, -1))
            else:
                of_output = gradient.product().reshape(*columns, *edge.call.out_shape)
                pulled = edge.rule.pull_back(self.call(edge), edge.pattern.T, of_output)
                gradient = Scaled(pulled.reshape(*columns, edge.call.in_size))
            if edge.source in of_vertices:
                gradient = of_vertices[edge.source].plus(gradient)
            of_vertices[edge.source] = gradient
        if self.stage.start not in of_vertices:
            return Scaled(gradients.gradients.new_zeros(()).expand(*columns, math.prod(self.stage.in_shape)))
        return of_vertices[self.stage.start]

    def winners(self, samples: slice = slice(None)) -> torch.Tensor | None:
        """The elements that a stage selects, as in max-pooling: int32, ``(windows, batch)``; None for other stages."""
        operator = self.stage.operator
        return None if operator is None else operator.rule.selection(self.call(operator, samples))

    def in_input_dtype(self, tensor: torch.Tensor) -> torch.Tensor:
        """A floating-point tensor in the input's dtype, in which Jacobians are; another tensor as it is."""
        dtype = self.recording.input.dtype
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    def call(self, edge: Edge, samples: slice = slice(None)) -> Call:
        """An operator's call with its tensors, for a slice of the batch."""
        operation, invocation = self.stage.program.operations[edge.target], self.invocation(edge.target)
        path, argument, layouts = edge.call.path, edge.call.argument, operation.layouts
        for weight in () if self._fits else edge.pruned_weights:
            if not weight.holds(self.weight(edge, weight.name)):
                raise RuntimeError(
                    f"{path}.{weight.name}: weights that were pruned or zero when the pattern was made are not zero "
                    "any more; make the chain again, keep them zero by a mask (torch.nn.utils.prune), or pass "
                    "pruned=False"
                )
        number = edge.target - invocation.first
        x = invocation.arguments[argument]
        if "input" in edge.rule.reads and invocation.is_stale(argument):
            if argument not in invocation.saved:
                raise _changed(f"{path}.{argument}")
            x = invocation.saved[argument]
        result = invocation.results[number]
        if "output" in edge.rule.reads and result._version != invocation.result_versions[number]:
            if None not in invocation.saved:
                raise _changed(f"{path}: what {operation.name} gave")
            result = invocation.saved[None]
        whole = samples == slice(None)

        def of_samples(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
            split = layout.split(tensor.detach())
            return self.in_input_dtype(split if whole else split[samples])

        def argument_of(name: str, value: torch.Tensor) -> torch.Tensor:
            if invocation.is_stale(name):
                raise _changed(f"{path}.{name}")
            layout = layouts.get(name)
            if layout is None:
                return self.in_input_dtype(value)
            if name in operation.alike:
                return self.in_input_dtype(layout.split(value.detach())[0])
            return of_samples(value, layout)

        arguments = {**edge.call.arguments, **invocation.arguments}
        del arguments[argument]
        derivative = _Derivative(self, edge, operation, invocation, samples)
        return edge.call.with_tensors(
            arguments=_Arguments(arguments, argument_of),
            input=of_samples(x, layouts[argument]),
            output=of_samples(result, self.stage.program.layouts[edge.target]),
            node=derivative.node if whole else None,
            vjp=derivative.vjp,
            vjps=None if operation.random else derivative.vjps,
            jvp=None if operation.random else derivative.jvp,
            sources=None if edge.call.sources is None else replace(edge.call.sources, samples=samples),
        )


@dataclass(eq=False)
class _Derivative:
    """An operator's own derivative with respect to one operand, at the numbers of one run."""

    record: Record
    edge: Edge
    operation: Operation
    invocation: Invocation
    samples: slice

    def node(self) -> Any:
        """Autograd's node, with the tensors that the forward pass saved; None where it is not of this call alone."""
        edge = self.record.recording.edges[self.edge.target]
        if edge is None or edge.node is None or self.invocation.sequence < 0:
            return None
        same = edge.node._sequence_nr() == self.invocation.sequence  # type: ignore[attr-defined]
        return edge.node if same and not isinstance(edge.node, BackwardCFunction) else None

    @functools.cached_property
    def _place(self) -> int | None:
        """The index of the operand's gradient among the node's results; None where it cannot be told."""
        source = self.record.recording.edges[self.edge.source]
        node = self.node()
        if node is None or source is None:
            return None
        places = [place for place, edge in enumerate(node.next_functions) if edge == source[:2]]
        # A tensor that is several operands has several gradients, in the order of the arguments.
        same = [name for name, vertex in self.operation.operands.items() if vertex == self.edge.source]
        return places[same.index(self.edge.call.argument)] if len(places) == len(same) else None

    def vjp(self, gradient: torch.Tensor) -> torch.Tensor:
        """``Jᵀ g``, ``(batch, *out_shape)`` to ``(batch, *in_shape)``."""
        whole = len(range(self.record.batch)[self.samples]) == self.record.batch
        place = self._place
        # An operator that draws, or that overwrote its operand, does not run again.
        if place is None or not (whole or self.operation.random or self.invocation.writes):
            return self.vjps(gradient[None])[0]
        into, out = self._layouts
        number = self.edge.target - self.invocation.first
        result, x = self.invocation.results[number], self.invocation.arguments[self.edge.call.argument]
        gradient = gradient.to(result.dtype)
        if not whole:
            # Samples do not mix, so any gradient of the other ones will do.
            of_all = out.split(torch.zeros_like(result))
            of_all[self.samples] = gradient.reshape(of_all[self.samples].shape)
            gradient = of_all
        node = self.node()
        gradients: list[torch.Tensor | None] = [None] * len(node._input_metadata)
        gradients[number if len(gradients) > 1 else 0] = out.join(gradient.reshape(out.split(result).shape))
        pulled = with_all_gradients(lambda: apply_node(node, gradients))[place]
        pulled = torch.zeros_like(x) if pulled is None else pulled.sum_to_size(x.shape)
        return self.record.in_input_dtype(into.split(pulled)[self.samples])

    @property
    def _layouts(self) -> tuple[Layout, Layout]:
        """The layouts of the operand and of the result."""
        return self.operation.layouts[self.edge.call.argument], self.record.stage.program.layouts[self.edge.target]

    @functools.cached_property
    def _x(self) -> torch.Tensor:
        """The operand, ``(batch, *shape)``."""
        into, _ = self._layouts
        return into.split(self.invocation.arguments[self.edge.call.argument].detach())[self.samples]

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        """The operator's result on these samples for another operand."""
        into, out = self._layouts
        arguments = dict(self.invocation.arguments)
        for name, value in arguments.items():
            layout = self.operation.layouts.get(name)
            if name == self.edge.call.argument:
                arguments[name] = into.join(x)
            elif isinstance(value, torch.Tensor):
                # No derivative of an operator that only moves elements depends on its other arguments' elements.
                if not self.operation.sources and self.invocation.is_stale(name):
                    raise _changed(f"{self.operation.path}.{name}")
                value = value.detach()
                if layout is not None:
                    value = layout.join(layout.split(value)[self.samples])
                arguments[name] = value
        return out.split(self.operation.evaluate(arguments))

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


@dataclass(frozen=True)
class Scaled:
    """The product of gradients, ``(columns, batch, elements)``, and of a scale for each element, not yet taken."""

    gradients: torch.Tensor
    scale: torch.Tensor | None = None

    def times(self, scale: torch.Tensor) -> Scaled:
        """The product with a diagonal; successive diagonals are multiplied first, without the columns."""
        return Scaled(self.gradients, scale if self.scale is None else self.scale * scale)

    def product(self) -> torch.Tensor:
        """The product."""
        return self.gradients if self.scale is None else self.gradients * self.scale

    def plus(self, other: Scaled) -> Scaled:
        """The sum of two products."""
        if self.scale is None and other.scale is not None:
            return other.plus(self)
        if self.scale is None:
            return Scaled(self.gradients + other.gradients)
        return Scaled(torch.addcmul(other.product(), self.gradients, self.scale))


#: Bytes of gradients that `pull_back_all` holds at once.
AT_ONCE = 2**26


def pull_back_all(records: Sequence[Record], columns: torch.Tensor) -> torch.Tensor:
    """``Jᵀ K`` for each sample by the operators' own backward, from the last record's output to the first one's input.

    `columns` has shape ``(out_size, columns, batch)``; a batch of 1 is shared by all samples. The result has shape
    ``(in_size, columns, batch)``.
    """
    batch = records[0].batch
    gradients = columns.expand(-1, -1, batch).permute(1, 2, 0)
    largest = max(record.stage.largest for record in records)
    if not gradients.numel():
        return gradients.new_zeros(math.prod(records[0].stage.in_shape), *columns.shape[1:2], batch)
    parts = []
    for part in gradients.split(max(1, AT_ONCE // (largest * batch * columns.element_size()))):
        scaled = Scaled(part)
        for record in reversed(records):
            scaled = record.pull_back_columns(scaled)
        parts.append(scaled.product())
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).permute(2, 0, 1)
