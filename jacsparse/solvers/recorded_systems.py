"""Back-propagation through the stages of a run as triangular systems, and gradients from their solutions."""

from __future__ import annotations

import itertools
import math
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..patterns import Diagonal, Pattern
from ..spgemm import SparseJacobian
from ..stages import Record, Run, add_gradients, empty_pattern, pull_back, refuse_hooks
from ..tracing import without_autocast
from .blocks import Block, sum_of
from .solver import TriangularSolver
from .systems import BlockTriangular


@dataclass(frozen=True)
class StageGroup:
    """The stages of one block row: what multiplies, if anything, and the elementwise ones that follow it."""

    linear: Record | None
    elementwise: tuple[Record, ...]

    def scale(self) -> torch.Tensor | None:
        """The product of the elementwise derivatives, ``(batch, elements)``; None where there are none."""
        product: torch.Tensor | None = None
        for record in self.elementwise:
            values = record.transposed_jacobian().values.T
            product = values if product is None else product * values
        return product


def groups_of(records: Sequence[Record]) -> list[StageGroup]:
    """The block rows of a chain's records, the one next to the input first; its group has no matrix."""
    groups: list[tuple[Record | None, list[Record]]] = [(None, [])]
    for record in records:
        if _is_elementwise(record):
            groups[-1][1].append(record)
        else:
            groups.append((record, []))
    return [StageGroup(linear, tuple(elementwise)) for linear, elementwise in groups]


def _is_elementwise(record: Record) -> bool:
    """Whether a record's matrix belongs to the diagonal blocks; a layer of one unit is a matrix all the same."""
    stage = record.stage
    if stage.operator is None or not isinstance(stage.operator.transposed_pattern.structure, Diagonal):
        return False
    return not (stage.shared and stage.operator.transposed_pattern.shape == (1, 1))


def diagonal_block(scale: torch.Tensor | None) -> SparseJacobian | None:
    """The diagonal matrix of each sample, from its elements ``(batch, elements)``."""
    return None if scale is None else SparseJacobian(Pattern.of(Diagonal(scale.shape[1])), scale.T.contiguous())


class RecordedSystem(ABC):
    """The system of a forward pass, and where its solution has the gradients of the stages' outputs."""

    system: BlockTriangular

    @abstractmethod
    def outputs(self, values: Sequence[torch.Tensor]) -> Iterator[tuple[Sequence[Record], torch.Tensor]]:
        """Successive records, and the gradient of the last one's output, ``(batch, elements)``; all records in turn."""

    def external_gradients(
        self, values: Sequence[torch.Tensor], places: Collection[int], apart: Collection[int] = ()
    ) -> dict[int, torch.Tensor]:
        """Gradients of externals by their places in the trace, from the solution of the system.

        Those in `apart` are read elsewhere too: the gradients through that are left out.
        """
        passes = [
            (records, gradient, sorted(set().union(*(record.externals for record in records)) & set(places)))
            for records, gradient in self.outputs(values)
        ]
        readers = Counter(place for *_, read in passes for place in read)
        apart = {place for place, count in readers.items() if count > 1 or place in apart}
        gradients: dict[int, torch.Tensor] = {}
        for records, gradient, read in passes:
            if read:
                _, pulled = pull_back(records[::-1], gradient, [], read, apart)
                add_gradients(gradients, pulled)
        return gradients


