"""What a recording says of every run that makes the same calls: the graph, and where the samples are in its tensors.

A program holds no number of the run that it was made of, but for what indices and masks hold, which say where something
is. A later run that makes the same calls, on tensors of the same shapes, with the same contents of those, has the same
program: `key_of` and `contents_of` are all that has to be compared.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ..patterns import UnsupportedOperatorError
from ..patterns._layout import WHOLE, Layout, MixedSamplesError
from ..patterns._rules import CONSTANT, Rule, Sources, Use, is_pointwise, rule_of
from ._recorder import Invocation, Overwrite, Recording, operator_name

__all__ = ["Operation", "Program", "contents_of", "key_of", "program_of"]


@dataclass(frozen=True, eq=False)
class Operation:
    """One ATen operator, as far as it makes one tensor through which a derivative passes.

    Attributes
    ----------
    vertex : int
        The tensor's number.
    place : int
        The invocation's among the recording's.
    number : int or None
        Which of the operator's results the tensor is; None where it gives one alone.
    overload : OpOverload or Overwrite
        As in ``torch.ops.aten.add.Tensor``.
    path, source : str
        The module that runs it, and the line of its code.
    operands : dict of str to int
        The arguments through which a derivative passes, and their vertices.
    dependent : frozenset of str
        All arguments that depend on the input.
    arguments : dict
        By name, for one sample: tensors on the meta device, but for indices and masks.
    layouts : dict of str to Layout
        Of the arguments that have samples.
    alike : frozenset of str
        Those of them that hold the same for all samples.
    sources : dict of str to Sources
        For an operator that moves elements, as `Placement` has it.
    hooked : bool
        Whether it stands for a module's backward hooks.
    """

    vertex: int
    place: int
    number: int | None
    overload: Any
    path: str
    source: str
    operands: dict[str, int]
    dependent: frozenset[str]
    arguments: dict[str, Any]
    layouts: dict[str, Layout]
    alike: frozenset[str]
    sources: dict[str, Sources]
    hooked: bool = False

    @property
    def name(self) -> str:
        """The operator, as in ``aten.add``."""
        return operator_name(self.overload)

    @cached_property
    def random(self) -> bool:
        """Whether it may draw random numbers, and so must not be run again."""
        return torch.Tag.nondeterministic_seeded in getattr(self.overload, "tags", ())

    def evaluate(self, arguments: Mapping[str, Any]) -> torch.Tensor:
        """The result on other arguments, none of which is written to."""
        return _evaluated(self.overload, self.number, arguments)


@dataclass(eq=False)
class Program:
    """The operations that lie between a module's input and its output.

    Attributes
    ----------
    batch : int
        Samples.
    output : int
        Vertex of the output; that of the input is 0.
    operations : dict of int to Operation
        By vertex, in the order in which they run.
    layouts : dict of int to Layout
        Of the vertices.
    shapes : dict of int to tuple of int
        Of the vertices, for a batch of one.
    """

    batch: int
    output: int
    operations: dict[int, Operation] = field(default_factory=dict)
    layouts: dict[int, Layout] = field(default_factory=dict)
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    #: Vertices within a module whose backward hooks are called at both its ends, and those without a gradient.
    bound: set[int] = field(default_factory=set)

    def between(self, start: int, stop: int) -> list[Operation]:
        """The operations that make `stop` of `start`, in order."""
        needed, waiting = set(), [stop]
        while waiting:
            vertex = waiting.pop()
            if vertex not in needed and vertex != start and vertex in self.operations:
                needed.add(vertex)
                waiting.extend(self.operations[vertex].operands.values())
        return [operation for vertex, operation in self.operations.items() if vertex in needed]

    def cuts(self, first: Layout) -> list[int]:
        """The vertices through which all of the input's influence on the output passes, in order, both ends included.

        Those between have the samples where the input has them, and a gradient that autograd can be asked for.
        """
        import networkx

        graph = networkx.DiGraph()
        graph.add_node(0)
        for vertex, operation in self.operations.items():
            graph.add_edges_from((operand, vertex) for operand in operation.operands.values())
        dominators = networkx.immediate_dominators(graph, 0)
        found = [self.output]
        while found[-1] != 0:
            found.append(dominators[found[-1]])
        inner = (
            vertex
            for vertex in found[1:-1]
            if self.layouts[vertex] == first
            and self.shapes[vertex][:1] == (1,)
            and vertex not in self.bound
            and not isinstance(self.operations[vertex].overload, Overwrite)
        )
        return [0, *reversed(list(inner)), self.output] if self.output else [0]


# What has to be compared.


def key_of(recording: Recording) -> Hashable:
    """All that decides upon a program but for what indices and masks hold."""
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
            # Which tensors are one and the same, as tied weights are.
            number = numbers.setdefault(id(value), len(numbers))
            parts += name, number, value.shape, value.stride(), value.dtype, value.requires_grad
        elif isinstance(value, float):
            parts += name, repr(value) if exact else _known(value)
        else:
            parts += name, tuple(value) if isinstance(value, list) else value
    for result in invocation.results:
        parts += result.shape, result.dtype
    parts.append(invocation.sequence < 0)
    return tuple(parts)


def _known(number: float) -> float | None:
    """What a rule is told of a floating-point number: whether it is 0 or 1."""
    return number if number in (0.0, 1.0) else None


def contents_of(recording: Recording) -> list[torch.Tensor]:
    """The indices and masks that patterns depend on, in the order of the calls.

    Raises
    ------
    RuntimeError
        Where one was written to after its call.
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


