"""Tensors of the CPU that say they are a GPU's, and refuse to meet those of the host as a GPU's do.

An operator on tensors of both memories raises, and what waits for the device, or copies between the two, is in `NOTED`.
PyTorch's engine of gradients knows no CUDA device where there is none: to it, their device is another kind's.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from jacsparse.runtime import Launch, backend, device_memory
from tests.cuda.harness import Fibers

_DEVICE = torch.device("cuda:0")
#: The names of operators that waited for the device, or copied between the two memories.
NOTED: list[str] = []
_WAITING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero")
#: What takes tensors of both memories; indices of the host are copied.
_BETWEEN, _INDEXED = ("copy_", "_to_copy"), ("index", "index_put", "index_put_", "_index_put_impl_")


class Tensor(torch.Tensor):
    """A tensor of the device, by one of the host."""

    host: torch.Tensor
    is_cuda, is_cpu, device = True, False, _DEVICE  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> Tensor:
        form = {"strides": host.stride(), "storage_offset": host.storage_offset(), "dtype": host.dtype}
        tensor = torch.Tensor._make_wrapper_subclass(cls, host.shape, **form, device="lazy:0")  # type: ignore[attr-defined]
        tensor.host = host
        return tensor  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _called(function, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def untyped_storage(self) -> Any:
        return self.host.untyped_storage()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return self.detach().cpu().numpy()


class _Mode(TorchDispatchMode):
    """Sees the calls that make tensors from nothing."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _called(function, args, kwargs or {})


def _called(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operator computes of tensors of either memory."""
    name = function.overloadpacket.__name__
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    ours = {id(each.host): each for each in tensors if isinstance(each, Tensor)}
    to = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else None
    if ours and any(each.ndim and not isinstance(each, Tensor) for each in tensors) and name not in _BETWEEN:
        assert name in _INDEXED, f"{function} on tensors of both memories"
        NOTED.append(name)
    if name in _WAITING or (name == "_to_copy" and to is not None):
        NOTED.append(name)
    if to is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    args, kwargs = tree_map(lambda each: each.host if isinstance(each, Tensor) else each, (args, kwargs))
    result = function(*args, **kwargs)
    if to == "cpu" or (to is None and (not ours or (name == "copy_" and id(args[0]) not in ours))):
        return result
    return tree_map_only(torch.Tensor, lambda each: ours[id(each)] if id(each) in ours else Tensor(each), result)


class _Backend(Fibers):
    def on_device(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, Tensor)

    def launch(self, launch: Launch) -> None:
        hosts = [each.host if isinstance(each, Tensor) else each for each in launch.arguments]
        super().launch(launch._replace(arguments=hosts))


@contextmanager
def two_memories(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A context in which `Tensor` is of a GPU whose kernels are run by fibers."""
    tensor: Callable[..., torch.Tensor] = torch.tensor

    def made(*args: Any, device: Any = None, **options: Any) -> torch.Tensor:
        made_here = tensor(*args, **options)
        return made_here if device is None or torch.device(device).type == "cpu" else Tensor(made_here)

    properties = types.SimpleNamespace(total_memory=2**36, multi_processor_count=132)
    with monkeypatch.context() as patch, backend(_Backend()), _Mode():
        patch.setattr(torch, "tensor", made)
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(torch.cuda, "default_generators", (torch.default_generator,))
        patch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(device_memory, "_stream_on", lambda _: 7)
        patch.setattr(device_memory, "_disable_current_modes", contextlib.nullcontext)
        patch.setattr("jacsparse.jacobians.fused_values.host_flag", lambda _: torch.zeros(1, dtype=torch.int32))
        patch.setattr("jacsparse.stages.checks.PLAIN", (torch.Tensor, nn.Parameter, nn.Buffer, Tensor))
        # They are of a class of their own already.
        patch.setattr("jacsparse.jacobians.arguments.Arguments.with_numbers_apart", lambda arguments: arguments)
        NOTED.clear()
        yield
