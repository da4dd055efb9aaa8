"""Graphs of what a function does: ATen calls in single-assignment form.

A graph holds for every run that makes the same calls. Its values are tensors by number: the input, what the calls read
from elsewhere (captures), and what they return. None is written to, so that a graph can be evaluated on other tensors.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..patterns import is_pointwise
from .comparisons import Comparisons
from .operators import RUNNING, BackwardPass, Facts, Gather, Rewrite, is_written, operator_name, with_written

#: Of consecutive calls the operator, and the line of the user's code, as `Node.source`.
Lines = Sequence[tuple[Any, str]]


@dataclass(frozen=True, slots=True)
class Value:
    """A reference to a value of a graph; the input has number 0."""

    number: int


@dataclass(frozen=True, slots=True)
class Scalar:
    """A reference to a number of a run, which may be another in the next one."""

    place: int
    #: What it may be.
    types: tuple[type, ...] = (float,)
    #: 0 or 1 where it is that in every run: rules may tell these from other numbers.
    special: float | None = None


def referred(argument: Any, value: Callable[[int], Any], scalars: Sequence[Any] | Mapping[int, Any]) -> Any:
    """What an argument of a call refers to, of some values and numbers; an argument that is no reference as it is."""
    if type(argument) is Value:
        return value(argument.number)
    return scalars[argument.place] if type(argument) is Scalar else argument


class Operand(NamedTuple):
    """A tensor argument that depends on the input."""

    #: The argument in the operator's schema; ``tensors.0`` is the first element of a list.
    name: str
    value: int
    #: Whether autograd computes a gradient of it.
    active: bool


#: How a tensor lies in memory: all that a call may depend on besides its elements.
Form = tuple[torch.Size, tuple[int, ...], torch.layout, torch.dtype, torch.device]


#: Classes of which no tensor is without a shape, as a lazy module's parameter is.
_WITH_SHAPES = (torch.Tensor, nn.Parameter)


def form_of(tensor: torch.Tensor) -> Form:
    """The form of a tensor; that of a parameter without a shape, as a lazy module has, is like no other."""
    if type(tensor) not in _WITH_SHAPES and is_lazy(tensor):
        return torch.Size(), (-1,), tensor.layout, tensor.dtype, tensor.device
    stride = tensor.stride() if tensor.layout == torch.strided else ()
    return tensor.shape, stride, tensor.layout, tensor.dtype, tensor.device


@dataclass(eq=False, slots=True)
class Node:
    """One call of an operator."""

    #: An OpOverload, as in ``torch.ops.aten.add.Tensor``, a `Gather`, a `Rewrite` or a `BackwardPass`.
    overload: Any
    facts: Facts
    #: As it was called, with references in the place of tensors and of numbers that may change.
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: The same by their names in the schema. Elements of lists of tensors have names of their own; defaults are absent.
    arguments: dict[str, Any]
    #: The arguments that depend on the input.
    operands: tuple[Operand, ...]
    #: For each tensor argument, whether autograd has a derivative by it.
    differentiable: tuple[bool, ...]
    #: Whether autograd recorded the call.
    seen: bool
    #: The arguments that are tensors, by name, and their values.
    tensors: list[tuple[str, int]] = field(init=False)
    #: The values of the tensors that the call returns, and then of the others that it writes to.
    results: tuple[int, ...] = ()
    #: The elements of the indices and masks among the arguments on which patterns depend, by name.
    contents: dict[str, torch.Tensor] = field(default_factory=dict)
    #: Calls of other operators that have the derivative of this one; and whether it is only ever replayed by these,
    #: because PyTorch has no such derivative.
    parts: tuple[Node, ...] = ()
    by_parts: bool = False
    #: The place of the call in the graph; of one that is a part, that of the whole.
    place: int = -1
    #: How far the number of autograd's node is from that which was the next one; None where it cannot be told.
    shift: int | None = 0
    #: Whether it writes to an argument.
    writes: bool = False
    #: Whether it drew random numbers.
    draws: bool = False
    #: Whether it stands for a module's backward hooks.
    hooked: bool = False
    #: For messages: the path of the module that made the call, and the line of the user's code in it, as in
    #: `` at net.py, line 7``.
    path: str = ""
    source: str = ""

    @property
    def name(self) -> str:
        """The name of the operator, as in ``aten.add``."""
        return operator_name(self.overload)

    def computed(self, arguments: Mapping[str, Any]) -> list[torch.Tensor]:
        """The results for other arguments, by their names, of which numbers may be tensors without axes."""
        return results_of(self.overload, arguments)

    def by_value(self, results: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """The results of another such call, by their values in this one."""
        # Without gradients an operator may leave out the last ones, which it saves for a backward pass.
        return dict(zip(self.results, results, strict=False))

    def __post_init__(self) -> None:
        self.tensors = [(name, value.number) for name, value in self.arguments.items() if type(value) is Value]

    def writes_to(self, argument: str) -> bool:
        """Whether it writes to an argument."""
        return argument.partition(".")[0] in self.facts.written


@dataclass(eq=False, slots=True)
class Info:
    """What is known of a value in every run."""

    #: The node that has its derivative; None for the input and for captures.
    maker: Node | None
    #: The node that computes it, of which `maker` may be a part; None where that is `maker`.
    whole: Node | None = None
    #: Whether it depends on the input.
    dependent: bool = False
    #: Whether it was computed from random numbers.
    drawn: bool = False
    #: Whether it is the same in each run: it was made of nothing but shapes and literal numbers.
    fixed: bool = False
    #: The captures with gradients that it was computed from, by their places among the graph's externals.
    externals: frozenset[int] = frozenset()

    @property
    def replayed(self) -> Node | None:
        """The node that computes it in a replay; None for the input and for captures."""
        return self.maker if self.whole is None or self.whole.by_parts else self.whole


@dataclass(eq=False)
class Graph:
    """The calls of a function of one tensor."""

    nodes: list[Node] = field(default_factory=list)
    #: By value.
    infos: list[Info] = field(default_factory=list)
    #: The forms of the tensors that calls read from elsewhere, by value.
    captures: dict[int, tuple[Form, bool]] = field(default_factory=dict)
    #: The values of those that have a gradient: mostly parameters.
    externals: list[int] = field(default_factory=list)
    #: The values of the real and the imaginary part of each complex one through which a derivative passes.
    complex_parts: dict[int, tuple[int, int]] = field(default_factory=dict)
    #: The tensors that the parts of calls read beside their operands: they are the same in each run.
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    #: The value here of each of a run's values.
    numbers: list[int] = field(default_factory=list)
    #: Whether values have the shape of a mask in the place of what it selects in runs.
    spreads: bool = False
    #: If there are backward hooks of modules: the calls within each module, from one to another.
    hooked_spans: list[tuple[int, int]] = field(default_factory=list)
    #: Those of the elements of indices and masks on a device, by value.
    comparisons: Comparisons = field(default_factory=Comparisons)
    #: The output as an operand.
    last: Operand = field(default_factory=lambda: Operand("", -1, False))
    #: The value of the output.
    output: int = -1

    @functools.cached_property
    def numbers_as_runs(self) -> bool:
        """Whether its values have the numbers and shapes that runs give them."""
        return (
            not self.spreads and len(self.numbers) == len(self.infos) and self.numbers == list(range(len(self.infos)))
        )

    @functools.cached_property
    def lines(self) -> Lines:
        """PyTorch's operators that are called, or None in the place of another one, and the lines that call them."""
        return [(n.overload if isinstance(n.overload, torch._ops.OpOverload) else None, n.source) for n in self.nodes]

    @functools.cached_property
    def differentiated(self) -> list[Node]:
        """The nodes that have the derivatives: of a call that has parts, these."""
        return [each for node in self.nodes for each in (node.parts or (node,))]

    @property
    def replayed(self) -> Iterator[Node]:
        """The nodes that a replay runs: of a call whose parts replace it, these."""
        return (each for node in self.nodes for each in (node.parts if node.by_parts else (node,)))

    @functools.cached_property
    def contents(self) -> dict[int, torch.Tensor]:
        """The elements of indices and masks on which patterns depend, by value."""
        nodes = {id(node): node for node in (*self.nodes, *self.differentiated)}.values()
        return {node.arguments[name].number: each for node in nodes for name, each in node.contents.items()}

    @property
    def drawing(self) -> str | None:
        """The path of the first module that drew random numbers; None where none did."""
        return next((node.path for node in self.nodes if node.draws), None)

    def info(self, node: Node, dependent: bool) -> Info:
        """What is known of the results of a call."""
        infos = [self.infos[value] for _, value in node.tensors]
        drawn = node.facts.random or any(info.drawn for info in infos)
        has_scalars = any(type(value) is Scalar for value in node.arguments.values())
        # What is in fresh memory, others may have put there.
        fixed = not drawn and not has_scalars and (node.facts.of_shape or all(info.fixed for info in infos))
        return Info(node, None, dependent, drawn, fixed and not node.facts.fresh, self.externals_of(node))

    def nodes_for(self, value: int, known: Callable[[int], bool]) -> list[Node]:
        """The nodes that compute a value from known ones, in order.

        Raises
        ------
        LookupError
            Where that takes the input, a capture or random numbers, which are not known.
        """
        needed: dict[int, Node] = {}
        waiting = [value]
        while waiting:
            each = waiting.pop()
            if each not in needed and not known(each):
                node = self.infos[each].replayed
                if node is None or node.draws:
                    raise LookupError
                needed[each] = node
                waiting.extend(operand for _, operand in node.tensors)
        return sorted(dict.fromkeys(needed.values()), key=lambda node: max(node.results))

    def made_of(self, value: int, others: Collection[int]) -> bool:
        """Whether a value is among others, or was computed from them."""
        waiting, seen = [value], set[int]()
        while waiting:
            number = waiting.pop()
            if number in others:
                return True
            maker = self.infos[number].maker
            if number not in seen and maker is not None and not maker.facts.of_shape:
                seen.add(number)
                waiting.extend(each for _, each in maker.tensors)
        return False

    def externals_of(self, node: Node, through: Collection[str] = ()) -> frozenset[int]:
        """The places of the externals that the arguments of a call were computed from, but for those in `through`."""
        if not self.externals:
            return frozenset()
        pairs = zip(node.tensors, node.differentiable, strict=True)
        values = (value for (name, value), differentiable in pairs if differentiable and name not in through)
        return frozenset[int]().union(*(self.infos[value].externals for value in values))


