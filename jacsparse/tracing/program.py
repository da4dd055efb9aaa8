"""Programs: what a recording has in common with every run that makes the same calls.

A program is the graph of the calls and the places of the samples in its tensors. Of the numbers of the run, it depends
only on the elements of indices and masks, which select positions. A later run has the same program where it makes the
same calls, on tensors of the same shapes, with equal indices and masks: `key_of` and `contents_of` return all that has
to be compared.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..patterns import (
    CONSTANT,
    WHOLE,
    Layout,
    MixedSamplesError,
    Rule,
    Sources,
    UnsupportedOperatorError,
    Use,
    is_pointwise,
    rule_of,
)
from .modules import name_of
from .operators import is_written, operator_name
from .overwrite import Overwrite
from .recording import Invocation, Recording


@dataclass(frozen=True, eq=False)
class Operation:
    """A call of an ATen operator that computes a tensor through which a derivative passes."""

    #: The number of the tensor.
    vertex: int
    #: The index of the invocation in the recording.
    place: int
    #: The index of the tensor among the operator's results; None where the operator returns a single tensor.
    number: int | None
    #: An OpOverload, as in ``torch.ops.aten.add.Tensor``, or an Overwrite.
    overload: Any
    #: The path of the module that makes the call, and the line of its code.
    path: str
    source: str
    #: The arguments through which a derivative passes, and their vertices.
    operands: dict[str, int]
    #: All arguments that depend on the input.
    dependent: frozenset[str]
    #: Arguments by name, for one sample: tensors are on the meta device, except indices and masks.
    arguments: dict[str, Any]
    #: Where the samples are in the arguments that have samples; and those of them that are equal for all samples.
    layouts: dict[str, Layout]
    alike: frozenset[str]
    #: `Placement.sources` of an operator that moves elements.
    sources: dict[str, Sources]
    #: Whether the call stands for a module's backward hooks.
    hooked: bool = False

    @property
    def name(self) -> str:
        """The name of the operator, as in ``aten.add``."""
        return operator_name(self.overload)

    @functools.cached_property
    def random(self) -> bool:
        """Whether the operator may draw random numbers, so that it must not run again."""
        return torch.Tag.nondeterministic_seeded in getattr(self.overload, "tags", ())

    def of_sample(self, name: str, constant: torch.Tensor) -> torch.Tensor:
        """An argument that is equal for all samples, for one of them."""
        layout = self.layouts.get(name)
        return constant if layout is None else layout.split(constant)[0]

    def evaluate(self, arguments: Mapping[str, Any]) -> torch.Tensor:
        """The result for other arguments; none of them is written to."""
        return _evaluated(self.overload, self.number, arguments)


@dataclass(eq=False)
class Program:
    """The operations that lie between a module's input and its output."""

    #: The number of samples.
    batch: int
    #: The vertex of the output; the input's is 0.
    output: int
    #: The operations by vertex, in the order in which they run.
    operations: dict[int, Operation] = field(default_factory=dict)
    #: For each vertex, where the samples are, and the shape for a batch of one.
    layouts: dict[int, Layout] = field(default_factory=dict)
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    #: Vertices at which no stage may end: those within a module whose backward hooks are called at both its ends, and
    #: those without a gradient.
    uncut: set[int] = field(default_factory=set)

    def between(self, start: int, stop: int) -> list[Operation]:
        """The operations that compute `stop` from `start`, in order."""
        needed, waiting = set(), [stop]
        while waiting:
            vertex = waiting.pop()
            if vertex not in needed and vertex != start and vertex in self.operations:
                needed.add(vertex)
                waiting.extend(self.operations[vertex].operands.values())
        return [operation for vertex, operation in self.operations.items() if vertex in needed]

    def cuts(self) -> list[int]:
        """The vertices that every path from the input to the output passes, in order, both ends included.

        Each inner one has the samples where the input has them, and a gradient that autograd computes.
        """
        if not self.output:
            return [0]
        operations = self.between(0, self.output)
        # The last vertex that is computed from each one: operands come before what is computed from them.
        last = {operand: operation.vertex for operation in operations for operand in operation.operands.values()}
        # A path passes by a vertex where one before it leads to one after it.
        passed, furthest = [], last.get(0, self.output)
        for operation in operations[:-1]:
            if furthest == operation.vertex:
                passed.append(operation.vertex)
            furthest = max(furthest, last[operation.vertex])
        inner = [
            vertex
            for vertex in passed
            if self.layouts[vertex] == self.layouts[0]
            and self.shapes[vertex][:1] == (1,)
            and vertex not in self.uncut
            and not isinstance(self.operations[vertex].overload, Overwrite)
        ]
        return [0, *inner, self.output]


