"""Gradients through one stage by calls of autograd's nodes in the thread that asks: no engine, no hooks.

So any number of threads, each on a stream of its own, may go back through the same recorded run.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from ..runtime import DispatchMode
from ..stages import Record, walk
from ..tracing import Operation, Rewrite, Trace


def pull_back_by_nodes(
    record: Record, gradient: torch.Tensor, externals: Sequence[int]
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Gradients of a stage's input and of externals, by their places, for a gradient of its output."""
    trace = record.trace
    output, start = trace.gradient_edge(record.stage.stop), trace.gradient_edge(record.stage.start)
    if output is None or start is None:
        return torch.zeros_like(record.input), {}
    of_trace = trace.externals
    tensors = [of_trace[place] for place in externals]
    ends = [(start, record.input), *((get_gradient_edge(tensor), tensor) for tensor in tensors)]
    gradient = gradient.reshape(record.output.shape)
    of_input, *of_externals = walk([(output, gradient)], ends)
    gradients = {place: term for place, term in zip(externals, of_externals, strict=True) if term is not None}
    return torch.zeros_like(record.input) if of_input is None else of_input, gradients


def pull_back_input(record: Record, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of a stage's input, without the work of those of its externals."""
    # An operator that draws must not run again, and whether its results take its place depends on PyTorch.
    if not record.externals or any(operation.random for operation in record.stage.operations):
        return pull_back_by_nodes(record, gradient, ())[0]
    return pull_back_by_copies(record, gradient)


def pull_back_by_copies(record: Record, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of a stage's input by new nodes of autograd, for the same results, in which externals are constants.

    The run's own nodes compute all gradients that their calls have, each under a lock.
    """
    trace = record.trace
    with torch.enable_grad():
        leaf = trace.elements(record.stage.start).detach().requires_grad_()
        values = {record.stage.start: leaf}
        for operation in record.stage.operations:
            arguments = {name: _constant(trace.read(argument)) for name, argument in operation.referenced.items()}
            arguments |= {name: values[value] for name, value in operation.operands.items()}
            with DispatchMode(functools.partial(_result, trace, operation)):
                result = operation.evaluate(arguments)
            if isinstance(operation.node.overload, Rewrite) or trace.graph.infos[operation.value].whole is not None:
                # What is written unseen, and the parts of a call, have the derivative, but not always the elements.
                result = result + (trace.elements(operation.value) - result).detach()
            values[operation.value] = result
        output = values[record.stage.stop]
    if not output.requires_grad:
        return torch.zeros_like(leaf)
    gradient = gradient.reshape(output.shape)
    (of_input,) = walk([(get_gradient_edge(output), gradient)], [(get_gradient_edge(leaf), leaf)])
    return torch.zeros_like(leaf) if of_input is None else of_input


def _constant(argument: Any) -> Any:
    return argument.detach() if isinstance(argument, torch.Tensor) else argument


def _result(trace: Trace, operation: Operation, overload: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operator has computed in a traced run; it runs again only where that makes views or a list."""
    node = operation.node
    if overload is not operation.overload or operation.overload is not node.overload:
        return overload(*args, **kwargs)
    results = [trace.elements(value).detach() for value in node.results]
    returns = overload._schema.returns
    if node.writes and torch.Tag.inplace_view not in overload.tags:
        # An operator that works in place returns the argument that it writes to, a copy here.
        return args[0].copy_(results[0])
    if any(each.alias_info for each in returns) or len(returns) != len(results):
        return overload(*args, **kwargs)
    return results[0] if len(results) == 1 else tuple(results)
