"""Traces from which replays are prepared: what a function does at arguments, its numbers taken for tensors."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from ..patterns import UnsupportedOperatorError
from ..stages import agree, chain_of, refuse_hooks, traced
from ..tracing import Contents, Trace, check_module, check_replays, name_of, undisturbed, without_autocast
from .arguments import Arguments, FlatFunction
from .gradients import Gradient, registered_in
from .traced_function import TracedFunction

#: Where the captures of a graph come from: places of arguments, what returns them, or themselves.
Sources = dict[int, int | Callable[[], torch.Tensor] | torch.Tensor]


def traced_program(
    f: Callable[..., Any], arguments: Arguments, pruned: bool, asks: bool
) -> tuple[Arguments, frozenset[int], Sources, dict[int, Contents], TracedFunction]:
    """What a prepared Jacobian is made of; `asks` whether numbers among the arguments may be taken for tensors.

    Returns
    -------
    arguments : Arguments
        The arguments as the program takes them: their elements are apart in memory, unless it may read others too.
    tensors : frozenset of int
        The places of the numbers among the arguments that are taken for tensors without axes.
    captures, contents : dict
        By value, where captures come from, and the elements of those on which patterns may depend.
    function : TracedFunction
        The function.
    """
    dense = arguments.dense()
    tensors, traced_at, trace = _trace(f, dense, asks)
    if dense is not arguments and any(n.overload is torch.ops.aten.as_strided.default for n in trace.graph.nodes):
        # The function may read elements beside those of its arguments.
        dense = arguments
        tensors, traced_at, trace = _trace(f, arguments, asks)
    places = {id(leaf): place for place, leaf in enumerate(traced_at.leaves) if isinstance(leaf, torch.Tensor)}
    graph, by_name = trace.graph, dict(_named(f))
    captures: Sources = {}
    for value in graph.captures:
        tensor = trace.tensor(value)
        captures[value] = places[id(tensor)] if id(tensor) in places else by_name.get(id(tensor), tensor)
    read = {value: trace.tensor(value) for value in graph.captures}
    contents = {
        value: Contents.of(tensor)
        for value, tensor in read.items()
        if not tensor.is_floating_point() or tensor.layout != torch.strided
    }
    _check_indices(trace)
    floats = [tensor for tensor in read.values() if tensor.is_floating_point()]
    varying = [tensor for tensor in floats if not pruned or id(tensor) in places]
    watched = [tensor for tensor in floats if pruned and id(tensor) not in places]
    with without_autocast(trace.input.device):
        chain, records = chain_of(trace, varying=varying, watched=watched).records(trace)
        refuse_hooks(records)
    return dense, tensors, captures, contents, TracedFunction(trace, chain, records)


def _named(f: Callable[..., Any]) -> Iterator[tuple[int, Callable[[], torch.Tensor]]]:
    """The parameters and buffers of a function's modules by ``id``, each with what finds it by its name."""
    for module in modules_of(f, set()):
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            yield id(tensor), functools.partial(attrgetter(name), module)


def modules_of(f: Any, seen: set[int]) -> Iterator[nn.Module]:
    """The modules that a function is, is a method of, or reads as a variable; not those of functions that it calls."""
    if id(f) in seen:
        return
    seen.add(id(f))
    parts: Iterable[Any] = ()
    if isinstance(f, nn.Module):
        yield f
        parts = [part for module in f.modules() for part in vars(module).values()]
    elif isinstance(f, MethodType):
        parts = [f.__self__]
    elif isinstance(f, functools.partial):
        parts = [f.func, *f.args, *f.keywords.values()]
    elif isinstance(f, FunctionType):
        parts = inspect.getclosurevars(f)[:2]
        parts = [part for variables in parts for part in variables.values() if not isinstance(part, FunctionType)]
    for part in parts:
        if isinstance(part, (nn.Module, MethodType, functools.partial, FunctionType)):
            yield from modules_of(part, seen)


