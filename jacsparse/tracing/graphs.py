"""Functional graphs: a tape, or a function of its replay, as a graph of ATen calls without writes, made simple."""

from __future__ import annotations

import itertools
import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map

from .sparse_products import Elements, is_sparse
from .tape import Number, Reads, Slot, Tape, Taping, mutates, same_number

aten = torch.ops.aten


def inputs_of(tape: Tape, x: torch.Tensor, reads: Reads) -> list[torch.Tensor]:
    """The inputs of a tape's graph: the tensor, the externals, and each number as a tensor without axes."""
    numbers = number_tensors(tape, reads.numbers, x.device)
    return [x.detach(), *tensors_of_externals(reads), *numbers]


def tensors_of_externals(reads: Reads) -> list[torch.Tensor]:
    """The externals without gradients, and for a sparse matrix the rows, columns and values of its elements."""
    tensors: list[torch.Tensor] = []
    for external in reads.externals:
        # PyTorch compiles no views of sparse tensors.
        parts = [part.clone() for part in Elements.of(external)[:3]] if is_sparse(external) else [external]
        tensors += [part.detach() for part in parts]
    return tensors


def number_tensors(
    tape: Tape,
    numbers: Sequence[Any],
    device: torch.device,
    before: tuple[Sequence[Any], Sequence[torch.Tensor]] = ((), ()),
) -> list[torch.Tensor]:
    """Each number of a tape as a tensor without axes, in the dtype in which its operator works.

    `before` has earlier numbers and their tensors, which are taken again where numbers are equal.
    """
    return [
        tensor if same_number(number, earlier) else torch.tensor(number, dtype=dtype, device=device)
        for number, dtype, earlier, tensor in itertools.zip_longest(numbers, tape.dtypes, *before)
    ]


def graph_of_tape(tape: Tape, inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The graph of a tape, a function of `inputs_of`."""
    count = 1 + len(tape.inputs)

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        return tape.run(tensors[0], tensors[1:count], tensors[count:])

    writes = any(mutates(instruction.overload) for instruction in tape.instructions)
    graph = _traced(torch.func.functionalize(run) if writes else run, inputs)
    for node in list(graph.graph.nodes):
        if node.target == aten.copy.default:
            _replace_copy(graph.graph, node)
        else:
            node.args = tuple(_moderate(value, node) if type(value) is int else value for value in node.args)
    return _without_repeats(graph)


def _moderate(bound: int, node: fx.Node) -> int:
    """A slice's bound without the extremes that stand for none, which PyTorch's transforms overflow on."""
    if bound == -(2**63):
        return 0
    if bound == 2**63 - 1 and node.target == aten.slice_scatter.default:
        axis = node.args[2] if len(node.args) > 2 else 0
        return int(node.meta["val"].shape[axis])  # type: ignore[index]
    return bound


def _replace_copy(graph: fx.Graph, node: fx.Node) -> None:
    """Replace ``aten.copy``, which has no derivative, by operators that have one."""
    written, source = node.args[:2]
    assert isinstance(written, fx.Node) and isinstance(source, fx.Node)
    shape, dtype = _form(written)
    with graph.inserting_before(node):
        result = graph.call_function(aten.expand.default, (source, list(shape)))
        result.meta.update(node.meta)
        if _form(source)[1] != dtype:
            result = graph.call_function(aten._to_copy.default, (result,), {"dtype": dtype})
            result.meta.update(node.meta)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


#: PyTorch's forward mode has one state for all threads, and ends the process where two of them enter it at once.
_FORWARD_MODE = threading.RLock()


def graph_of_values(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The graph of the ATen calls that a function of tensors makes, of which only the values count."""
    return _simplified(_traced(function, inputs))


def _traced(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    # PyTorch's own tracer first loads its compiler, which takes seconds.
    inputs = [tensor.detach() for tensor in inputs]
    taping = Taping(inputs)
    with _FORWARD_MODE, taping:
        output = function(*inputs)
    graph, constants = fx.Graph(), nn.Module()
    nodes: dict[int, fx.Node] = {}
    written = taping.written()

    def compute(slot: int, node: fx.Node) -> None:
        # An operator may return its argument itself, whose slot then has another node.
        nodes[slot] = node
        node.meta["val"] = taping.alive[slot].detach().to("meta")
        node.meta["written"] = slot in written

    for slot in range(len(inputs)):
        compute(slot, graph.placeholder(f"input_{slot}"))
    for number, slot in enumerate(taping.tape.forms):
        constants.register_buffer(f"constant_{number}", taping.alive[slot])
        compute(slot, graph.get_attr(f"constant_{number}"))

    def argument(value: Any) -> Any:
        if type(value) is Slot:
            return nodes[value.place]
        if type(value) is Number:
            return taping.numbers[value.place]
        return [argument(part) for part in value] if type(value) in (list, tuple) else value

    for instruction in taping.tape.instructions:
        args = tuple(argument(value) for value in instruction.args)
        kwargs = {name: argument(value) for name, value in instruction.kwargs.items()}
        node = graph.call_function(instruction.overload, args, kwargs)
        if returns_one_tensor(instruction.overload):
            compute(instruction.results[0], node)
        else:
            for place, slot in zip(instruction.places, instruction.results, strict=True):
                compute(slot, graph.call_function(operator.getitem, (node, place)))
    graph.output(tree_map(lambda tensor: nodes[taping.slots[id(tensor)]], output))
    return fx.GraphModule(constants, graph)


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
    graph.recompile()
    return graph


def in_graphs(overload: Any) -> Any:
    """The operator that a graph has for another one: ``reshape`` for views, as results may lie otherwise in memory."""
    return aten.reshape.default if overload in (aten.view.default, aten._unsafe_view.default) else overload


def _simplified(graph: fx.GraphModule) -> fx.GraphModule:
    """The same graph without calls that return one of their arguments, whose results may lie otherwise in memory."""
    graph = _without_repeats(graph)
    if any(node.target == aten.as_strided.default for node in graph.graph.nodes):
        return graph
    while True:
        replaced = 0
        for node in list(graph.graph.nodes):
            node.target = in_graphs(node.target)
            other = _simpler(graph.graph, node) if node.op == "call_function" else None
            if other is not None:
                node.replace_all_uses_with(other)
                graph.graph.erase_node(node)
                replaced += 1
        graph = _without_repeats(graph)
        if not replaced:
            return graph


_COPIES = (aten.alias.default, aten.clone.default, aten.detach.default, aten.lift_fresh_copy.default)
_SAME = (aten.expand.default, aten._to_copy.default, aten.reshape.default, aten.permute.default)
_ONES = (aten.ones_like.default, aten.ones.default, aten.new_ones.default)


def _simpler(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """The node whose result a call's result equals; None where there is none."""
    first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    if first is None:
        return None
    if node.target in _COPIES and not node.meta.get("written") and not first.meta.get("written"):
        # PyTorch's backward pass of adaptive_max_pool3d reads indices as if they lay one after the other.
        return None if node.target == aten.clone.default and not _form(first)[1].is_floating_point else first
    if node.target in _SAME and _form(first) == _form(node) and not _moves(node):
        return first
    if node.target == aten.mul.Tensor:
        for one, other in ((node.args[0], node.args[1]), (node.args[1], node.args[0])):
            if isinstance(other, fx.Node) and isinstance(one, fx.Node) and one.target in _ONES:
                return _expanded(graph, node, other)
    return None


def _moves(node: fx.Node) -> bool:
    return node.target == aten.permute.default and list(node.args[1]) != list(range(len(node.args[1])))  # type: ignore[arg-type]


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
