"""Gradients through stages of a traced run, by autograd's graph of that run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from ..patterns import gradients_of
from ..tracing import apply_node, ending_at, gradient_edge_of, has_node_hooks, is_hooked, with_all_gradients
from .record import Record

#: Where a walk ends: an edge of autograd's graph, and the tensor whose gradient it has.
End = tuple[GradientEdge, torch.Tensor]


def pull_back(
    records: Sequence[Record],
    gradient: torch.Tensor,
    inputs: Sequence[Record],
    externals: Sequence[int],
    apart: Collection[int],
    strict: Sequence[Record] = (),
) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
    """Gradients of inputs of stages and of externals, for a gradient of the last stage's output.

    Parameters
    ----------
    records : sequence of Record
        Records of stages that follow each other, the last one first.
    gradient : Tensor, (batch, *out_shape)
        Gradient of the output of the first record.
    inputs, externals : sequence of Record, sequence of int
        The records whose inputs' gradients are returned, and the places of the externals whose are, if they have any.
    apart : collection of int
        The externals that other stages read too: the gradients through those are left out.
    strict : sequence of Record
        The records in which no hook may change a gradient, because their Jacobians are multiplied: RuntimeError is
        raised where one does, or may; the message begins with the stage's path.
    """
    trace, last = records[0].trace, records[0]
    output = trace.gradient_edge(last.stage.stop)
    like, values = trace.tensor(last.stage.stop), trace.graph.externals
    gradient = gradient.reshape(like.shape).to(like.dtype)
    if output is None:
        # The module may return a parameter itself.
        itself = {place: gradient for place in externals if values[place] == last.stage.stop}
        return [torch.zeros_like(record.input) for record in inputs], itself
    tensors = {place: tensor for place in externals if (tensor := trace.tensors[values[place]]) is not None}
    # The caller's own backward pass is to call the hooks of these tensors, once.
    alone = [place for place, tensor in tensors.items() if place in apart or is_hooked(tensor)]
    together = [place for place in tensors if place not in alone] if alone else list(tensors)
    hooked = [record for record in strict if has_hooks(record, of_nodes=True)] if strict else []
    hooks = [(record, *pair) for record in hooked for pair in _around_hooks(record)] if hooked else []
    edges = [gradient_edge_of(tensors[place]) for place in together]
    wanted: list[Any] = [trace.gradient_edge(record.stage.start) for record in inputs]
    wanted += edges
    for _, *pair in hooks:
        wanted += pair
    results: Sequence[torch.Tensor | None] = ()
    if wanted:
        with ending_at(edges, [output.node]):
            results = gradients_of(output, wanted, gradient, retain_graph=True)
    of_inputs = [
        torch.zeros_like(record.input) if result is None else result
        for result, record in zip(results, inputs, strict=False)
    ]
    gradients = dict(zip(together, results[len(inputs) :], strict=False))
    around = results[len(results) - 2 * len(hooks) :]
    for (record, *_), outside, inside in zip(hooks, around[::2], around[1::2], strict=True):
        if outside is not None and inside is not None and not torch.equal(outside.reshape(inside.shape), inside):
            raise _changes(record)
    if alone:
        for record in records:
            if has_hooks(record, of_nodes=True):
                raise _hidden(record, tensors[alone[0]])
        ends = [(gradient_edge_of(tensors[place]), tensors[place]) for place in alone]
        start = trace.gradient_edge(records[-1].stage.start)
        behind = [] if start is None else [(start, records[-1].input)]
        gradients |= zip(alone, walk([(output, gradient)], [*ends, *behind]), strict=False)
    return of_inputs, {place: result for place, result in gradients.items() if result is not None}


def has_hooks(record: Record, *, of_nodes: bool) -> bool:
    """Whether hooks of a module, of a tensor or, on request, of autograd's nodes see a gradient within a stage."""
    if record.stage.hooked or not record.trace.may_have_hooks:
        return record.stage.hooked
    return _has_tensor_hooks(record) or (of_nodes and _has_node_hooks(record))


def _has_tensor_hooks(record: Record) -> bool:
    values = (value for operation in record.stage.operations for value in operation.node.results)
    results = (record.trace.tensors[value] for value in values)
    return any(tensor._backward_hooks for tensor in (record.input, *results) if tensor is not None)


def _has_node_hooks(record: Record) -> bool:
    # The nodes of hooked operations have the hooks of a module.
    edges = (record.trace.gradient_edge(each.value) for each in record.stage.operations if not each.node.hooked)
    return any(edge is not None and edge.node is not None and has_node_hooks(edge.node) for edge in edges)


