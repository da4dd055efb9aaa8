"""Custom functions, ``torch.autograd.Function``: the derivative is that of their own backward pass, as in autograd.

A backward pass takes a gradient ``g`` of what the Function returned to ``Jᵀ g``. It runs once in a capture, at zeros,
and its calls are recorded: what they compute of the tensors that it saved are values of the run, constants to
derivatives. Where ``Jᵀ g`` is linear in ``g``, autograd has ``J v`` as the derivative of ``⟨Jᵀ g, v⟩`` by ``g``: the
calls that it makes take the Function's place in a graph, with the operands for ``v``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..patterns import CONSTANT, UnsupportedOperatorError, gradients_of, holds_numbers
from .autograd_nodes import apply_function, is_of_hooks, is_of_operator, zeros_for
from .callers import Unreadable
from .graph import Graph, Node, Values
from .operators import BackwardPass, FunctionCall, facts_of
from .traces import ACTIVE, DEPENDENT
from .writes import append_call, end_write

if TYPE_CHECKING:
    from .capture import Recorder

_OURS = __name__.partition(".")[0]


class RecordedBackward(NamedTuple):
    """What a Function's backward pass computed in a run, as values."""

    gradients: Sequence[int] = ()
    #: What it computed of these; the operands whose gradients that is; and what else the calls between read.
    results: Sequence[int] = ()
    operands: Sequence[int] = ()
    others: Sequence[int] = ()
    #: Why it has no derivative that is known.
    problem: str = ""


def value_of_function(recorder: Recorder, tensor: torch.Tensor, node: Any, number: int) -> int | None:
    """The value of what a Function returned, whose elements are those of another value; None of other such nodes'."""
    recorder.has_hooks |= is_of_hooks(node)
    if is_of_hooks(node) or is_of_operator(node):
        return None
    place = node, tensor.output_nr
    if place not in recorder.functions:
        recorder.functions[place] = _derivative(recorder, tensor, node, number), {}
    derivative, known = recorder.functions[place]
    if number not in known:
        # Autograd may not have seen the last write of these elements.
        value = append_call(
            recorder, FunctionCall(type(node)._forward_cls), (number, derivative), tensor, (False, True)
        )
        known |= {number: value, value: value}
        if tensor._base is None:
            # Views of it are read from its storage, which the Function may have written to where autograd did not see.
            end_write(recorder, tensor, value, seen=True)
    recorder.numbers[id(tensor)] = known[number]
    return known[number]


def _derivative(recorder: Recorder, tensor: torch.Tensor, node: Any, number: int) -> int:
    """The value that has the derivative of what a Function returned, whose elements are those of another value."""
    function, output = type(node)._forward_cls, tensor.output_nr
    if node not in recorder.backward_passes:
        operands = [_behind(recorder, *edge) for edge in node.next_functions if edge[0] is not None]
        recorded = RecordedBackward(operands=operands)
        active = any(recorder.flags[value] & ACTIVE for value in operands)
        if active and not _is_refused(recorder, function):
            recorded = _recorded(recorder, node, operands)
        recorder.backward_passes[node] = recorded
    known = recorder.backward_passes[node]
    operator = BackwardPass(function, output, len(known.gradients), len(known.results), known.problem)
    read = [number, *known.gradients, *known.results, *known.operands, *known.others]
    begin = len(read) - len(known.others) - len(known.operands)
    passes = [begin <= place < begin + len(known.operands) for place in range(len(read))]
    return append_call(recorder, operator, read, tensor, passes)


def _is_refused(recorder: Recorder, function: type) -> bool:
    """Whether a Function's backward pass is none of operators, so that the run is refused."""
    what = f"{function.__name__} is a torch.autograd.Function, whose backward pass is not one of operators"
    remedy = "write it with operators, or make it a custom operator with a rule"
    if function.__module__ == "torch.utils.checkpoint":
        remedy = "pass use_reentrant=False to checkpoint"
    elif function.__module__.startswith(f"{_OURS}.jacobians"):
        what = "values of a Jacobian are not differentiated by rules"
        remedy = f"take {_OURS}.hessian of a scalar function, or torch.autograd's Jacobian of the values"
    elif function.__module__.partition(".")[0] != _OURS:
        return False
    recorder.refuse(what, remedy)
    return True


def _behind(recorder: Recorder, node: Any, output: int) -> int:
    """The value whose gradient a node computes."""
    if hasattr(node, "variable"):
        number = recorder.numbers.get(id(node.variable))
        return recorder.from_elsewhere(node.variable) if number is None else number
    for value, edge in recorder.run.gradient_edges.items():
        if edge == (node, output):
            return value
    for tensor in (*recorder.run.tensors, *recorder.alive):
        if tensor.grad_fn is node and tensor.output_nr == output:
            return recorder.value_of(tensor)
    raise UnsupportedOperatorError(f"{node.name()} is computed by no operator that was seen")


