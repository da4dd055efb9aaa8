"""Functions that torch.compile leaves alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .torch_versions import compiler_of_frames, without_dynamo

Function = TypeVar("Function", bound=Callable[..., Any])


def run_while_traced(function: Function) -> Function:
    """Decorator: what traces the caller's Python code calls the function as it traces.

    As torch.compiler.assume_constant_result, which imports the compiler at once.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def uncompiled(function: Function) -> Function:
    """Decorator: torch.compile leaves the function as it is.

    As torch.compiler.disable, which imports the compiler at once, for seconds: this only where something is compiled.
    Where the caller's frame was too often compiled anew and is now run as it is, the frames that it calls still are.
    """
    apart = without_dynamo(function)

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        compiles = torch.compiler.is_dynamo_compiling() or compiler_of_frames() is not None
        return (apart if compiles else function)(*arguments, **options)

    return call  # type: ignore[return-value]
