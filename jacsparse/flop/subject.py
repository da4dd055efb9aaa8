"""The operators that a FLOP analysis counts, one after the other, and their transposed Jacobians."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ..patterns import Csr, Diagonal, Identity, Pattern, Pooling, UnsupportedOperatorError
from ..runtime import frozen, row_starts
from ..stages import (
    Edge,
    Record,
    Region,
    Stage,
    boundaries,
    chain_of_trace,
    forward_pass,
)
from ..tracing import traced, undisturbed
from .coupled_edges import counted_record
from .estimate import check_memory
from .layer_flop import LayerFlop, OperatorWork, layers_of, unpruned_nnz
from .network import Network

#: Bytes of an observed entry: its place in two patterns, and its value.
_OBSERVED = 12


@dataclass(frozen=True)
class CountedOperator:
    """One operator of a `Subject`, without its transposed Jacobian."""

    #: Path in the model, and name of the ATen operator.
    path: str
    name: str
    #: FLOP of the thesis' gradient operator over the observed entries of the operator's factor.
    gradient_flop: Callable[[Pattern | Region], float]
    #: The same FLOP over all entries, without any pruning.
    unpruned: float
    #: FLOP of PyTorch's own gradient operator.
    executed: float
    #: The edges of the factor whose weights' gradient takes a multiply-add for each entry.
    entrywise: tuple[int, ...] = ()
    #: What a training step computes for each operator of the stage.
    work: tuple[OperatorWork, ...] = ()


#: The factors of one sample; and, for each factor, which elements of the operands of entrywise edges are not zero.
Observation = tuple[Sequence["Pattern | Region"], Sequence[Mapping[int, np.ndarray]]]


@dataclass(frozen=True)
class Subject:
    """A sequence of operators whose FLOP are counted, from the network's input to its output."""

    #: Shape of one sample.
    in_shape: tuple[int, ...]
    #: The operators' transposed Jacobians.
    factors: Sequence[Pattern | Region]
    operators: Sequence[CountedOperator]
    #: Goes through the samples; the factors of each in turn have only the entries that are not zero.
    observe: Callable[[], Iterator[Observation]]
    #: The operators that have weights.
    layers: tuple[LayerFlop, ...]
    #: FLOP of the gradients of weights other than those of entrywise edges, by `BackPropagation.structure`.
    weights: Mapping[str, float | None]
    #: The numbers of the operators that couple samples.
    coupling: tuple[int, ...] = ()
    #: The number of samples to observe.
    samples: int = 0
    #: What is counted of the inputs and of the output, in words.
    counted: str = ""
    #: Whether the operators are steps, of which the first takes a state and not the network's input.
    recurrent: bool = False

    def __len__(self) -> int:
        return len(self.factors)

    def boundaries(self, workers: int, first: int = 0, stop: int | None = None) -> list[int]:
        """The places at which `jacsparse.schedule.balanced` cuts the operators from `first` to `stop`."""
        return boundaries(self.factors[first:stop], workers)


