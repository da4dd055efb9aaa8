"""Modules as they are given: what they are made of, and what a question about them may not change."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

__all__ = [
    "check_initialised",
    "check_module",
    "parts_of",
    "refresh_weights",
    "set_weights",
    "tensors_of",
    "trains",
    "undisturbed",
    "without_autocast",
]


def check_module(module: object) -> nn.Module:
    """`module` where it is one that can be looked into.

    Raises
    ------
    TypeError
        Where it is no Module, or a program that TorchScript has compiled.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}; expected a torch.nn.Module")
    if any(isinstance(part, torch.jit.ScriptModule) for part in parts_of(module)):
        raise TypeError("module is, or holds, a torch.jit.ScriptModule; give the module that it was compiled from")
    return module


def check_initialised(module: nn.Module) -> None:
    """Raise where a lazy module has no weights yet.

    Raises
    ------
    ValueError
        With its path.

    Examples
    --------
    >>> check_initialised(nn.Sequential(nn.Flatten(), nn.LazyLinear(3)))
    Traceback (most recent call last):
    ValueError: 1: LazyLinear has no weights before its first batch; run the module on one first
    """
    for part in parts_of(module):
        if isinstance(part, LazyModuleMixin) and part.has_uninitialized_params():
            kind = type(part).__name__
            path = next(name for name, other in module.named_modules() if other is part)
            raise ValueError(
                f"{path or kind}: {kind} has no weights before its first batch; run the module on one first"
            )


def parts_of(module: nn.Module) -> list[nn.Module]:
    """A module and all inside it, each once; in any order, but faster than ``module.modules()`` has them."""
    found, waiting = {id(module): module}, [module]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                waiting.append(child)
    return list(found.values())


def tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """All parameters and buffers, in any order."""
    for part in parts_of(module):
        for tensors in (part._parameters, part._buffers):
            yield from (tensor for tensor in tensors.values() if tensor is not None)


@contextlib.contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Undo on exit what a forward pass changes: buffers, attributes of modules, the state of random numbers.

    What user code keeps elsewhere, as in a global counter, or inside an attribute, as in a list, is not undone.

    Raises
    ------
    ValueError
        Where a lazy module has no weights yet: those that it would get could not be taken away again.
    """
    check_initialised(module)
    parts = parts_of(module)
    attributes = [(part, dict(part.__dict__), dict(part._buffers)) for part in parts]
    # Pruning's masks are as large as all weights: no copy of those that no forward pass has written to so far.
    buffers = [
        (part, name, buffer, buffer._version, None if part in _LEAVE_MASKS and _is_mask(part, name) else buffer.clone())
        for part in parts
        for name, buffer in part._buffers.items()
        if buffer is not None and not buffer.is_inference() and buffer.device.type != "meta"
    ]
    cuda = torch.cuda.is_initialized()
    devices = {tensor.device for tensor in tensors_of(module) if tensor.is_cuda} if cuda else set()
    with torch.random.fork_rng(sorted(devices, key=str)):
        try:
            yield
        finally:
            for part, fields, own_buffers in attributes:
                for now, then in ((part.__dict__, fields), (part._buffers, own_buffers)):
                    # Never empty: other threads may be using the module.
                    now.update(then)
                    for name in now.keys() - then.keys():
                        del now[name]
            for part, name, buffer, version, before in buffers:
                _restore(part, name, buffer, version, before)


#: Modules whose forward passes have left their pruning masks as they were.
_LEAVE_MASKS: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _is_mask(part: nn.Module, name: str) -> bool:
    return name.endswith("_mask") and f"{name[:-5]}_orig" in part._parameters


def _restore(part: nn.Module, name: str, buffer: torch.Tensor, version: int, before: torch.Tensor | None) -> None:
    if buffer._version == version:
        if _is_mask(part, name):
            _LEAVE_MASKS.add(part)
    elif before is not None:
        with torch.no_grad():
            buffer.copy_(before)
    else:
        _LEAVE_MASKS.discard(part)
        raise RuntimeError(
            f"{type(part).__name__}.{name}: a forward pass has written to this mask of pruning, as none had before, "
            "which was not undone; call again"
        )


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Where ``torch.autocast`` changes no dtype: the caller may be within one."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def refresh_weights(module: nn.Module) -> None:
    """Let the hooks that make weights out of others, pruning's above all, set them as they do before each forward."""
    with torch.no_grad():
        set_weights(module)


def set_weights(module: nn.Module) -> None:
    """As `refresh_weights`, as part of autograd's graph."""
    for hook in module._forward_pre_hooks.values():
        if type(hook).__module__.startswith("torch.nn.utils."):
            hook(module, None)


def trains(module: nn.Module, name: str) -> bool:
    """Whether any parameter trains that a weight is, or is made of as pruning and parametrisations do."""
    own = module._parameters.get(name)
    if own is not None or name in module._buffers:
        return own is not None and own.requires_grad
    begins = (f"{name}_", f"parametrizations.{name}.")
    return any(p.requires_grad for path, p in module.named_parameters() if path.startswith(begins))
