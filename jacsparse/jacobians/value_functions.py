"""What each run computes of a function's values, as graphs of calls that begin with its inputs or with its results."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..patterns import gradients_of
from ..tracing import Scalar, Trace, Value, Values, calls_of, with_constants, with_identities
from .traced_function import TracedFunction

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
        The values that it reads in a run; in a replay, it reads what the function's calls begin with.
    others : sequence of Tensor
        The other tensors, of which each call may pass others of the same forms.
    identities : collection of int
        The places of those that are identity matrices in each call.
    """

    def __init__(
        self,
        function: TracedFunction,
        compute: Compute,
        reads: Sequence[int],
        others: Sequence[torch.Tensor] = (),
        identities: Collection[int] = (),
    ) -> None:
        self._function, self._others, count = function, len(others), len(others)
        #: The numbers of the last run, and the same as tensors.
        self._numbers: tuple[list[Any], list[Any]] | None = None
        begin, scalars = function.inputs if function.replays else dict.fromkeys(reads), function.scalars(function.trace)
        #: What it takes of a run: values and, as tensors without axes, numbers; that at a place is ``~place`` here.
        self.sources = [*begin, *(() if function.replays else (~place for place in function.scalar_dtypes))]
        #: The values that it leaves in the trace of a replay.
        self._kept = [value for value in function.kept if value not in self.sources]

        def computed(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
            known, of_run = dict(zip(self.sources, tensors[count:], strict=True)), list(scalars)
            for source in [source for source in known if source < 0]:
                of_run[~source] = known.pop(source)
            values = Values(function.graph, known, of_run)
            return [*compute(values, *tensors[:count]), *(values[value] for value in self._kept)]

        with torch.no_grad():
            self.graph = with_identities(calls_of(computed, [*others, *self.inputs(function.trace)]), identities)
        if not function.replays:
            self.sources += _take_results(self.graph, function, self.sources, count)
        with torch.no_grad():
            self.graph = with_constants(self.graph, [*others, *self.inputs(function.trace)])
        self._take_what_is_used(count)

    def _take_what_is_used(self, others: int) -> None:
        """Leave out what no call of the graph takes."""
        placeholders = [node for node in self.graph.graph.nodes if node.op == "placeholder"][others:]
        pairs = [*zip(placeholders, self.sources, strict=True)]
        self.sources = [source for node, source in pairs if node.users]
        for node in placeholders:
            if not node.users:
                self.graph.graph.erase_node(node)
        self.graph.recompile()

    @property
    def outputs(self) -> list[fx.Node]:
        """The results of calls that it returns."""
        every: list[fx.Node] = list(self.graph.graph.output_node().args[0])  # type: ignore[arg-type]
        return every[: len(every) - len(self._kept)]

    def return_only(self, outputs: Sequence[fx.Node]) -> None:
        """Return these results of calls alone."""
        node = self.graph.graph.output_node()
        every: Any = node.args[0]
        node.args = ([*outputs, *every[len(self.outputs) :]],)
        self.graph.recompile()

    def inputs(self, trace: Trace) -> list[torch.Tensor]:
        """What the graph takes of a run, as plain tensors: those of other classes make others that no call tells of."""
        return [tensor.detach().as_subclass(torch.Tensor) for tensor in self.known(trace, self.sources).values()]

    def known(self, trace: Trace, sources: Iterable[int]) -> dict[int, torch.Tensor]:
        """Some values and numbers of a run, which may have gradients."""
        # Other threads may replace it meanwhile.
        numbers = self._numbers
        if numbers is None or not _are_same(numbers[0], trace.scalars):
            numbers = self._numbers = list(trace.scalars), self._function.scalars(trace)
        return {each: trace.elements(each) if each >= 0 else numbers[1][~each] for each in sources}

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
            # Counts of operations read shapes there.
            last.meta.update(node.meta)
            of_rest[node].replace_all_uses_with(last)
        for graph in graphs:
            graph.eliminate_dead_code()
        return fx.GraphModule(self.graph, graphs[0]), fx.GraphModule(self.graph, graphs[1])


def elementwise_derivatives(
    evaluate: Callable[[dict[str, Any]], torch.Tensor],
    arguments: Mapping[str, Any],
    names: Sequence[str],
    shape: Sequence[int],
) -> dict[str, torch.Tensor]:
    """The derivatives of an elementwise call by some operands, at each place of its result.

    The call's own backward pass makes them of ones; `shape` is the result's.
    """
    with torch.enable_grad():
        operands = {name: arguments[name].expand(shape).detach().requires_grad_() for name in names}
        y = evaluate({**arguments, **operands})
    gradients = gradients_of(y, [*operands.values()], torch.ones_like(y)) if y.requires_grad else [None] * len(names)
    pairs = zip(operands.items(), gradients, strict=True)
    return {name: torch.zeros_like(operand) if each is None else each for (name, operand), each in pairs}


def _take_results(module: fx.GraphModule, function: TracedFunction, sources: Sequence[int], count: int) -> list[int]:
    """Make results of a function's calls inputs of a graph, after its others, where it would compute them."""
    graph = module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    names: dict[Any, Hashable] = {
        node: Value(source) if source >= 0 else ("scalar", ~source)
        for node, source in zip(placeholders[count:], sources, strict=True)
    }
    calls = {_key((each.overload, each.args, each.kwargs), {}): each for each in function.nodes}
    taken = dict(zip(sources, placeholders[count:], strict=True))
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
    return list(taken)[len(sources) :]


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


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether all of two tuples' numbers are equal, zeros with their signs: the inverses of 0.0 and -0.0 differ."""
    return some == others and (0 not in some or repr(some) == repr(others))
