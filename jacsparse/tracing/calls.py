"""Functions of tensors as graphs of ATen calls, made simple: what repeated calls run, and compilers take.

What is left out changes no place in memory of what remains: some kernels refuse other operands than contiguous ones,
and some read them as if they were.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map

from ..runtime import DispatchMode
from .operators import RUNNING, WITHOUT_MEMORY, is_lazily_changed, is_written, tensors_in
from .storages import memory_of

aten = torch.ops.aten


def calls_of(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The graph of the ATen calls that a function of tensors makes, of which only the values count.

    It is to be recompiled before it runs.
    """
    inputs = [tensor.detach() for tensor in inputs]
    calls = _Calls(inputs)
    with _FORWARD_MODE, DispatchMode(calls.call):
        output = function(*inputs)
    return _simplified(calls.finished(output))


class _Calls:
    """Collects calls: PyTorch's own tracer first loads its compiler, which takes seconds."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        self.graph, self.constants = fx.Graph(), nn.Module()
        #: By a tensor's id. An operator may return its argument itself, which then has another node.
        self.nodes: dict[int, fx.Node] = {}
        self.alive: list[tuple[torch.Tensor, fx.Node]] = []
        self.written: set[int] = set()
        for number, tensor in enumerate(inputs):
            self.note(tensor, self.graph.placeholder(f"input_{number}"))

    def call(self, overload: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a call of an operator, and collect it."""
        overload = aten.zeros.default if overload is WITHOUT_MEMORY else overload
        node = self.graph.call_function(overload, *fx.node.map_aggregate((args, kwargs), self.argument))
        result = overload(*args, **kwargs)
        if returns_one_tensor(overload):
            self.note(result, node)
        else:
            for place, part in enumerate(result if isinstance(result, (list, tuple)) else ()):
                if isinstance(part, torch.Tensor):
                    self.note(part, self.graph.call_function(operator.getitem, (node, place)))
        for place, parameter in enumerate(overload._schema.arguments):
            if is_written(parameter) or parameter.name in RUNNING:
                value = args[place] if place < len(args) else kwargs.get(parameter.name)
                self.written |= set(map(memory_of, tensors_in(value)))
        return result

    def note(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """Take a node for what computes a tensor."""
        self.nodes[id(tensor)] = node
        self.alive.append((tensor, node))
        node.meta["lazy"] = is_lazily_changed(tensor)
        if tensor.layout == torch.strided:
            form = tensor.shape, tensor.stride()
            node.meta["val"] = torch.empty_strided(*form, dtype=tensor.dtype, device="meta")
        else:
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
            node.meta["written"] = memory_of(tensor) in self.written
        return _GraphModule(self.constants, self.graph)


class _GraphModule(fx.GraphModule):
    """A graph that is compiled when it first runs, however often it was changed before."""

    def recompile(self) -> Any:
        type(self).forward = _compile_and_run


def _compile_and_run(module: fx.GraphModule, *inputs: torch.Tensor) -> Any:
    fx.GraphModule.recompile(module)
    return module.forward(*inputs)


#: PyTorch's forward mode has one state for all threads, and ends the process where two of them enter it at once.
_FORWARD_MODE = threading.RLock()


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


def _simplified(graph: fx.GraphModule) -> fx.GraphModule:
    """The same graph without calls that return what one of their arguments holds."""
    graph = _without_repeats(graph)
    if any(node.target in _OF_PLACES for node in graph.graph.nodes):
        return graph
    while True:
        replaced = 0
        for node in list(graph.graph.nodes):
            _skip_views(node)
            other = _simpler(node) if node.op == "call_function" else None
            if other is not None:
                node.replace_all_uses_with(other)
                graph.graph.erase_node(node)
                replaced += 1
        graph = _without_repeats(graph)
        if not replaced:
            return graph


#: What takes places in memory.
_OF_PLACES = (aten.as_strided.default, aten.as_strided_scatter.default)
_COPIES = (
    *(aten.alias.default, aten.clone.default, aten.detach.default),
    *(aten.lift_fresh.default, aten.lift_fresh_copy.default),
    aten._to_copy.default,
)
_VIEWS = (aten.view.default, aten._unsafe_view.default)
_MOVES = (*_VIEWS, aten.expand.default, aten.permute.default)
#: What holds the elements of its operand in their order.
_ORDERED = (*_VIEWS, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default)
#: What depends on an operand's form alone.
_FILLS = (aten.ones_like.default, aten.zeros_like.default, aten.full_like.default, aten.scalar_tensor.default)
_ONES = (aten.ones_like.default, aten.ones.default, aten.new_ones.default)


def _simpler(node: fx.Node) -> fx.Node | None:
    """The node whose result a call's result equals, in all places; None where there is none."""
    operands: list[Any] = list(node.args[:2])
    if node.target is aten.mul.Tensor:
        # The factors of ones.
        factors = zip(operands, reversed(operands), strict=True)
        operands = [each for each, other in factors if isinstance(other, fx.Node) and other.target in _ONES]
    elif node.target in (*_COPIES, *_MOVES):
        operands = operands[:1]
    elif node.target is aten.t.default and operands[0].target is aten.t.default:
        return operands[0].args[0]
    else:
        return None
    for each in operands:
        if isinstance(each, fx.Node) and _form(each) == _form(node):
            writes = node.meta.get("written") or each.meta.get("written")
            return each if node.target in _MOVES or not writes else None
    return None


def _skip_views(node: fx.Node) -> None:
    """Let a view of a tensor that holds the elements of another one in their order take that one."""
    first: Any = node.args[0] if node.target in _VIEWS else None
    while first is not None and first.target in _ORDERED:
        if any(each.meta.get("written") for each in (node, first, first.args[0])):
            return
        first = first.args[0]
        node.args = (first, *node.args[1:])


def with_identities(graph: fx.GraphModule, places: Collection[int]) -> fx.GraphModule:
    """The same graph without the products with those of its inputs that are identity matrices."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node in list(graph.graph.nodes) if places else ():
        if node.target is aten.mm.default and any(node.args[0] is inputs[place] for place in places):
            matrix = node.args[1]
            if _form(matrix) == _form(node) and not matrix.meta.get("written"):
                node.replace_all_uses_with(matrix)
                graph.graph.erase_node(node)
    return _simplified(graph) if places else graph


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
            constant.meta["val"] = value.new_empty((1,) * value.ndim).expand(value.shape)
            node.replace_all_uses_with(constant, delete_user_cb=_takes_constants)
    if constants:
        graph.graph.eliminate_dead_code()
    return graph


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


def _takes_constants(node: fx.Node) -> bool:
    """Whether a call works on elements one by one, and no constant of one element moves its result in memory."""
    if not _is_fresh(node):
        return False
    values = (each.meta["val"] for each in (node, *node.all_input_nodes))
    # Where an operand is expanded, strides of axes of one element decide how the result lies in memory.
    return all(each.stride() in (each.new_empty(each.shape).stride(), (0,) * each.ndim) for each in values)


def _form(node: fx.Node) -> tuple[Any, ...] | None:
    value = node.meta["val"]
    form = value.shape, value.stride(), value.dtype, node.meta.get("lazy", False)
    return form if value.layout == torch.strided else None
