"""The graph of a captured run: what is known of its calls in every run of its key.

A graph is made once for a key, and for the elements of the indices and masks on which patterns depend. Operators
without a rule are made of others here, by their decompositions.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import nn

from ..decompositions import ComplexParts, MadeMatrix, is_sparse, operator_on_elements, operator_on_parts, selection
from ..patterns import REGISTERED, UnsupportedOperatorError, holds_numbers
from ..runtime import DispatchMode
from .callers import Callers, source_of
from .capture import Recorder, capture
from .derivatives import check_derivatives
from .functions import is_linear, products
from .graph import Graph, Info, Lines, Node, Operand, Value
from .masks import with_mask
from .modules import check_outside_transforms, without_autocast
from .operators import BackwardPass, Gather, Rewrite, draws, facts_of, operand_names, tensors_in
from .traces import ACTIVE, DEPENDENT, DIFFERENTIABLE, CapturedCall, CapturedRun, Trace
from .writes import append_call

_CROSS = torch.ops.aten.linalg_cross.default


#: The most keys whose graphs are remembered, and the most graphs of one.
MOST_KEYS, MOST_GRAPHS = 64, 8


@functools.lru_cache(MOST_KEYS)
def graphs_of(key: Hashable) -> list[Graph]:
    """The graphs of recent runs of a key, for other elements of indices and masks; the one used last comes first."""
    return []


#: The lines of the last run of a function, by whose runs these are.
_LINES: weakref.WeakKeyDictionary[Any, Lines] = weakref.WeakKeyDictionary()


def traced(
    module: nn.Module,
    x: torch.Tensor,
    *,
    arguments: Sequence[Any] = (),
    cached: bool = False,
    owner: Any = None,
    readable: bool = True,
    hidden: Sequence[torch.Tensor] = (),
    beside: Callable[[], Sequence[torch.Tensor]] = tuple,
) -> Trace:
    """The trace of a run of a module, with all that it changes and draws.

    Parameters
    ----------
    module : Module
        It runs once.
    x : Tensor, (batch, *input_shape)
        The module gets a copy, which it may overwrite.
    arguments : sequence
        What the module gets behind it, as it is.
    cached : bool
        Whether the graph may be that of an earlier run that made the same calls.
    owner : object, optional
        Whose runs make mostly the same calls, as a function's code: by weak reference.
    readable : bool
        Whether Python may read the elements of a tensor, as a branch does: the graph then holds for this input alone.
    hidden : sequence of Tensor
        Tensors from elsewhere that Python may not read either, unless it may all.
    beside : callable
        What the module has returned beside its output, of which the trace has the values.

    Raises
    ------
    ValueError, TypeError
        Where the input does not fit, or a parameter is on another device, or of another dtype.
    UnsupportedOperatorError
        Where a derivative is not that of the operators, or where elements are read although `readable` is False.
    """
    lines = () if owner is None else _LINES.get(owner, ())
    run = capture(module, x, arguments, readable=readable, hidden=hidden, beside=beside, lines=lines)
    check_outside_transforms(module, run.tensors)
    trace = _known_trace(module, run) if cached else _Analysis(module, run).trace
    if owner is not None and trace.graph.lines is not lines:
        _LINES[owner] = trace.graph.lines
    return trace


def _known_trace(module: nn.Module, run: CapturedRun) -> Trace:
    """The trace of a run, with the graph that an earlier one of its key and its indices has made, or a new one."""
    # A rule may be another one by now.
    known = graphs_of((run.key, len(REGISTERED)))
    for graph in tuple(known):
        trace = Trace.of_run(module, graph, run)
        if all(_has_contents(trace, value, contents) for value, contents in graph.contents.items()):
            break
    else:
        trace = _Analysis(module, run).trace
        for value in trace.graph.contents:
            trace.graph.comparisons.outcome(value, trace.elements(value), lambda: True)
    if not known or known[0] is not trace.graph:
        # Other threads may go through the list meanwhile.
        known[:] = [trace.graph, *(each for each in known if each is not trace.graph)][:MOST_GRAPHS]
    return trace


def _has_contents(trace: Trace, value: int, contents: torch.Tensor) -> bool:
    elements = trace.elements(value)
    return trace.graph.comparisons.outcome(value, elements, lambda: torch.equal(elements, contents))


class _Analysis:
    """Makes the graph of a run call by call, and with it the run's trace, which has the values so far.

    UnsupportedOperatorError is raised where a derivative is not that of the operators.
    """

    def __init__(self, module: nn.Module, run: CapturedRun) -> None:
        self.graph = graph = Graph(spreads=bool(run.spread))
        self.trace = trace = Trace(module, graph, run)
        trace.tensors, trace.versions = [], []
        graph.numbers.append(self._new_value(Info(None, dependent=True), run, 0))
        with torch.no_grad(), without_autocast(trace.input.device):
            for call in run.calls:
                self._take_captures(run, call.results.start)
                graph.nodes.append(self._node(call, run, graph.numbers))
        self._take_captures(run, len(run.tensors))
        graph.output = graph.numbers[run.output]
        graph.hooked_spans = run.hooked_spans
        graph.last = Operand("", graph.output, run.active)
        check_derivatives(trace)

    # Values.

    def _new_value(self, info: Info, run: CapturedRun, number: int) -> int:
        """A new value, of one of a run's tensors."""
        value = len(self.graph.infos)
        self.graph.infos.append(info)
        self.trace.tensors.append(None)
        self.trace.versions.append(0)
        self.trace.place([(value, number)], run)
        return value

    def _take_captures(self, run: CapturedRun, stop: int) -> None:
        """Give the tensors from elsewhere, of those before a number, their values."""
        graph = self.graph
        for number in range(len(graph.numbers), stop):
            value, (form, has_gradient) = self._new_value(Info(None), run, number), run.captures[number]
            graph.numbers.append(value)
            graph.captures[value] = form, has_gradient
            if has_gradient:
                graph.infos[value].externals = frozenset((len(graph.externals),))
                graph.externals.append(value)

    # Calls.

    def _node(self, call: CapturedCall, run: CapturedRun, numbers: list[int], *, in_parts: bool = False) -> Node:
        """The node of a call, whose results get their values; `numbers` are those of a run's values so far."""
        graph, trace, facts, call = self.graph, self.trace, facts_of(call.overload), with_mask(call, run)

        operands, scalars = iter(call.operands), dict(call.scalars)
        names = facts.names or operand_names(call.overload, len(call.args))

        def referred(name: str, argument: Any) -> Any:
            if isinstance(argument, torch.Tensor):
                return Value(numbers[next(operands)])
            if isinstance(argument, (list, tuple)):
                parts = [referred("", part) for part in argument]
                return parts if any(type(part) is Value for part in parts) else tuple(parts)
            return scalars.get(name, argument)

        args = tuple(itertools.starmap(referred, zip(names, call.args, strict=False)))
        kwargs = {name: referred(name, each) for name, each in call.kwargs.items()}
        arguments: dict[str, Any] = {}
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            parts = {f"{name}.{n}": part for n, part in enumerate(value)} if type(value) is list else {name: value}
            arguments |= parts
        differentiable = tuple([kind is not None for kind in call.kinds])
        node = Node(call.overload, facts, args, kwargs, arguments, (), differentiable, call.seen)
        node.place, node.path, node.source = len(graph.nodes), call.path, source_of(call.place)
        if not facts.of_shape:
            pairs = zip(node.tensors, run.active_operands(call), strict=True)
            dependent = ((*each, active) for each, active in pairs if graph.infos[each[1]].dependent)
            node.operands = tuple(itertools.starmap(Operand, dependent))
        if facts.contents:
            infos = {name: graph.infos[value] for name, value in node.tensors}
            node.contents = {
                name: trace.elements(value).detach().clone()
                for name, value in node.tensors
                if not (holds_numbers(trace.tensor(value)) or infos[name].fixed or infos[name].dependent)
            }
        if facts.random:
            node.draws = draws(call.overload, {name: trace.read(argument) for name, argument in arguments.items()})
        results = [run.tensors[number] for number in call.results]
        node.writes = call.writes
        if in_parts or call.sequence < 0 or (call.writes and any(tensor._is_view() for tensor in results)):
            # Autograd's node of a write to a view is that of its base.
            node.shift = None
        self._add_results(node, call, run, numbers, in_parts=in_parts)
        return node

    def _add_results(
        self, node: Node, call: CapturedCall, run: CapturedRun, numbers: list[int], *, in_parts: bool
    ) -> None:
        """Give the results of a call their values: those that other operators have, if these take its place."""
        graph, begin, known = self.graph, len(self.graph.infos), list[int]()
        dependent, made = bool(node.operands), [run.tensors[number] for number in call.results]
        # What makes a dense result of a sparse one has the parts of both.
        has_parts = dependent and not all(map(is_sparse, made))
        parts = by_mask = run.by_mask.get(call.first, (None, None))[0]
        is_complex = self._is_complex(node, made)
        if is_complex:
            parts = self._on_parts(node, by_mask=parts is not None)
        elif parts is None and has_parts and (in_parts or any(operand.active for operand in node.operands)):
            parts = self._parts_of(node)
        if parts is not None:
            known, dependent = self._decomposed(node, parts, in_parts=in_parts), False
            node.by_parts |= is_complex or by_mask is not None
            if isinstance(node.overload, BackwardPass) and not is_linear(node, graph, known):
                known, dependent = [], True
        results, values = list[int](), iter(known)
        for number in call.results:
            value = next(values, -1)
            if is_complex and run.tensors[number].is_complex():
                of_parts = value, next(values, -1)
                value = self._new_value(self._info(node, True), run, number)
                if min(of_parts) >= 0:
                    graph.complex_parts[value] = of_parts
                    self.trace.place_parts(value, range(begin, value))
            elif value < 0 or not graph.infos[value].dependent:
                value = self._new_value(self._info(node, dependent), run, number)
            elif value >= begin:
                graph.infos[value].whole = node
                self.trace.place([(value, number)], run)
            numbers.append(value)
            results.append(value)
        node.results = tuple(results)

    def _info(self, node: Node, dependent: bool) -> Info:
        """What is known of a result of a call."""
        info = self.graph.info(node, dependent)
        if node.writes:
            written = (value for name, value in node.tensors if node.writes_to(name))
            info.externals = info.externals.union(*(self.graph.infos[value].externals for value in written))
        return info

    # Operators that are made of others.

    def _parts_of(self, node: Node) -> Callable[..., Any] | None:
        """Other operators that have the derivative of a call, if it needs such."""
        facts, tensors = node.facts, {name: self.trace.tensor(value) for name, value in node.tensors}
        if isinstance(node.overload, BackwardPass):
            return None if node.overload.problem else products(node, self.graph, self.trace.scalars)
        if any(map(is_sparse, tensors.values())):
            return operator_on_elements(node.overload, [self._given(each) for each in node.args])
        if facts.contents and any(not holds_numbers(tensors[operand.name]) for operand in node.operands):
            return selection(node.overload, node.args)
        if facts.weighted is not None and any(o.active and o.name in ("weight", "bias") for o in node.operands):
            return facts.weighted
        return facts.parts

    def _is_complex(self, node: Node, made: Sequence[torch.Tensor]) -> bool:
        """Whether a derivative passes through a call by complex numbers."""
        active = [operand.value for operand in node.operands if operand.active]
        if not self.graph.complex_parts.keys().isdisjoint(active):
            return any(map(holds_numbers, made))
        return bool(active) and any(tensor.is_complex() for tensor in made)

    def _on_parts(self, node: Node, *, by_mask: bool) -> Callable[..., Any]:
        """Operators on the parts of complex numbers that take a call's place."""
        parts = None if by_mask else operator_on_parts(node.overload, node.name)
        if parts is None:
            raise self._without_parts(node)
        return parts

    def _without_parts(self, node: Node) -> UnsupportedOperatorError:
        name = node.overload.function.__name__ if isinstance(node.overload, BackwardPass) else node.name
        what = f"{name} has no rule for these complex numbers{node.source}"
        return UnsupportedOperatorError(f"{node.path}: {what}; work on real and imaginary parts")

    def _given(self, argument: Any) -> Any:
        """What an argument of a call was."""
        if isinstance(argument, list):
            return [self._given(part) for part in argument]
        return self.trace.read(argument)

    def _decomposed(self, node: Node, parts: Callable[..., Any], *, in_parts: bool) -> list[int]:
        """Make the nodes of the operators that take a call's place, and return the values of their results."""
        graph, active = self.graph, {operand.name: operand.active for operand in node.operands}
        differentiable = {name: each for (name, _), each in zip(node.tensors, node.differentiable, strict=True)}
        recorder, numbers = Recorder(Callers(self.trace.module, node.path), in_parts=True), list[int]()
        names = iter([name for name, _ in node.tensors])

        def begun(argument: Any, flags: int, writes: bool = False) -> Any:
            tensor = self.trace.elements(argument.number).detach()
            tensor = tensor.clone() if writes else tensor
            numbers.append(argument.number)
            recorder.begin(tensor, flags | DEPENDENT * graph.infos[argument.number].dependent)
            return tensor

        def made_matrix(argument: Any, flags: int) -> MadeMatrix:
            maker = graph.infos[argument.number].maker
            assert maker is not None
            if not all(self.trace.is_intact(value) for _, value in maker.tensors):
                # The matrix has their memory.
                raise UnsupportedOperatorError(
                    f"{node.path}: what a sparse matrix was made of is written to afterwards{node.source}; make the "
                    "matrix of a clone"
                )
            parts = functools.partial(begun, flags=flags), functools.partial(made_matrix, flags=flags)
            return MadeMatrix.by(maker.overload, maker.args, *parts)

        def given(argument: Any) -> Any:
            if isinstance(argument, list):
                return [given(part) for part in argument]
            if type(argument) is not Value:
                return self.trace.read(argument)
            name, info = next(names), graph.infos[argument.number]
            # A derivative passes within parts wherever one may.
            flags = ACTIVE * active.get(name, False) | DIFFERENTIABLE * differentiable[name]
            if info.dependent and is_sparse(self.trace.tensor(argument.number)):
                return made_matrix(argument, flags)
            if argument.number in graph.complex_parts:
                return ComplexParts(*(begun(Value(each), flags) for each in graph.complex_parts[argument.number]))
            if active.get(name) and self.trace.tensor(argument.number).is_complex():
                raise self._without_parts(node)
            return begun(argument, flags, node.writes_to(name))

        args, kwargs = [given(each) for each in node.args], {name: given(each) for name, each in node.kwargs.items()}
        with DispatchMode(recorder.call):
            results = tensors_in(parts(*args, **kwargs))
        is_complex = any(value in graph.complex_parts for _, value in node.tensors)
        if is_complex and type(node.overload) in (Gather, Rewrite):
            halves = results[::2], results[1::2]
            returned = [
                append_call(recorder, node.overload, recorder.values_of(half), node.overload(*half)) for half in halves
            ]
        else:
            returned = recorder.values_of(results)
        inner, made = recorder.run, list[Node]()
        for call in inner.calls:
            self._take_constants(inner, numbers, call.results.start)
            part = self._node(call, inner, numbers, in_parts=True)
            made += part.parts
            # Of a part that has parts itself, these are enough.
            if not part.parts or not {*part.results} <= {value for each in part.parts for value in each.results}:
                made.append(part)
            part.parts = ()
        self._take_constants(inner, numbers, len(inner.tensors))
        node.parts = tuple(made)
        # The derivative of a cross product is not elementwise.
        is_whole = node.overload is _CROSS or isinstance(node.overload, BackwardPass)
        node.by_parts = is_whole or any(is_sparse(self.trace.tensor(value)) for _, value in node.tensors)
        return [numbers[number] for number in returned]

    def _take_constants(self, inner: CapturedRun, numbers: list[int], stop: int) -> None:
        """Give the tensors that parts have from elsewhere, of those before a number, their values."""
        for number in range(len(numbers), stop):
            value = self._new_value(Info(None, fixed=True), inner, number)
            self.graph.constants[value] = inner.copies.get(number, inner.tensors[number])
            numbers.append(value)