class ChainSystem(RecordedSystem):
    """Back-propagation through a chain's records as one block bi-diagonal system (Naumov, equation 14).

    Its rows are ``E_k v_k - A_k v_{k+1} = c_k``: `v_k` is the gradient of what the matrix of group k gives, and `v_0`
    that of the input.
    """

    def __init__(self, records: Sequence[Record], gradient: torch.Tensor) -> None:
        refuse_hooks(records)
        self.groups, batch = groups_of(records), len(gradient)
        like = records[0].trace.input.detach()
        gradient = gradient.flatten(1).to(like.dtype)
        blocks = {
            (place, place + 1): group.linear.transposed_jacobian()
            for place, group in enumerate(self.groups[1:])
            if group.linear is not None
        }
        sizes = [*(block.shape[0] for block in blocks.values()), gradient.shape[1]]
        right = [like.new_zeros(batch, size) for size in sizes]
        right[-1] = gradient
        # As autograd, it passes on infinities.
        scales = [diagonal_block(group.scale()) for group in self.groups]
        self.system = BlockTriangular(blocks, right, inverse_diagonal=scales, check_finite=False)

    def outputs(self, values: Sequence[torch.Tensor]) -> Iterator[tuple[Sequence[Record], torch.Tensor]]:
        for place, group in enumerate(self.groups):
            if group.linear is not None:
                yield [group.linear], values[place]
            # `values` are behind the elementwise stages; only gradients of their parameters need those before them.
            if any(record.externals for record in group.elementwise):
                yield group.elementwise, self._before_scaling(place, values)

    def _before_scaling(self, place: int, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """``c_k + A_k v_{k+1}``, the gradient of what a group's elementwise stages give."""
        block, right = self.system.off_diagonal.blocks.get((place, place + 1)), self.system.right[place].T
        if block is None:
            return right
        return right + SparseJacobian(block.pattern, block.values).jvp(values[place + 1])


class GraphSystem(RecordedSystem):
    """Back-propagation through all operators' edges as one block triangular system (the end of Naumov's section 2).

    Its nodes are the results of operators, of which several may be read more than once, as in a residual connection.
    """

    def __init__(self, records: Sequence[Record], gradient: torch.Tensor) -> None:
        refuse_hooks(records)
        self.records, batch = records, len(gradient)
        like = records[0].trace.input.detach()
        terms: dict[tuple[int, int], list[Block]] = {}
        sizes: dict[int, int] = {}
        for record in records:
            # Where the output does not depend on the input, a stage has no edges.
            sizes[record.stage.start] = math.prod(record.input.shape[1:])
            sizes[record.stage.stop] = math.prod(record.output.shape[1:])
            for edge in record.stage.edges:
                terms.setdefault((edge.source, edge.target), []).append(
                    Block(edge.transposed_pattern, record.transposed_values(edge))
                )
                sizes[edge.source], sizes[edge.target] = edge.transposed_pattern.shape
        self.nodes = {vertex: node for node, vertex in enumerate(sorted(sizes))}
        blocks = {}
        for (source, target), parts in terms.items():
            total = sum_of(parts)
            blocks[self.nodes[source], self.nodes[target]] = SparseJacobian(total.pattern, total.values)
        right = [like.new_zeros(batch, sizes[vertex]) for vertex in self.nodes]
        right[self.nodes[records[-1].stage.stop]] = gradient.flatten(1).to(like.dtype)
        self.system = BlockTriangular(blocks, right, check_finite=False)

    def outputs(self, values: Sequence[torch.Tensor]) -> Iterator[tuple[Sequence[Record], torch.Tensor]]:
        for record in self.records:
            yield [record], values[self.nodes[record.stage.stop]]


def _outline(records: Sequence[Record]) -> BlockTriangular:
    """A system with the shape, dtype and device of a chain's, and no elements in its blocks."""
    x = records[0].trace.input.detach()
    linear = [group.linear for group in groups_of(records) if group.linear is not None]
    sizes = [records[0].input[0].numel(), *(record.output[0].numel() for record in linear)]
    blocks = {
        (place, place + 1): SparseJacobian(empty_pattern(*shape), x.new_empty(0, 1))
        for place, shape in enumerate(itertools.pairwise(sizes))
    }
    return BlockTriangular(blocks, [x.new_zeros(len(x), size) for size in sizes], check_finite=False)


def stretches(records: Sequence[Record]) -> list[Sequence[Record]]:
    """The records between those that couple samples, and each of these by itself, in order."""
    groups = itertools.groupby(records, lambda record: record.stage.stop if record.stage.couples else None)
    return [list(group) for _, group in groups]


class Propagator:
    """Pulls gradients back through a chain by a triangular solver, as `jacsparse.scan.Scanner` does by a schedule.

    Stages that couple samples have no block: each stretch between them is a system, and autograd goes through them.

    Raises
    ------
    ValueError, UnsupportedOperatorError
        Where the solver does not apply to the run's chain, or hooks may change its gradients.
    """

    module: ClassVar[str] = "nn.Solve"

    def __init__(self, method: TriangularSolver, run: Run) -> None:
        self.method, self.in_shape = method, run.trace.input.shape[1:]
        if run.records:
            # In the forward pass, where the traceback shows the caller's own line.
            refuse_hooks(run.records)
            for records in stretches(run.records):
                if not records[0].stage.couples:
                    method.check(_outline(records))

    def pull_back(
        self, records: Sequence[Record], gradient: torch.Tensor, externals: Iterable[int], *, for_input: bool
    ) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        """Gradients of the chain's input and of externals, for a gradient of its output."""
        places = set(externals)
        if not records:
            return (gradient.reshape(len(gradient), *self.in_shape) if for_input else None), {}
        parts = [
            (part, places & set[int]().union(*(record.externals for record in part))) for part in stretches(records)
        ]
        readers = Counter(place for _, read in parts for place in read)
        apart = {place for place, count in readers.items() if count > 1}
        gradients: dict[int, torch.Tensor] = {}
        with without_autocast(gradient.device):
            for part, read in reversed(parts):
                if part[0].stage.couples:
                    (gradient,), terms = pull_back(part, gradient, part, sorted(read), apart)
                else:
                    gradient, terms = self._solved(part, gradient, read, apart)
                add_gradients(gradients, terms)
        return (gradient.reshape(records[0].input.shape) if for_input else None), gradients

    def _solved(
        self, records: Sequence[Record], gradient: torch.Tensor, places: Collection[int], apart: Collection[int]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """The gradients of the input of successive stages, ``(batch, elements)``, and of externals."""
        recorded = ChainSystem(records, gradient)
        solution = self.method.solve(recorded.system)
        if not solution.converged and solution.residual is not None:
            warnings.warn(
                f"{solution.method} stopped after {solution.iterations} iterations, with a residual of "
                f"{solution.residual:.1e}; the gradients are as inexact",
                RuntimeWarning,
                stacklevel=3,
            )
        return solution.values[0], recorded.external_gradients(solution.values, places, apart)
