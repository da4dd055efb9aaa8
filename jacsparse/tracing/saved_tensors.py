"""Hooks of the tensors that autograd saves: whether any are in force, and whose they are."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

from ..patterns import UnsupportedOperatorError

#: A context that changes nothing.
NO_CONTEXT = contextlib.nullcontext()

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
    if not saves_by_hooks():
        return True
    pack, _ = innermost_hooks(False)
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
