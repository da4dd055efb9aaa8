"""Stages that couple samples as counts see them: operators that vectors pass through, and no matrix."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from torch.utils.flop_counter import flop_registry

from ..patterns import Call, Full, Pattern, Rule
from ..tracing import Operation, Value
from .accumulation import Region
from .cutting import edge_of
from .record import Record
from .stage import Edge


class _CouplingRule(Rule):
    """The rule of an operator that couples samples: its products are counted, and it has no matrix."""

    entrywise = False

    def __init__(self, multiply_adds: int) -> None:
        self._multiply_adds = multiply_adds

    def multiply_adds(self, call: Call) -> int:
        return self._multiply_adds

    def pattern(self, call: Call) -> Pattern:
        # A gradient that reaches one element reaches all.
        return Pattern.of(Full(call.out_size, call.in_size))


@dataclass(frozen=True, eq=False, repr=False)
class CoupledEdge(Edge):
    """The dependence of an operator that couples samples on one of its operands, for a sample's share of the batch."""

    #: Multiply-adds of its matrix products in the forward pass.
    products: int = 0

    @cached_property
    def rule(self) -> Rule:
        return _CouplingRule(self.products)

    @property
    def multiply_adds(self) -> int:
        """Of the operand's gradient: its products, or half an operation for each element that is read and written."""
        return self.products or (self.call.in_size + self.call.out_size + 1) // 2


@dataclass(eq=False)
class CoupledRegion(Region):
    """A graph of operators of which some couple samples: vectors go through it, and no matrix stands for it."""

    #: The multiply-adds of the edges that couple samples, by their numbers.
    coupling: Mapping[int, int] = field(default_factory=dict)

    @property
    def nnz(self) -> int:
        """Multiply-adds of a product with a full vector."""
        separate = (pattern.nnz for number, (*_, pattern) in enumerate(self.edges) if number not in self.coupling)
        return sum(separate) + sum(self.coupling.values())

    def pairs(
        self, nonzero: np.ndarray, read: dict[int, int] | None = None
    ) -> tuple[dict[int, np.ndarray], np.ndarray]:
        pairs, reached = super().pairs(nonzero, read)
        for number, total in self.coupling.items():
            if number in pairs and pairs[number].any():
                each, more = divmod(total, len(pairs[number]))
                pairs[number] = each + (np.arange(len(pairs[number])) < more)
        return pairs, reached


def counted_record(record: Record) -> Record:
    """The record with edges for all operators of its stage, where that couples samples; of any other, itself."""
    if not record.stage.couples:
        return record
    edges = [
        _coupled(record, operation, name) if operation.couples else edge_of(record.trace, operation, name)
        for operation in record.stage.operations
        for name in operation.operands
    ]
    return replace(record, stage=replace(record.stage, edges=tuple(edges)))


def _coupled(record: Record, operation: Operation, argument: str) -> CoupledEdge:
    def share(value: int) -> tuple[int]:
        """A sample's share of the elements, as a shape."""
        return (math.ceil(record.trace.tensor(value).numel() / record.batch),)

    path, where = operation.node.path, operation.node.source
    call = Call(operation.name, {}, share(operation.operands[argument]), share(operation.value), path, where, argument)
    products = math.ceil(_multiply_adds(record, operation) / record.batch)
    return CoupledEdge(operation, call, products=products)


def _multiply_adds(record: Record, operation: Operation) -> int:
    """Multiply-adds of the matrix products in an operator's forward pass, for the whole batch."""
    count = flop_registry.get(getattr(operation.overload, "_overloadpacket", None))
    if count is None:
        return 0
    trace = record.trace
    arguments = [
        trace.tensor(value.number) if isinstance(value, Value) else trace.read(value)
        for value in operation.referenced.values()
    ]
    return int(count(*arguments, out_val=trace.tensor(operation.value))) // 2


def factor_of(record: Record, patterns: Sequence[Pattern] | None = None) -> Pattern | Region:
    """The transposed Jacobian of a stage as counts see it, of a record that `counted_record` gave.

    Patterns of the edges other than their own are taken on request.
    """
    stage = record.stage
    if not stage.couples:
        return stage.factor(patterns)
    coupling = {n: edge.multiply_adds for n, edge in enumerate(stage.edges) if isinstance(edge, CoupledEdge)}
    return CoupledRegion(*stage._region(patterns), coupling)
