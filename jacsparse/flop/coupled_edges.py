"""Stages that couple samples as counts see them: operators that vectors pass through, and no matrix."""

from __future__ import annotations

import math
from dataclasses import replace

from ..patterns import Call
from ..stages import Edge, Record, edge_of
from ..tracing import Operation
from .layer_flop import multiply_adds_of


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


def _coupled(record: Record, operation: Operation, argument: str) -> Edge:
    """The dependence of an operator that couples samples on an operand, for a sample's share of the batch."""

    def share(value: int) -> int:
        """A sample's share of the elements."""
        return math.ceil(record.trace.tensor(value).numel() / record.batch)

    inputs, outputs = share(operation.operands[argument]), share(operation.value)
    products = multiply_adds_of(record.trace, operation.overload, operation.referenced.values(), operation.value)
    products = math.ceil(products / record.batch)
    path, where = operation.node.path, operation.node.source
    call = Call(operation.name, {"products": products}, (inputs,), (outputs,), path, where, argument)
    # Without products, half an operation for each element that is read and written.
    return Edge(operation, call, coupling=products or (inputs + outputs + 1) // 2)