def _around_hooks(record: Record) -> list[tuple[GradientEdge | None, GradientEdge | None]]:
    """The edges behind and before each call of a module's backward hooks.

    RuntimeError is raised where the change by a hook cannot be told from other parts of a gradient.
    """
    users = Counter(edge.source for edge in record.stage.edges)
    hooks = [(each.value, *each.operands.values()) for each in record.stage.operations if each.node.hooked]
    if _has_tensor_hooks(record) or _has_node_hooks(record) or any(users[inside] > 1 for _, inside in hooks):
        raise _changes(record)
    return [(record.trace.gradient_edge(outside), record.trace.gradient_edge(inside)) for outside, inside in hooks]


def _hidden(record: Record, tensor: torch.Tensor) -> RuntimeError:
    names = [name for name, parameter in record.trace.module.named_parameters() if parameter is tensor]
    return RuntimeError(
        f"{record.stage.path}: a backward hook sees a gradient here, which that of {names[0] if names else 'a tensor'} "
        "passes by, as it has hooks of its own or is read in several places; call the module itself, or remove the "
        "hook"
    )


def _changes(record: Record) -> RuntimeError:
    return RuntimeError(
        f"{record.stage.path}: a backward hook changes the gradient, or may, which a product of Jacobians cannot know; "
        "use schedule='linear', or a module of its own"
    )


def pulled_by_autograd(records: Sequence[Record], batch: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """What takes gradients of the last stage's output, ``(batch, out_size)``, to the input's, ``(batch, in_size)``."""

    def pulled(gradient: torch.Tensor) -> torch.Tensor:
        ((of_input,), _) = pull_back(records[::-1], gradient, records[:1], (), ())
        return of_input.reshape(batch, -1)

    return pulled


def add_gradients(gradients: dict[int, torch.Tensor], terms: Mapping[int, torch.Tensor]) -> None:
    """Add terms to gradients of externals by their places."""
    for place, term in terms.items():
        gradients[place] = gradients[place] + term if place in gradients else term


def walk(starts: Sequence[tuple[GradientEdge, torch.Tensor]], ends: Sequence[End]) -> list[torch.Tensor | None]:
    """Gradients at some edges of autograd's graph, for those at other edges, node by node and without hooks."""
    return with_all_gradients(lambda: _walk(starts, ends))


def _walk(starts: Sequence[tuple[GradientEdge, torch.Tensor]], ends: Sequence[End]) -> list[torch.Tensor | None]:
    targets = {edge[:2]: number for number, (edge, _) in enumerate(ends)}

    def followed(node: Any) -> list[Any]:
        """The nodes of operators that a node passes gradients to, up to the ends of the walk."""
        edges = (edge for edge in node.next_functions if edge[0] is not None and edge not in targets)
        # A node with a variable gathers the gradient of a leaf.
        return [behind for behind, _ in edges if not hasattr(behind, "variable")]

    first = [*dict.fromkeys(edge.node for edge, _ in starts if edge[:2] not in targets)]
    waiting, users = list(first), Counter(dict.fromkeys(first, 0))
    while waiting:
        for behind in followed(waiting.pop()):
            if behind not in users:
                waiting.append(behind)
            users[behind] += 1
    pending: dict[Any, list[torch.Tensor | None]] = {}
    forms: dict[Any, Any] = {}
    gradients: list[torch.Tensor | None] = [None] * len(ends)

    def add(edge: tuple[Any, int], term: torch.Tensor | None) -> None:
        """Add a term to the gradient of an end, or of a node's output."""
        node, number = edge
        if term is None:
            return
        if edge in targets:
            sums, number = gradients, targets[edge]
            shape = ends[number][1].shape
        elif node in users:
            # A node makes the list anew each time, which may be long.
            if node not in forms:
                forms[node] = node._input_metadata
            sums = pending.setdefault(node, [None] * len(forms[node]))
            shape = forms[node][number].shape
        else:
            return
        term, total = term.sum_to_size(shape), sums[number]
        sums[number] = term if total is None else total + term

    for (node, number, *_), gradient in starts:
        add((node, number), gradient)
    ready = [node for node in first if not users[node]]
    while ready:
        node = ready.pop()
        if node in pending:
            for edge, passed in zip(node.next_functions, apply_node(node, pending.pop(node)), strict=True):
                if edge[0] is not None:
                    add(edge, passed)
        for behind in followed(node):
            users[behind] -= 1
            if not users[behind]:
                ready.append(behind)
    return gradients