def key_of(recording: Recording) -> Hashable:
    """All that a program depends on, except the elements of indices and masks."""
    numbers: dict[int, int] = {}
    calls = tuple([_call_key(invocation, numbers) for invocation in recording.invocations])
    x, output = recording.input, recording.output
    return recording.last, output.shape, x.shape, x.stride(), x.dtype, x.device, calls


def _call_key(invocation: Invocation, numbers: dict[int, int]) -> Hashable:
    facts = invocation.facts
    exact = facts is not None and facts.exact
    dependent = {operand.name for operand in invocation.operands}
    parts: list[Hashable] = [invocation.overload if facts is None else facts, invocation.hooked]
    parts += invocation.operands
    for name, value in invocation.arguments.items():
        if name in dependent:
            continue
        if name in invocation.versions:
            # Equal numbers tell that arguments are one tensor, as tied weights are.
            number = numbers.setdefault(id(value), len(numbers))
            parts += name, number, value.shape, value.stride(), value.dtype, value.requires_grad
        elif isinstance(value, float):
            parts += name, repr(value) if exact else _zero_or_one(value)
        else:
            parts += name, tuple(value) if isinstance(value, list) else value
    for result in invocation.results:
        parts += result.shape, result.dtype
    parts.append(invocation.sequence < 0)
    return tuple(parts)


def _zero_or_one(number: float) -> float | None:
    """The number where it is 0 or 1, else None: most rules tell no other numbers apart."""
    return number if number in (0.0, 1.0) else None


def contents_of(recording: Recording) -> list[torch.Tensor]:
    """The indices and masks that patterns depend on, in the order of the calls.

    Raises
    ------
    RuntimeError
        Where one of them was written to after its call.
    """
    contents = []
    for invocation in recording.invocations:
        if invocation.facts is not None and invocation.facts.contents:
            for name, version in invocation.versions.items():
                value = invocation.arguments[name]
                if not value.is_floating_point():
                    if value._version != version:
                        raise RuntimeError(
                            f"{invocation.name}: its {name} was written to after it was used{invocation.source}; write "
                            "to a clone"
                        )
                    contents.append(value)
    return contents


def program_of(recording: Recording) -> Program:
    """The program of a recording.

    Raises
    ------
    UnsupportedOperatorError
        Where an operator has no rule, or mixes samples; the message begins with the operator's path in the model.
    """
    x, batch = recording.input, recording.input.shape[0]
    assert recording.last is not None
    program = Program(batch, recording.last.vertex)
    program.layouts[0] = WHOLE if batch == 1 else Layout(0)
    program.shapes[0] = program.layouts[0].shape_of_sample(x.shape)
    paths = {id(part): name for name, part in reversed(list(recording.module.named_modules()))}
    for vertex in _needed(recording):
        invocation = recording.makers[vertex]
        assert invocation is not None
        where = paths.get(id(invocation.module), "") or name_of(invocation.module or recording.module)
        result = invocation.results[vertex - invocation.first]
        if result.is_complex():
            raise UnsupportedOperatorError(
                f"{where}: {invocation.name} gives complex numbers{invocation.source}; Jacobians are of real ones: "
                "work on real and imaginary parts"
            )
        operation, layout = _operation(program, invocation, vertex, where)
        program.operations[vertex], program.layouts[vertex] = operation, layout
        program.shapes[vertex] = layout.shape_of_sample(result.shape)
    # The parts of a decomposed operator are one node to autograd: tensors between them have no gradient.
    without_gradient = {vertex for vertex in program.operations if recording.edges[vertex] is None}
    program.uncut = without_gradient | _between_hooks(recording)
    return program


def _between_hooks(recording: Recording) -> set[int]:
    """The vertices from the call of a module's hooks on its input to their call on its output."""
    begun: dict[int, int] = {}
    vertices: set[int] = set()
    for invocation in recording.invocations:
        if invocation.hooked:
            start = begun.pop(id(invocation.module), None)
            if start is None:
                begun[id(invocation.module)] = invocation.first
            else:
                vertices.update(range(start, invocation.first))
    return vertices


