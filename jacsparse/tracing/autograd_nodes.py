"""Nodes of autograd's graph: one called at a time, and passes that end at some of them; hooks of what they save."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, disable_saved_tensors_hooks, get_gradient_edge, saved_tensors_hooks
from torch.nn.modules._functions import BackwardHookFunction
from torch.overrides import enable_reentrant_dispatch

from ..patterns import UnsupportedOperatorError

Result = TypeVar("Result")
#: A context that changes nothing.
NO_CONTEXT = contextlib.nullcontext()


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


def is_of_function(tensor: torch.Tensor) -> bool:
    """Whether a tensor is what a ``torch.autograd.Function`` returned."""
    return isinstance(node_of(tensor), BackwardCFunction)


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


def gradient_edge_of(tensor: torch.Tensor) -> GradientEdge:
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
            for behind, _ in reached.next_functions:
                waiting.append(behind)
    unrelated |= seen
    return False


# The tensors that nodes save, and hooks that these pass through.


def _any_hooks(ignores_tracing: bool) -> tuple[Any, Any] | None:
    try:
        # Refused where there are hooks; nothing else is done.
        with disable_saved_tensors_hooks("hooks of saved tensors are in force"):
            return None
    except RuntimeError:
        return None, None


#: This thread's innermost hooks, None where there are none. PyTorch before 2.8 does not tell which ones these are.
innermost_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", _any_hooks)


def saves_by_hooks() -> bool:
    """Whether what an operator saves here passes through hooks, which may change it or compute it anew."""
    hooks = innermost_hooks(False)
    return hooks is not None and hooks[0] is not noted


def saves_objects() -> bool:
    """Whether autograd gives back the very object that a function saves here.

    Within ``torch.utils.checkpoint``, it is the one that the function saves when it is run anew.
    """
    hooks = innermost_hooks(False)
    if hooks is None or hooks[0] is noted:
        return True
    pack = hooks[0]
    module, name = getattr(pack, "__module__", None), getattr(pack, "__qualname__", "")
    return module == "torch.utils.checkpoint" and name.startswith(("_checkpoint_hook.", "_recomputation_hook."))


def check_hooks_are_told(what: str) -> None:
    """Raise where hooks are in force, and PyTorch does not tell whether a checkpoint's, which run a function anew.

    Raises
    ------
    UnsupportedOperatorError
        It names what needs that, and the version.
    """
    if innermost_hooks is _any_hooks and saves_by_hooks():
        raise UnsupportedOperatorError(
            f"{what} within hooks of saved tensors, as torch.utils.checkpoint, needs PyTorch 2.8 or later; this is "
            f"{torch.__version__}: call it outside of them"
        )


def saved_handle(content: Any) -> torch.Tensor:
    """A tensor for ``save_for_backward`` whose `content` lives as long as autograd saves it."""
    handle = torch.empty(0, device="cpu")
    handle.content = content  # type: ignore[attr-defined]
    return handle


def without_saving_hooks() -> contextlib.AbstractContextManager[object]:
    """A context whose operators save tensors as they are, whatever hooks are in force.

    A backward pass raises RuntimeError where they have been written to since, as it does without hooks.
    """
    return saved_tensors_hooks(noted, unchanged) if saves_by_hooks() else NO_CONTEXT


def noted(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A tensor and its version, for a hook that packs."""
    return tensor, version_of(tensor)


def unchanged(saved: tuple[torch.Tensor, int]) -> torch.Tensor:
    """The tensor that was noted; RuntimeError where it was written to since, which autograd leaves to hooks."""
    tensor, version = saved
    if version_of(tensor) != version:
        raise RuntimeError(
            f"a tensor of {tuple(tensor.shape)}, which a gradient needs, has been modified by an inplace operation "
            f"since it was computed: it is at version {version_of(tensor)}, and was at {version}; change it after the "
            "backward pass, or call again"
        )
    return tensor


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to; tensors of inference mode do not tell."""
    return 0 if tensor.is_inference() else tensor._version


def versions_of(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """`version_of` of several tensors, 0 of none."""
    try:
        return [0 if tensor is None else tensor._version for tensor in tensors]
    except RuntimeError:
        return [0 if tensor is None else version_of(tensor) for tensor in tensors]