def chain_subject(network: Network) -> Subject:
    """The stages of a network's chain."""
    with undisturbed(network.module):
        try:
            trace = traced(network, network.samples(0), readable=False)
        except UnsupportedOperatorError:
            network.refuse_packed()
            raise
        chain = chain_of_trace(trace, couples=True)
        records = [counted_record(record) for record in chain.records(trace)]
        counts = [len(record.stage.edges) for record in records]
        stages = layers_of(
            records, lambda: traced(network, network.samples(0, copies=1), readable=False), network.joins
        )

    def observed_pattern(record: Record, edge: Edge, sample: int) -> Pattern:
        if edge.shared or edge.coupling:
            return edge.transposed_pattern
        values = record.transposed_values(edge, slice(sample, sample + 1))[:, 0]
        return without_zeros(edge.transposed_pattern, values.cpu().numpy())

    def nonzero_operands(record: Record, entrywise: Sequence[int], sample: int) -> dict[int, np.ndarray]:
        edges = _operator_edges(record.stage)
        return {number: (record.call(edges[number]).input[sample] != 0).flatten().cpu().numpy() for number in entrywise}

    def observed(x: torch.Tensor, count: int) -> Iterator[Observation]:
        with undisturbed(network.module):
            records = forward_pass(network, x, couples=True, by_autograd=False)[1].records
        records = [counted_record(record) for record in records]
        if [len(record.stage.edges) for record in records] != counts:
            raise UnsupportedOperatorError(
                f"{chain.name}: what it calls depends on the number of samples, as where they are not along the first "
                "axis; put them there (batch_first=True), or count the guaranteed structure"
            )
        edges = [edge for record in records for edge in record.stage.edges if not (edge.shared or edge.coupling)]
        nbytes = _OBSERVED * sum(edge.transposed_pattern.nnz for edge in edges)
        check_memory("the entries of observed Jacobians take", nbytes, "count the guaranteed structure")
        for n in range(count):
            factors = [
                record.stage.factor([observed_pattern(record, edge, n) for edge in record.stage.edges])
                for record in records
            ]
            yield (
                factors,
                [nonzero_operands(record, layers.entrywise, n) for record, layers in zip(records, stages, strict=True)],
            )

    def observe() -> Iterator[Observation]:
        if chain.coupling and network.count > 1:
            # Samples that depend on each other stay together.
            yield from observed(network.samples(), network.count)
            return
        for number in range(network.count):
            # As many copies as before: the chain is found again. Of one, it would be cut into other stages.
            yield from observed(network.samples(number), 1)

    operators = [
        CountedOperator(
            stage.path,
            stage.name,
            partial(_observed_flop, stage),
            math.fsum(_operator_flop(edge, unpruned_nnz(edge)) for edge in _operator_edges(stage)),
            layers.executed,
            layers.entrywise,
            layers.work,
        )
        for stage, layers in zip((record.stage for record in records), stages, strict=True)
    ]
    weights = dict.fromkeys(("pruned", "observed"), float(sum(layers.other_weights for layers in stages)))
    all_layers = tuple(layer for layers in stages for layer in layers.layers)
    factors = [record.stage.factor() for record in records]
    return Subject(
        chain.in_shape,
        factors,
        operators,
        observe,
        all_layers,
        weights,
        chain.coupling,
        network.count,
        network.counted,
    )


def without_zeros(pattern: Pattern, values: np.ndarray) -> Pattern:
    """The entries of a pattern whose values are not zero."""
    nonzero = values != 0
    # The number of nonzeros before each row.
    indptr = row_starts(nonzero, pattern.indptr.dtype)[pattern.indptr]
    return Pattern.of(Csr(*pattern.shape, frozen(indptr), frozen(pattern.indices[nonzero])))


def _operator_edges(stage: Stage) -> Sequence[Edge]:
    """The stage's single operator, or all of its edges."""
    return stage.edges if stage.operator is None else (stage.operator,)


def _observed_flop(stage: Stage, factor: Pattern | Region) -> float:
    """FLOP of a stage's gradient operators over the observed entries of its factor."""
    patterns = [pattern for _, _, pattern in factor.edges] if isinstance(factor, Region) else [factor]
    edges = zip(_operator_edges(stage), patterns, strict=True)
    return math.fsum(_operator_flop(edge, pattern.nnz) for edge, pattern in edges)


def _operator_flop(edge: Edge, nnz: int) -> float:
    """FLOP of a gradient operator, as `BaselineStep.flop` counts them, with `nnz` entries of its pattern."""
    if edge.coupling:
        return 2.0 * edge.coupling
    pattern = edge.transposed_pattern
    rows, columns = pattern.shape
    if isinstance(pattern.structure, Identity):
        return 0.0
    if isinstance(pattern.structure, Diagonal):
        return rows + nnz
    if isinstance(pattern.structure, Pooling) and pattern.structure.selects:
        return float(rows + columns)
    return 2.0 * nnz
