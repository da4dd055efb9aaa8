"""What each run computes of a function's values, as graphs of calls that begin with its inputs or with its results."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..tracing import Scalar, Trace, Value, Values, calls_of, with_constants
from .traced_function import TracedFunction, same_numbers

#: ``compute(values, *others)``: tensors of values of the function, and of other tensors.
Compute = Callable[..., Sequence[torch.Tensor]]


class ValueFunction:
    """Tensors that are computed of a function's values, in a run of the function or in a replay of it.

    Parameters
    ----------
    function : TracedFunction
        The function.
    compute : callable
        ``compute(values, *others) -> tensors``, of the values of calls: their arguments.
    reads : sequence of int
        The values that it reads.
    others : sequence of Tensor
        The other tensors, of which each call may pass others of the same forms.
    replays : bool
        Whether runs are replays, which have inputs alone.
    """

    def __init__(
        self,
        function: TracedFunction,
        compute: Compute,
        reads: Sequence[int],
        others: Sequence[torch.Tensor] = (),
        *,
        replays: bool,
    ) -> None:
        self._function, self._others, count = function, len(others), len(others)
        #: The numbers of the last run, and the same as tensors.
        self._numbers: tuple[tuple[Any, ...], list[torch.Tensor]] | None = None
        #: What it computes, and of which values.
        self.compute, self.reads = compute, reads
        scalars = function.scalars(function.trace)
        self._places = sorted(function.scalar_dtypes)
        #: The values that it begins with.
        self.begin = function.inputs if replays else list(dict.fromkeys(reads))
        #: The values that it leaves in the trace of a replay.
        self._kept = [value for value in function.kept if value not in self.begin]
        #: The results of the run that the graph takes.
        self._taken: list[int] = []

        def computed(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
            others, rest = tensors[:count], iter(tensors[count:])
            known = {value: next(rest) for value in self.begin}
            of_run = list(scalars)
            for place in self._places:
                of_run[place] = next(rest)
            values = Values(function.graph, known, of_run)
            return [*compute(values, *others), *(values[value] for value in self._kept)]

        with torch.no_grad():
            inputs = [*others, *self.inputs(function.trace)]
            self.graph = calls_of(computed, inputs)
        if not replays:
            self._taken = _take_results(self.graph, function, self.begin, self._places, count)
        with torch.no_grad():
            self.graph = with_constants(self.graph, [*others, *self.inputs(function.trace)])
        self._take_what_is_used(count)

    def _take_what_is_used(self, others: int) -> None:
        """Leave out the values of the function that no call of the graph takes."""
        placeholders = [node for node in self.graph.graph.nodes if node.op == "placeholder"][others:]
        of_values = [*zip(placeholders, self.begin, strict=False)]
        taken = placeholders[len(placeholders) - len(self._taken) :]
        self.begin = [value for node, value in of_values if node.users]
        self._taken = [value for node, value in zip(taken, self._taken, strict=True) if node.users]
        for node in (*(node for node, _ in of_values), *taken):
            if not node.users:
                self.graph.graph.erase_node(node)
        self.graph.recompile()

    @property
    def outputs(self) -> list[fx.Node]:
        """The results of calls that it returns."""
        every: list[fx.Node] = list(self.graph.graph.output_node().args[0])  # type: ignore[arg-type]
        return every[: len(every) - len(self._kept)]

    def keep(self, outputs: Sequence[fx.Node]) -> None:
        """Return these results of calls alone."""
        node = self.graph.graph.output_node()
        every: Any = node.args[0]
        node.args = ([*outputs, *every[len(self.outputs) :]],)
        self.graph.recompile()

    def inputs(self, trace: Trace) -> list[torch.Tensor]:
        """What the graph takes of a run."""
        values, taken = ([trace.value(value).detach() for value in part] for part in (self.begin, self._taken))
        return [*values, *self._numbers_of(trace), *taken]

    def _numbers_of(self, trace: Trace) -> list[torch.Tensor]:
        numbers = tuple([trace.scalars[place] for place in self._places])
        # Other threads may replace it meanwhile.
        current = self._numbers
        if current is None or not same_numbers(current[0], numbers):
            scalars = self._function.scalars(trace)
            current = self._numbers = numbers, [scalars[place] for place in self._places]
        return current[1]

    def __call__(self, trace: Trace, *others: torch.Tensor) -> Sequence[torch.Tensor]:
        """The tensors of a run."""
        return self._returned(trace, self.graph.forward(*others, *self.inputs(trace)))

    def of_parts(self, trace: Trace, parts: Sequence[Sequence[torch.Tensor]]) -> Iterator[Sequence[torch.Tensor]]:
        """The tensors of a run for each of several groups of other tensors; what depends on none is computed once."""
        if len(parts) == 1:
            yield self(trace, *parts[0])
            return
        alike, of_part = self.apart
        inputs = self.inputs(trace)
        results = alike.forward(*inputs)
        for others in parts:
            yield self._returned(trace, of_part.forward(*others, *inputs, *results))

    def _returned(self, trace: Trace, results: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The results but for those that a replay keeps, which are left in its trace."""
        results = list(results)
        for value in reversed(self._kept):
            trace.copies[value] = results.pop()
        return results

    @functools.cached_property
    def apart(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The calls that depend on no other tensors; and all calls, which take the results of the former as inputs."""
        graphs, (of_alike, of_rest) = (fx.Graph(), fx.Graph()), (dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]())
        nodes = self.graph.graph.nodes
        graphs[1].output(graphs[1].graph_copy(self.graph.graph, of_rest))
        placeholders = [node for node in nodes if node.op == "placeholder"]
        # What is written to is made anew for each part.
        varying = {node for node in nodes if node.meta.get("written")}.union(placeholders[: self._others])
        for node in nodes:
            if node.op == "output" or not varying.isdisjoint(node.all_input_nodes):
                varying.add(node)
            if node not in varying or node in placeholders[self._others :]:
                of_alike[node] = graphs[0].node_copy(node, of_alike.__getitem__)
        alike = [n for n in of_alike if n.op == "call_function" and not varying.isdisjoint(n.users)]
        graphs[0].output([of_alike[node] for node in alike])
        last = of_rest[placeholders[-1]]
        for node in alike:
            with graphs[1].inserting_after(last):
                last = graphs[1].placeholder(f"alike_{node.name}")
            of_rest[node].replace_all_uses_with(last)
        for graph in graphs:
            graph.eliminate_dead_code()
        return fx.GraphModule(self.graph, graphs[0]), fx.GraphModule(self.graph, graphs[1])


def _take_results(
    module: fx.GraphModule, function: TracedFunction, begin: Sequence[int], places: Sequence[int], count: int
) -> list[int]:
    """Make results of a function's calls inputs of a graph, after its others, where it would compute them."""
    graph = module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    names: dict[Any, Hashable] = dict(
        zip(placeholders[count:], [*map(Value, begin), *(("scalar", place) for place in places)], strict=True)
    )
    calls = {_key((call.overload, call.args, call.kwargs), {}): call for call in function.calls}
    taken: dict[int, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.meta.get("written") or node.target is operator.getitem:
            continue
        call = calls.get(_key((node.target, node.args, node.kwargs), names))
        returns = [] if call is None else node.target._schema.returns
        if call is None or len(returns) != len(call.results):
            continue
        users = [user for user in node.users if user.target is operator.getitem] if len(returns) > 1 else [node]
        for user in users:
            value = call.results[user.args[1] if len(returns) > 1 else 0]  # type: ignore[index]
            if value not in taken:
                with graph.inserting_after([*placeholders, *taken.values()][-1]):
                    taken[value] = graph.placeholder(f"value_{value}")
                taken[value].meta.update(user.meta)
                names[taken[value]] = Value(value)
            user.replace_all_uses_with(taken[value])
    graph.eliminate_dead_code()
    for value, node in list(taken.items()):
        if not node.users:
            graph.erase_node(node)
            del taken[value]
    return list(taken)


def _key(value: Any, names: Mapping[Any, Hashable]) -> Hashable:
    """A call, or a part of it, with other names for tensors and numbers that vary."""
    if isinstance(value, dict):
        return tuple((name, _key(part, names)) for name, part in sorted(value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(_key(part, names) for part in value)
    if isinstance(value, fx.Node):
        return names.get(value, value)
    if isinstance(value, Scalar):
        return "scalar", value.place
    # By its text: zeros have signs, and a bool is no number.
    return value if isinstance(value, Value) else (type(value), repr(value))
