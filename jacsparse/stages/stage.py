"""Stages of a chain, which no run changes: their operators and patterns, and how a program is cut into them."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..patterns import Call, Full, Identity, Pattern, Rule, UnsupportedOperatorError, rule_for
from ..runtime import on_device
from ..tracing import Operation, Program, PrunedWeight, Trace, excluded_by, mask_of
from .accumulation import Accumulation, Region, empty_pattern, is_light
from .elimination import eliminate


class _CouplingRule(Rule):
    """The rule of an operator that couples samples: its products are counted, and it has no matrix."""

    entrywise = False

    def multiply_adds(self, call: Call) -> int:
        return call["products"]  # type: ignore[no-any-return]

    def pattern(self, call: Call) -> Pattern:
        # A gradient that reaches one element reaches all.
        return Pattern.of(Full(call.out_size, call.in_size))


_COUPLING = _CouplingRule()


@dataclass(frozen=True, eq=False, repr=False)
class Edge:
    """The dependence of one operation on one of its operands: a local Jacobian."""

    operation: Operation
    #: The call of the operator for this operand, with shapes only.
    call: Call
    #: Of which weights and masks the pattern omits elements.
    omissions: tuple[PrunedWeight, ...] = ()
    #: Of an operand that holds scores, what excludes some of them: see `excluded_by`.
    excluded: tuple[int, Any] | None = None
    #: Of an edge that couples samples, for counts alone: the multiply-adds of its product with a vector, for a sample.
    coupling: int = 0

    @functools.cached_property
    def source(self) -> int:
        """The value of the operand."""
        return self.operation.operands[self.call.argument]

    @functools.cached_property
    def target(self) -> int:
        """The value of the result."""
        return self.operation.value

    @functools.cached_property
    def rule(self) -> Rule:
        """The rule that computes the pattern and the values."""
        return _COUPLING if self.coupling else rule_for(self.call)

    @property
    def pattern(self) -> Pattern:
        """The pattern of the Jacobian, ``(out_size, in_size)``."""
        return self.transposed_pattern.T

    @functools.cached_property
    def transposed_pattern(self) -> Pattern:
        """The pattern of the transposed Jacobian, ``(in_size, out_size)``."""
        if not self.call.in_size * self.call.out_size:
            return empty_pattern(self.call.in_size, self.call.out_size)
        return self.rule.pattern(self.call).T if self.coupling else self.call.pattern.T

    @property
    def shared(self) -> bool:
        """Whether all samples share the values."""
        return self.rule.shared(self.call)

    def number_of(self, name: str) -> int:
        """The value of a constant argument; for the operand itself, of what excludes elements of it."""
        if name == self.call.argument and self.excluded is not None:
            return self.excluded[0]
        return self.operation.number_of(name)

    def weight(self, name: str, trace: Trace) -> torch.Tensor:
        """A constant argument in a run as a weight, whose zeros the pattern may omit."""
        constant = trace.elements(self.number_of(name))
        if name == self.call.argument and self.excluded is not None and self.excluded[1] is not None:
            excludes = trace.read(self.excluded[1]) == -math.inf
            constant = ~constant.bool() if excludes else torch.ones_like(constant, dtype=torch.bool)
        return self.as_weight(name, constant)

    def as_weight(self, name: str, constant: torch.Tensor) -> torch.Tensor:
        """The elements of an argument as a weight, of which a sample has these."""
        of_sample = constant if name == self.call.argument else self.operation.of_sample(name, constant)
        return self.rule.as_weight(self.call, name, of_sample)

    def without(self, names: Sequence[str], trace: Trace, *, by_masks: bool) -> Edge:
        """The same edge with a pattern that omits zeros of these arguments in a run, where that pays.

        With `by_masks`, only tensors from elsewhere that are no weights decide it, as pruning masks.
        """
        weights = (self._pruned_weight(name, trace) for name in names)
        weights = (weight for weight in weights if weight.source is not None or not by_masks)
        pruned = tuple(w for w in weights if w.omits and self.rule.prunes(self.call, w.mask))
        if not pruned and not self.omissions:
            return self
        call = replace(self.call, masks={weight.name: weight.mask for weight in pruned})
        return replace(self, call=call, omissions=pruned)

    def _pruned_weight(self, name: str, trace: Trace) -> PrunedWeight:
        """Which elements of an argument are zero in a run, and what decides that."""
        weight, value = self.weight(name, trace), self.number_of(name)
        source, mask = mask_of(trace, value) or (value, None)
        mask = None if mask is None else self.operation.of_sample(name, mask)
        is_constant = source in trace.graph.captures and trace.is_intact(source)
        trains = isinstance(trace.tensor(source), nn.Parameter)
        pruned = PrunedWeight(name, weight, mask, source if is_constant else None, trains=trains)
        if pruned.source is not None:
            pruned.comparisons.outcome(source, trace.tensor(source), lambda: True)
        return pruned

    def omits_zeros(self, weight: PrunedWeight, trace: Trace) -> bool:
        """Whether what the pattern omits of a weight is zero in a run; on a device, its mask tells, by its version."""
        source = weight.source
        if source is None or not on_device(trace.input) or not trace.is_intact(source):
            return weight.holds(self.weight(weight.name, trace))

        def compare() -> bool:
            return weight.is_within(self._pruned_weight(weight.name, trace))

        return weight.comparisons.outcome(source, trace.tensor(source), compare)

    def adapted(self, trace: Trace, *, by_masks: bool = False) -> Edge:
        """The same edge with a pattern that omits only elements that are zero in a run's weights."""
        # A tensor that was overwritten after the run does not tell which elements were zero.
        stale = {w.name for w in self.omissions if trace.is_stale(self.number_of(w.name))}
        if not stale and all(self.omits_zeros(weight, trace) for weight in self.omissions):
            return self
        # Elements had been zero by chance, or by another mask: the zeros of this forward decide.
        names = [weight.name for weight in self.omissions if weight.name not in stale]
        return self.without(names, trace, by_masks=by_masks)

    def __repr__(self) -> str:
        return f"<Edge {self.call.path}: {self.call.operator}, {self.call.argument}>"


