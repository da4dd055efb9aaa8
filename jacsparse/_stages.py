"""Stages of a chain, and what a forward pass recorded of each."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from ._accumulation import Accumulation, Region, eliminate, empty_pattern
from ._jacobian import SparseJacobian
from ._nodes import applied, freely
from ._pruned import Kept
from .patterns import Call, Diagonal, Identity, Pattern, Rule, rule_for
from .patterns._layout import Layout
from .spgemm import matvec
from .tracing import Invocation, Operation, Program, Recording

__all__ = ["AT_ONCE", "Edge", "Record", "Stage", "pull_back_all", "working"]


@dataclass(frozen=True, eq=False, repr=False)
class Edge:
    """One operator's dependence on one of its operands: a local Jacobian.

    Attributes
    ----------
    source, target : int
        Vertices of the operand and of the result.
    call : Call
        The operator's, while only shapes are known.
    kept : tuple of Kept
        The weights of which the pattern leaves some out.
    """

    source: int
    target: int
    call: Call
    kept: tuple[Kept, ...] = ()

    @functools.cached_property
    def rule(self) -> Rule:
        """How the operator's pattern and values are made."""
        return rule_for(self.call)

    @functools.cached_property
    def pattern(self) -> Pattern:
        """Of the transposed Jacobian, ``(in_size, out_size)``."""
        pattern, expected = self.rule.pattern(self.call), (self.call.out_size, self.call.in_size)
        if pattern.shape != expected:
            raise ValueError(
                f"{self.call.path}: the rule of {self.call.operator} gave a pattern of shape {pattern.shape}; "
                f"expected {expected}"
            )
        return pattern.T

    @property
    def shared(self) -> bool:
        """Whether all samples share the values."""
        return self.rule.shared(self.call)

    def keeping(self, kept: Sequence[Kept]) -> Edge:
        """The same edge with a pattern that leaves out what these weights do, where that pays."""
        some = tuple(w for w in kept if not bool(w.mask.all()) and self.rule.prunes(self.call, w.mask))
        return replace(self, call=replace(self.call, kept={weight.name: weight.mask for weight in some}), kept=some)

    def __repr__(self) -> str:
        return f"<Edge {self.call.path}: {self.call.operator}, {self.call.argument}>"


def working(edges: Sequence[Edge]) -> list[Edge]:
    """The edges of operators that do more than pass their one operand on, in another shape perhaps."""
    operands = Counter(edge.target for edge in edges)
    return [edge for edge in edges if operands[edge.target] > 1 or not isinstance(edge.pattern.structure, Identity)]


