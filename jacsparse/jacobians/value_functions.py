"""What each run computes of a function's values, as graphs of calls that begin with its inputs or with its results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..codegen import CallResult, Calls
from ..patterns import gradients_of
from ..tracing import Scalar, Trace, Value, Values, calls_of, key_of
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
        arguments = (each for node in function.graph.nodes for each in node.arguments.values())
        varying = {each.place: each for each in arguments if type(each) is Scalar and function.varies(each.place)}
        sources: list[Value | Scalar] = [*map(Value, begin), *varying.values()]
        self.sources = list(map(_number_of, sources))
        #: The values that it leaves in the trace of a replay.
        self._kept = [value for value in function.kept if value not in self.sources]
        # A run has the results of its calls: they are not computed again.
        nodes = [] if function.replays else function.nodes
        known = {key_of(n.overload, n.args, n.kwargs): list(map(Value, n.results)) for n in nodes if n.facts.overload}

        def computed(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
            known, of_run = dict(zip(self.sources, tensors[count:], strict=True)), list(scalars)
            for source in [source for source in known if source < 0]:
                of_run[~source] = known.pop(source)
            values = Values(function.graph, known, of_run)
            return [*compute(values, *tensors[:count]), *(values[value] for value in self._kept)]

        with torch.no_grad():
            inputs = [*others, *self.inputs(function.trace)]
            of_inputs = [*(None for _ in others), *sources]
            calls = calls_of(computed, inputs, of_inputs, identities=identities, known=known)
        self._return(calls, calls.outputs)

    def _return(self, calls: Calls, outputs: Sequence[CallResult]) -> None:
        self.calls = calls.returning(outputs, least=self._others)
        #: What it takes of a run: values and, as tensors without axes, numbers; that at a place is ``~place`` here.
        self.sources = [_number_of(each.source) for each in self.calls.inputs[self._others :]]

    @property
    def outputs(self) -> Sequence[CallResult]:
        """The results of calls that it returns."""
        return self.calls.outputs[: len(self.calls.outputs) - len(self._kept)]

    def return_only(self, outputs: Sequence[CallResult]) -> None:
        """Return these results of calls alone."""
        self._return(self.calls, [*outputs, *self.calls.outputs[len(self.outputs) :]])

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
        return self._returned(trace, self.calls(*others, *self.inputs(trace)))

    def of_parts(self, trace: Trace, parts: Sequence[Sequence[torch.Tensor]]) -> Iterator[Sequence[torch.Tensor]]:
        """The tensors of a run for each of several groups of other tensors; what depends on none is computed once."""
        if len(parts) == 1:
            yield self(trace, *parts[0])
            return
        alike, of_part = self.apart
        inputs = self.inputs(trace)
        results = alike(*inputs)
        for others in parts:
            yield self._returned(trace, of_part(*others, *inputs, *results))

    def _returned(self, trace: Trace, results: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The results but for those that a replay keeps, which are left in its trace."""
        results = list(results)
        for value in reversed(self._kept):
            trace.copies[value] = results.pop()
        return results

    @functools.cached_property
    def apart(self) -> tuple[Calls, Calls]:
        """The calls that depend on no other tensors; and all others, which take the results of the former as inputs."""
        return self.calls.apart(self.calls.inputs[: self._others])


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


def _number_of(source: Value | Scalar) -> int:
    return source.number if isinstance(source, Value) else ~source.place


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether all of two tuples' numbers are equal, zeros with their signs: the inverses of 0.0 and -0.0 differ."""
    return some == others and (0 not in some or repr(some) == repr(others))
