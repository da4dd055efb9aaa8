"""CUDA kernels compiled and run by CuPy."""

from __future__ import annotations

import functools
import threading
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from .device_memory import before_captures

if TYPE_CHECKING:
    from .cuda import KernelFile, Launch


class CupyBackend:
    """Compiles kernels with CuPy, and runs them on PyTorch's current stream."""

    #: A getter of `operator`, which takes a tenth of a method's time: small calls ask many times.
    on_device = staticmethod(attrgetter("is_cuda"))

    def launch(self, launch: Launch) -> None:
        file, instance, grid, block, arguments, shared, device = launch
        number = torch.cuda.current_device() if device.index is None else device.index
        kernel = _compiled(file, instance, number)
        if shared > kernel.shared:
            kernel.allow(shared)
        current = torch.cuda.current_stream(number).cuda_stream
        with kernel.cupy.cuda.Device(number), cupy_stream(current, number):
            kernel.function(grid, block, tuple(map(_plain, arguments)), shared_mem=shared)


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
    cupy : module
        CuPy.
    function : cupy.RawKernel
        The compiled kernel.
    shared : int
        The most bytes of dynamic shared memory that a block may ask for.
    """

    _lock = threading.Lock()

    def __init__(self, file: KernelFile, instance: str, device: int) -> None:
        before_captures(f"{instance} is not compiled for cuda:{device}", torch.device("cuda", device))
        self.cupy, self.device = cupy_for(torch.device("cuda", device)), device
        with self.cupy.cuda.Device(device):
            module = self.cupy.RawModule(code=file.source, options=("-std=c++17",), name_expressions=(instance,))
            self.function = module.get_function(instance)
            self.shared = self.function.max_dynamic_shared_size_bytes

    def allow(self, shared: int) -> None:
        """Let blocks ask for `shared` bytes at least."""
        with self._lock, self.cupy.cuda.Device(self.device):
            if self.function.max_dynamic_shared_size_bytes < shared:
                self.function.max_dynamic_shared_size_bytes = shared
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


def _plain(argument: Any) -> Any:
    """An argument as CuPy takes it: a number, or an address."""
    if argument is None:
        return np.uintp(0)
    return np.uintp(argument.data_ptr()) if isinstance(argument, torch.Tensor) else argument


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
            f"the tensors are on {device}, where kernels need CuPy: {remedy}, or move them with .cpu()"
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