@dataclass(frozen=True, eq=False, repr=False)
class Stage:
    """A part of a chain through which all of the gradient passes: an operator, or a graph of several.

    Attributes
    ----------
    path : str
        In the model, as in ``features.0``.
    in_shape, out_shape : tuple of int
        Without the batch axis.
    edges : tuple of Edge
        The operators, with their operands.
    start, stop : int
        The edges' first source and last target.
    program : Program
        The whole of which the stage is a part.
    """

    path: str
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    edges: tuple[Edge, ...]
    start: int
    stop: int
    program: Program

    @functools.cached_property
    def operator(self) -> Edge | None:
        """The operator, where there is one alone among others that only reshape; else None."""
        if len({edge.source for edge in self.edges}) < len(self.edges):
            return None
        some = working(self.edges) or self.edges[:1]
        return some[0] if len(some) == 1 else None

    @property
    def name(self) -> str:
        """The ATen operator, or how many there are that do more than reshape."""
        operator, count = self.operator, len({edge.target for edge in working(self.edges)})
        return f"{count} operators" if operator is None else operator.call.operator

    @functools.cached_property
    def _accumulated(self) -> tuple[Accumulation, int | None]:
        accumulation = Accumulation()
        return accumulation, self.joined(accumulation, lambda edge: accumulation.leaf(edge, edge.pattern))

    @functools.cached_property
    def pattern(self) -> Pattern:
        """Of the transposed Jacobian, ``(in_size, out_size)``: the union over all paths."""
        accumulation, result = self._accumulated
        if result is None:
            return empty_pattern(math.prod(self.in_shape), math.prod(self.out_shape))
        return accumulation.matrices[result].pattern

    def factor(self, patterns: Sequence[Pattern] | None = None) -> Pattern | Region:
        """The transposed Jacobian as what counts ask of it; made of other patterns of the edges where given."""
        own = [edge.pattern for edge in self.edges] if patterns is None else patterns
        if self.operator is not None:
            return own[self.edges.index(self.operator)]
        edges = [(edge.source, edge.target, pattern) for edge, pattern in zip(self.edges, own, strict=True)]
        return Region((math.prod(self.in_shape), math.prod(self.out_shape)), edges, self.start, self.stop)

    def joined(self, accumulation: Accumulation, leaf: Callable[[Edge], int]) -> int | None:
        """The stage's matrix among those of an accumulation, made of its edges' own; None where it is zero."""
        if self.operator is not None:
            return leaf(self.operator)
        edges = [(edge.source, edge.target, leaf(edge)) for edge in self.edges]
        return eliminate(accumulation, edges, self.start, self.stop)

    @functools.cached_property
    def shared(self) -> bool:
        """Whether all samples share the Jacobian's values."""
        return all(edge.shared for edge in self.edges)

    @property
    def backward_work(self) -> int:
        """Multiply-adds, roughly, of the operators' own backward for one sample: dense, and one for each element."""
        return sum(edge.rule.multiply_adds(edge.call) + edge.call.in_size + edge.call.out_size for edge in self.edges)

    @functools.cached_property
    def operations(self) -> tuple[Operation, ...]:
        """The operations of the edges, in order."""
        return tuple(self.program.operations[target] for target in dict.fromkeys(edge.target for edge in self.edges))

    @functools.cached_property
    def hooked(self) -> bool:
        """Whether backward hooks of a module see a gradient within the stage."""
        return any(operation.hooked for operation in self.operations)

    @functools.cached_property
    def largest(self) -> int:
        """Elements of the largest operand or result, of one sample."""
        return max(max(edge.pattern.shape) for edge in self.edges)

    def keeping(self, edges: Sequence[Edge]) -> Stage:
        """The same stage with other edges in the place of its own."""
        return replace(self, edges=tuple(edges))

    def __repr__(self) -> str:
        return f"<Stage {self.path}: {self.name}, {self.in_shape} to {self.out_shape}>"