def results_of(overload: Any, arguments: Mapping[str, Any]) -> list[torch.Tensor]:
    """The results of a call in the order of `Node.results`, from its arguments by name; none of them is written to."""
    if isinstance(overload, (Gather, Rewrite, BackwardPass)):
        return [overload(*arguments.values())]
    if overload is torch.ops.aten.view.default:
        # A tensor whose shape the run changed in place may lie in memory otherwise here.
        return [arguments["self"].reshape(arguments["size"])]
    if overload is torch.ops.aten.rsub.Scalar and isinstance(arguments["other"], torch.Tensor):
        # A number may be a tensor without axes.
        overload = torch.ops.aten.rsub.Tensor
    positional, named, written = [], {}, []
    for parameter in overload._schema.arguments:
        value = arguments.get(parameter.name, parameter.default_value)
        if value is None and f"{parameter.name}.0" in arguments:
            # The elements of a list have names of their own.
            names = (f"{parameter.name}.{n}" for n in itertools.count())
            value = [arguments[name] for name in itertools.takewhile(arguments.__contains__, names)]
        updated = parameter.name in RUNNING and arguments.get("training", True)
        if value is not None and (is_written(parameter) or updated):
            if isinstance(value, torch.Tensor) and is_pointwise(operator_name(overload)):
                shapes = [each.shape for each in arguments.values() if isinstance(each, torch.Tensor)]
                value = value.expand(torch.broadcast_shapes(*shapes))
            value = [each.clone() for each in value] if isinstance(value, list) else value.clone()
            if is_written(parameter):
                written += value if isinstance(value, list) else [value]
        if parameter.kwarg_only:
            named[parameter.name] = value
        else:
            positional.append(value)
    return with_written(overload(*positional, **named), written)


class Values(dict[int, torch.Tensor]):
    """The values of a graph, computed from known ones where they are asked for, with the numbers of some run."""

    def __init__(self, graph: Graph, known: Mapping[int, torch.Tensor], scalars: Sequence[Any]) -> None:
        super().__init__({**graph.constants, **known})
        self.graph, self.scalars = graph, scalars

    def __missing__(self, value: int) -> torch.Tensor:
        for node in self.graph.nodes_for(value, self.__contains__):
            self.update(node.by_value(self.results(node)))
        return self[value]

    def results(self, node: Node) -> list[torch.Tensor]:
        """The results of a call."""
        return node.computed(self.arguments(node.arguments))

    def arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """What the arguments of a call refer to."""
        return {name: referred(argument, self.__getitem__, self.scalars) for name, argument in arguments.items()}
