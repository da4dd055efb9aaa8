"""Programs: what a graph says of one sample.

A program has the calls through which a derivative passes, and the places of the samples in their tensors. It holds for
every run of its graph.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from ..patterns import (
    CONSTANT,
    WHOLE,
    Call,
    Layout,
    MixedSamplesError,
    Rule,
    UnsupportedOperatorError,
    Use,
    remedy_for,
    rule_of,
)
from .functions import function_error
from .graph import Node, Operand, Value, form_of, results_of
from .operators import BackwardPass, Gather, Rewrite, defaults_of, operator_name
from .traces import Trace

_SAME = torch.ops.aten.alias.default


@dataclass(frozen=True, eq=False)
class Operation:
    """A call of an ATen operator that computes a value through which a derivative passes."""

    value: int
    node: Node
    #: The place of the value among the call's results.
    number: int
    #: An OpOverload, as in ``torch.ops.aten.add.Tensor``, or a `Gather`.
    overload: Any
    #: The arguments through which a derivative passes, and their values.
    operands: dict[str, int]
    #: Whether the samples of a batch depend on each other, here or in an operand; else, by operand, the call as its
    #: rule sees it.
    couples: bool = True
    calls: dict[str, Call] = field(default_factory=dict)
    #: Where the samples are in the arguments that have samples, and in the result; None where that has none.
    layouts: dict[str, Layout] = field(default_factory=dict)
    layout: Layout | None = None
    #: The arguments that are equal for all samples.
    alike: frozenset[str] = frozenset()
    #: Whether the operator itself mixes samples; and why it is taken only beside one that does, where it is so.
    mixes: bool = False
    refusal: str = ""

    @functools.cached_property
    def name(self) -> str:
        """The name of the operator, as in ``aten.add``."""
        return operator_name(self.overload)

    @functools.cached_property
    def referenced(self) -> Mapping[str, Any]:
        """The arguments of the call by name, with references to tensors and numbers of runs."""
        rewrites = isinstance(self.node.overload, Rewrite)
        return {"self": Value(*self.operands.values())} if rewrites else self.node.arguments

    @functools.cached_property
    def random(self) -> bool:
        """Whether only its run has the derivative: it may draw random numbers, or is a Function's without operators."""
        is_function = isinstance(self.overload, BackwardPass)
        return is_function or torch.Tag.nondeterministic_seeded in getattr(self.overload, "tags", ())

    def number_of(self, name: str) -> int:
        """The value of an argument that is a tensor."""
        return self.node.arguments[name].number  # type: ignore[no-any-return]

    def of_sample(self, name: str, constant: torch.Tensor) -> torch.Tensor:
        """An argument that is equal for all samples, for one of them."""
        layout = self.layouts.get(name)
        return constant if layout is None else layout.split(constant)[0]

    def evaluate(self, arguments: Mapping[str, Any]) -> torch.Tensor:
        """The result for other arguments; none of them is written to."""
        return results_of(self.overload, arguments)[self.number]


@dataclass(eq=False)
class Program:
    """The operations that lie between a module's input and its output."""

    #: The number of samples.
    batch: int
    #: The output; the input is 0.
    output: int
    #: The operations by value, in the order in which they run.
    operations: dict[int, Operation] = field(default_factory=dict)
    #: For each value, where the samples are, and the shape for a batch of one; without a layout, that of the batch.
    layouts: dict[int, Layout] = field(default_factory=dict)
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    #: Values at which no stage may end: those within a module whose backward hooks are called at both its ends, those
    #: without a gradient, and views that are written to.
    uncut: set[int] = field(default_factory=set)

    def between(self, start: int, stop: int) -> list[Operation]:
        """The operations that compute `stop` from `start`, in order."""
        needed, waiting = set(), [stop]
        while waiting:
            value = waiting.pop()
            if value not in needed and value != start and value in self.operations:
                needed.add(value)
                waiting.extend(self.operations[value].operands.values())
        return [operation for value, operation in self.operations.items() if value in needed]

    def cuts(self) -> list[int]:
        """The values that every path from the input to the output passes, in order, both ends included.

        Each inner one has the samples where the input has them, and a gradient that autograd computes.
        """
        if not self.output:
            return [0]
        operations = self.between(0, self.output)
        passed = passed_by_all_paths([(operation.value, operation.operands.values()) for operation in operations])
        inner = [
            value
            for value in passed
            if self.layouts.get(value) == self.layouts[0]
            and self.shapes[value][:1] == (1,)
            and value not in self.uncut
            and type(self.operations[value].node.overload) not in (Gather, Rewrite)
        ]
        return [0, *inner, self.output]


