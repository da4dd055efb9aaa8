"""The parts, tensors and hooks of a module, and how to leave it unchanged by a forward pass."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from ..patterns import holds_numbers
from ..runtime import a_type, has_tangent, is_transformed, on_device, transform_under_way, without_compiling
from .autograd_nodes import NO_CONTEXT, noted, unchanged


def check_module(module: object) -> nn.Module:
    """Return `module` where its forward pass can be recorded.

    Raises
    ------
    TypeError
        Where it is no Module, or has parts that TorchScript has compiled.
    """
    if not isinstance(module, nn.Module):
        remedy = ": jacobian, prepare_jacobian and hessian take functions" if callable(module) else ""
        raise TypeError(f"module is {a_type(module)}; expected a torch.nn.Module{remedy}")
    for part in parts_of(module):
        if isinstance(part, torch.jit.ScriptModule):
            raise TypeError("module is, or holds, a torch.jit.ScriptModule; give the module that it was compiled from")
    return module


def name_of(f: Any) -> str:
    """The name of a function, or the class of a module or of another callable."""
    while isinstance(f, functools.partial):
        f = f.func
    if isinstance(f, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(f)
    return getattr(f, "__qualname__", None) or type(f).__name__


def module_of(f: Any) -> nn.Module | None:
    """The module that a function is, or is a method or a ``functools.partial`` of; None where it is another function.

    Examples
    --------
    >>> [module_of(f) for f in (nn.ReLU(), nn.ReLU().forward, functools.partial(nn.ReLU(), inplace=True), torch.relu)]
    [ReLU(), ReLU(), ReLU(), None]
    """
    while isinstance(f, functools.partial):
        f = f.func
    module = f if isinstance(f, nn.Module) else getattr(f, "__self__", None)
    return module if isinstance(module, nn.Module) else None


def check_initialised(module: nn.Module) -> list[nn.Module]:
    """The parts of a module, unless one of them is a lazy module without weights.

    Raises
    ------
    ValueError
        It names the path of the lazy module.

    Examples
    --------
    >>> check_initialised(nn.Sequential(nn.Flatten(), nn.LazyLinear(3)))
    Traceback (most recent call last):
    ValueError: 1: LazyLinear has no weights before its first batch; run the module on one first
    """
    parts = parts_of(module)
    for part in parts:
        if isinstance(part, LazyModuleMixin) and part.has_uninitialized_params():
            kind = type(part).__name__
            path = next(name for name, other in module.named_modules() if other is part)
            raise ValueError(
                f"{path or kind}: {kind} has no weights before its first batch; run the module on one first"
            )
    return parts


def parts_of(module: nn.Module) -> list[nn.Module]:
    """A module and all modules inside it, each once, in any order: faster than ``module.modules()``."""
    parts, waiting = {id(module): module}, [module]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and id(child) not in parts:
                parts[id(child)] = child
                waiting.append(child)
    return list(parts.values())


def tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """All parameters and buffers, in any order."""
    for part in parts_of(module):
        for tensors in (part._parameters, part._buffers):
            yield from (tensor for tensor in tensors.values() if tensor is not None)


class undisturbed:  # noqa: N801
    """A context that undoes what a forward pass changes: buffers, attributes of modules, the state of random numbers.

    Changes to globals, and inside the value of an attribute, as to a list, are not undone. Functions given to
    ``torch.compile`` run as they are written within: to compile them takes long, and their derivatives are the same.

    Raises
    ------
    ValueError
        Where a lazy module has no weights yet: it could not lose again those that a forward pass creates.
    """

    def __init__(self, module: nn.Module, device: torch.device | None = None) -> None:
        self._module, self._device = module, device

    def __enter__(self) -> None:
        #: Each part, with its attributes and buffers; and the buffers of all, each with its version and a copy.
        self._attributes: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = []
        self._buffers: list[tuple[nn.Module, str, torch.Tensor, int, torch.Tensor | None]] = []
        generators = {torch.default_generator}
        if self._device is not None and self._device.type == "cuda":
            generators.add(torch.cuda.default_generators[self._device.index])
        for part in check_initialised(self._module):
            self._attributes.append((part, dict(part.__dict__), dict(part._buffers)))
            for name, buffer in part._buffers.items():
                if buffer is not None and not buffer.is_inference() and buffer.device.type != "meta":
                    # Pruning masks are as large as all weights: those that no forward pass wrote to are not copied.
                    is_left = part in _LEAVE_MASKS and _is_mask(part, name)
                    copy = None if is_left else buffer.clone()
                    self._buffers.append((part, name, buffer, buffer._version, copy))
            for tensor in (*part._parameters.values(), *part._buffers.values()):
                if tensor is not None and tensor.is_cuda:
                    generators.add(torch.cuda.default_generators[tensor.device.index])
        self._random = {generator: generator.get_state() for generator in generators}
        without_compiling.__enter__()

    def __exit__(self, *error: object) -> None:
        without_compiling.__exit__()
        for generator, state in self._random.items():
            generator.set_state(state)
        for part, fields, buffers in self._attributes:
            for current, before in ((part.__dict__, fields), (part._buffers, buffers)):
                # The dictionary is never empty meanwhile: other threads may use the module.
                current.update(before)
                if len(current) > len(before):
                    for name in current.keys() - before.keys():
                        del current[name]
        lost = list[str]()
        for each in self._buffers:
            if not _restored(*each):
                lost.append(f"{type(each[0]).__name__}.{each[1]}")
        if lost:
            raise RuntimeError(
                f"{', '.join(lost)}: a forward pass has written to this mask of pruning, as none had before, "
                "which was not undone; call again"
            )


@contextlib.contextmanager
def saved_buffers(module: nn.Module) -> Iterator[None]:
    """A context in which autograd saves copies of a module's buffers, so that what it saves outlives `undisturbed`.

    A checkpoint around it does not see what is saved.
    """
    memories = {
        buffer.untyped_storage()._cdata
        for part in parts_of(module)
        for name, buffer in part._buffers.items()
        if buffer is not None
        and buffer.layout == torch.strided
        # Masks are as large as all weights.
        and not (part in _LEAVE_MASKS and _is_mask(part, name))
    }
    if not memories or not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        yield
        return

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        of_buffer = tensor.layout == torch.strided and tensor.untyped_storage()._cdata in memories
        return noted(tensor.clone() if of_buffer else tensor)

    with torch.autograd.graph.saved_tensors_hooks(pack, unchanged):
        yield


# Modules whose forward passes have not written to their pruning masks.
_LEAVE_MASKS: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _is_mask(part: nn.Module, name: str) -> bool:
    return name.endswith("_mask") and f"{name[:-5]}_orig" in part._parameters


def _restored(part: nn.Module, name: str, buffer: torch.Tensor, version: int, copy: torch.Tensor | None) -> bool:
    """Undo writes to a buffer since a version of it; False where there is no copy of what was overwritten."""
    # Batch normalisation writes to its statistics without a new version of them.
    silent = False
    if copy is not None and buffer.layout == torch.strided:
        if not on_device(buffer):
            silent = not torch.equal(buffer, copy)
        elif buffer.is_floating_point():
            # A look at elements would wait; this is no new version either.
            buffer.data.copy_(copy)
    if buffer._version == version and not silent:
        if _is_mask(part, name):
            _LEAVE_MASKS.add(part)
        return True
    if copy is None:
        _LEAVE_MASKS.discard(part)
        return False
    with torch.no_grad():
        buffer.copy_(copy)
    return True


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context in which ``torch.autocast`` changes no dtype, although the caller may be within one."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return NO_CONTEXT


def refresh_weights(module: nn.Module) -> None:
    """Call the hooks of ``torch.nn.utils``, such as pruning's, that compute weights before each forward pass."""
    with torch.no_grad():
        set_weights(module)


def set_weights(module: nn.Module) -> None:
    """As `refresh_weights`, recorded by autograd."""
    for hook in module._forward_pre_hooks.values():
        if sets_weights(hook):
            hook(module, None)


def sets_weights(hook: object) -> bool:
    """Whether a hook is one of ``torch.nn.utils``, which compute weights before each forward pass."""
    return type(hook).__module__.startswith("torch.nn.utils.")


def trains(module: nn.Module, name: str) -> bool:
    """Whether a weight trains: itself, or a parameter that pruning or a parametrisation computes it from."""
    parameter = module._parameters.get(name)
    if parameter is not None or name in module._buffers:
        return parameter is not None and parameter.requires_grad
    prefixes = (f"{name}_", f"parametrizations.{name}.")
    return any(p.requires_grad for path, p in module.named_parameters() if path.startswith(prefixes))


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
