"""Nodes of autograd's graph: one called at a time, and passes that end at some of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules._functions import BackwardHookFunction
from torch.overrides import enable_reentrant_dispatch

from .saved_tensors import NO_CONTEXT

Result = TypeVar("Result")


#: The number of the node of autograd's graph that this thread makes next.
next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr  # type: ignore[attr-defined]


#: The class of the nodes that only raise errors.
OF_ERRORS = type(torch._C._functions.DelayedError(b"", 1)(torch.empty(0, device="cpu", requires_grad=True)).grad_fn)  # type: ignore[attr-defined]


def recording_derivatives() -> contextlib.AbstractContextManager[Any]:
    """A context in which autograd records, also while a mode handles a call, where PyTorch leaves that out."""
    within = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)
    return enable_reentrant_dispatch() if within else NO_CONTEXT


def node_of(tensor: torch.Tensor) -> Any:
    """Autograd's node of a tensor; None also for a view that was made under ``no_grad``, and whose base has another."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def is_of_hooks(node: Any) -> bool:
    """Whether a node stands for a module's backward hooks."""
    return isinstance(node, BackwardCFunction) and issubclass(type(node)._forward_cls, BackwardHookFunction)  # type: ignore[attr-defined]


def is_of_operator(node: Any) -> bool:
    """Whether a node is that of an operator of ``torch.library``, which has its derivative."""
    is_function = isinstance(node, BackwardCFunction)
    return is_function and type(node)._forward_cls.__module__ == "torch._library.autograd"  # type: ignore[attr-defined]


def has_node_hooks(node: Any) -> bool:
    """Whether hooks are registered on a node itself: PyTorch tells it only through the handle of another hook."""
    for register in (node.register_prehook, node.register_hook):
        handle = register(lambda *_: None)
        handle.remove()
        if handle.hooks_dict_ref():
            return True
    return False


def edge_of(tensor: torch.Tensor) -> GradientEdge:
    """Where autograd has a tensor's gradient, of a sparse leaf too: PyTorch's function takes a view of a leaf."""
    if tensor.grad_fn is not None or tensor.layout == torch.strided:
        return get_gradient_edge(tensor)
    with torch.enable_grad():
        node: Any = tensor.clone().grad_fn
    return GradientEdge(node.next_functions[0][0], 0)


def is_hooked(tensor: torch.Tensor) -> bool:
    """Whether something sees a tensor's gradient in a backward pass: a hook, or ``retain_grad``."""
    return bool(tensor._backward_hooks) or tensor.retains_grad


def with_all_gradients(function: Callable[[], Result]) -> Result:
    """Return the result of a function that calls nodes, which compute the gradients of all their inputs.

    Within a backward pass, such as that of `Scan`, a node computes only those gradients that the pass asks for. So the
    function is called within an inner backward pass, which asks for all of them.
    """
    if torch._C._current_graph_task_id() == -1:
        return function()
    results: list[Result] = []
    with torch.enable_grad():
        leaf = torch.zeros((), requires_grad=True, device="cpu")
        leaf.register_hook(lambda _: results.append(function()))
        leaf.clone().backward()
    return results[0]


def apply_node(node: Any, gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """The gradients that a node passes on, one for each of its ``next_functions``; no hook is called."""
    with torch.no_grad():
        if isinstance(node, BackwardCFunction):
            pairs = zip(gradients, zeros_for(node), strict=True)
            results = iter(apply_function(node, [zero if gradient is None else gradient for gradient, zero in pairs]))
            return tuple([None if behind is None else next(results) for behind, _ in node.next_functions])
        passed = node(*gradients)
    return passed if isinstance(passed, tuple) else (passed,)


def zeros_for(node: Any) -> list[torch.Tensor]:
    """Zeros as gradients of all that a node is of."""
    return [torch.zeros(each.shape, dtype=each.dtype, device=each.device) for each in node._input_metadata]


def apply_function(node: Any, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """What a ``torch.autograd.Function``'s backward pass returns for those of its inputs that need a gradient."""
    passed = node.apply(*gradients)
    passed = passed if isinstance(passed, (tuple, list)) else (passed,)
    return [passed[place] for place, needed in enumerate(node.needs_input_grad) if needed]


@contextlib.contextmanager
def ending_at(edges: Sequence[GradientEdge], starts: Sequence[Any]) -> Iterator[None]:
    """A context in which backward passes from nodes go on from no tensor, of these with such edges, to another one.

    The gradients of all of them are then those of what was computed from each directly, so that the caller's own
    backward pass, which goes on from each of them, counts nothing twice.
    """
    ends, unrelated, passes = {edge.node for edge in edges}, set[Any](), set[int]()
    # A parameter's node leads nowhere.
    related = [node for node in ends if node.next_functions and leads_to(node, ends, unrelated)]

    def begin(gradients: tuple[torch.Tensor | None, ...]) -> None:
        passes.add(torch._C._current_graph_task_id())

    def stop(gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...] | None:
        # Other passes, as those of other threads, go through these nodes too.
        return (None,) * len(gradients) if torch._C._current_graph_task_id() in passes else None

    hooks = [*((node, begin) for node in starts), *((node, stop) for node in related)] if related else []
    handles = [node.register_prehook(hook) for node, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def leads_to(node: Any, ends: set[Any], unrelated: set[Any] | None = None) -> bool:
    """Whether a backward pass goes on from a node to one of others.

    `unrelated` has nodes from which it does not, and gets more.
    """
    unrelated = set() if unrelated is None else unrelated
    waiting, seen = [behind for behind, _ in node.next_functions], {None}
    while waiting:
        reached = waiting.pop()
        if reached in ends:
            return True
        if reached not in seen and reached not in unrelated:
            seen.add(reached)
            waiting.extend(behind for behind, _ in reached.next_functions)
    unrelated |= seen
    return False
