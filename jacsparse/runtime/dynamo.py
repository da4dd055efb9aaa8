"""Functions that torch.compile leaves alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

# Private: where a PyTorch lacks one, what is public does, and costs more.
try:
    from torch._compile import _disable_dynamo as _disable
except ImportError:
    _disable = torch.compiler.disable
try:
    from torch._C._dynamo.eval_frame import get_eval_frame_callback as _frames_seen_by
except ImportError:

    def _frames_seen_by() -> object:  # type: ignore[misc]
        return None


Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Decorator: torch.compile leaves the function as it is.

    As torch.compiler.disable, which imports the compiler at once, for seconds: this only where something is compiled.
    Where the caller's frame was too often compiled anew and is now run as it is, the frames that it calls still are.
    """
    apart = _disable(function)

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        compiles = torch.compiler.is_dynamo_compiling() or _frames_seen_by() is not None
        return (apart if compiles else function)(*arguments, **options)

    return call  # type: ignore[return-value]
