"""Runs: what a function did at an input, its calls and the values of its tensors; and the trace of that in a graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from .autograd_nodes import version_of, versions_of
from .callers import Place, hooks_so_far
from .graph import Form, Graph, Node, Scalar, Value, referred
from .operators import Facts, number_types
from .storages import memory_of

#: A value that depends on the input; one through which its derivative passes; one through which any passes; one
#: that depends on a tensor from elsewhere.
DEPENDENT, ACTIVE, DIFFERENTIABLE, OF_CAPTURES = 1, 2, 4, 8
#: What is so of a value because of its elements alone, also where no derivative passes.
OF_ELEMENTS = DEPENDENT | OF_CAPTURES


class CapturedCall(NamedTuple):
    """A call of a run."""

    #: An OpOverload, a `Gather`, a `Rewrite` or a `BackwardPass`.
    overload: Any
    #: As they were passed; of a call that the run did not make, any tensors.
    args: Sequence[Any]
    kwargs: dict[str, Any]
    #: The values of the tensors among these, in order.
    operands: Sequence[int]
    #: For each, the class of autograd's node; that of None for a leaf, None without a gradient.
    kinds: tuple[type | None, ...]
    #: The numbers that are no part of the key, by the names of the arguments.
    scalars: tuple[tuple[str, Scalar], ...]
    #: Whether autograd recorded the call.
    seen: bool
    #: The first value of what it returns, and then of what else it writes to; and how many these are.
    first: int
    result_count: int
    #: Whether it writes to its arguments.
    writes: bool
    #: The number of the node that autograd made last when it began; -1 where the run did not make the call.
    sequence: int
    #: The path of the module that made it, and the line of the user's code in it, for messages.
    path: str
    place: Place | str | None

    @property
    def results(self) -> range:
        """The values of its results."""
        return range(self.first, self.first + self.result_count)


class OutsideWrite(NamedTuple):
    """A write to memory that no call of the run made."""

    #: As `memory_of` gives it.
    memory: int
    #: The operator's name.
    operator: str
    #: The path of the module that made it, and the line of the user's code, as `Node.source`.
    path: str
    source: str


@dataclass(eq=False)
class CapturedRun:
    """What a function did at an input."""

    calls: list[CapturedCall] = field(default_factory=list)
    #: By value, those of `DEPENDENT`, `ACTIVE`, `DIFFERENTIABLE` and `OF_CAPTURES` that it is.
    flags: list[int] = field(default_factory=list)
    #: By value, as the run left them: some have been overwritten.
    tensors: list[torch.Tensor] = field(default_factory=list)
    overwritten: set[int] = field(default_factory=set)
    #: The elements of values that were overwritten, and that no call computes again.
    copies: dict[int, torch.Tensor] = field(default_factory=dict)
    #: The first write to each memory that no call of the run made.
    writes_outside: list[OutsideWrite] = field(default_factory=list)
    #: The forms of tensors from elsewhere, by value, and whether they need gradients.
    captures: dict[int, tuple[Form, bool]] = field(default_factory=dict)
    #: The numbers of calls that are no part of the key.
    scalars: list[Any] = field(default_factory=list)
    #: Where autograd computes the gradients of values that calls used: a node, and the place among its outputs.
    gradient_edges: dict[int, tuple[Any, int]] = field(default_factory=dict)
    #: Whether what its operators saved passed through hooks, as those of a checkpoint within the function.
    saved_by_hooks: bool = False
    #: If there are backward hooks of modules: the calls within each module that returned, from one to another.
    hooked_spans: list[tuple[int, int]] = field(default_factory=list)
    #: How many hooks had been registered when it began.
    hooks: int = 0
    #: The values of elements that masks select which are of the masks' own shapes in a graph.
    spread: set[int] = field(default_factory=set)
    #: What computes the results of some calls from tensors of such shapes, by the first result: see `Masks`.
    by_mask: dict[int, tuple[Callable[..., torch.Tensor] | None, int | None]] = field(default_factory=dict)
    key: tuple[Hashable, ...] = ()
    output: int = -1
    #: Whether a derivative passes through the output.
    active: bool = False
    #: The values of what the function returned beside it.
    beside: list[int] = field(default_factory=list)

    def active_operands(self, call: CapturedCall) -> list[bool]:
        """For each operand of a call, whether a derivative passes through it."""
        pairs = zip(call.operands, call.kinds, strict=True)
        return [kind not in (None, type(None)) and bool(self.flags[value] & ACTIVE) for value, kind in pairs]


def free_numbers(
    facts: Facts,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    keys: list[Hashable],
    places: list[int],
    numbers: list[Any],
) -> tuple[tuple[str, Scalar], ...]:
    """Take the numbers of a call out of a key that its runs may have others for, and add them to those of the run.

    `places` are those in the key of what may be such. It returns references to the numbers by their arguments' names.
    """
    scalars: list[tuple[str, Scalar]] = []
    for place in places:
        value, name = keys[place], facts.names[place] if place < len(args) else [*kwargs][place - len(args)]
        types = number_types(facts, name, args)
        if type(value) in types:
            scalar = _scalar(len(numbers), types, value if value in (0, 1) else None)
            scalars.append((name, scalar))
            keys[place] = types, scalar.special
            numbers.append(value)
        else:
            keys[place] = exactly(value)
    return tuple(scalars)


def exactly(value: Any) -> Hashable:
    """What a key has of a number: those that are equal may be of several types, and zeros have signs."""
    return type(value), repr(value)


#: A reference to a number, of which there are few.
_scalar = functools.lru_cache(maxsize=1024)(Scalar)


class Trace:
    """One run of a function on a copy of the caller's input: its graph, tensors, numbers and nodes of autograd.

    A tensor that was overwritten during the run is computed anew where its elements are asked for.
    """

    def __init__(self, module: nn.Module, graph: Graph, run: CapturedRun) -> None:
        self.module, self.graph, self.run, self.scalars = module, graph, run, run.scalars
        self.input, self.output = run.tensors[0], run.tensors[run.output]
        #: By value, as the run left them; None for values that the run did not compute.
        self.tensors: list[torch.Tensor | None] = [self.input]
        #: Their versions when the run ended; -1 of those that it had overwritten by then.
        self.versions = [0]
        #: The elements of values that were overwritten; in a replay, of all that were computed.
        self.copies: dict[int, torch.Tensor] = {}
        #: Where autograd computes the gradients of values, as far as that is known.
        self.gradient_edges: dict[int, GradientEdge | tuple[Any, int]] = {}

    @classmethod
    def of_run(cls, module: nn.Module, graph: Graph, run: CapturedRun) -> Trace:
        """The trace of a run that has this graph."""
        trace = cls(module, graph, run)
        if graph.numbers_as_runs:
            trace.tensors, trace.copies, trace.gradient_edges = [*run.tensors], run.copies, {**run.gradient_edges}
            trace.versions = versions_of(run.tensors)
            for number in run.overwritten:
                trace.versions[number] = -1
        else:
            trace.tensors, trace.versions = [None] * len(graph.infos), [0] * len(graph.infos)
            # Backwards: an operator may return an argument, whose value that is.
            trace.place(reversed([*zip(graph.numbers, range(len(run.tensors)), strict=True)]), run)
            trace.copies |= graph.constants
        for value in graph.complex_parts:
            trace.place_parts(value)
        return trace

    def place(self, pairs: Iterable[tuple[int, int]], run: CapturedRun) -> None:
        """Take tensors of a run for values, by pairs of numbers, here and there, where they are of one shape."""
        for value, number in pairs:
            if number in run.spread:
                continue
            tensor = self.tensors[value] = run.tensors[number]
            self.versions[value] = -1 if number in run.overwritten else version_of(tensor)
            if number in run.copies:
                self.copies[value] = run.copies[number]
            if number in run.gradient_edges:
                self.gradient_edges[value] = run.gradient_edges[number]

    def place_parts(self, value: int, new: Collection[int] = ()) -> None:
        """Take the parts of a run's complex tensor for their values, if these are new ones or have no tensors."""
        tensor = self.tensors[value]
        if tensor is not None:
            views = tensor.detach().real, tensor.detach().imag.resolve_neg()
            for part, view in zip(self.graph.complex_parts[value], views, strict=True):
                if part in new or self.tensors[part] is None:
                    self.tensors[part], self.versions[part] = view, self.versions[value]

    @classmethod
    def replayed(
        cls,
        graph: Graph,
        module: nn.Module,
        x: torch.Tensor,
        captures: Mapping[int, torch.Tensor],
        scalars: Sequence[Any],
    ) -> Trace:
        """A trace without a run: values are computed from these where they are asked for, and have no gradients."""
        trace = cls(module, graph, CapturedRun(tensors=[x], scalars=list(scalars), hooks=hooks_so_far()))
        missing = len(graph.infos) - 1
        trace.tensors += [None] * missing
        trace.versions = [version_of(x)] + [0] * missing
        trace.copies |= graph.constants
        for value, tensor in captures.items():
            trace.tensors[value], trace.versions[value] = tensor, version_of(tensor)
        return trace

    def without_elements(self) -> Trace:
        """A trace of the same run whose tensors have no elements, unless they are sparse."""
        trace = Trace(
            self.module, self.graph, CapturedRun(tensors=[_without_elements(self.input)], scalars=self.scalars)
        )
        trace.versions = list(self.versions)
        trace.tensors = [None if tensor is None else _without_elements(tensor) for tensor in self.tensors]
        return trace

    @functools.cached_property
    def sequences(self) -> list[int]:
        """By call, the number of the node that autograd made last when it began."""
        return [call.sequence for call in self.run.calls]

    @property
    def may_have_hooks(self) -> bool:
        """Whether any hook was registered anywhere since the run began; if not, no tensor of the run has one."""
        return self.run.hooks != hooks_so_far()

    @property
    def externals(self) -> list[torch.Tensor]:
        """The tensors from before the run that autograd computes gradients of: mostly parameters."""
        return [self.tensor(value) for value in self.graph.externals]

    def values_of(self, tensors: Collection[torch.Tensor]) -> frozenset[int]:
        """The values that the run read from these tensors."""
        if not tensors:
            return frozenset()
        numbers = {id(self.tensors[value]): value for value in (0, *self.graph.captures)}
        return frozenset(numbers[id(tensor)] for tensor in tensors if id(tensor) in numbers)

    def tensor(self, value: int) -> torch.Tensor:
        """The tensor of a value, for its form: it may have been overwritten since, unlike `elements`."""
        tensor = self.tensors[value]
        return self.elements(value) if tensor is None else tensor

    def is_stale(self, value: int) -> bool:
        """Whether the elements of a value were overwritten and cannot be computed anew."""
        return self.tensors[value] is not None and not self._has(value) and self._nodes_for(value) is None

    def is_intact(self, value: int) -> bool:
        """Whether the tensor of a value has the elements that it had in the run."""
        tensor = self.tensors[value]
        return tensor is not None and version_of(tensor) == self.versions[value]

    def _has(self, value: int) -> bool:
        """Whether the elements of a value are at hand."""
        return value in self.copies or self.is_intact(value)

    def _nodes_for(self, value: int) -> list[Node] | None:
        """The nodes that compute a value anew; None where that takes elements that were overwritten."""
        try:
            return self.graph.nodes_for(value, self._has)
        except LookupError:
            return None

    def elements(self, value: int) -> torch.Tensor:
        """The elements that a value had in the run.

        Raises
        ------
        StaleError
            Where they were overwritten after the run.
        """
        tensor = self.tensors[value]
        if tensor is not None and version_of(tensor) == self.versions[value]:
            return tensor
        if value not in self.copies:
            nodes = self._nodes_for(value)
            if nodes is None:
                what = "a tensor that a gradient needs was modified by an inplace operation after the forward pass"
                raise StaleError(f"{what}; run it again")
            with torch.no_grad():
                for node in nodes:
                    arguments = {name: self.read(argument) for name, argument in node.arguments.items()}
                    self.copies |= node.by_value(node.computed(arguments))
        return self.copies[value]

    def read(self, argument: Any, others: Mapping[int, torch.Tensor] | None = None) -> Any:
        """What an argument refers to: the elements, or the number, of the run; what is no reference as it is.

        Some values may have other elements.
        """
        if others and type(argument) is Value and argument.number in others:
            return others[argument.number]
        return referred(argument, self.elements, self.scalars)

    def in_own_memory(self, values: torch.Tensor) -> torch.Tensor:
        """Values, copied where they lie in the memory of a tensor of the run, which may change later."""
        memories = {memory_of(tensor) for tensor in self.tensors if tensor is not None}
        return values.clone() if memory_of(values) in memories else values

    def gradient_edge(self, value: int) -> GradientEdge | None:
        """Where autograd computes the gradient of a value; None where it has none."""
        edge = self.gradient_edges.get(value)
        if edge is None and self.is_intact(value):
            # A write gives a tensor another node.
            tensor = self.tensors[value]
            edge = None if tensor is None or tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)
        if edge is None or isinstance(edge, GradientEdge):
            return edge
        edge = self.gradient_edges[value] = GradientEdge(*edge)
        return edge


def _without_elements(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("meta") if tensor.layout == torch.strided else tensor


class StaleError(RuntimeError):
    """The elements of a value were overwritten after the run."""
