"""Traces from which replays are prepared: what a function does at arguments, whose numbers are tensors to it."""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from ..decompositions import indices_of, is_sparse
from ..patterns import UnsupportedOperatorError, holds_numbers
from ..stages import chain_of, refuse_hooks
from ..tracing import (
    BackwardPass,
    FunctionCall,
    Node,
    OutsideWrite,
    Trace,
    Value,
    check_module,
    function_error,
    memory_of,
    module_of,
    name_of,
    shows,
    traced,
    undisturbed,
    without_autocast,
)
from .arguments import Arguments
from .differentiable import check_second_derivatives
from .flat_function import FlatFunction, Returned, WithAux
from .gradients import Gradient, registered_in
from .options import Options
from .traced_function import TracedFunction

#: Where the captures of a graph come from: places of arguments, what returns them, or themselves.
Origins = dict[int, int | Callable[[], torch.Tensor] | torch.Tensor]


@dataclass(frozen=True, eq=False)
class TracedProgram:
    """What a function did in a run, and where a replay finds what it begins with."""

    function: TracedFunction
    #: The arguments as the program takes them: their elements are apart in memory, unless it may read others too.
    arguments: Arguments
    #: Where each capture comes from.
    captures: Origins
    #: The elements of the captures on which patterns may depend, all that are no floats, as `contents_of` gives them.
    contents: dict[int, torch.Tensor]
    #: What the function returned; tensors that it returned beside its result are values of the graph.
    returned: Returned

    @property
    def digest(self) -> str:
        """A digest of all that a prepared Jacobian depends on besides elements and numbers."""
        digest, graph = hashlib.blake2b(digest_size=16), self.function.graph
        for part in (self.arguments.form, graph.captures, graph.output):
            digest.update(repr(part).encode())
        for node in graph.nodes:
            call = node.overload, node.args, sorted(node.kwargs.items()), node.results, node.seen
            digest.update(repr(call).encode())
        contents = [node.contents[name] for node in graph.differentiated for name in sorted(node.contents)]
        contents += [elements.resolve_conj() for elements in self.contents.values()]
        for elements in (*contents, *(weight.mask for weight in self.function.chain.pruned_weights)):
            digest.update(elements.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()


def traced_program(f: Callable[..., Any], arguments: Arguments, options: Options) -> TracedProgram:
    """What a prepared Jacobian is made of."""
    arguments = arguments.with_numbers_apart()
    dense = arguments.dense()
    trace, returned = _run(f, dense, options)
    if dense is not arguments and any(n.overload is torch.ops.aten.as_strided.default for n in trace.graph.nodes):
        # The function may read elements beside those of its arguments.
        dense = arguments
        trace, returned = _run(f, arguments, options)
    places = {id(leaf): place for place, leaf in enumerate(dense.leaves) if isinstance(leaf, torch.Tensor)}
    graph, by_name = trace.graph, _named(f)
    read = {value: trace.tensor(value) for value in graph.captures}
    captures: Origins = {value: places.get(id(t), by_name.get(id(t), t)) for value, t in read.items()}
    contents = {
        value: contents_of(tensor).clone()
        for value, tensor in read.items()
        if not holds_numbers(tensor) or tensor.layout != torch.strided
    }
    _check_indices(trace)
    if options.create_graph:
        _check_gradients(trace)
    returned_values = [leaf.number for leaf in _pytree.tree_leaves(returned.aux) if isinstance(leaf, Value)]
    floats = [tensor for tensor in read.values() if holds_numbers(tensor)]
    varying = [tensor for tensor in floats if not options.pruned or id(tensor) in places]
    watched = [tensor for tensor in floats if options.pruned and id(tensor) not in places]
    with without_autocast(trace.input.device):
        if options.pattern is None:
            chain = chain_of(trace, varying=varying, watched=watched)
            refuse_hooks(chain.records(trace))
            if options.create_graph and chain.trained_zeros(trace):
                chain = chain_of(trace, varying=floats)
            function = TracedFunction(trace, chain, replays=True)
        else:
            function = TracedFunction.with_pattern(trace, options.pattern)
        if options.create_graph:
            records = function.chain.records(trace)
            check_second_derivatives(trace, function.chain, records, of_gradient=isinstance(f, Gradient))
    if options.result:
        returned_values.append(graph.last.value)
    function.kept = tuple(dict.fromkeys(returned_values))
    return TracedProgram(function, dense, captures, contents, returned)


def _named(f: Callable[..., Any]) -> dict[int, Callable[[], torch.Tensor]]:
    """What finds the parameters and buffers of a function's modules by their names, by the ``id`` of each."""
    names: dict[int, list[tuple[str, nn.Module]]] = {}
    for module in modules_of(f, set()):
        if isinstance(module, WithAux):
            # It has no names: `modules_of` finds what it wraps.
            continue
        named = (module.named_parameters, module.named_buffers)
        for name, tensor in itertools.chain(*(each(remove_duplicate=False) for each in named)):
            names.setdefault(id(tensor), []).append((name, module))
    return {number: _finder(of_tensor) for number, of_tensor in names.items()}


def _finder(names: Sequence[tuple[str, nn.Module]]) -> Callable[[], torch.Tensor]:
    """What finds the parameter or buffer that has these names in modules."""
    if len(names) > 1:
        return functools.partial(_tied, names)
    # It is called for each tensor in each call.
    ((name, module),) = names
    return functools.partial(attrgetter(name), module)


def _tied(names: Sequence[tuple[str, nn.Module]]) -> torch.Tensor:
    """The tensor that has several names; ValueError where these are of several ones by now."""
    (name, module), *others = names
    tensor: torch.Tensor = attrgetter(name)(module)
    for other, of in others:
        if attrgetter(other)(of) is not tensor:
            raise ValueError(
                f"{name_of(module)}.{name} and {name_of(of)}.{other} were one tensor when this Jacobian was prepared, "
                "and are two now: prepare one for these"
            )
    return tensor


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


def _run(f: Callable[..., Any], arguments: Arguments, options: Options) -> tuple[Trace, Returned]:
    """A run that may be replayed; and what the function returned, whose tensors beside the result are values.

    No elements of the input, and of numbers among the arguments, may be read.
    """
    numbers = [arguments.leaves[place] for place in arguments.numbers]
    function = FlatFunction(f, arguments, options.has_aux)
    check_module(function)

    def beside() -> list[torch.Tensor]:
        """The tensors that the function returned beside its result."""
        leaves = _pytree.tree_leaves(function.returned and function.returned.aux)
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    with undisturbed(function, arguments.tensors[0].device):
        try:
            trace = traced(function, arguments.flat(), readable=False, hidden=numbers, beside=beside)
        except UnsupportedOperatorError as error:
            if not numbers:
                raise
            raise UnsupportedOperatorError(f"{error}; {_STATIC}") from error
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            # As of a call that takes a size, and gets a tensor.
            if numbers:
                error.add_note(f"A remark of jacsparse: {_STATIC}.")
            raise
        returned = function.returned
        assert returned is not None
        registered = registered_in(trace) if isinstance(f, Gradient) or options.pattern is not None else None
        if registered is not None:
            what, remedy = "a prepared Hessian", "call jacsparse.hessian, which compares them"
            if options.pattern is not None:
                what, remedy = "a Jacobian of a given pattern", "leave the pattern out"
            raise UnsupportedOperatorError(
                f"{name_of(f)}: {what} takes PyTorch's derivative of {registered.name}, whose values were "
                f"registered and may be others{registered.source}; {remedy}"
            )
        _check_replays(trace, f, numbers)
    values = (Value(trace.graph.numbers[number]) for number in trace.run.beside)
    return trace, replace(returned, aux=_pytree.tree_map_only(torch.Tensor, lambda _: next(values), returned.aux))


#: What to do where a function needs a number's value.
_STATIC = (
    "numbers among its arguments are tensors without axes to the function; name those whose values it needs, as for a "
    "branch, a shape or math.sin, in static_argnums"
)


def contents_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of an index or a mask; the indices of a sparse tensor."""
    return indices_of(tensor) if is_sparse(tensor) else tensor.detach()


def _check_replays(trace: Trace, f: Callable[..., Any], numbers: Sequence[torch.Tensor]) -> None:
    """Raise where a replay of a graph, among whose captures are numbers, is not a run of the function."""

    def refusal(made: Node | OutsideWrite | None, effect: str, remedy: str) -> Exception:
        where, source = (name_of(f), "") if made is None else (made.path or name_of(f), made.source)
        what = f"{where}: {effect}, so that no prepared program repeats the call{source}"
        return UnsupportedOperatorError(f"{what}; {remedy}")

    jacobian, module = "jacsparse.jacobian, which runs it each time", module_of(f)
    again = in_training = f"call {jacobian}"
    if module is not None and any(part.training for part in module.modules()):
        in_training = f"call .eval() on the module first, or {jacobian}"
    graph = trace.graph
    varies = {0, *graph.captures}
    # Other captures are constants.
    floats = {n for n in graph.captures if holds_numbers(t := trace.tensor(n)) and t.layout == torch.strided}
    for node in graph.nodes:
        values = [value for _, value in node.tensors]
        if isinstance(node.overload, FunctionCall) and node.arguments["elements"].number in graph.captures:
            raise refusal(node, f"{node.overload.function.__name__} computes by no operator of PyTorch's", again)
        if isinstance(node.overload, BackwardPass) and node.overload.problem:
            raise function_error(node)
        if any(isinstance(value, torch.UntypedStorage) for value in node.arguments.values()):
            raise refusal(node, f"{node.name} takes the memory of a tensor", again)
        if node.draws:
            raise refusal(node, f"{node.name} draws random numbers", in_training)
        if node.facts.reads and not node.facts.dynamic and varies.intersection(values):
            of_numbers = any(graph.made_of(value, trace.values_of(numbers)) for value in values)
            effect = f"{node.name} shows Python what a tensor holds"
            raise refusal(node, effect, f"{again}; {_STATIC}" if of_numbers else again)
        read = [trace.tensor(value).dtype for value in values if value in floats]
        sized = node.facts.dynamic and not node.by_parts
        if read and (node.name == "aten._to_sparse" or (sized and shows(node.overload, read))):
            raise refusal(
                node, f"the size of the result of {node.name} depends on what a tensor of floats holds", again
            )
        for each in (varies, floats):
            if each.intersection(values):
                each.update(node.results)
    for write in trace.run.writes_outside:
        for buffer, tensor in trace.module.named_buffers():
            if memory_of(tensor) == write.memory:
                remedy = in_training if in_training == again else f"{in_training} with batched=False"
                raise refusal(write, f"{write.operator} writes to the buffer {buffer}", remedy)
        raise refusal(write, f"{write.operator} writes to a tensor from before the call", "write to a clone")
    if trace.may_have_hooks:
        raise refusal(None, "a hook sees gradients, and may change them", "remove it")


def _check_indices(trace: Trace) -> None:
    """Raise where indices that move elements are computed from a capture of floats, and not from the input."""
    graph = trace.graph
    captures = {value: trace.tensor(value) for value in graph.captures}
    # The indices of sparse ones are parts of the program.
    floats = {n for n, tensor in captures.items() if holds_numbers(tensor) and tensor.layout == torch.strided}
    for node in graph.differentiated:
        for name in node.contents if any(operand.active for operand in node.operands) else ():
            value = node.arguments[name].number
            if not graph.infos[value].dependent and graph.made_of(value, floats):
                raise UnsupportedOperatorError(
                    f"{node.name}: its indices are computed from what a tensor holds, so that no pattern holds for all "
                    f"inputs{node.source}; call jacsparse.jacobian, which follows each run"
                )


def _check_gradients(trace: Trace) -> None:
    """Raise where a replay's gradients by what the function reads would not be the function's."""
    for node in trace.graph.nodes:
        if isinstance(node.overload, FunctionCall) and any(node.differentiable):
            raise UnsupportedOperatorError(
                f"{node.path}: {node.overload.function.__name__} is a torch.autograd.Function{node.source}, and values "
                "of a prepared Jacobian have gradients by operators alone; write it with operators, or call "
                "jacsparse.jacobian(..., create_graph=True)"
            )
