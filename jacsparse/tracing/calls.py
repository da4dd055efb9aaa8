"""Functions of tensors as graphs of ATen calls, made simple: what repeated calls run, and compilers take."""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map

from ..runtime import DispatchMode
from .graph import tensors_in
from .operators import is_written, with_memory

aten = torch.ops.aten


def calls_of(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The graph of the ATen calls that a function of tensors makes, of which only the values count.

    It is to be recompiled before it runs.
    """
    inputs = [tensor.detach() for tensor in inputs]
    calls = _Calls(inputs)
    with _FORWARD_MODE, calls:
        output = function(*inputs)
    return _with_contiguous_operands(_simplified(calls.finished(output)), inputs)


class _Calls(DispatchMode):
    """Collects calls while it is active: PyTorch's own tracer first loads its compiler, which takes seconds."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.graph, self.constants = fx.Graph(), nn.Module()
        #: By a tensor's id. An operator may return its argument itself, which then has another node.
        self.nodes: dict[int, fx.Node] = {}
        self.alive: list[tuple[torch.Tensor, fx.Node]] = []
        self.written: set[int] = set()
        for number, tensor in enumerate(inputs):
            self.note(tensor, self.graph.placeholder(f"input_{number}"))

    def __torch_dispatch__(self, overload: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        overload, kwargs = with_memory(overload), kwargs or {}
        node = self.graph.call_function(overload, *tree_map(self.argument, (args, kwargs)))
        if not takes_any_layout(overload):
            tensors = ((place, arg) for place, arg in enumerate(args) if isinstance(arg, torch.Tensor))
            strided = ((place, tensor) for place, tensor in tensors if tensor.layout == torch.strided)
            node.meta["contiguous"] = [place for place, tensor in strided if tensor.is_contiguous()]
        result = overload(*args, **kwargs)
        if returns_one_tensor(overload):
            self.note(result, node)
        else:
            for place, part in enumerate(result if isinstance(result, (list, tuple)) else ()):
                if isinstance(part, torch.Tensor):
                    self.note(part, self.graph.call_function(operator.getitem, (node, place)))
        if any(map(is_written, overload._schema.arguments)):
            self.written |= _memories(tensors_in((args, *kwargs.values(), result)))
        return result

    def note(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """Take a node for what computes a tensor."""
        self.nodes[id(tensor)] = node
        self.alive.append((tensor, node))
        node.meta["val"] = tensor.detach().to("meta")

    def argument(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self.nodes:
            name = f"constant_{len(self.alive)}"
            self.constants.register_buffer(name, value)
            self.note(value, self.graph.get_attr(name))
        return self.nodes[id(value)]

    def finished(self, output: Any) -> fx.GraphModule:
        """The graph of all calls, whose nodes tell whether their results are written to."""
        self.graph.output(tree_map(self.argument, output))
        for tensor, node in self.alive:
            node.meta["written"] = bool(_memories([tensor]) & self.written)
        return fx.GraphModule(self.constants, self.graph)


#: PyTorch's forward mode has one state for all threads, and ends the process where two of them enter it at once.
_FORWARD_MODE = threading.RLock()


def _memories(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout == torch.strided}


def returns_one_tensor(overload: Any) -> bool:
    """Whether an operator returns a tensor, and no list or tuple."""
    returns = overload._schema.returns
    return len(returns) == 1 and isinstance(returns[0].type, torch.TensorType)


def _without_repeats(graph: fx.GraphModule) -> fx.GraphModule:
    """The same graph with each call once, and only those that the output needs."""
    calls: dict[str, fx.Node] = {}
    for node in list(graph.graph.nodes):
        # Two tensors of equal elements are one only as long as neither is written to.
        if node.op == "call_function" and not node.meta.get("written"):
            call = repr((node.target, node.args, node.kwargs))
            if call in calls:
                node.replace_all_uses_with(calls[call])
                graph.graph.erase_node(node)
            calls.setdefault(call, node)
    graph.graph.eliminate_dead_code()
    return graph


def in_graphs(overload: Any) -> Any:
    """The operator that a graph has for another one: ``reshape`` for views, as results may lie otherwise in memory."""
    return aten.reshape.default if overload in (aten.view.default, aten._unsafe_view.default) else overload


def _simplified(graph: fx.GraphModule) -> fx.GraphModule:
    """The same graph without calls that return one of their arguments, whose results may lie otherwise in memory."""
    graph = _without_repeats(graph)
    if any(node.target in _OF_PLACES for node in graph.graph.nodes):
        return graph
    while True:
        replaced = 0
        for node in list(graph.graph.nodes):
            node.target = in_graphs(node.target)
            _skip_views(node)
            other = _simpler(graph.graph, node) if node.op == "call_function" else None
            if other is not None:
                node.replace_all_uses_with(other)
                graph.graph.erase_node(node)
                replaced += 1
        graph = _without_repeats(graph)
        if not replaced:
            return graph


@functools.cache
def takes_any_layout(overload: Any) -> bool:
    """Whether an operator surely reads its operands where they lie in memory: it is pointwise, a view, or well known.

    Some kernels refuse others than contiguous operands, and some read them as if they were.
    """
    views = any(parameter.alias_info is not None for parameter in overload._schema.arguments)
    return views or torch.Tag.pointwise in overload.tags or overload in _OF_ANY_LAYOUT


class _Layouts(fx.Interpreter):
    """Runs a graph, and finds the operands that are not contiguous any more, by calls and places."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.found: list[tuple[fx.Node, int]] = []

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        for place in n.meta.get("contiguous", ()) if n.op == "call_function" else ():
            if not args[place].is_contiguous():
                self.found.append((n, place))
                args = (*args[:place], args[place].contiguous(), *args[place + 1 :])
        return getattr(self, n.op)(n.target, args, kwargs)


def _with_contiguous_operands(graph: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The same graph with copies where an operator may need them that seemed to be needless."""
    if not any(node.meta.get("contiguous") for node in graph.graph.nodes):
        return graph
    layouts = _Layouts(graph)
    layouts.run(*inputs)
    for node, place in layouts.found:
        operand: Any = node.args[place]
        with graph.graph.inserting_before(node):
            copy = graph.graph.call_function(aten.clone.default, (operand,), {"memory_format": torch.contiguous_format})
        copy.meta["val"] = operand.meta["val"]
        node.update_arg(place, copy)
    return graph


#: What takes places in memory.
_OF_PLACES = (aten.as_strided.default, aten.as_strided_scatter.default)
_OF_ANY_LAYOUT = frozenset(
    (
        *(aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.cat.default),
        *(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.stack.default),
        *(aten.clone.default, aten._to_copy.default, aten.index_select.default, aten.index.Tensor),
        *(aten._unsafe_view.default, aten.slice_backward.default, aten.select_backward.default),
    )
)
_COPIES = (aten.alias.default, aten.clone.default, aten.detach.default, aten.lift_fresh_copy.default)
_SAME = (aten.expand.default, aten._to_copy.default, aten.reshape.default, aten.permute.default)
#: What holds the elements of its operand in their order.
_ORDERED = (aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default)
#: What depends on an operand's form alone.
_FILLS = (aten.ones_like.default, aten.zeros_like.default, aten.full_like.default, aten.scalar_tensor.default)
_ONES = (aten.ones_like.default, aten.ones.default, aten.new_ones.default)


def _simpler(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """The node whose result a call's result equals; None where there is none."""
    first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    if first is None:
        return None
    if node.target in _COPIES and not node.meta.get("written") and not first.meta.get("written"):
        return first
    if node.target in _SAME and _form(first) == _form(node):
        axes: Any = node.args[1] if node.target == aten.permute.default else ()
        return first if list(axes) == list(range(len(axes))) else None
    if node.target == aten.mul.Tensor:
        for one, other in ((node.args[0], node.args[1]), (node.args[1], node.args[0])):
            if isinstance(other, fx.Node) and isinstance(one, fx.Node) and one.target in _ONES:
                return _expanded(graph, node, other)
    return None


def _skip_views(node: fx.Node) -> None:
    """Let a ``reshape`` of a tensor that holds the elements of another one in their order take that one."""
    first: Any = node.args[0] if node.target is aten.reshape.default else None
    while first is not None and first.target in _ORDERED:
        if any(each.meta.get("written") for each in (node, first, first.args[0])):
            return
        first = first.args[0]
        node.args = (first, *node.args[1:])


def with_constants(graph: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The same graph, in which elementwise calls read what depends on no elements as constants of one element each."""
    constants: dict[fx.Node, torch.Tensor] = {}
    devices = {tensor.device for tensor in inputs}
    for node in list(graph.graph.nodes) if len(devices) == 1 else ():
        value = node.meta.get("val")
        if node.op != "call_function" or node.meta.get("written") or not isinstance(value, torch.Tensor):
            continue
        known = all(each in constants for each in node.all_input_nodes)
        if node.target in _FILLS or (_is_fresh(node) and known and node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: constants.get(each, _one(each, devices)))
            filled, name = node.target(*args, **kwargs), f"filled_{node.name}"
            # A module finds its buffers later than other attributes.
            setattr(graph, name, filled.expand(value.shape))
            with graph.graph.inserting_after(node):
                constant = graph.graph.create_node("get_attr", name)
            constants[node] = constants[constant] = filled
            constant.meta["val"] = value
            node.replace_all_uses_with(constant, delete_user_cb=_is_fresh)
    if constants:
        graph.graph.eliminate_dead_code()
    return _with_contiguous_operands(graph, inputs) if constants else graph


def _one(node: fx.Node, devices: Iterable[torch.device]) -> torch.Tensor:
    """A tensor of one element with as many axes as a result, and of its dtype."""
    value: torch.Tensor = node.meta["val"]
    return torch.empty((1,) * value.ndim, dtype=value.dtype, device=next(iter(devices)))


def _is_fresh(node: fx.Node) -> bool:
    """Whether a call computes new elements one by one, and writes to no argument."""
    overload: Any = node.target
    if node.op != "call_function" or torch.Tag.pointwise not in getattr(overload, "tags", ()):
        return False
    return all(argument.alias_info is None for argument in overload._schema.arguments)


def _expanded(graph: fx.Graph, node: fx.Node, other: fx.Node) -> fx.Node | None:
    """`other` in the shape of a node; None where its dtype differs."""
    if _form(other) == _form(node):
        return other
    if _form(other)[1] != _form(node)[1]:
        return None
    with graph.inserting_before(node):
        expanded = graph.call_function(aten.expand.default, (other, list(_form(node)[0])))
    expanded.meta.update(node.meta)
    return expanded


def _form(node: fx.Node) -> tuple[Any, Any]:
    value = node.meta["val"]
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else (None, None)