def working(edges: Sequence[Edge]) -> list[Edge]:
    """The edges of the operators that do more than reshape a single operand."""
    operands = Counter(edge.target for edge in edges)
    return [
        edge
        for edge in edges
        if operands[edge.target] > 1 or not isinstance(edge.transposed_pattern.structure, Identity)
    ]


@dataclass(frozen=True, eq=False, repr=False)
class Stage:
    """A part of a chain through which all of the gradient passes: an operator, or a graph of several.

    Attributes
    ----------
    path : str
        Place in the model, as in ``features.0``.
    in_shape, out_shape : tuple of int
        Shapes of one sample of the input and of the output.
    edges : tuple of Edge
        An edge for each operand of each operator.
    start, stop : int
        Values of the input and of the output.
    operations : tuple of Operation
        The operators, in order.
    """

    path: str
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    edges: tuple[Edge, ...]
    start: int
    stop: int
    operations: tuple[Operation, ...]

    @functools.cached_property
    def couples(self) -> bool:
        """Whether the samples of a batch depend on each other: then there are no edges, and no matrix."""
        return any(operation.couples for operation in self.operations)

    @functools.cached_property
    def operator(self) -> Edge | None:
        """The edge of the stage's one operator besides those that only reshape; None where there are more."""
        if self.couples:
            return None
        # Branches meet again, at several edges that all count as working.
        edges = working(self.edges) or self.edges[:1]
        return edges[0] if len(edges) == 1 else None

    @property
    def name(self) -> str:
        """The ATen operator; or the number of operators that do more than reshape."""
        if self.couples:
            return "couples samples"
        operator, count = self.operator, len({edge.target for edge in working(self.edges)})
        return f"{count} operators" if operator is None else operator.call.operator

    @functools.cached_property
    def accumulation(self) -> Accumulation:
        """The products and sums of the transposed Jacobian, whose leaves are edges."""
        accumulation = Accumulation((math.prod(self.in_shape), math.prod(self.out_shape)))
        accumulation.finish(self.joined(accumulation, lambda edge: accumulation.leaf(edge, edge.transposed_pattern)))
        return accumulation

    @property
    def pattern(self) -> Pattern:
        """The pattern of the Jacobian, ``(out_size, in_size)``: the union over all paths."""
        return self.transposed_pattern.T

    @functools.cached_property
    def transposed_pattern(self) -> Pattern:
        """The pattern of the transposed Jacobian, ``(in_size, out_size)``."""
        return self.accumulation.pattern

    def factor(self, patterns: Sequence[Pattern] | None = None) -> Pattern | Region:
        """The transposed Jacobian as counts see it, with patterns of the edges other than their own on request.

        That of a stage that couples samples takes a record of `counted_record`.
        """
        if not self.edges:
            self.check_matrix()
        if self.operator is not None:
            return self.operator.transposed_pattern if patterns is None else patterns[self.edges.index(self.operator)]
        if patterns is None:
            patterns = [edge.transposed_pattern for edge in self.edges]
        edges = [(edge.source, edge.target, pattern) for edge, pattern in zip(self.edges, patterns, strict=True)]
        shape = math.prod(self.in_shape), math.prod(self.out_shape)
        coupling = {number: edge.coupling for number, edge in enumerate(self.edges) if edge.coupling}
        return Region(shape, edges, self.start, self.stop, coupling)

    def joined(self, accumulation: Accumulation, leaf: Callable[[Edge], int]) -> int | None:
        """Add the stage's matrix to an accumulation, from the leaves of its edges; None where it is zero."""
        self.check_matrix()
        if self.operator is not None:
            return leaf(self.operator)
        edges = [(edge.source, edge.target, leaf(edge)) for edge in self.edges]
        return eliminate(accumulation, edges, self.start, self.stop)

    @functools.cached_property
    def shared(self) -> bool:
        """Whether all samples share the Jacobian's values."""
        return not self.couples and all(edge.shared for edge in self.edges)

    @functools.cached_property
    def light(self) -> bool:
        """Whether each row of the transposed Jacobian has at most one entry: those of a diagonal, or of a selection."""
        return self.operator is not None and is_light(self.operator.transposed_pattern)

    @property
    def backward_work(self) -> int:
        """Rough multiply-adds of the operators' dense backward for one sample, and one for each element."""
        return sum(edge.rule.multiply_adds(edge.call) + edge.call.in_size + edge.call.out_size for edge in self.edges)

    def check_matrix(self) -> None:
        """Raise where there is no matrix for each sample."""
        if self.couples:
            name = next(operation.name for operation in self.operations if operation.couples)
            raise UnsupportedOperatorError(
                f"{self.path}: {name} couples the samples of a batch, so that there is no Jacobian of each of them; "
                "take products with vectors, as schedule='linear' and exchange='linear' do"
            )

    @functools.cached_property
    def hooked(self) -> bool:
        """Whether backward hooks of a module see a gradient within the stage."""
        return any(operation.node.hooked for operation in self.operations)

    @functools.cached_property
    def largest(self) -> int:
        """Elements of one sample of the largest operand or result."""
        ends = math.prod(self.in_shape), math.prod(self.out_shape)
        return max(ends if self.couples else itertools.chain(ends, *(e.transposed_pattern.shape for e in self.edges)))

    def __repr__(self) -> str:
        return f"<Stage {self.path}: {self.name}, {self.in_shape} to {self.out_shape}>"


