"""Gradients through some stages of a recorded run, by autograd's own graph of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from . import _nodes
from ._nodes import applied, freely
from ._stages import Record

__all__ = ["has_hooks", "pull_back"]


def pull_back(
    records: Sequence[Record],
    gradient: torch.Tensor,
    inputs: Sequence[Record],
    externals: Sequence[int],
    apart: Collection[int],
    strict: Sequence[Record] = (),
) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
    """Gradients of inputs of stages and of tensors from outside, for a gradient of the last stage's output.

    Parameters
    ----------
    records : sequence of Record
        Of stages that follow each other, the last one first.
    gradient : Tensor, (batch, *out_shape)
        Of the output of the first record.
    inputs : sequence of Record
        Those of the records whose input's gradient is wanted.
    externals : sequence of int
        Which tensors from outside, by place.
    apart : collection of int
        Those of them that other stages read too: what those add is left out.
    strict : sequence of Record
        Those of the records in which hooks may change no gradient, as their Jacobians are multiplied.

    Raises
    ------
    RuntimeError
        Where a hook does; with the stage's path.
    """
    recording, last = records[0].recording, records[0]
    output = recording.edges[last.stage.stop]
    if output is None:
        return [torch.zeros_like(record.input) for record in inputs], {}
    gradient = gradient.reshape(last.output.shape).to(last.output.dtype)
    tensors = {place: recording.externals[place] for place in externals}
    # Their hooks are for the caller's own backward pass to run, once.
    alone = [place for place, tensor in tensors.items() if place in apart or tensor._backward_hooks]
    together = [place for place in tensors if place not in alone]
    wanted: list[Any] = [recording.edges[record.stage.start] for record in inputs]
    wanted += [tensors[place] for place in together]
    hooks = [(record, *pair) for record in strict for pair in _around_hooks(record)]
    wanted += [edge for _, *pair in hooks for edge in pair]
    found: Sequence[torch.Tensor | None] = ()
    if wanted:
        found = torch.autograd.grad([output], wanted, [gradient], retain_graph=True, allow_unused=True)
    # Where there is no input, nothing may have been asked for.
    of_inputs = [
        torch.zeros_like(record.input) if own is None else own for own, record in zip(found, inputs, strict=False)
    ]
    gradients = dict(zip(together, found[len(inputs) :], strict=False))
    around = found[len(found) - 2 * len(hooks) :]
    for (record, *_), outside, inside in zip(hooks, around[::2], around[1::2], strict=True):
        if outside is not None and inside is not None and not torch.equal(outside.reshape(inside.shape), inside):
            raise _changes(record)
    if alone:
        for record in records:
            if has_hooks(record, of_nodes=True):
                raise _hidden(record, tensors[alone[0]])
        start = recording.edges[records[-1].stage.start]
        others: list[torch.Tensor | None] = []
        freely(lambda: others.extend(_walked(output, gradient, start, [tensors[place] for place in alone])))
        gradients |= zip(alone, others, strict=True)
    return of_inputs, {place: own for place, own in gradients.items() if own is not None}


def _walked(
    output: GradientEdge, gradient: torch.Tensor, start: GradientEdge | None, tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Gradients of tensors through autograd's nodes from one edge back to another, node by node and without hooks."""
    targets = {_pair(get_gradient_edge(tensor)): number for number, tensor in enumerate(tensors)}
    ends = {*targets, *([] if start is None else [_pair(start)])}

    def followed(node: Any) -> list[tuple[int, Any, int]]:
        edges = enumerate(node.next_functions)
        return [(place, *edge) for place, edge in edges if edge[0] is not None and edge not in ends and _inner(edge[0])]

    waiting, users = [output.node], Counter([output.node])
    while waiting:
        for _, node, _ in followed(waiting.pop()):
            users[node] += 1
            if users[node] == 1:
                waiting.append(node)
    pending: dict[Any, list[torch.Tensor | None]] = {}
    found: list[torch.Tensor | None] = [None] * len(tensors)

    def add(edge: tuple[Any, int], own: torch.Tensor | None) -> None:
        node, number = edge
        if own is None:
            return
        if edge in targets:
            shape = tensors[targets[edge]].shape
            own, known = own.sum_to_size(shape), found[targets[edge]]
            found[targets[edge]] = own if known is None else known + own
        elif edge not in ends and node in users:
            metadata = node._input_metadata
            inputs = pending.setdefault(node, [None] * len(metadata))
            own, known = own.sum_to_size(metadata[number].shape), inputs[number]
            inputs[number] = own if known is None else known + own

    add(_pair(output), gradient)
    ready = [output.node]
    while ready:
        node = ready.pop()
        if node in pending:
            for edge, own in zip(node.next_functions, applied(node, pending.pop(node)), strict=True):
                if edge[0] is not None:
                    add(edge, own)
        for _, behind, _ in followed(node):
            users[behind] -= 1
            if not users[behind]:
                ready.append(behind)
    return found


def _pair(edge: GradientEdge) -> tuple[Any, int]:
    return edge.node, edge.output_nr


def _inner(node: Any) -> bool:
    """Whether a node is of an operator, and does not gather a leaf's gradient."""
    return not hasattr(node, "variable")


def has_hooks(record: Record, *, of_nodes: bool) -> bool:
    """Whether hooks of a module, of a tensor or, where asked, of autograd's nodes see a gradient within a stage."""
    if record.stage.hooked or not record.recording.may_have_hooks:
        return record.stage.hooked
    return _has_tensor_hooks(record) or (of_nodes and _has_node_hooks(record))


def _has_tensor_hooks(record: Record) -> bool:
    recording = record.recording
    made = (r for operation in record.stage.operations for r in recording.invocations[operation.place].results)
    return any(tensor._backward_hooks for tensor in (record.input, *made))


def _has_node_hooks(record: Record) -> bool:
    # A module's hooks are hooks of a node that does nothing else.
    edges = (record.recording.edges[operation.vertex] for operation in record.stage.operations if not operation.hooked)
    return any(edge is not None and edge.node is not None and _nodes.has_hooks(edge.node) for edge in edges)


def _around_hooks(record: Record) -> list[tuple[GradientEdge | None, GradientEdge | None]]:
    """The edges behind and before each place where backward hooks of a module are called.

    Raises
    ------
    RuntimeError
        Where a hook's own share of a gradient cannot be told from others.
    """
    users = Counter(edge.source for edge in record.stage.edges)
    hooks = [
        (operation.vertex, *operation.operands.values()) for operation in record.stage.operations if operation.hooked
    ]
    if _has_tensor_hooks(record) or _has_node_hooks(record) or any(users[inside] > 1 for _, inside in hooks):
        raise _changes(record)
    edges = record.recording.edges
    return [(edges[outside], edges[inside]) for outside, inside in hooks]


def _hidden(record: Record, tensor: torch.Tensor) -> RuntimeError:
    names = [name for name, parameter in record.recording.module.named_parameters() if parameter is tensor]
    return RuntimeError(
        f"{record.stage.path}: a backward hook sees a gradient here, which that of {names[0] if names else 'a tensor'} "
        "passes by, as it has hooks of its own or is read in several places; use the module without Scan, or remove "
        "the hook"
    )


def _changes(record: Record) -> RuntimeError:
    return RuntimeError(
        f"{record.stage.path}: a backward hook changes the gradient, or may, which a product of Jacobians cannot know; "
        "use schedule='linear', or a module of its own"
    )
