"""CUDA kernels compiled by CuPy."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .device_memory import before_captures
from .driver import DriverKernel

if TYPE_CHECKING:
    from .cuda import KernelFile, Launch


class CupyBackend:
    """Compiles kernels with CuPy; the driver launches them on PyTorch's current stream."""

    #: A getter of `operator` is quicker than a method, and small calls ask many times.
    on_device = staticmethod(attrgetter("is_cuda"))

    def launch(self, launch: Launch) -> None:
        self._kernel(launch).launch((*launch.grid, *launch.block, launch.shared), launch.arguments)

    def record(self, launch: Launch) -> Callable[..., None]:
        return self._kernel(launch).record((*launch.grid, *launch.block, launch.shared), launch.arguments)

    def _kernel(self, launch: Launch) -> DriverKernel:
        device = launch.device.index
        compiled = _compiled(launch.file, launch.instance, torch.cuda.current_device() if device is None else device)
        if launch.shared > compiled.shared:
            compiled.allow(launch.shared)
        return compiled.kernel


class _Compiled:
    """An instance of a kernel, compiled for a device; alone, for all instances of a file take seconds.

    Parameters
    ----------
    file : KernelFile
        The kernel's file.
    instance : str
        The instance.
    device : int
        The device's number.

    Attributes
    ----------
    kernel : DriverKernel
        The compiled kernel.
    shared : int
        The most bytes of dynamic shared memory that a block may ask for.
    """

    _lock = threading.Lock()

    def __init__(self, file: KernelFile, instance: str, device: int) -> None:
        before_captures(f"{instance} is not compiled for cuda:{device}", torch.device("cuda", device))
        self._cupy, self._device = cupy_for(torch.device("cuda", device)), device
        with self._cupy.cuda.Device(device):
            module = self._cupy.RawModule(code=file.source, options=("-std=c++17",), name_expressions=(instance,))
            # It holds the module, without which the driver's handle is none.
            self._function = module.get_function(instance)
            self.shared = self._function.max_dynamic_shared_size_bytes
            handle = self._function.kernel.ptr
        types = [None if parameter.pointer else parameter.type for parameter in file.parameters[instance]]
        self.kernel = DriverKernel(instance, handle, device, types)

    def allow(self, shared: int) -> None:
        """Let blocks ask for `shared` bytes at least."""
        with self._lock, self._cupy.cuda.Device(self._device):
            if self._function.max_dynamic_shared_size_bytes < shared:
                self._function.max_dynamic_shared_size_bytes = shared
            self.shared = max(self.shared, shared)


_compiled = functools.cache(_Compiled)


class _Handle(NamedTuple):
    """A PyTorch stream under CUDA's stream protocol, which `torch.cuda.Stream` follows in later versions only."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


@functools.cache
def cupy_stream(handle: int, device: int) -> Any:
    """CuPy's view of a stream of its current device."""
    cuda = cupy_for(torch.device("cuda", device)).cuda
    # From CuPy 14 on, which deprecates ExternalStream.
    if hasattr(cuda.Stream, "from_external"):
        return cuda.Stream.from_external(_Handle(handle))
    return cuda.ExternalStream(handle, device)


@functools.cache
def cupy_for(device: torch.device) -> Any:
    """The module CuPy, once it is known to compile and run.

    Raises
    ------
    ImportError, RuntimeError
        Where CuPy is not installed, does not fit the driver or has no compiler; the message says what to install. Also
        where PyTorch is built for ROCm.
    """
    if torch.version.hip:
        raise RuntimeError(f"{device} is ROCm's, for which there are no kernels; move the tensors with .cpu()")
    version = _cuda_version()
    remedy = f"pip install cupy-cuda{version}x"
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            f"the tensors are on {device}, where kernels need CuPy: {gpu_extra()}, or move them with .cpu()"
        ) from error
    try:
        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        raise RuntimeError(
            f"CuPy {cupy.__version__} cannot run here ({error}); PyTorch's CUDA is {torch.version.cuda}: {remedy}"
        ) from error
    try:
        cupy.cuda.nvrtc.getVersion()
    except Exception as error:
        package = f"nvidia-cuda-nvrtc{'-cu12' if version == 12 else ''}"
        raise RuntimeError(
            f"CuPy {cupy.__version__} finds no NVRTC, which compiles kernels ({error}): "
            f"pip install 'cupy-cuda{version}x[ctk]' or pip install {package}"
        ) from error
    return cupy


def _cuda_version() -> int:
    """The major version of PyTorch's CUDA; 12 where PyTorch has none."""
    return int((torch.version.cuda or "12").partition(".")[0])


def gpu_extra() -> str:
    """The command that installs the library with a CuPy for PyTorch's CUDA."""
    return f"pip install 'jacsparse[{'gpu' if _cuda_version() < 13 else 'gpu-cuda13'}]'"