class _Arguments(Mapping[str, Any]):
    """Arguments of a call, each made as it was where it is asked for.

    Parameters
    ----------
    arguments : mapping of str
        As the operator was given them.
    tensor : callable
        ``tensor(name, argument) -> argument`` as a rule is to see one that is a tensor.
    """

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
    """What a stage computed for one batch.

    Attributes
    ----------
    stage : Stage
        What it was.
    recording : Recording
        The forward pass that it was a part of.
    """

    stage: Stage
    recording: Recording = field(repr=False)
    #: Whether the patterns are known to leave out none of this forward's weights.
    _fits: bool = field(default=False, repr=False)

    def invocation(self, target: int) -> Invocation:
        """The call that made a vertex."""
        return self.recording.invocations[self.stage.program.operations[target].place]

    def adapted(self) -> Record:
        """The same record, of a stage whose pattern leaves out what is zero in the weights of this forward."""
        new: dict[Edge, Edge] = {}
        for edge in self.stage.edges:
            arguments = self.invocation(edge.target).arguments if edge.kept else {}
            if not all(kept.holds(arguments[kept.name]) for kept in edge.kept):
                # What does not hold is what was zero by chance.
                names = edge.rule.pruned_arguments(edge.call)
                new[edge] = edge.keeping([Kept(name, arguments[name], None) for name in names])
        if not new:
            self._fits = True
            return self
        return Record(self.stage.keeping([new.get(edge, edge) for edge in self.stage.edges]), self.recording, True)

    @property
    def batch(self) -> int:
        """Samples."""
        return self.stage.program.batch

    @property
    def input(self) -> torch.Tensor:
        """What the stage was given."""
        return self._tensor(self.stage.start)

    @property
    def output(self) -> torch.Tensor:
        """What the stage gave."""
        return self._tensor(self.stage.stop)

    def _tensor(self, vertex: int) -> torch.Tensor:
        invocation = self.recording.makers[vertex]
        if invocation is None:
            return self.recording.input
        return invocation.results[vertex - invocation.first]

    @functools.cached_property
    def externals(self) -> set[int]:
        """The tensors from outside that the stage reads and that autograd has gradients of, by their places."""
        recording, maker = self.recording, self.recording.makers[self.stage.stop]
        if not self.stage.edges:
            return set() if maker is None else recording.externals_of(maker)
        externals: set[int] = set()
        for operation in self.stage.operations:
            externals |= recording.externals_of(recording.invocations[operation.place], operation.operands)
        return externals

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """All that its operators were given, and gave."""
        for operation in self.stage.operations:
            invocation = self.recording.invocations[operation.place]
            yield from (invocation.arguments[name] for name in invocation.versions)
            yield from invocation.results

    def jacobian(self) -> SparseJacobian:
        """``J`` for the whole batch."""
        operator = self.stage.operator
        if operator is None:
            return self.transposed_jacobian().T
        call = self._call(operator, slice(None))
        return self._made(self.stage.pattern.T, lambda: operator.rule.values(call, self.stage.pattern.T))

    def transposed_jacobian(self, samples: slice = slice(None)) -> SparseJacobian:
        """``J.T`` for a slice of the batch."""
        operator = self.stage.operator
        if operator is not None:
            return self._made(self.stage.pattern, lambda: self.values(operator, samples))
        accumulation, result = self.stage._accumulated
        if result is None:
            count = len(range(self.batch)[samples])
            return SparseJacobian(self.stage.pattern, self.recording.input.detach().new_empty((0, count)))
        return self._made(self.stage.pattern, lambda: accumulation.run(result, lambda edge: self.values(edge, samples)))

    def operand(self, edge: Edge) -> torch.Tensor:
        """What an operator was given in the place that an edge is about, ``(batch, *in_shape)``."""
        x = self._call(edge, slice(None)).input
        assert x is not None
        return x

    def values(self, edge: Edge, samples: slice = slice(None)) -> torch.Tensor:
        """Values of one operator's transposed Jacobian, ``(nnz, batch)`` or ``(nnz, 1)``."""
        return edge.rule.transposed_values(self._call(edge, samples), edge.pattern)

    def pull_back_sparse(self, vectors: torch.Tensor, samples: slice = slice(None)) -> torch.Tensor:
        """``Jᵀ g`` for a slice of the batch by the operators' sparse Jacobians, one by one: ``(elements, batch)``."""
        gradients = {self.stage.stop: vectors}
        for edge in reversed(self.stage.edges):
            if edge.target in gradients:
                own = matvec(edge.pattern, self.values(edge, samples), gradients[edge.target])
                gradients[edge.source] = gradients[edge.source] + own if edge.source in gradients else own
        found = gradients.get(self.stage.start)
        return vectors.new_zeros((math.prod(self.stage.in_shape), vectors.shape[1])) if found is None else found

    def pull_back_columns(self, gradients: Scaled) -> Scaled:
        """``Jᵀ g`` of many gradients for each sample by the operators' own backward."""
        columns = gradients.gradients.shape[:2]
        waiting = {self.stage.stop: gradients}
        for edge in reversed(self.stage.edges):
            if edge.target not in waiting:
                continue
            own = waiting[edge.target]
            if isinstance(edge.pattern.structure, Identity):
                pass
            elif isinstance(edge.pattern.structure, Diagonal):
                own = own.times(self.values(edge).T)
            else:
                given = own.product().reshape(*columns, *edge.call.out_shape)
                pulled = edge.rule.pull_back(self._call(edge, slice(None)), edge.pattern.T, given)
                own = Scaled(pulled.reshape(*columns, edge.call.in_size))
            waiting[edge.source] = waiting[edge.source].plus(own) if edge.source in waiting else own
        if self.stage.start not in waiting:
            return Scaled(gradients.gradients.new_zeros(()).expand(*columns, math.prod(self.stage.in_shape)))
        return waiting[self.stage.start]

    def _made(self, pattern: Pattern, values: Callable[[], torch.Tensor]) -> SparseJacobian:
        try:
            return SparseJacobian(pattern, values())
        except torch.OutOfMemoryError as error:
            rows, columns = pattern.shape
            raise torch.OutOfMemoryError(f"{self.stage.path}, {rows:,} × {columns:,}: {error}") from error

    def winners(self, samples: slice = slice(None)) -> torch.Tensor | None:
        """For a stage that selects, what it selects: int32, ``(windows, batch)``."""
        operator = self.stage.operator
        return None if operator is None else operator.rule.selection(self._call(operator, samples))

    def numbers(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of floating-point numbers in the input's dtype, in which Jacobians are: others as they are."""
        dtype = self.recording.input.dtype
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    def _call(self, edge: Edge, samples: slice) -> Call:
        """An operator's call with its tensors, for a slice of the batch."""
        operation, invocation = self.stage.program.operations[edge.target], self.invocation(edge.target)
        path, argument, layouts = edge.call.path, edge.call.argument, operation.layouts
        given = invocation.arguments
        for kept in () if self._fits else edge.kept:
            if not kept.holds(given[kept.name]):
                raise RuntimeError(
                    f"{path}.{kept.name}: weights that were pruned or zero when the pattern was made are not zero any "
                    "more; make the chain again, keep them zero by a mask (torch.nn.utils.prune), or pass pruned=False"
                )
        number = edge.target - invocation.first
        x = given[argument]
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
            return self.numbers(split if whole else split[samples])

        def argument_of(name: str, value: torch.Tensor) -> torch.Tensor:
            if invocation.is_stale(name):
                raise _changed(f"{path}.{name}")
            layout = layouts.get(name)
            if layout is None:
                return self.numbers(value)
            if name in operation.alike:
                return self.numbers(layout.split(value.detach())[0])
            return of_samples(value, layout)

        arguments = {**edge.call.arguments, **given}
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
        """Autograd's node, which has what the forward pass saved; None where it is not that of this call alone."""
        edge = self.record.recording.edges[self.edge.target]
        if edge is None or edge.node is None or self.invocation.sequence < 0:
            return None
        same = edge.node._sequence_nr() == self.invocation.sequence  # type: ignore[attr-defined]
        return edge.node if same and not isinstance(edge.node, BackwardCFunction) else None

    @functools.cached_property
    def _place(self) -> int | None:
        """Which of the node's results is the gradient of the operand."""
        source = self.record.recording.edges[self.edge.source]
        node = self.node()
        if node is None or source is None:
            return None
        places = [n for n, (node, number) in enumerate(node.next_functions) if (node, number) == source[:2]]
        # An operand that is given twice has two, in the order of the arguments.
        same = [name for name, vertex in self.operation.operands.items() if vertex == self.edge.source]
        return places[same.index(self.edge.call.argument)] if len(places) == len(same) else None

    def vjp(self, gradient: torch.Tensor) -> torch.Tensor:
        """``Jᵀ g``, ``(batch, *out_shape)`` to ``(batch, *in_shape)``."""
        whole = len(range(self.record.batch)[self.samples]) == self.record.batch
        place = self._place
        # Neither is run again: what draws, and what has overwritten its operand.
        if place is None or not (whole or self.operation.random or self.invocation.writes):
            return self.vjps(gradient[None])[0]
        into, out = self._layouts
        number = self.edge.target - self.invocation.first
        result, x = self.invocation.results[number], self.invocation.arguments[self.edge.call.argument]
        gradient = gradient.to(result.dtype)
        if not whole:
            # Samples do not mix, so the others may have any gradient.
            others = out.split(torch.zeros_like(result))
            others[self.samples] = gradient.reshape(others[self.samples].shape)
            gradient = others
        node = self.node()
        inputs: list[torch.Tensor | None] = [None] * len(node._input_metadata)
        inputs[number if len(inputs) > 1 else 0] = out.join(gradient.reshape(out.split(result).shape))
        found: list[torch.Tensor | None] = []
        freely(lambda: found.extend(applied(node, inputs)))
        own = found[place]
        own = torch.zeros_like(x) if own is None else own.sum_to_size(x.shape)
        return self.record.numbers(into.split(own)[self.samples])

    @property
    def _layouts(self) -> tuple[Any, Any]:
        return self.operation.layouts[self.edge.call.argument], self.record.stage.program.layouts[self.edge.target]

    def _run(self, own: torch.Tensor) -> torch.Tensor:
        """The operator on these samples, with others in the place of its operand."""
        into, out = self._layouts
        arguments = dict(self.invocation.arguments)
        for name, value in arguments.items():
            layout = self.operation.layouts.get(name)
            if name == self.edge.call.argument:
                arguments[name] = into.join(own)
            elif isinstance(value, torch.Tensor):
                # Of an operator that only moves elements no derivative depends on another's.
                if not self.operation.sources and self.invocation.is_stale(name):
                    raise _changed(f"{self.operation.path}.{name}")
                value = value.detach()
                if layout is not None:
                    value = layout.join(layout.split(value)[self.samples])
                arguments[name] = value
        return out.split(self.operation.evaluate(arguments))

    @functools.cached_property
    def _x(self) -> torch.Tensor:
        into, _ = self._layouts
        return into.split(self.invocation.arguments[self.edge.call.argument].detach())[self.samples]

    def vjps(self, gradients: torch.Tensor) -> torch.Tensor:
        """The same for many gradients, ``(many, batch, *shape)``."""
        count, x = len(gradients), self._x
        with torch.enable_grad():
            own = x.clone().requires_grad_()
            y = self._run(own)
        if not y.requires_grad:
            return self.record.numbers(torch.zeros_like(x)).expand(count, *x.shape)
        gradients = gradients.reshape(count, *y.shape).to(y.dtype)
        if count == 1:
            (found,) = torch.autograd.grad(y, own, gradients[0], materialize_grads=True)
            return self.record.numbers(found)[None]
        (found,) = torch.autograd.grad(y, own, gradients, is_grads_batched=True, allow_unused=True)
        return self.record.numbers(torch.zeros_like(x).expand(count, *x.shape) if found is None else found)

    def jvp(self, tangent: torch.Tensor) -> torch.Tensor:
        """``J v``, ``(batch, *in_shape)`` to ``(batch, *out_shape)``."""
        # Twice backward: forward mode takes an operator that has none for a constant, and says nothing.
        with torch.enable_grad():
            own = self._x.clone().requires_grad_()
            y = self._run(own)
            gradient = torch.zeros_like(y, requires_grad=True)
            (pulled,) = torch.autograd.grad(y, own, gradient, create_graph=True, materialize_grads=True)
        if not pulled.requires_grad:
            return self.record.numbers(torch.zeros_like(y))
        tangent = tangent.reshape(own.shape).to(own.dtype)
        (found,) = torch.autograd.grad(pulled, gradient, tangent, materialize_grads=True)
        return self.record.numbers(found)


@dataclass(frozen=True)
class Scaled:
    """Gradients, ``(columns, batch, elements)``, and what each element is still to be multiplied by."""

    gradients: torch.Tensor
    scale: torch.Tensor | None = None

    def times(self, scale: torch.Tensor) -> Scaled:
        """Of diagonals that follow each other the product is taken, not that of each with all columns."""
        return Scaled(self.gradients, scale if self.scale is None else self.scale * scale)

    def product(self) -> torch.Tensor:
        """The gradients."""
        return self.gradients if self.scale is None else self.gradients * self.scale

    def plus(self, other: Scaled) -> Scaled:
        """The sum of two."""
        if self.scale is None and other.scale is not None:
            return other.plus(self)
        if self.scale is None:
            return Scaled(self.gradients + other.gradients)
        return Scaled(torch.addcmul(other.product(), self.gradients, self.scale))


#: Bytes of gradients that are held at once.
AT_ONCE = 2**26


def pull_back_all(records: Sequence[Record], columns: torch.Tensor) -> torch.Tensor:
    """``Jᵀ K`` for each sample by the operators' own backward, from the last record's output to the first one's input.

    Of ``(out_size, columns, batch)``, where a batch of 1 is shared; the result is ``(in_size, columns, batch)``.
    """
    batch = records[0].batch
    gradients = columns.expand(-1, -1, batch).permute(1, 2, 0)
    largest = max(record.stage.largest for record in records)
    if not gradients.numel():
        return gradients.new_zeros(math.prod(records[0].stage.in_shape), *columns.shape[1:2], batch)
    parts = []
    for part in gradients.split(max(1, AT_ONCE // (largest * batch * columns.element_size()))):
        own = Scaled(part)
        for record in reversed(records):
            own = record.pull_back_columns(own)
        parts.append(own.product())
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).permute(2, 0, 1)
