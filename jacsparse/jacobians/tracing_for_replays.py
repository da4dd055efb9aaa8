"""Traces from which replays are prepared: what a function does at arguments, its numbers taken for tensors."""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree

from ..decompositions import indices_of, is_sparse
from ..patterns import UnsupportedOperatorError, requiring_gradient
from ..stages import agree, chain_of, refuse_hooks
from ..tracing import (
    FunctionCall,
    Node,
    Trace,
    Value,
    check_module,
    form_of,
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
    #: The places of the numbers among the arguments that are tensors without axes to it.
    tensors: frozenset[int]
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


def traced_program(f: Callable[..., Any], arguments: Arguments, options: Options, asks: bool) -> TracedProgram:
    """What a prepared Jacobian is made of; `asks` whether numbers among the arguments may be taken for tensors."""
    dense = arguments.dense()
    tensors, traced_at, (trace, returned) = _trace(f, dense, options, asks)
    if dense is not arguments and any(n.overload is torch.ops.aten.as_strided.default for n in trace.graph.nodes):
        # The function may read elements beside those of its arguments.
        dense = arguments
        tensors, traced_at, (trace, returned) = _trace(f, arguments, options, asks)
    places = {id(leaf): place for place, leaf in enumerate(traced_at.leaves) if isinstance(leaf, torch.Tensor)}
    graph, by_name = trace.graph, _named(f)
    read = {value: trace.tensor(value) for value in graph.captures}
    captures: Origins = {value: places.get(id(t), by_name.get(id(t), t)) for value, t in read.items()}
    contents = {
        value: contents_of(tensor).clone()
        for value, tensor in read.items()
        if not tensor.is_floating_point() or tensor.layout != torch.strided
    }
    _check_indices(trace)
    if options.create_graph:
        _check_gradients(trace)
    returned_values = [leaf.number for leaf in _pytree.tree_leaves(returned.aux) if isinstance(leaf, Value)]
    floats = [tensor for tensor in read.values() if tensor.is_floating_point()]
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
        # A chain has been made of what depends on the input.
        assert graph.last is not None
        returned_values.append(graph.last.value)
    function.kept = tuple(dict.fromkeys(returned_values))
    return TracedProgram(function, dense, tensors, captures, contents, returned)


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


#: A run; and what the function returned, with values in the place of the tensors beside its result.
_Run = tuple[Trace, Returned]


def _trace(
    f: Callable[..., Any], arguments: Arguments, options: Options, asks: bool
) -> tuple[frozenset[int], Arguments, _Run]:
    """The places of the numbers that are taken for tensors, the arguments with these, and a run at them.

    A number stays one where the function needs its value, or does something else with a tensor: it is asked for other
    numbers too. What is a tensor stays one.
    """
    numbers = arguments.number_places
    before = frozenset(place for place in numbers if isinstance(arguments.leaves[place], torch.Tensor))
    plain, cases = _run(f, arguments, options), [arguments, *map(arguments.with_numbers, _OTHERS)]

    @functools.cache
    def returned(case: int) -> tuple[torch.Tensor, Returned]:
        return _returned(f, cases[case], options)

    def taken(places: frozenset[int]) -> tuple[frozenset[int], Arguments, _Run] | None:
        places |= before
        changed = arguments.with_tensors(places)
        try:
            run = _run(f, changed, options, [changed.leaves[place] for place in places])
            (trace, _), (expected, _) = run, plain
            if _computes(expected) != _computes(trace) or _is_coarser(expected, trace):
                return None
            for case, at in enumerate(cases):
                at_tensors = _unhashed(at.with_tensors(places), places - before)
                if not _alike(_returned(f, at_tensors, options), returned(case)):
                    return None
        except Exception:
            # The function may raise anything where it gets a tensor in the place of a number, or another number.
            return None
        return places, changed, run

    numbers = numbers - before if asks else frozenset()
    with warnings.catch_warnings():
        # Of tensors in the place of numbers, which nobody has passed.
        warnings.simplefilter("ignore")
        best = taken(numbers) if numbers else None
        if best is None and len(numbers) > 1:
            numbers = frozenset(place for place in numbers if taken(frozenset([place])) is not None)
            best = taken(numbers) if numbers else None
    return (before, arguments, plain) if best is None else best


#: Other numbers to ask for than those of the arguments.
_OTHERS: tuple[Callable[[float], float], ...] = (lambda c: 1.3 * c + 0.7, lambda c: 0.4 - c)


class _Unhashed(torch.Tensor):
    """A tensor in the place of a number, which a set or a dictionary would not find: their hashes differ."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __hash__(self) -> int:
        raise TypeError("no tensor has the hash of a number")


def _unhashed(arguments: Arguments, places: Collection[int]) -> Arguments:
    """The same arguments with tensors at some places that no set or dictionary takes."""
    pairs = enumerate(arguments.leaves)
    return replace(arguments, leaves=[leaf.as_subclass(_Unhashed) if n in places else leaf for n, leaf in pairs])


def _returned(f: Callable[..., Any], arguments: Arguments, options: Options) -> tuple[torch.Tensor, Returned]:
    """What a function returns: its flat result, and the rest."""
    function = FlatFunction(f, arguments, options.has_aux)
    x = requiring_gradient(arguments.flat())
    with torch.enable_grad(), undisturbed(function, x.device):
        y, returned = function(x.clone()), function.returned
        assert returned is not None
        return y.detach(), returned


def _alike(first: tuple[torch.Tensor, Returned], second: tuple[torch.Tensor, Returned]) -> bool:
    """Whether a function returned the same with numbers and with tensors in their place; other objects may differ."""
    (y, returned), (other_y, other) = first, second
    leaves, spec = _pytree.tree_flatten(returned.aux)
    other_leaves, other_spec = _pytree.tree_flatten(other.aux)
    if not agree(y, other_y) or returned.forms != other.forms or spec != other_spec:
        return False
    return all(itertools.starmap(_is_alike, zip(leaves, other_leaves, strict=True)))


def _is_alike(leaf: Any, other: Any) -> bool:
    if type(leaf) is not type(other):
        return False
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype == other.dtype and (agree if leaf.is_floating_point() else torch.equal)(leaf, other)
    # By their texts: zeros have signs. An object of another kind has none that tells.
    is_told = isinstance(leaf, (bool, int, float, complex, str, bytes, np.generic, np.ndarray, torch.dtype))
    return not is_told or repr(leaf) == repr(other)


def _is_coarser(of_numbers: Trace, of_tensors: Trace) -> bool:
    """Whether a run with numbers has other tensors than one with tensors in their place, of which some are coarser.

    As where ``torch.tensor`` reads a number, whose dtype is another one than the tensor's, or an integer has it for a
    factor.
    """
    read = (Counter(form_of(t.tensor(value)) for value in t.graph.captures) for t in (of_numbers, of_tensors))
    others, alone = next(read) - next(read), _alone(of_numbers) - _alone(of_tensors)
    return any(dtype != torch.float64 for dtype in (*(form[3] for form in others), *(dtype for _, dtype in alone)))


def _alone(trace: Trace) -> Counter[tuple[str, torch.dtype]]:
    """What calls compute without axes that does not depend on the input."""
    infos = trace.graph.infos
    pairs = ((node, value) for node in trace.graph.nodes for value in node.results if not infos[value].dependent)
    tensors = ((node, trace.tensor(value)) for node, value in pairs)
    return Counter((_NAMES.get(node.name, node.name), tensor.dtype) for node, tensor in tensors if not tensor.ndim)


#: A number minus a tensor is another operator than a tensor minus a tensor.
_NAMES = {"aten.rsub": "aten.sub"}


def _computes(trace: Trace) -> list[tuple[str, torch.Size, torch.dtype]]:
    """What the calls compute that depend on the input, and those whose results have axes."""
    graph = trace.graph
    values = [(node.name, value, trace.tensor(value)) for node in graph.nodes for value in node.results]
    return [
        (_NAMES.get(name, name), tensor.shape, tensor.dtype)
        for name, value, tensor in values
        if graph.infos[value].dependent or tensor.ndim
    ]


def _run(
    f: Callable[..., Any], arguments: Arguments, options: Options, hidden: list[torch.Tensor] | None = None
) -> _Run:
    """A run that may be replayed; no elements of the input, and of hidden tensors, may be read."""
    function = FlatFunction(f, arguments, options.has_aux)
    check_module(function)

    def beside() -> list[torch.Tensor]:
        """The tensors that the function returned beside its result."""
        leaves = _pytree.tree_leaves(function.returned and function.returned.aux)
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    with undisturbed(function, arguments.tensors[0].device):
        trace = traced(function, arguments.flat(), readable=False, hidden=hidden or (), beside=beside)
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
        _check_replays(trace, f)
    values = map(Value, trace.beside)
    return trace, replace(returned, aux=_pytree.tree_map_only(torch.Tensor, lambda _: next(values), returned.aux))


def contents_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of an index or a mask; the indices of a sparse tensor."""
    return indices_of(tensor) if is_sparse(tensor) else tensor.detach()


def _check_replays(trace: Trace, f: Callable[..., Any]) -> None:
    """Raise where a replay of a graph is not a run of the function."""

    def refusal(node: Node | None, effect: str, remedy: str) -> Exception:
        where, source = (name_of(f), "") if node is None else (node.path or name_of(f), node.source)
        what = f"{where}: {effect}, so that no prepared program repeats the call{source}"
        return UnsupportedOperatorError(f"{what}; {remedy}")

    jacobian, module = "jacsparse.jacobian, which runs it each time", module_of(f)
    again = in_training = f"call {jacobian}"
    if module is not None and any(part.training for part in module.modules()):
        in_training = f"call .eval() on the module first, or {jacobian}"
    graph = trace.graph
    varies = {0, *graph.captures}
    # Other captures are constants.
    floats = {n for n in graph.captures if (t := trace.tensor(n)).is_floating_point() and t.layout == torch.strided}
    for node in graph.nodes:
        values = [value for _, value in node.tensors]
        memories = {value: memory_of(trace.tensor(value)) for value in values}
        if isinstance(node.overload, FunctionCall) and node.arguments["elements"].number in graph.captures:
            raise refusal(node, f"{node.overload.function.__name__} computes by no operator of PyTorch's", again)
        if any(isinstance(value, torch.UntypedStorage) for value in node.arguments.values()):
            raise refusal(node, f"{node.name} takes the memory of a tensor", again)
        if node.draws:
            raise refusal(node, f"{node.name} draws random numbers", in_training)
        if node.facts.reads and not node.facts.dynamic and varies.intersection(values):
            is_number = any(not trace.tensor(value).ndim and value in graph.captures for value in values)
            remedy = f"pass the number as a float, each of which makes a program of its own, or {again}"
            raise refusal(node, f"{node.name} shows Python what a tensor holds", remedy if is_number else again)
        read = [trace.tensor(value).dtype for value in values if value in floats]
        if read and (node.name == "aten._to_sparse" or (node.facts.dynamic and shows(node.overload, read))):
            raise refusal(
                node, f"the size of the result of {node.name} depends on what a tensor of floats holds", again
            )
        if node.writes_outside:
            written = {memories[value] for argument, value in node.tensors if node.writes_to(argument)}
            for buffer, tensor in trace.module.named_buffers():
                if memory_of(tensor) in written:
                    remedy = in_training if in_training == again else f"{in_training} with batched=False"
                    raise refusal(node, f"{node.name} writes to the buffer {buffer}", remedy)
            raise refusal(node, f"{node.name} writes to a tensor from before the call", "write to a clone")
        for each in (varies, floats):
            if each.intersection(values):
                each.update(node.results)
    if trace.may_have_hooks:
        raise refusal(None, "a hook sees gradients, and may change them", "remove it")


def _check_indices(trace: Trace) -> None:
    """Raise where indices that move elements are computed from a capture of floats, and not from the input."""
    graph = trace.graph
    captures = {value: trace.tensor(value) for value in graph.captures}
    # The indices of sparse ones are parts of the program.
    floats = {n for n, tensor in captures.items() if tensor.is_floating_point() and tensor.layout == torch.strided}
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