#: The values whose zeros are not pruned, those of which selections are not, and the arguments of a call.
Varying = tuple[frozenset[int], frozenset[int], frozenset[int]]
NONE_VARIES: Varying = (frozenset(), frozenset(), frozenset())


def stages_of(program: Program, trace: Trace, varying: Varying | None, *, by_masks: bool = False) -> list[Stage]:
    """The stages between the values that alone carry everything from a program's input to its output.

    Patterns omit zeros of weights, but for those that vary; none where that is None; with `by_masks`, as in
    `Edge.without`.
    """
    stages: list[Stage] = []
    start, *cuts = program.cuts()
    for stop in cuts:
        operations = program.between(start, stop)
        couples = any(operation.couples for operation in operations)
        pairs = [(operation, name) for operation in operations for name in operation.operands]
        edges = () if couples else tuple(edge_of(trace, *pair, varying, by_masks=by_masks) for pair in pairs)
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


def edge_of(
    trace: Trace,
    operation: Operation,
    argument: str,
    varying: Varying | None = NONE_VARIES,
    *,
    by_masks: bool = False,
) -> Edge:
    """The edge of an operator that works on each sample by itself; its pattern omits pruned weights."""
    edge = Edge(operation, operation.calls[argument])
    edge.rule.check(edge.call)
    return edge if varying is None else _pruned(edge, trace, varying, by_masks=by_masks)


def _excluded(edge: Edge, trace: Trace) -> tuple[int, Any] | None:
    """What excludes scores of all samples alike."""
    excluded, scores = excluded_by(trace.graph, edge.source), trace.tensor(edge.source)
    if excluded is None:
        return None
    layout, shape = edge.operation.layouts[edge.call.argument], trace.tensor(excluded[0]).shape
    shape = torch.Size([1] * (scores.ndim - len(shape)) + list(shape))
    return excluded if layout.axis < 0 or shape[layout.axis] == 1 else None


def _pruned(edge: Edge, trace: Trace, varying: Varying, *, by_masks: bool) -> Edge:
    """The edge with a pattern that omits the zeros of weights, but for those that vary."""
    call, graph, names = edge.call, trace.graph, list[str]()
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
        names.append(name)
    return edge.without(names, trace, by_masks=by_masks) if names else edge
