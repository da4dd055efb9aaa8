"""Runs of functions under a tracer, with errors in the user's words."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..patterns import UnsupportedOperatorError, holds_numbers
from ..runtime import has_tangent, is_transformed, transform_under_way, without_compiling
from .callers import Callers, is_users
from .capture import capture
from .graphs import GRAPHS, new_trace
from .modules import name_of, tensors_of
from .operators import operator_name, tensors_in
from .reads import Unreadable
from .traces import Observing, Trace

#: Random samples that a module runs on where there is no input: a single one would not show how samples stay apart.
SAMPLES = 3


def samples_of(module: nn.Module, shape: tuple[int, ...], like: torch.Tensor | None = None) -> torch.Tensor:
    """Random samples with the dtype and device of the module, or of `like` where the module has no tensors."""
    tensors = (tensor.real for tensor in tensors_of(module) if holds_numbers(tensor))
    like = next(tensors, torch.empty(0, device="cpu") if like is None else like)
    return random_tensor((SAMPLES, *shape), like, torch.Generator().manual_seed(0))


def random_tensor(shape: tuple[int, ...], like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random numbers with the dtype and device of a tensor; the same ones everywhere."""
    drawn = torch.randn(shape, generator=generator, device="cpu")
    return drawn if like.device.type == "meta" else drawn.to(like)


def traced(
    module: nn.Module,
    x: torch.Tensor,
    *,
    arguments: Sequence[Any] = (),
    cached: bool = False,
    readable: bool = True,
    hidden: Sequence[torch.Tensor] = (),
    beside: Callable[[], Sequence[torch.Tensor]] = tuple,
) -> Trace:
    """The trace of a run of a module, with all that it changes and draws.

    Parameters
    ----------
    module : Module
        It runs once.
    x : Tensor, (batch, *input_shape)
        The module gets a copy, which it may overwrite.
    arguments : sequence
        What the module gets behind it, as it is.
    cached : bool
        Whether the graph may be that of an earlier run that made the same calls.
    readable : bool
        Whether Python may read the elements of a tensor, as a branch does: the graph then holds for this input alone.
    hidden : sequence of Tensor
        Tensors from elsewhere that Python may not read either, unless it may all.
    beside : callable
        What the module has returned beside its output, of which the trace has the values.

    Raises
    ------
    ValueError, TypeError
        Where the input does not fit, or a parameter is on another device, or of another dtype.
    UnsupportedOperatorError
        Where a derivative is not that of the operators, or where elements are read although `readable` is False.
    """
    callers, reads = Callers(module), None if readable else partial(Unreadable, hidden=hidden)
    try:
        with Observing(), without_compiling:
            run = capture(lambda copy: module(copy, *arguments), x, callers, reads, beside)
    except (UnsupportedOperatorError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, IndexError, ValueError, TypeError, AssertionError) as error:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            _check_alike(module, name, tensor, x, error)
        raise _in_users_words(module, x, callers, error) from error
    check_outside_transforms(module, run.tensors)
    return GRAPHS.trace_of(module, run) if cached else new_trace(module, run)


def check_outside_transforms(f: Any, tensors: Iterable[Any]) -> None:
    """Raise TypeError within a transform of ``torch.func``, or where a tensor has a tangent of forward mode."""
    if not is_transformed():
        return
    name = name_of(f)
    remedy = f"call {name} itself there, or take gradients by torch.autograd"
    if torch._C._are_functorch_transforms_active():
        raise TypeError(f"{name}: the call is within {transform_under_way()}, which does not see it; {remedy}")
    if any(isinstance(tensor, torch.Tensor) and has_tangent(tensor) for tensor in tensors):
        raise TypeError(f"{name}: a tensor has a tangent of forward mode, which would be lost; {remedy}")


def _check_alike(module: nn.Module, name: str, tensor: torch.Tensor, x: torch.Tensor, error: Exception) -> None:
    """Raise where a forward pass failed because a parameter or buffer has another dtype or device than the input."""
    where = name if "." in name else f"{name_of(module)}.{name}"
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{where} is on {tensor.device}; this runs on CPUs and CUDA: move it with .cpu()") from error
    if tensor.device != x.device:
        raise ValueError(f"{where} is on {tensor.device}, its input on {x.device}; move one of them") from error
    if holds_numbers(tensor) and tensor.real.dtype != x.dtype:
        raise TypeError(f"{where} is {tensor.dtype}, its input {x.dtype}; convert one of them") from error


def _in_users_words(module: nn.Module, x: torch.Tensor, callers: Callers, error: Exception) -> Exception:
    """An error that names the innermost module and the operator at which a run ended, and what these got."""
    arguments = getattr(module, "arguments", None)
    call = f"an input of shape {tuple(x.shape[1:])}" if arguments is None else f"a call with {arguments}"
    where, part = name_of(module), module
    if callers.failed is not None:
        where, part, args = callers.failed
        if args and isinstance(args[0], torch.Tensor):
            call = f"an input of shape {tuple(args[0].shape[1:])}"
    operator, args = callers.call or (None, ())
    source = _source_of(error)
    if str(error).startswith("derivative for aten::"):
        # Within the run, as for a Hessian.
        missing = str(error).removesuffix(" is not implemented")
        return UnsupportedOperatorError(f"{where}: PyTorch has no {missing}{source}")
    if "no rule registered for" in str(error):
        return UnsupportedOperatorError(
            f"{where}: a function of functions, as torch.cond, is no operator{source}; write it with Python's if and "
            "loops, or torch.where"
        )
    dtypes = list(dict.fromkeys(str(tensor.dtype) for tensor in tensors_in(args) if tensor.is_floating_point()))
    if len(dtypes) > 1 and "type" in str(error):
        return TypeError(
            f"{where}: {operator_name(operator)} gets tensors of {' and '.join(dtypes)}{source}; convert them to one "
            f"dtype, as by .to({dtypes[0]}): {error}"
        )
    what = name_of(part) if part._modules or "__qualname__" in vars(part) else str(part)
    return ValueError(f"{where}: {call} does not fit {what}{source}: {error}")


def _source_of(error: BaseException) -> str:
    """The last line of the user's code that an error passed, as in `` at net.py, line 7``."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(frame.filename) and Path(frame.filename).is_file():
            return f" at {frame.filename}, line {frame.lineno} ({(frame.line or '').strip()})"
    return ""
