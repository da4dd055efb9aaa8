"""Values of a function's Jacobian in a run of it, or in a replay, whichever way to them was chosen."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import torch

from ..patterns import gradient_of
from ..stages import all_finite, pulled_by_autograd, with_backward_passes
from ..tracing import Node, Trace, Values
from .evaluator import Evaluator
from .traced_function import TracedFunction


def jacobian_values(
    function: TracedFunction,
    evaluator: Evaluator,
    trace: Trace,
    by_autograd: Callable[[TracedFunction, Trace], Callable[[torch.Tensor], torch.Tensor]],
) -> torch.Tensor:
    """The values on the pattern, ``(nnz, batch)`` or ``(nnz, 1)``, in a run of the function's graph.

    Those that are not finite as products are computed by backward passes; `by_autograd` returns what takes a gradient
    of the output back to the input.
    """
    x, fused = trace.input, evaluator.fused
    if fused is not None:
        values, are_finite = fused.of(trace)
    else:
        values = evaluator.computed(trace)
        # A function may return coarser numbers, as under ``torch.autocast``.
        values = values if values.dtype is x.dtype else values.to(x.dtype)
        are_finite = bool(function.chain.registered_values) or all_finite(values)
    if are_finite:
        return values
    return with_backward_passes(values, evaluator.pattern, len(x), by_autograd(function, trace))


def pull_back_of_run(function: TracedFunction, trace: Trace) -> Callable[[torch.Tensor], torch.Tensor]:
    """The pull-back of a run, by autograd's graph of it."""
    return pulled_by_autograd(function.chain.adapted(trace).records(trace), len(trace.input))


def pull_back_of_replay(function: TracedFunction, trace: Trace) -> Callable[[torch.Tensor], torch.Tensor]:
    """The pull-back of a replay, by autograd of another one."""
    x = trace.input.detach().requires_grad_()
    known = {value: trace.elements(value).detach() for value in function.inputs}
    with torch.enable_grad():
        y = connected_output(function, trace, known | {0: x})

    return lambda gradient: gradient_of(y, x, gradient, retain_graph=True).reshape(len(x), -1)


def connected_output(function: TracedFunction, trace: Trace, known: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """The output, computed from the input and captures with the derivatives of the run; so are the values to keep."""
    output = function.graph.last
    assert output is not None
    values = _Connected(function.graph, known, function.scalars(trace))
    y = values[output.value]
    trace.copies |= {value: values[value] for value in function.kept}
    return y if output.active else y.detach()


class _Connected(Values):
    """Values with the derivatives that autograd saw in the run, if captures had some."""

    def results(self, node: Node) -> list[torch.Tensor]:
        arguments = self.arguments(node.arguments)
        active = {operand.name: operand.active for operand in node.operands}
        # An overwrite has the kind of one argument alone.
        kinds = itertools.chain(node.kinds, itertools.repeat(None))
        for (name, _), kind in zip(node.tensors, kinds, strict=False):
            if not active.get(name, kind is not None):
                arguments[name] = arguments[name].detach()
        results = node.computed(arguments)
        if not node.writes_unseen:
            return results
        # Other elements, with the derivative of those before.
        before = next(arguments[name] for name, _ in node.tensors if node.writes_to(name))
        return [before + (result - before).detach() if before.requires_grad else result for result in results]
