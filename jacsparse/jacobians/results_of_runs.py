"""Graphs that take what a run of the function has computed, instead of computing it again."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import fx

from ..tracing import Number, Slot, Tape, in_graphs, mutates, returns_one_tensor

aten = torch.ops.aten


def take_results(graph: fx.GraphModule, tape: Tape, first: int) -> tuple[int, ...]:
    """Make results of a tape's calls inputs of a graph, after its others, where it would compute them.

    Parameters
    ----------
    graph : GraphModule
        A function of a few other tensors and then of the inputs of the tape's graph. It is changed.
    tape : Tape
        The calls of the function.
    first : int
        How many other tensors there are.

    Returns
    -------
    tuple of int
        The slots of these results.
    """
    results = _results(graph, tape, first)
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    inputs: dict[int, fx.Node] = {}
    for node, slot in results.items():
        if all(user in results for user in node.users):
            continue
        if slot not in inputs:
            with graph.graph.inserting_after(last):
                last = inputs[slot] = graph.graph.placeholder(f"result_{slot}")
            last.meta.update(node.meta)
        node.replace_all_uses_with(inputs[slot], delete_user_cb=lambda user: user not in results)
    graph.graph.eliminate_dead_code()
    for slot, node in list(inputs.items()):
        if not node.users:
            graph.graph.erase_node(node)
            del inputs[slot]
    graph.recompile()
    return tuple(inputs)


def _results(graph: fx.GraphModule, tape: Tape, first: int) -> dict[fx.Node, int]:
    """The slots of the tape's results that nodes of a graph compute."""
    if any(mutates(call.overload) for call in tape.instructions) or len(tape.inputs) > len(tape.forms):
        # What is written to is no result any longer; a sparse tensor has several inputs.
        return {}
    inputs = [*map(Slot, (0, *tape.inputs)), *map(Number, range(len(tape.dtypes)))]
    #: A slot, a number or, for a call of several results, their slots by their places.
    values: dict[fx.Node, Any] = dict(zip(islice(graph.graph.nodes, first, None), inputs, strict=False))
    shapes = {value: tuple(node.meta["val"].shape) for node, value in values.items()}
    calls = _calls(tape, shapes)
    for node in graph.graph.nodes:
        if node.op != "call_function" or node.meta.get("written"):
            continue
        if all(operand in values for operand in node.all_input_nodes):
            result = _result(node, values, calls)
            if result is not None:
                values[node] = result
    slots_of_calls = {node: value for node, value in values.items() if node.op == "call_function"}
    return {node: value.place for node, value in slots_of_calls.items() if type(value) is Slot}


def _calls(tape: Tape, shapes: Mapping[Any, tuple[int, ...]]) -> dict[Hashable, dict[int, Slot]]:
    """The slots of the results of each call by their places; `shapes` has those of inputs."""
    calls: dict[Hashable, dict[int, Slot]] = {}
    sources: dict[Slot, Hashable] = {}
    for call in tape.instructions:
        args, kwargs = _key(call.args, sources), _key(call.kwargs, sources)
        # Graphs leave out views of the same shape, as that of an input which is flat already.
        same = call.overload is aten.view.default and shapes.get(call.args[0]) == call.args[1]
        if same or call.overload in _ALIASES:
            sources[Slot(call.results[0])] = _key(call.args[0], sources)
        elif torch.Tag.nondeterministic_seeded not in call.overload.tags:
            slots = dict(zip(call.places, map(Slot, call.results), strict=True))
            calls.setdefault((in_graphs(call.overload), args, kwargs), slots)
    return calls


def _result(node: fx.Node, values: Mapping[fx.Node, Any], calls: Mapping[Hashable, dict[int, Slot]]) -> Any:
    """What a call of a graph computes, as one of a tape's calls did; None where none did."""
    if node.target is operator.getitem:
        source, place = node.args
        return values[source].get(place)  # type: ignore[index]
    if node.target in _ALIASES:
        return values[node.args[0]]  # type: ignore[index]
    target: Any = node.target
    slots = calls.get((in_graphs(target), _key(node.args, values), _key(node.kwargs, values)))
    return slots[0] if slots is not None and returns_one_tensor(target) else slots


_ALIASES = (aten.alias.default, aten.clone.default, aten.detach.default)


def _key(value: Any, names: Mapping[Any, Hashable]) -> Hashable:
    """An argument, or several, with other names for tensors and their numbers; a bool is no number."""
    if isinstance(value, dict):
        return tuple((name, _key(part, names)) for name, part in sorted(value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(_key(part, names) for part in value)
    if isinstance(value, (fx.Node, Slot, Number)):
        return names.get(value, value)
    # By its text: zeros have signs.
    return type(value), repr(value)