def passed_by_all_paths(made: Sequence[tuple[int, Collection[int]]]) -> list[int]:
    """The values that all paths pass from 0 to the last one, of values in order with those that each is made of."""
    # The last value that is computed from each one: operands come before what is computed from them.
    last = {operand: value for value, operands in made for operand in operands}
    # A path passes by a value where one before it leads to one after it.
    passed, furthest = [], last.get(0, made[-1][0])
    for value, _ in made[:-1]:
        if furthest == value:
            passed.append(value)
        furthest = max(furthest, last[value])
    return passed


def program_of(trace: Trace, *, couples: bool = False) -> Program:
    """The program of a run's graph; UnsupportedOperatorError where an operator has no rule, or mixes samples.

    Operators may mix samples where `couples`. Samples are apart again from the first value on that all paths pass,
    whose first axis has their number.
    """
    x, graph = trace.input, trace.graph
    last = graph.infos[graph.last.value].maker
    if last is not None and trace.tensor(graph.last.value).is_complex():
        raise UnsupportedOperatorError(
            f"{last.path}: {last.name} gives complex numbers, which are returned{last.source}; return "
            "torch.view_as_real of them"
        )
    program = Program(x.shape[0], graph.last.value)
    program.layouts[0] = WHOLE if program.batch == 1 else Layout(0)
    program.shapes[0] = program.layouts[0].shape_of_sample(x.shape)
    needed, known = _needed(trace), dict[Hashable, Operation]()
    passed = set[int]()
    if couples and needed:
        edges = [(value, [operand.value for operand in operands]) for value, operands in needed.items()]
        passed = {*passed_by_all_paths(edges), program.output}
    for value, operands in needed.items():
        node = graph.infos[value].maker
        assert node is not None
        result = trace.tensor(value)
        operation = _operation(program, trace, node, value, operands, couples, known)
        if operation.layout is None and value in passed and result.shape[:1] == x.shape[:1]:
            operation = replace(operation, layout=program.layouts[0])
        program.operations[value], program.shapes[value] = operation, tuple(result.shape)
        if operation.layout is not None:
            program.layouts[value] = operation.layout
            program.shapes[value] = operation.layout.shape_of_sample(result.shape)
    # The parts of a decomposed operator are one node to autograd: tensors between them have no gradient.
    without_gradient = {value for value in program.operations if trace.gradient_edge(value) is None}
    program.uncut = without_gradient | _written_views(trace) | _between_hooks(trace)
    _check_refusals(program)
    return program


def _check_refusals(program: Program) -> None:
    """Raise where an operator has no rule, and none beside it mixes samples so that autograd goes through them all."""
    if any(operation.refusal for operation in program.operations.values()):
        for start, stop in pairwise(program.cuts()):
            operations = program.between(start, stop)
            refusal = next((operation.refusal for operation in operations if operation.refusal), "")
            if refusal and not any(operation.mixes for operation in operations):
                raise UnsupportedOperatorError(refusal)


def _written_views(trace: Trace) -> set[int]:
    """The views that calls write to, and those that these are views of.

    Autograd takes the gradient on to the tensor that has the memory, and not to them.
    """
    views = set[int]()
    for node in trace.graph.differentiated:
        written = (value for name, value in node.tensors if node.writes_to(name))
        for value in written if node.writes and node.shift is None else ():
            views.add(value)
            viewed = _viewed(trace, value)
            while viewed is not None and (behind := _viewed(trace, viewed)) is not None:
                views.add(viewed)
                viewed = behind
    return views