def _needed(recording: Recording) -> list[int]:
    """The vertices through which a derivative passes from the input to the output, in order, without the input."""
    assert recording.last is not None
    # A tensor may have a gradient only because of weights: it is not reached from the input.
    reached = {0}
    for invocation in recording.invocations:
        # The sign of a complex number is its direction, which has a derivative.
        passes = invocation.name not in CONSTANT or any(result.is_complex() for result in invocation.results)
        if passes and any(operand.active and operand.vertex in reached for operand in invocation.operands):
            reached.update(range(invocation.first, invocation.first + len(invocation.results)))
    needed: set[int] = set()
    waiting = [recording.last.vertex] if recording.last.active else []
    while waiting:
        vertex = waiting.pop()
        maker = recording.makers[vertex]
        if maker is not None and vertex in reached and vertex not in needed:
            needed.add(vertex)
            waiting.extend(operand.vertex for operand in maker.operands if operand.active)
    return sorted(needed)


def _operation(program: Program, invocation: Invocation, vertex: int, where: str) -> tuple[Operation, Layout]:
    """The operation that computes a vertex, and the layout of its result."""
    result = invocation.results[vertex - invocation.first]
    number = vertex - invocation.first if _returns_several(invocation.overload) else None
    active = {o.name: o.vertex for o in invocation.operands if o.active and o.vertex in program.layouts}
    arguments = {**_defaults(invocation.overload), **invocation.arguments}
    use = Use(
        invocation.name,
        arguments,
        {name: program.layouts[operand] for name, operand in active.items()},
        result,
        program.batch,
        functools.partial(_evaluated, invocation.overload, number),
    )
    rule = rule_of(invocation.name)
    if rule is None:
        raise UnsupportedOperatorError(
            f"{where}: operator {invocation.name} has no rule; register one with jacsparse.register_rule"
            f"{invocation.source}"
        )
    if number and not rule.all_results:
        raise UnsupportedOperatorError(
            f"{where}: the rule of {invocation.name} is of its first result alone{invocation.source}; compute result "
            f"{number} by other operators"
        )
    try:
        placement = rule.placement(use)
    except MixedSamplesError as error:
        what, remedy = error.args or (
            f"{invocation.name} mixes the samples of a batch{invocation.source}",
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
    dependent = frozenset(operand.name for operand in invocation.operands)
    operation = Operation(
        vertex,
        invocation.place,
        number,
        invocation.overload,
        where,
        invocation.source,
        active,
        dependent,
        {name: _symbolic(value, layouts.get(name), rule, name in alike) for name, value in arguments.items()},
        layouts,
        alike,
        placement.sources,
        invocation.hooked,
    )
    return operation, placement.output


def _symbolic(value: Any, layout: Layout | None, rule: Rule, alike: bool) -> Any:
    """An argument for one sample; tensors have no elements, except the indices and masks that the rule reads."""
    if isinstance(value, torch.Tensor):
        if rule.reads_contents and not value.is_floating_point() and (layout is None or alike):
            return (value if layout is None else layout.split(value)[0]).detach().clone()
        shape = value.shape if layout is None else layout.shape_of_sample(value.shape)
        return torch.empty(shape, dtype=value.dtype, device="meta")
    if isinstance(value, float) and not rule.reads_numbers:
        return float("nan") if _zero_or_one(value) is None else value
    return value


@functools.cache
def _defaults(overload: Any) -> Mapping[str, Any]:
    if isinstance(overload, Overwrite):
        return {}
    return {p.name: p.default_value for p in overload._schema.arguments if p.has_default_value()}


@functools.cache
def _returns_several(overload: Any) -> bool:
    """Whether an operator returns a tuple or a list."""
    returns: Sequence[Any] = () if isinstance(overload, Overwrite) else overload._schema.returns
    return len(returns) > 1 or (len(returns) == 1 and isinstance(returns[0].type, torch.ListType))


def _evaluated(overload: Any, number: int | None, arguments: Mapping[str, Any]) -> torch.Tensor:
    """One result of an operator; no argument is written to."""
    if isinstance(overload, Overwrite):
        return overload(arguments["tensor"], arguments["written"])
    positional, named = [], {}
    for parameter in overload._schema.arguments:
        value = arguments.get(parameter.name, parameter.default_value)
        if value is None and f"{parameter.name}.0" in arguments:
            # The elements of a list have names of their own.
            names = (f"{parameter.name}.{n}" for n in itertools.count())
            value = [arguments[name] for name in itertools.takewhile(arguments.__contains__, names)]
        if isinstance(value, torch.Tensor) and is_written(parameter):
            if is_pointwise(operator_name(overload)):
                shapes = [each.shape for each in arguments.values() if isinstance(each, torch.Tensor)]
                value = value.expand(torch.broadcast_shapes(*shapes))
            value = value.clone()
        if parameter.kwarg_only:
            named[parameter.name] = value
        else:
            positional.append(value)
    result = overload(*positional, **named)
    return result if number is None else result[number]  # type: ignore[no-any-return]
