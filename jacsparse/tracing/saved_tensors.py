"""Hooks of the tensors that autograd saves: whether any are in force, and whose they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

# PyTorch before 2.8 tells only whether there are hooks.
_innermost = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def saves_by_hooks() -> bool:
    """Whether hooks change or compute anew what an operator saves here.

    Where ``torch.utils.checkpoint`` computes a part anew, its hooks keep every tensor as it is.
    """
    return _in_force() and _owner() != "_recomputation_hook"


def saves_objects() -> bool:
    """Whether autograd gives back the very object that a function saves here.

    With ``torch.utils.checkpoint``, it is the one that the function saves when it is run anew.
    """
    return not _in_force() or _owner() in ("_checkpoint_hook", "_recomputation_hook")


@contextlib.contextmanager
def without_saving_hooks() -> Iterator[None]:
    """Run the body, whose operators save tensors as they are, whatever hooks are in force."""
    if not _in_force():
        yield
        return
    with saved_tensors_hooks(_same, _same):
        yield


def _in_force() -> bool:
    """Whether there are hooks for what operators of this thread save."""
    if _innermost is not None:
        return _innermost(False) is not None
    try:
        # Refused where there are hooks, and nothing else is done.
        with disable_saved_tensors_hooks("hooks of saved tensors are in force"):
            return False
    except RuntimeError:
        return True


def _owner() -> str | None:
    """The class in ``torch.utils.checkpoint`` that the innermost hooks are of; None for others."""
    hooks = None if _innermost is None else _innermost(False)
    if hooks is None or getattr(hooks[0], "__module__", None) != "torch.utils.checkpoint":
        return None
    return str(getattr(hooks[0], "__qualname__", "")).partition(".")[0]


def _same(tensor: Any) -> Any:
    return tensor