def _trace(f: Callable[..., Any], arguments: Arguments, asks: bool) -> tuple[frozenset[int], Arguments, Trace]:
    """The places of the numbers that are taken for tensors, the arguments with these, and a run at them.

    A number stays one where the function needs its value, or does something else with a tensor: it is asked for other
    numbers too. What is a tensor stays one.
    """
    numbers = arguments.number_places
    before = frozenset(place for place in numbers if isinstance(arguments.leaves[place], torch.Tensor))
    plain, others = _run(f, arguments), [arguments.with_numbers(change) for change in _OTHERS]

    def taken(places: frozenset[int]) -> tuple[frozenset[int], Arguments, Trace] | None:
        places |= before
        changed = arguments.with_tensors(places)
        try:
            trace = _run(f, changed, [changed.leaves[place] for place in places])
            if _computes(plain) != _computes(trace) or not agree(trace.output.detach(), plain.output.detach()):
                return None
            for other in others:
                if not agree(_output(f, other.with_tensors(places)), _output(f, other)):
                    return None
        except (UnsupportedOperatorError, RuntimeError, TypeError, ValueError, ArithmeticError):
            return None
        return places, changed, trace

    numbers = numbers - before if asks else frozenset()
    best = taken(numbers) if numbers else None
    if best is None and len(numbers) > 1:
        numbers = frozenset(place for place in numbers if taken(frozenset([place])) is not None)
        best = taken(numbers) if numbers else None
    return (before, arguments, plain) if best is None else best


#: Other numbers to ask for than those of the arguments.
_OTHERS: tuple[Callable[[float], float], ...] = (lambda c: 1.5 * c + 1, lambda c: 0.5 - c)


def _output(f: Callable[..., Any], arguments: Arguments) -> torch.Tensor:
    function = FlatFunction(f, arguments)
    with torch.enable_grad(), undisturbed(function):
        return function(arguments.flat().requires_grad_().clone()).detach()


#: A number minus a tensor is another operator than a tensor minus a tensor.
_NAMES = {"aten.rsub": "aten.sub"}


def _computes(trace: Trace) -> list[tuple[str, torch.Size, torch.dtype]]:
    """What the calls that depend on the input compute."""
    infos = trace.graph.infos
    values = [(node, value) for node in trace.graph.nodes for value in node.results if infos[value].dependent]
    return [
        (_NAMES.get(node.name, node.name), trace.tensor(value).shape, trace.tensor(value).dtype)
        for node, value in values
    ]


def _run(f: Callable[..., Any], arguments: Arguments, hidden: list[torch.Tensor] | None = None) -> Trace:
    """The trace of a run that may be replayed; no elements of the input, and of hidden tensors, may be read."""
    function = FlatFunction(f, arguments)
    check_module(function)
    with undisturbed(function):
        trace = traced(function, arguments.flat(), readable=False, hidden=hidden or ())
        registered = registered_in(trace) if isinstance(f, Gradient) else None
        if registered is not None:
            raise UnsupportedOperatorError(
                f"{name_of(f)}: a prepared Hessian takes PyTorch's derivative of {registered.name}, whose values were "
                f"registered and may be others{registered.source}; call jacsparse.hessian, which compares them"
            )
        check_replays(trace, name_of(f))
    return trace


def _check_indices(trace: Trace) -> None:
    """Raise where indices that move elements are computed from a capture of floats, and not from the input."""
    graph = trace.graph
    captures = {value: trace.tensor(value) for value in graph.captures}
    # The indices of sparse ones are parts of the program.
    floats = {n for n, tensor in captures.items() if tensor.is_floating_point() and tensor.layout == torch.strided}
    for call in graph.calls:
        for name in call.contents:
            value = call.arguments[name].number
            if not graph.infos[value].dependent and graph.made_of(value, floats):
                raise UnsupportedOperatorError(
                    f"{call.name}: its indices are computed from what a tensor holds, so that no pattern holds for all "
                    f"inputs{call.source}; call jacsparse.jacobian, which follows each run"
                )


def digest_of(arguments: Arguments, function: TracedFunction) -> str:
    """A digest of all that a prepared Jacobian depends on besides elements and numbers."""
    digest, graph = hashlib.blake2b(digest_size=16), function.graph
    for part in (arguments.form, graph.captures, graph.output):
        digest.update(repr(part).encode())
    for node in graph.nodes:
        digest.update(repr((node.overload, node.args, sorted(node.kwargs.items()), node.results, node.seen)).encode())
    contents = [call.contents[name] for call in graph.calls for name in sorted(call.contents)]
    for elements in (*contents, *(weight.mask for weight in function.chain.pruned_weights)):
        digest.update(elements.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
