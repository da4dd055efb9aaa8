"""Records: what one forward pass computed in each stage."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ..patterns import Call, Diagonal, Identity, Pattern
from ..spgemm import SparseJacobian, matvec
from ..tracing import Trace
from .local_jacobian import LocalJacobian
from .stage import Edge, Stage

#: Bytes of gradients that `pull_back_all` holds at once.
GRADIENT_BYTES = 2**26


@dataclass(eq=False)
class Record:
    """What a stage computed for one batch; the elements that its patterns omit are zero in its weights."""

    stage: Stage
    #: The forward pass of the whole module.
    trace: Trace = field(repr=False)

    @property
    def batch(self) -> int:
        """The number of samples."""
        return len(self.trace.input)

    @property
    def input(self) -> torch.Tensor:
        """The stage's input, whose elements a later call may have overwritten."""
        return self.trace.tensor(self.stage.start)

    @property
    def output(self) -> torch.Tensor:
        """The stage's output, whose elements a later call may have overwritten."""
        return self.trace.tensor(self.stage.stop)

    def output_for(self, x: torch.Tensor) -> torch.Tensor:
        """The stage's output for another input, by the run's calls; its tensors are left as they are."""
        trace, values = self.trace, {self.stage.start: x}
        for node in trace.graph.replayed:
            if any(value in values for _, value in node.tensors):
                arguments = {name: trace.read(a, values) for name, a in node.arguments.items()}
                values |= node.by_value(node.computed(arguments))
            if self.stage.stop in values:
                break
        return values[self.stage.stop]

    @functools.cached_property
    def externals(self) -> set[int]:
        """The places of the externals that the stage reads, or that constants which it reads were computed from."""
        graph = self.trace.graph
        if not self.stage.operations:
            return {*graph.infos[self.stage.stop].externals}
        operations = self.stage.operations
        return set[int]().union(*(graph.externals_of(each.node, each.operands) for each in operations))

    def jacobian(self) -> SparseJacobian:
        """``J`` for the whole batch."""
        operator = self.stage.operator
        pattern = self.stage.pattern
        if operator is None or not pattern.nnz:
            return self.transposed_jacobian().T
        call = self.call(operator)
        return self._jacobian(pattern, lambda: operator.rule.values(call, pattern))

    def transposed_jacobian(self, samples: slice = slice(None)) -> SparseJacobian:
        """``J.T`` for a slice of the batch."""
        accumulation, pattern = self.stage.accumulation, self.stage.transposed_pattern
        if accumulation.result is None:
            return SparseJacobian(pattern, self.input.detach().new_empty((0, len(range(self.batch)[samples]))))
        return self._jacobian(pattern, lambda: accumulation.run(lambda edge: self.transposed_values(edge, samples)))

    def _jacobian(self, pattern: Pattern, values: Callable[[], torch.Tensor]) -> SparseJacobian:
        try:
            return SparseJacobian(pattern, values())
        except torch.OutOfMemoryError as error:
            rows, columns = pattern.shape
            raise torch.OutOfMemoryError(f"{self.stage.path}, {rows:,} × {columns:,}: {error}") from error

    def transposed_values(self, edge: Edge, samples: slice = slice(None)) -> torch.Tensor:
        """Values of one operator's transposed Jacobian, ``(nnz, batch)`` or ``(nnz, 1)``."""
        return LocalJacobian(edge, self.trace, samples).transposed_values

    def pull_back_columns(self, gradients: ScaledGradients) -> ScaledGradients:
        """``Jᵀ g`` for many gradients of each sample, by the operators' own backward."""
        columns = gradients.gradients.shape[:2]
        of_vertices = {self.stage.stop: gradients}
        for edge in reversed(self.stage.edges):
            if edge.target not in of_vertices:
                continue
            gradient = of_vertices[edge.target]
            if isinstance(edge.transposed_pattern.structure, Identity):
                pass
            elif isinstance(edge.transposed_pattern.structure, Diagonal):
                gradient = gradient.times(self.transposed_values(edge).T)
            elif edge.rule.has_registered_values:
                values, of_output = self.transposed_values(edge), gradient.product()
                vectors = of_output.reshape(math.prod(columns), -1).T.contiguous()
                if values.shape[1] > 1:
                    values = values.repeat(1, columns[0])
                gradient = ScaledGradients(matvec(edge.transposed_pattern, values, vectors).T.reshape(*columns, -1))
            else:
                of_output = gradient.product().reshape(*columns, *edge.call.out_shape)
                pulled = edge.rule.pull_back(self.call(edge), edge.pattern, of_output)
                gradient = ScaledGradients(pulled.reshape(*columns, edge.call.in_size))
            if edge.source in of_vertices:
                gradient = of_vertices[edge.source].plus(gradient)
            of_vertices[edge.source] = gradient
        if self.stage.start not in of_vertices:
            return ScaledGradients(gradients.gradients.new_zeros(()).expand(*columns, math.prod(self.stage.in_shape)))
        return of_vertices[self.stage.start]

    def winners(self, samples: slice = slice(None)) -> torch.Tensor | None:
        """The elements that a stage selects, as in max-pooling: int32, ``(windows, batch)``; None for other stages."""
        operator = self.stage.operator
        return None if operator is None else operator.rule.selection(self.call(operator, samples))

    def call(self, edge: Edge, samples: slice = slice(None)) -> Call:
        """An operator's call with its tensors, for a slice of the batch."""
        return LocalJacobian(edge, self.trace, samples).call


@dataclass(frozen=True)
class ScaledGradients:
    """The product of gradients, ``(columns, batch, elements)``, and of a scale for each element, not yet taken."""

    gradients: torch.Tensor
    scale: torch.Tensor | None = None

    def times(self, scale: torch.Tensor) -> ScaledGradients:
        """The product with a diagonal; successive diagonals are multiplied first, without the columns."""
        return ScaledGradients(self.gradients, scale if self.scale is None else self.scale * scale)

    def product(self) -> torch.Tensor:
        """The product."""
        return self.gradients if self.scale is None else self.gradients * self.scale

    def plus(self, other: ScaledGradients) -> ScaledGradients:
        """The sum of two products."""
        if self.scale is None and other.scale is not None:
            return other.plus(self)
        if self.scale is None:
            return ScaledGradients(self.gradients + other.gradients)
        return ScaledGradients(torch.addcmul(other.product(), self.gradients, self.scale))


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
    for part in gradients.split(max(1, GRADIENT_BYTES // (largest * batch * columns.element_size()))):
        scaled = ScaledGradients(part)
        for record in reversed(records):
            scaled = record.pull_back_columns(scaled)
        parts.append(scaled.product())
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).permute(2, 0, 1)