def _viewed(trace: Trace, value: int) -> int | None:
    """What a value is a view of; None where it is none."""
    maker = trace.graph.infos[value].maker
    return None if maker is None or maker.facts.viewed is None else maker.arguments[maker.facts.viewed].number


def _between_hooks(trace: Trace) -> set[int]:
    """The values from the call of a module's hooks on its input to their call on its output."""
    hooked = [node for node in trace.graph.nodes if node.hooked]
    values: set[int] = set()
    for begin, end in trace.graph.hooked_spans if hooked else ():
        # Hooks are called before the module's first call, and after its last one.
        first, last = (next((node for node in hooked if node.place >= place), None) for place in (begin, end))
        if first is not None and last is not None:
            values.update(range(first.results[0], last.results[0]))
    return values


def _needed(trace: Trace) -> dict[int, list[Operand]]:
    """The values through which a derivative passes from the input to the output, in order, without the input.

    With each come the operands by which it passes.
    """
    graph = trace.graph
    # A tensor may have a gradient only because of weights: it is not reached from the input.
    reached = {0}
    for node in graph.differentiated:
        if node.name not in CONSTANT and any(operand.active and operand.value in reached for operand in node.operands):
            reached.update(node.results)
    needed: dict[int, list[Operand]] = {}
    waiting = [graph.last.value] if graph.last.active else []
    while waiting:
        value = waiting.pop()
        maker = graph.infos[value].maker
        if maker is not None and value in reached and value not in needed:
            needed[value] = [operand for operand in maker.operands if operand.active and operand.value in reached]
            waiting.extend(operand.value for operand in needed[value])
    return dict(sorted(needed.items()))


