"""A traced program cut into stages, and the edges within them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..patterns import Identity
from ..tracing import Operation, Program, PrunedWeight, Trace, excluded_by, mask_of
from .stage import Edge, Stage, working

#: The values whose zeros are not pruned, those of which selections are not, and the arguments of a call.
Varying = tuple[frozenset[int], frozenset[int], frozenset[int]]
NONE_VARIES: Varying = (frozenset(), frozenset(), frozenset())


def stages_of(program: Program, trace: Trace, varying: Varying | None) -> list[Stage]:
    """The stages between the values that alone carry everything from a program's input to its output.

    Patterns omit zeros of weights, but for those that vary; none where that is None.
    """
    stages: list[Stage] = []
    start, *cuts = program.cuts()
    for stop in cuts:
        operations = program.between(start, stop)
        couples = any(operation.couples for operation in operations)
        pairs = [(operation, name) for operation in operations for name in operation.operands]
        edges = () if couples else tuple(edge_of(trace, *pair, varying) for pair in pairs)
        # A sum of two identities is no identity.
        meet = len({edge.target for edge in edges}) < len(edges)
        if not meet and not couples and all(isinstance(edge.transposed_pattern.structure, Identity) for edge in edges):
            if stop != cuts[-1]:
                # Operators that only reshape belong to the stage that follows.
                continue
            if stages:
                # At the end, they belong to the last stage.
                last = stages.pop()
                edges, start = () if last.couples else (*last.edges, *edges), last.start
                operations = program.between(start, stop)
            elif not any(
                operation.node.hooked or trace.graph.externals_of(operation.node, operation.operands)
                for operation in operations
            ):
                return []
        shapes = program.shapes[start][1:], program.shapes[stop][1:]
        worked = [edge.operation for edge in working(edges) or edges]
        path = _path(worked or operations, {stage.path for stage in stages})
        stages.append(Stage(path, *shapes, edges, start, stop, tuple(operations)))
        start = stop
    return stages


def _path(operations: Sequence[Operation], taken: set[str]) -> str:
    """The path of a stage: the common part of its operations' paths, with an operator and number if it is taken."""
    paths = zip(*(operation.node.path.split(".") for operation in operations), strict=False)
    common = [names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, paths)]
    path = ".".join(common) or operations[-1].node.path.rpartition(".")[0] or operations[-1].node.path
    name = operations[-1].name.partition(".")[2]
    candidates = [path, f"{path}:{name}", *(f"{path}:{name}:{number}" for number in range(2, len(taken) + 3))]
    return next(candidate for candidate in candidates if candidate not in taken)


def edge_of(trace: Trace, operation: Operation, argument: str, varying: Varying | None = NONE_VARIES) -> Edge:
    """The edge of an operator that works on each sample by itself; its pattern omits pruned weights."""
    edge = Edge(operation, operation.calls[argument])
    edge.rule.check(edge.call)
    return edge if varying is None else _pruned(edge, trace, varying)


def _excluded(edge: Edge, trace: Trace) -> tuple[int, Any] | None:
    """What excludes scores of all samples alike."""
    excluded, scores = excluded_by(trace.graph, edge.source), trace.tensor(edge.source)
    if excluded is None:
        return None
    layout, shape = edge.operation.layouts[edge.call.argument], trace.tensor(excluded[0]).shape
    shape = torch.Size([1] * (scores.ndim - len(shape)) + list(shape))
    return excluded if layout.axis < 0 or shape[layout.axis] == 1 else None


def _pruned(edge: Edge, trace: Trace, varying: Varying) -> Edge:
    """The edge with a pattern that omits the zeros of weights, but for those that vary."""
    call, graph, weights = edge.call, trace.graph, list[PrunedWeight]()
    for name in edge.rule.pruned_arguments(call):
        if name == call.argument:
            edge = replace(edge, excluded=_excluded(edge, trace))
            if edge.excluded is None:
                continue
        value = edge.number_of(name)
        # A drawn zero is not guaranteed, nor is one in a tensor that was overwritten.
        if name in call.dependent | call.batched or graph.infos[value].drawn or trace.is_stale(value):
            continue
        values = varying[0] if trace.tensor(value).is_floating_point() else varying[0] | varying[1]
        if not edge.rule.prunes_variables:
            values |= varying[2]
            if graph.infos[value].externals:
                continue
        if values and graph.made_of(value, values):
            continue
        mask = mask_of(trace, value)
        mask = None if mask is None else edge.operation.of_sample(name, mask)
        weights.append(PrunedWeight(name, edge.weight(name, trace), mask))
    return edge.without(weights) if weights else edge
