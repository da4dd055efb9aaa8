"""Launches by the CUDA driver: a kernel's arguments lie in cells of memory, and a launch is a call of four addresses.

PyTorch on a GPU has the driver's library loaded. A call through ``ctypes`` takes half a microsecond; CuPy's own launch
takes ten times as long, for it makes an object of each argument.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from . import interception
from .device_memory import extend_lives

#: CUDA's `CUlaunchConfig`: grid, block and bytes of dynamic shared memory; the stream; a list of no attributes.
_CONFIGURATION = struct.Struct("<7I4xQQI4x")
#: The cell of a configuration that has the stream.
_STREAM = 4
#: How a scalar fills its cell of eight bytes, by the name of its type in NumPy.
_SCALARS = {"int32": "i4x", "int64": "q", "float32": "f4x", "float64": "d", "bool": "?7x"}
#: CUDA_ERROR_INVALID_CONTEXT: a thread has no context before CUDA's runtime has worked for it, as a new thread of
#: autograd's that found memory in PyTorch's cache.
_NO_CONTEXT = 201


@functools.cache
def driver() -> Any:
    """The CUDA driver's library.

    Raises
    ------
    RuntimeError
        Where there is none, or one from before CUDA 11.8.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
        library.cuLaunchKernelEx.argtypes = (ctypes.c_void_p,) * 4
    except (OSError, AttributeError) as error:
        raise RuntimeError(
            f"no CUDA driver that launches kernels ({error}); install one for CUDA 12 or later"
        ) from error
    return library


class _Cells(threading.local):
    """Each thread's own memory of a launch: its configuration, its arguments, and the addresses of both."""

    def __init__(self, configuration: bytes, arguments: bytes) -> None:
        self.configuration = (ctypes.c_uint64 * (len(configuration) // 8)).from_buffer_copy(configuration)
        count = len(arguments) // 8
        self.arguments = (ctypes.c_uint64 * count).from_buffer_copy(arguments)
        first = ctypes.addressof(self.arguments)
        self.pointers = (ctypes.c_void_p * count)(*range(first, first + 8 * count, 8))
        self.addresses = ctypes.addressof(self.configuration), ctypes.addressof(self.pointers)


class DriverKernel:
    """A compiled kernel on a device.

    Parameters
    ----------
    name : str
        Its name, for errors.
    handle : int
        The driver's handle.
    device : int
        The device's number.
    types : sequence of type or None
        NumPy's type of each scalar parameter, None for pointers.
    """

    def __init__(self, name: str, handle: int, device: int, types: Sequence[type | None]) -> None:
        self.name, self.handle, self.device, self._launch = name, handle, device, driver().cuLaunchKernelEx
        self._arguments = struct.Struct(
            "<" + "".join("Q" if kind is None else _SCALARS[np.dtype(kind).name] for kind in types)
        )
        self._cells = _Cells(bytes(_CONFIGURATION.size), bytes(self._arguments.size))

    def launch(self, sizes: Sequence[int], arguments: Sequence[Any]) -> None:
        """Run the kernel once.

        Parameters
        ----------
        sizes : sequence of int
            The grid and the block, three sizes each, and the bytes of dynamic shared memory.
        arguments : sequence
            A number for each scalar; a tensor or None for each pointer.
        """
        cells = self._cells
        _CONFIGURATION.pack_into(cells.configuration, 0, *sizes, 0, 0, 0)
        self._arguments.pack_into(cells.arguments, 0, *map(_plain, arguments))
        self.run(cells)

    def record(self, sizes: Sequence[int], arguments: Sequence[Any]) -> Callable[..., None]:
        """A launch whose sizes and scalars stay, called with what arguments of None are.

        These are tensors, None for null pointers, or integers of 64 bits, and lie behind all that stays.
        """
        cells = _Cells(_CONFIGURATION.pack(*sizes, 0, 0, 0), self._arguments.pack(*map(_plain, arguments)))
        run, begin, end = self.run, arguments.index(None), len(arguments)
        tensors, streams, device = [each for each in arguments if isinstance(each, torch.Tensor)], set(), self.device
        places = range(begin, end)

        def launch(*values: Any) -> None:
            if interception.active is not None:
                interception.active(functools.partial(self.launch, sizes, [*arguments[:begin], *values]))
                return
            if tensors:
                stream = torch._C._cuda_getCurrentRawStream(device)
                if stream not in streams or torch._C._cuda_isCurrentStreamCapturing():
                    extend_lives(tensors)
                    streams.add(stream)
            own = cells.arguments
            for place, each in zip(places, values, strict=True):
                own[place] = 0 if each is None else each if each.__class__ is int else each.data_ptr()
            run(cells)

        return launch

    def run(self, cells: _Cells) -> None:
        """Launch what the cells say on PyTorch's current stream of the device."""
        device, (configuration, pointers) = self.device, cells.addresses
        cells.configuration[_STREAM] = torch._C._cuda_getCurrentRawStream(device)
        if torch._C._cuda_getDevice() == device:
            status = self._launch(configuration, self.handle, pointers, None)
        else:
            with torch.cuda.device(device):
                status = self._launch(configuration, self.handle, pointers, None)
        if status == _NO_CONTEXT:
            with torch.cuda.device(device):
                _enter_context(device)
                status = self._launch(configuration, self.handle, pointers, None)
        if status:
            raise RuntimeError(f"{self.name} was not launched on cuda:{device}: {_message(status)}")


def _enter_context(device: int) -> None:
    """Give the calling thread the context of a device that PyTorch works in."""
    library, handle, context = driver(), ctypes.c_int(), ctypes.c_void_p()
    status = (
        library.cuDeviceGet(ctypes.byref(handle), device)
        or library.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
        or library.cuCtxSetCurrent(context)
    )
    if status:
        raise RuntimeError(f"cuda:{device} has no context for a thread: {_message(status)}")


def _plain(argument: Any) -> Any:
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument or 0


def _message(status: int) -> str:
    """The driver's words for an error, with its number."""
    text = ctypes.c_char_p()
    driver().cuGetErrorString(status, ctypes.byref(text))
    return f"{(text.value or b'an unknown error').decode()} ({status})"