def _operation(
    program: Program,
    trace: Trace,
    node: Node,
    value: int,
    operands: list[Operand],
    couples: bool,
    known: dict[Hashable, Operation],
) -> Operation:
    """The operation that computes a value; `known` are those so far, for calls that do the same, as those of layers."""
    key = _key(program, trace, node, value, operands)
    if key in known:
        place = key, node.path, node.source
        if place not in known:
            same = known[key]
            here = {name: call.with_tensors(path=node.path, source=node.source) for name, call in same.calls.items()}
            known[place] = replace(same, calls=here)
        return replace(known[place], value=value, node=node, operands={each.name: each.value for each in operands})
    result, overload, number = trace.tensor(value), node.overload, node.results.index(value)
    arguments = {**defaults_of(overload), **{name: trace.read(argument) for name, argument in node.arguments.items()}}
    rewrites = isinstance(overload, Rewrite)
    if rewrites:
        # The derivative is that of what was written to.
        overload, number = _SAME, 0
        operands = [operand._replace(name="self") for operand in operands]
        arguments = {"self": trace.tensor(operands[0].value)} if operands else {}
    active = {operand.name: operand.value for operand in operands}
    name, where = operator_name(overload), node.path
    dependent = frozenset(active) if rewrites else frozenset(operand.name for operand in node.operands)
    coupling = Operation(value, node, number, overload, active)
    if not program.layouts.keys() >= set(active.values()):
        return coupling

    def unchanged() -> Layout | None:
        """Where shapes are equal, samples go on to lie where they lay, although they may depend on each other."""
        same = {program.layouts[each] for each in active.values() if trace.tensor(each).shape == result.shape}
        return same.pop() if len(same) == 1 else None

    if isinstance(overload, BackwardPass):
        # Autograd takes vectors through it.
        if not couples:
            raise function_error(node)
        return replace(coupling, mixes=True, layout=unchanged())
    of_operands = {argument: program.layouts[operand] for argument, operand in active.items()}
    use = Use(name, arguments, of_operands, result, program.batch, coupling.evaluate)
    rule = rule_of(name)
    if rule is None or (number and not rule.all_results):
        refusal = f"{where}: operator {name} has no rule; {remedy_for(name)}{node.source}"
        if rule is not None:
            refusal = (
                f"{where}: the rule of {name} is of its first result alone{node.source}; compute result "
                f"{number} by other operators"
            )
        if not couples:
            raise UnsupportedOperatorError(refusal)
        return replace(coupling, refusal=refusal, layout=unchanged())
    try:
        placement = rule.placement(use)
    except MixedSamplesError as error:
        if couples:
            return replace(coupling, mixes=True, layout=unchanged())
        what, remedy = error.args or (
            f"{name} mixes the samples of a batch{node.source}",
            "each sample must be worked on by itself; a Jacobian by arguments without samples takes batched=False",
        )
        raise UnsupportedOperatorError(f"{where}: {what}; {remedy}") from None
    layouts = placement.layouts
    # After ``expand`` all samples share one memory.
    alike = frozenset(
        name
        for name, layout in layouts.items()
        if name not in active and layout.axis >= 0 and arguments[name].stride(layout.axis) == 0
    )
    symbolic = {name: _symbolic(value, layouts.get(name), rule, name in alike) for name, value in arguments.items()}

    lists = {
        name: name.partition(".")[0] if rule.operands_apart else name for name in (*symbolic, *layouts, *dependent)
    }

    @functools.cache
    def others(of: str) -> tuple[dict[str, Any], frozenset[str], frozenset[str]]:
        """The arguments that the rule of an operand sees, outside of its list, with samples, and dependent ones."""
        return (
            {name: value for name, value in symbolic.items() if lists[name] != of},
            frozenset(name for name in layouts.keys() - alike if lists[name] != of),
            frozenset(name for name in dependent if lists[name] != of),
        )

    calls = dict[str, Call]()
    for argument, operand in active.items():
        seen, batched, varying = others(lists[argument])
        calls[argument] = Call(
            name,
            seen,
            program.shapes[operand],
            placement.output.shape_of_sample(result.shape),
            where,
            node.source,
            argument=argument,
            batched=batched,
            dependent=varying,
            sources=placement.sources.get(argument),
            function=coupling.evaluate,
        )
    operation = replace(coupling, couples=False, calls=calls, layouts=layouts, layout=placement.output, alike=alike)
    if key is not None:
        known[key] = known[key, node.path, node.source] = operation
    return operation


def _key(program: Program, trace: Trace, node: Node, value: int, operands: list[Operand]) -> Hashable:
    """What decides how rules see a call, but for its place in the module; None where elements of tensors decide."""
    tensors, rule = [trace.tensor(each) for _, each in node.tensors], node.facts.rule
    if (
        rule is None
        or rule.places_by_elements
        or (rule.reads_contents and not all(tensor.is_floating_point() for tensor in tensors))
    ):
        return None
    numbers = (trace.read(each) for each in node.arguments.values() if type(each) is not Value)
    return (
        *(id(node.overload), node.results.index(value), *node.arguments),
        *(repr(_symbolic(number, None, rule, False)) for number in numbers),
        *(form_of(tensor) for tensor in (*tensors, trace.tensor(value))),
        *((name, program.layouts.get(value), active) for name, value, active in (*operands, *node.operands)),
    )


def _symbolic(value: Any, layout: Layout | None, rule: Rule, alike: bool) -> Any:
    """An argument for one sample; tensors have no elements, except the indices and masks that the rule reads."""
    if isinstance(value, torch.Tensor):
        if rule.reads_contents and not value.is_floating_point() and (layout is None or alike):
            return (value if layout is None else layout.split(value)[0]).detach().clone()
        shape = value.shape if layout is None else layout.shape_of_sample(value.shape)
        return torch.empty(shape, dtype=value.dtype, device="meta")
    if isinstance(value, float) and not rule.reads_numbers:
        # Most rules tell no other numbers apart than 0 and 1.
        return value if value in (0.0, 1.0) else float("nan")
    return value