def _recorded(recorder: Recorder, node: Any, operands: Sequence[int]) -> RecordedBackward:
    """Run a Function's backward pass at zeros, and record its calls."""
    run, begin, function = recorder.run, len(recorder.run.calls), type(node)._forward_cls
    try:
        with recorder.apart(), Unreadable(recorder):
            zeros = zeros_for(node)
            gradients = recorder.values_of(zeros)
            for value in gradients:
                recorder.flags[value] |= DEPENDENT
            tensors: list[tuple[torch.Tensor, int]] = []
            for tensor, value in zip(apply_function(node, zeros), operands, strict=True):
                if tensor is not None:
                    # As autograd does, where the operand was broadcast.
                    operand = run.tensors[value]
                    tensors.append((tensor.sum_to_size(operand.shape).to(operand.dtype), value))
            results = recorder.values_of([tensor for tensor, _ in tensors])
    except UnsupportedOperatorError as error:
        what, *_ = str(error).partition(";")
        return RecordedBackward(operands=operands, problem=_problem(function, f"is not recorded: {what}"))
    of_gradients, others, fresh = set(gradients), dict[int, None](), set[int]()
    for call in run.calls[begin:]:
        facts = facts_of(call.overload)
        if facts.fresh:
            fresh.update(call.results)
        if facts.of_shape or of_gradients.isdisjoint(call.operands):
            continue
        if facts.name in CONSTANT or facts.random or not all(holds_numbers(run.tensors[n]) for n in call.results):
            return RecordedBackward(operands=operands, problem=_problem(function))
        others |= dict.fromkeys(value for value in call.operands if value not in of_gradients)
        of_gradients.update(call.results)
    # At zeros a linear function is zero, or no number where its factors are infinite.
    if any(bool(tensor.detach().nan_to_num(0).any()) for tensor, _ in tensors):
        return RecordedBackward(operands=operands, problem=_problem(function))
    if not fresh.isdisjoint(results):
        return RecordedBackward(
            operands=operands, problem=_problem(function, "fills memory by no operator of PyTorch's")
        )
    known = [(result, n) for result, (_, n) in zip(results, tensors, strict=True) if result in of_gradients]
    return RecordedBackward(gradients, [r for r, _ in known], [n for _, n in known], list(others))


def _problem(function: type, what: str = "is not linear in the gradient, so that there is no Jacobian") -> str:
    return f"{function.__name__} is a torch.autograd.Function, and its backward pass {what}"


def products(node: Node, graph: Graph, scalars: Sequence[Any]) -> Callable[..., torch.Tensor]:
    """The function of the tensors of a `BackwardPass` that computes what it is by other operators."""
    operator: BackwardPass = node.overload
    values = [value for _, value in node.tensors]
    begin = 1 + operator.gradients + operator.results
    end = begin + operator.results

    def parts(*tensors: torch.Tensor) -> torch.Tensor:
        # The calls of the backward pass begin with these.
        inputs = [*range(1, 1 + operator.gradients), *range(end, len(tensors))]
        with torch.enable_grad():
            known = {values[n]: tensors[n] for n in inputs}
            gradient = known[values[1 + operator.output]].requires_grad_()
            computed = Values(graph, known, scalars)
            results = [computed[value] for value in values[1 + operator.gradients : begin]]
            terms = [
                gradients_of(result, [gradient], tensor, retain_graph=True)[0]
                for result, tensor in zip(results, tensors[begin:end], strict=True)
                if result.requires_grad
            ]
        known_terms = [term for term in terms if term is not None]
        return functools.reduce(torch.add, known_terms) if known_terms else torch.zeros_like(tensors[0])

    return parts


def is_linear(node: Node, graph: Graph, products: Sequence[int]) -> bool:
    """Whether the products that other operators compute are of no gradient; if not, the node has a problem."""
    gradients = [value for _, value in node.tensors][1 : 1 + node.overload.gradients]
    if not any(graph.made_of(value, gradients) for value in products):
        return True
    node.overload = replace(node.overload, problem=_problem(node.overload.function))
    node.parts, node.by_parts = (), False
    return False


def function_error(node: Node) -> UnsupportedOperatorError:
    """The error where a Jacobian needs a `BackwardPass` in whose place no operators are."""
    remedy = "write it with operators, as x + (f(x) - x).detach(), or take products with vectors, as jacsparse.vjp does"
    return UnsupportedOperatorError(f"{node.path}: {node.overload.problem}{node.source}; {remedy}")
