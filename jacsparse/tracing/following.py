"""The graph of a trace as far as it is that of an earlier run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from .derivatives_seen import SeenDerivatives
from .graph import Graph, Node, Scalar, Value, captured_form, kind_of, tensors_in
from .memory import Memory
from .operators import with_memory
from .saved_tensors import version_of
from .traces import Trace


class Followed:
    """What a trace that has the input alone goes on to have in common with graphs of earlier runs.

    It makes the trace's graph one of these, which are of the input's form, the most probable first.
    """

    def __init__(self, trace: Trace, memory: Memory, derivatives: SeenDerivatives, graphs: Sequence[Graph]) -> None:
        self.trace, self.graphs, self.derivatives = trace, graphs, derivatives
        self.memory, self.numbers = memory, memory.numbers
        #: The number of calls so far.
        self.count = 0
        self.active = bool(graphs)
        # What the last call that was compared has from elsewhere: tensors by the numbers of their values, and numbers.
        self._captures: dict[int, torch.Tensor] = {}
        self._scalars: list[Any] = []
        if graphs:
            self._enter(graphs[0])

    def _enter(self, graph: Graph) -> None:
        """Go on with a graph that begins with the same calls."""
        trace, size = self.trace, len(graph.infos)
        if graph is trace.graph:
            return
        noted = trace.graph.writes
        begin = self._begin(graph)
        trace.graph = graph
        trace.tensors = [*trace.tensors[:begin], *[None] * (size - begin)]
        trace.versions = [*trace.versions[:begin], *[0] * (size - begin)]
        if graph.writes and not noted:
            self.memory.hold_all()

    def _begin(self, graph: Graph) -> int:
        """How many values there are before the next call."""
        return graph.nodes[self.count].begin[0] if self.count < len(graph.nodes) else len(graph.infos)

    def leave(self) -> None:
        """Go on with a graph of this run's own."""
        if not self.active:
            return
        self.active = False
        trace, noted = self.trace, self.trace.graph.writes
        trace.graph = trace.graph.before(self.count)
        size = len(trace.graph.infos)
        del trace.tensors[size:], trace.versions[size:]
        if not noted:
            self.memory.hold_all()

    def next(
        self,
        overload: Any,
        args: Any,
        kwargs: dict[str, Any],
        seen: bool | None = None,
        sizes: Sequence[torch.Size] | None = None,
    ) -> Node | None:
        """The next call of the graph, or of another one that begins alike, where it is this one; else None.

        With `sizes`, of the results of a call of this graph, it is one of another graph that gave these.
        """
        if not self.active:
            return None
        graph, count = self.trace.graph, self.count
        if sizes is None and count < len(graph.nodes):
            node = graph.nodes[count]
            if self._is(node, overload, args, kwargs, seen, graph):
                return node
        for other in self._others():
            if count >= len(other.nodes) or sizes not in (None, other.nodes[count].sizes):
                continue
            node, copies = other.nodes[count], set(self.trace.copies)
            # While it is compared, values have the numbers of this graph.
            self._enter(other)
            if self._is(node, overload, args, kwargs, seen, other):
                return node
            self._enter(graph)
            for value in self.trace.copies.keys() - copies:
                del self.trace.copies[value]
        return None

    def _others(self) -> Iterator[Graph]:
        """The other graphs that begin with the calls so far."""
        graph, count = self.trace.graph, self.count
        for other in self.graphs:
            begins = len(other.nodes) >= count and (not count or other.nodes[count - 1] is graph.nodes[count - 1])
            if begins and other is not graph:
                yield other

    def take(self, node: Node, bind: Callable[..., None], sequence: int) -> None:
        """Take what the call that was found last has from elsewhere, and the number of autograd's node of it."""
        trace = self.trace
        if self._captures:
            for value, tensor in self._captures.items():
                trace.versions[value] = version_of(tensor)
                bind(value, tensor)
        if self._scalars:
            trace.scalars += self._scalars
        if trace.graph.writes:
            for operand in node.operands:
                # A write gives a tensor another node.
                if operand.active:
                    trace.note_gradient_edge(operand.value)
        trace.sequences.append(sequence)
        self.count += 1

    def ends_at(self, output: torch.Tensor) -> bool:
        """Whether the run made all calls of a graph, and returned the value that it says."""
        number = self.numbers.get(id(output))
        for graph in (self.trace.graph, *self._others()) if self.active else ():
            ends = len(graph.nodes) == self.count and graph.output == number
            if ends and (graph.last is None or graph.last.active is (output.grad_fn is not None)):
                self._enter(graph)
                return True
        return False

    def _is(
        self, node: Node, overload: Any, args: Any, kwargs: dict[str, Any], seen: bool | None, graph: Graph
    ) -> bool:
        """Whether a call is that of a node, as the head of `jacsparse.tracing` says.

        Written for speed: it is called for each operator of a run.
        """
        if overload is not node.overload and with_memory(overload) != node.overload:
            return False
        if (torch.is_grad_enabled() if seen is None else seen) is not node.seen or len(args) != len(node.args):
            return False
        pairs: Iterable[tuple[Any, Any]] = zip(node.args, args, strict=True)
        if kwargs or node.kwargs:
            if kwargs.keys() != node.kwargs.keys():
                return False
            pairs = [*pairs, *((node.kwargs[name], value) for name, value in kwargs.items())]
        self._captures, self._scalars = {}, []
        numbers, kinds = self.numbers, iter(node.kinds)
        for expected, value in pairs:
            kind = type(expected)
            if kind is Value:
                if seen is not None and type(value) is Value:
                    if value != expected:
                        return False
                elif numbers.get(id(value)) == expected.number:
                    # As `_is_tensor`, without a call.
                    if (type(value.grad_fn) if value.requires_grad else None) is not next(kinds):
                        return False
                elif not self._is_tensor(expected.number, value, graph, next(kinds)):
                    return False
            elif expected is value:
                continue
            elif kind is list:
                if not isinstance(value, (list, tuple)) or len(value) != len(expected):
                    return False
                for part, other in zip(expected, value, strict=True):
                    if type(part) is not Value:
                        if part is not other:
                            return False
                    elif not self._is_tensor(part.number, other, graph, next(kinds)):
                        return False
            elif kind is Scalar:
                if type(value) not in expected.types or (value if value in (0, 1) else None) != expected.special:
                    return False
                self._scalars.append(value)
            elif not _same(expected, value):
                return False
        return (
            not (node.fixed and self._is_changed(node.fixed, args, kwargs))
            and (not (node.contents or node.parts) or self._has_contents(node))
            and (not node.behind or self._has_behind(node, graph))
        )

    def _is_tensor(self, number: int, value: Any, graph: Graph, kind: type | None) -> bool:
        """Whether a value is the tensor with this number and kind, or can be it where that is from elsewhere."""
        if self.numbers.get(id(value)) != number:
            form = graph.captures.get(number)
            if form is None or not isinstance(value, torch.Tensor):
                return False
            captures = self._captures
            if number in captures:
                return captures[number] is value
            if number < self._begin(graph) or captured_form(value) != form:
                return False
            if id(value) in self.numbers and not self.memory.is_changed(value):
                return False
            if captures and any(value is each for each in captures.values()):
                return False
            if value.grad_fn is not None and self.derivatives.leads_to_input(value.grad_fn):
                return False
            captures[number] = value
        # As `kind_of`.
        return (type(value.grad_fn) if value.requires_grad else None) is kind

    def _is_changed(self, fixed: Sequence[int], args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether NumPy, or ``.data``, may have changed an argument that is the same in each run."""
        tensors = [t for t in tensors_in((*args, *kwargs.values())) if self.numbers.get(id(t)) in fixed]
        return any(map(self.memory.is_changed, tensors))

    def _has_contents(self, node: Node) -> bool:
        """Whether indices and masks of the call, and of its parts, have the elements that patterns depend on."""
        trace = self.trace
        for value, tensor in self._captures.items():
            trace.tensors[value], trace.versions[value] = tensor, version_of(tensor)
        for each in (node, *node.parts):
            for name, copy in each.contents.items():
                if not torch.equal(trace.elements(each.arguments[name].number), copy):
                    return False
        return True

    def _has_behind(self, node: Node, graph: Graph) -> bool:
        """Whether arguments that a Function has computed unseen come from the same captures."""
        for value, expected in node.behind.items():
            tensor = self._captures[value] if value in self._captures else self.trace.tensor(value)
            leaves = self.derivatives.leaves_behind(tensor.grad_fn, node)
            if len(leaves) != len(expected):
                return False
            for number, leaf in zip(expected, leaves, strict=True):
                if not self._is_tensor(number, leaf, graph, kind_of(leaf)):
                    return False
        return True


def _same(expected: Any, value: Any) -> bool:
    """Whether a literal argument is the expected one."""
    if type(expected) is tuple:
        return isinstance(value, (list, tuple)) and tuple(value) == expected
    if type(value) is not type(expected):
        return False
    # By its text: zeros have signs, and no number equals NaN.
    return repr(value) == repr(expected) if type(value) is float else bool(value == expected)
