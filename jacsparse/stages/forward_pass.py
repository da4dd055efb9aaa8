"""Trace a module's forward pass, with errors in the user's words."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from ..patterns import UnsupportedOperatorError
from ..tracing import Graph, Trace, failed_call, is_users, name_of, tensors_of, trace

#: Random samples that a module runs on where there is no input: a single one would not show how samples stay apart.
SAMPLES = 3


def samples_of(module: nn.Module, shape: tuple[int, ...], like: torch.Tensor | None = None) -> torch.Tensor:
    """Random samples with the dtype and device of the module, or of `like` where the module has no tensors."""
    tensors = (tensor for tensor in tensors_of(module) if tensor.is_floating_point())
    like = next(tensors, torch.empty(0) if like is None else like)
    return random_tensor((SAMPLES, *shape), like, torch.Generator().manual_seed(0))


def random_tensor(shape: tuple[int, ...], like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random numbers with the dtype and device of a tensor; the same ones everywhere."""
    drawn = torch.randn(shape, generator=generator)
    return drawn if like.device.type == "meta" else drawn.to(like)


def traced(
    module: nn.Module,
    x: torch.Tensor,
    graphs: Sequence[Graph] = (),
    *,
    readable: bool = True,
    hidden: Sequence[torch.Tensor] = (),
    connected: bool = False,
) -> Trace:
    """The trace of a module's forward pass, as `jacsparse.tracing.trace` makes it.

    Raises
    ------
    ValueError
        Where the input does not fit, or a parameter is on another device.
    TypeError
        Where parameters are of another dtype than the input.
    """
    try:
        return trace(module, x, graphs, readable=readable, hidden=hidden, connected=connected)
    except (UnsupportedOperatorError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, IndexError, ValueError, TypeError, AssertionError) as error:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            _check_alike(module, name, tensor, x, error)
        where, given, part = _failed(module, error, x)
        source = _source_of(error)
        if str(error).startswith("derivative for aten::"):
            # Within the run, as for a Hessian.
            missing = str(error).removesuffix(" is not implemented")
            raise UnsupportedOperatorError(f"{where}: PyTorch has no {missing}{source}") from error
        operator, tensors = failed_call(error)
        dtypes = list(dict.fromkeys(str(tensor.dtype) for tensor in tensors if tensor.is_floating_point()))
        if len(dtypes) > 1 and "type" in str(error):
            raise TypeError(
                f"{where}: {operator} gets tensors of {' and '.join(dtypes)}{source}; convert them to one dtype, as by "
                f".to({dtypes[0]}): {error}"
            ) from error
        what = name_of(part) if part._modules or "__qualname__" in vars(part) else str(part)
        raise ValueError(f"{where}: {given} does not fit {what}{source}: {error}") from error


def _check_alike(module: nn.Module, name: str, tensor: torch.Tensor, x: torch.Tensor, error: Exception) -> None:
    """Raise where a forward pass failed because a parameter or buffer has another dtype or device than the input."""
    where = name if "." in name else f"{name_of(module)}.{name}"
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{where} is on {tensor.device}; this runs on CPUs and CUDA: move it with .cpu()") from error
    if tensor.device != x.device:
        raise ValueError(f"{where} is on {tensor.device}, its input on {x.device}; move one of them") from error
    if (tensor.is_floating_point() or tensor.is_complex()) and tensor.dtype != x.dtype:
        raise TypeError(f"{where} is {tensor.dtype}, its input {x.dtype}; convert one of them") from error


def _failed(module: nn.Module, error: BaseException, x: torch.Tensor) -> tuple[str, str, nn.Module]:
    """The path of the innermost module in which an error was raised, what it got, in words, and the module."""
    paths = {id(part): name for name, part in module.named_modules()}
    arguments = getattr(module, "arguments", None)
    given = f"an input of shape {tuple(x.shape[1:])}" if arguments is None else f"a call with {arguments}"
    where, innermost = name_of(module), module
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is nn.Module._call_impl.__code__:
            part, args = frame.f_locals["self"], frame.f_locals["args"]
            if id(part) in paths and args and isinstance(args[0], torch.Tensor):
                where, innermost = paths[id(part)] or name_of(part), part
                given = f"an input of shape {tuple(args[0].shape[1:])}"
    return where, given, innermost


def _source_of(error: BaseException) -> str:
    """The last line of the user's code that an error passed, as in `` at net.py, line 7``."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(frame.filename) and Path(frame.filename).is_file():
            return f" at {frame.filename}, line {frame.lineno} ({(frame.line or '').strip()})"
    return ""