# What is made once.


def program_of(recording: Recording) -> Program:
    """The program of a recording.

    Raises
    ------
    UnsupportedOperatorError
        Where an operator has no rule, or mixes samples; the message begins with its path in the model.
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
        where = paths.get(id(invocation.module), "") or type(invocation.module or recording.module).__name__
        result = invocation.results[vertex - invocation.first]
        if result.is_complex():
            raise UnsupportedOperatorError(
                f"{where}: {invocation.name} gives complex numbers{invocation.source}; Jacobians are of real ones: "
                "work on real and imaginary parts"
            )
        operation, layout = _operation(program, invocation, vertex, where)
        program.operations[vertex], program.layouts[vertex] = operation, layout
        program.shapes[vertex] = layout.shape_of_sample(result.shape)
    program.bound = _bound_by_hooks(recording)
    # What an operator is made of that autograd takes for one has no gradient of its own.
    program.bound |= {vertex for vertex in program.operations if recording.edges[vertex] is None}
    return program


def _bound_by_hooks(recording: Recording) -> set[int]:
    """The vertices from where a module's hooks see its input to where they see its output."""
    begun: dict[int, int] = {}
    bound: set[int] = set()
    for invocation in recording.invocations:
        if invocation.hooked:
            start = begun.pop(id(invocation.module), None)
            if start is None:
                begun[id(invocation.module)] = invocation.first
            else:
                bound.update(range(start, invocation.first))
    return bound


def _needed(recording: Recording) -> list[int]:
    """The vertices through which a derivative passes from the input to the output, but for the input's, in order."""
    assert recording.last is not None
    # Autograd may have a gradient of a tensor for its weights alone.
    reached = {0}
    for invocation in recording.invocations:
        passes = invocation.name not in CONSTANT
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
    result = invocation.results[vertex - invocation.first]
    number = vertex - invocation.first if _gives_several(invocation.overload) else None
    active = {o.name: o.vertex for o in invocation.operands if o.active and o.vertex in program.layouts}
    arguments = {**_defaults(invocation.overload), **invocation.arguments}
    use = Use(
        invocation.name,
        arguments,
        {name: program.layouts[own] for name, own in active.items()},
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
            "each sample must be worked on by itself",
        )
        raise UnsupportedOperatorError(f"{where}: {what}; {remedy}") from None
    layouts = placement.layouts
    alike = {name for name, layout in layouts.items() if name not in active and _same_for_all(arguments[name], layout)}
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
        frozenset(alike),
        placement.sources,
        invocation.hooked,
    )
    return operation, placement.output


def _same_for_all(tensor: torch.Tensor, layout: Layout) -> bool:
    """Whether samples are one memory, as ``expand`` makes them."""
    return layout.axis >= 0 and tensor.stride(layout.axis) == 0


def _symbolic(value: Any, layout: Layout | None, rule: Rule, alike: bool) -> Any:
    """An argument as a rule sees it while only shapes are known."""
    if isinstance(value, torch.Tensor):
        if rule.reads_contents and not value.is_floating_point() and (layout is None or alike):
            return (value if layout is None else layout.split(value)[0]).detach().clone()
        shape = value.shape if layout is None else layout.shape_of_sample(value.shape)
        return torch.empty(shape, dtype=value.dtype, device="meta")
    if isinstance(value, float) and not rule.reads_numbers:
        return float("nan") if _known(value) is None else value
    return value


@functools.cache
def _defaults(overload: Any) -> Mapping[str, Any]:
    if isinstance(overload, Overwrite):
        return {}
    return {p.name: p.default_value for p in overload._schema.arguments if p.has_default_value()}


@functools.cache
def _gives_several(overload: Any) -> bool:
    """Whether an operator's result is a tuple or a list."""
    if isinstance(overload, Overwrite):
        return False
    returns = overload._schema.returns
    return len(returns) > 1 or (len(returns) == 1 and isinstance(returns[0].type, torch.ListType))


def _evaluated(overload: Any, number: int | None, arguments: Mapping[str, Any]) -> torch.Tensor:
    """One result of an operator, without writing to any of its arguments."""
    if isinstance(overload, Overwrite):
        return overload(arguments["tensor"], arguments["written"])
    positional, named = [], {}
    for parameter in overload._schema.arguments:
        value = arguments.get(parameter.name, parameter.default_value)
        if value is None and f"{parameter.name}.0" in arguments:
            value = _listed(parameter.name, arguments)
        if isinstance(value, torch.Tensor) and parameter.alias_info is not None and parameter.alias_info.is_write:
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


def _listed(name: str, arguments: Mapping[str, Any]) -> list[Any]:
    """The elements ``name.0``, ``name.1``, ... as a list again."""
    elements: list[Any] = []
    while f"{name}.{len(elements)}" in arguments:
        elements.append(arguments[f"{name}.{len(elements)}"])
    return elements
