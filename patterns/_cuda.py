"""CUDA kernels: templates, each instance compiled by CuPy when first launched, run on PyTorch's current stream.

A `.cu` file lies in a folder ``kernels/`` beside the Python that launches it, which names the template instances that
there are. What a launch passes is checked against the kernel's own parameters, as they stand in the file. Memory is
PyTorch's (`allocated`); index arrays of plans and patterns are copied to a device once (`uploaded`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "FILES",
    "INDEX",
    "REAL",
    "THREADS",
    "KernelFile",
    "Launch",
    "Parameter",
    "allocated",
    "blocks",
    "c_type",
    "extra",
    "index_type",
    "instances",
    "memory_for",
    "multiprocessors",
    "on_device",
    "uploaded",
]

_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.uint8: "unsigned char",
    torch.uint16: "unsigned short",
    torch.uint32: "unsigned int",
    torch.int32: "int",
    torch.int64: "long long",
}
_DTYPES = {name: dtype for dtype, name in _TYPES.items()}
_SCALARS = {"int": np.int32, "long long": np.int64, "float": np.float32, "double": np.float64, "bool": np.bool_}

#: What most templates are made for: elements of values, and of index arrays.
REAL, INDEX = ("float", "double"), ("int", "long long")
#: Of a block, where nothing asks for another number.
THREADS = 256
#: Blocks in each direction, at most; and threads of one.
_GRID, _BLOCK = (2**31 - 1, 65_535, 65_535), 1024

#: All files of kernels, by their names.
FILES: dict[str, KernelFile] = {}


def c_type(dtype: torch.dtype) -> str:
    """A tensor's element type, as kernels spell it.

    Examples
    --------
    >>> c_type(torch.int64)
    'long long'
    """
    return _TYPES[dtype]


def index_type(*arrays: np.ndarray) -> torch.dtype:
    """The type that holds all of these index arrays: int64 where one of them is."""
    return torch.int64 if any(array.dtype == np.int64 for array in arrays) else torch.int32


def blocks(count: int, size: int = THREADS) -> int:
    """How many blocks of so many threads, or rows of threads, there have to be for `count`."""
    return -(-count // size)


class Parameter(NamedTuple):
    """Of a kernel: its name, and the elements that it points to, or the number that it is."""

    name: str
    pointer: bool
    type: Any


class Launch(NamedTuple):
    """One run of a kernel; arguments are NumPy scalars, and tensors or None for pointers."""

    file: KernelFile
    instance: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    arguments: Sequence[Any]
    shared: int
    device: torch.device


class Backend(Protocol):
    """What runs kernels."""

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether this is what works on a tensor."""

    def launch(self, launch: Launch) -> None:
        """Run one kernel."""


_KERNEL = re.compile(
    r"template\s*<(?P<template>[^>]*)>\s*__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s+)?(?P<name>\w+)\s*"
    r"\((?P<parameters>[^)]*)\)"
)

_INCLUDE = re.compile(r'#include "([^"]+)"')


@dataclass(frozen=True, eq=False)
class KernelFile:
    """A file of kernels, and the instances of its templates that are used.

    Parameters
    ----------
    path : Path
        The file.
    instances : tuple of str
        As C++ spells them, ``scale<float, int>``.
    """

    path: Path
    instances: tuple[str, ...]

    def __post_init__(self) -> None:
        FILES[self.path.name] = self

    @functools.cached_property
    def source(self) -> str:
        """The file's text, with those of its folder that it includes, after what all of them share."""
        common = Path(__file__).parent / "kernels" / "common.cuh"
        parts = [common.read_text(), f'#line 1 "{self.path.name}"']
        for number, line in enumerate(self.path.read_text().splitlines(), 1):
            included = _INCLUDE.fullmatch(line)
            if included:
                header = self.path.parent / included[1]
                parts += [f'#line 1 "{header.name}"', header.read_text(), f'#line {number + 1} "{self.path.name}"']
            else:
                parts.append(line)
        return "\n".join((*parts, ""))

    @functools.cached_property
    def _templates(self) -> dict[str, tuple[list[str], str]]:
        return {
            found["name"]: ([part.split()[-1] for part in found["template"].split(",")], found["parameters"])
            for found in _KERNEL.finditer(self.path.read_text())
        }

    @functools.cached_property
    def parameters(self) -> dict[str, tuple[Parameter, ...]]:
        """What each instance takes."""
        return {instance: self._parameters(instance) for instance in self.instances}

    def _parameters(self, instance: str) -> tuple[Parameter, ...]:
        name, _, given = instance.removesuffix(">").partition("<")
        names, text = self._templates[name]
        values = dict(zip(names, (part.strip() for part in given.split(",")), strict=True))
        found = []
        for part in text.split(","):
            words = part.replace("*", " * ").split()
            kind = " ".join(word for word in words[:-1] if word not in ("const", "*", "__restrict__"))
            kind, pointer = values.get(kind, kind), "*" in words
            found.append(Parameter(words[-1], pointer, (_DTYPES if pointer else _SCALARS)[kind]))
        return tuple(found)

    def launch(
        self,
        instance: str,
        grid: Sequence[int],
        block: Sequence[int],
        *arguments: Any,
        device: torch.device,
        shared: int = 0,
    ) -> None:
        """Run a kernel on PyTorch's current stream of a device; a grid without blocks does nothing.

        Parameters
        ----------
        instance : str
            One of `instances`.
        grid, block : sequence of int
            Up to three sizes each.
        *arguments
            Tensors on the device, or None, for pointers; numbers for the others.
        device : torch.device
            Where.
        shared : int
            Bytes of dynamic shared memory.

        Raises
        ------
        TypeError
            Where the arguments are not what the kernel takes.
        ValueError
            Where CUDA has no such grid or block.
        """
        if any(size > most for size, most in zip(grid, _GRID, strict=False)) or math.prod(block) > _BLOCK:
            raise ValueError(f"{instance}: CUDA has no grid of {tuple(grid)} blocks of {tuple(block)} threads")
        parameters = self.parameters[instance]
        if len(arguments) != len(parameters):
            raise TypeError(f"{instance} takes {len(parameters)} arguments, not {len(arguments)}")
        checked = []
        for (name, pointer, kind), value in zip(parameters, arguments, strict=True):
            if not pointer:
                checked.append(kind(value))
            elif value is None or (value.dtype is kind and value.is_contiguous()):
                checked.append(value)
            else:
                raise TypeError(
                    f"{instance}: {name} points to {c_type(kind)}, and the tensor is of {value.dtype}, strides "
                    f"{value.stride()}"
                )
        if 0 in grid:
            return
        _backend.launch(Launch(self, instance, (*grid, 1, 1)[:3], (*block, 1, 1)[:3], checked, shared, device))


class _CupyBackend:
    def on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def launch(self, launch: Launch) -> None:
        file, instance, grid, block, arguments, shared, device = launch
        number = torch.cuda.current_device() if device.index is None else device.index
        kernel = _compiled(file, instance, number)
        if shared > kernel.shared:
            kernel.allow(shared)
        current = torch.cuda.current_stream(number).cuda_stream
        with kernel.cupy.cuda.Device(number), _stream(current, number):
            kernel.function(grid, block, tuple(map(_plain, arguments)), shared_mem=shared)


class _Compiled:
    """One instance on one device: alone it compiles in a tenth of a second, all of a file take several.

    Parameters
    ----------
    file : KernelFile
        Where it is.
    instance : str
        Which.
    device : int
        The number of the device.

    Attributes
    ----------
    cupy : module
        CuPy.
    function : cupy.RawKernel
        What runs it.
    shared : int
        Bytes of dynamic shared memory that a block may ask for.
    """

    _lock = threading.Lock()

    def __init__(self, file: KernelFile, instance: str, device: int) -> None:
        _before_captures(f"{instance} is not compiled for cuda:{device}", torch.device("cuda", device))
        self.cupy, self.device = _cupy(torch.device("cuda", device)), device
        with self.cupy.cuda.Device(device):
            module = self.cupy.RawModule(code=file.source, options=("-std=c++17",), name_expressions=(instance,))
            self.function = module.get_function(instance)
            self.shared = self.function.max_dynamic_shared_size_bytes

    def allow(self, shared: int) -> None:
        """Let blocks ask for so much, or for what they already may where that is more."""
        with self._lock, self.cupy.cuda.Device(self.device):
            if self.function.max_dynamic_shared_size_bytes < shared:
                self.function.max_dynamic_shared_size_bytes = shared
            self.shared = max(self.shared, shared)


_compiled = functools.cache(_Compiled)


class _Handle(NamedTuple):
    """A stream of PyTorch's, by CUDA's protocol; PyTorch's own class speaks it only in later versions."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


@functools.cache
def _stream(handle: int, device: int) -> Any:
    """CuPy's view of a stream; the device is CuPy's current one."""
    cuda = _cupy(torch.device("cuda", device)).cuda
    # From 14 on, where the other is deprecated.
    if hasattr(cuda.Stream, "from_external"):
        return cuda.Stream.from_external(_Handle(handle))
    return cuda.ExternalStream(handle, device)


def _plain(argument: Any) -> Any:
    """An argument as CuPy takes it: a scalar, or a pointer as one."""
    if argument is None:
        return np.uintp(0)
    return np.uintp(argument.data_ptr()) if isinstance(argument, torch.Tensor) else argument


@functools.cache
def _cupy(device: torch.device) -> Any:
    """CuPy, able to compile and to run.

    Raises
    ------
    ImportError, RuntimeError
        Where it is not installed, does not fit the driver or has no compiler; the message says what to install. And
        where PyTorch is ROCm's.
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
    """Of PyTorch's CUDA, the first number; 12 where PyTorch has none."""
    return int((torch.version.cuda or "12").partition(".")[0])


def extra() -> str:
    """What installs the library with a CuPy for PyTorch's CUDA."""
    return f"pip install 'jacsparse[{'gpu' if _cuda_version() < 13 else 'gpu-cuda13'}]'"


_backend: Backend = _CupyBackend()


def on_device(*tensors: torch.Tensor) -> bool:
    """Whether CUDA kernels work on these tensors.

    Raises
    ------
    ValueError
        Where they are on several devices.
    """
    first, *others = tensors
    for other in others:
        if other.device != first.device:
            raise ValueError(f"tensors are on {first.device} and {other.device}; move them to one device")
    return _backend.on_device(first)


@contextlib.contextmanager
def memory_for(
    what: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device, batch: int = 1
) -> Iterator[None]:
    """What is run inside takes memory on a device for the named thing, and says so where there is not enough.

    Parameters
    ----------
    what : str
        The thing, as a message begins.
    shape : sequence of int
        Its shape.
    dtype : torch.dtype
        Of its elements.
    device : torch.device
        Where.
    batch : int
        How many samples it holds.

    Raises
    ------
    torch.OutOfMemoryError
        In the place of PyTorch's own: with the thing, its bytes and what takes fewer.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        sizes = " × ".join(f"{size:,}" for size in shape)
        smaller = ["a smaller batch"] if batch > 1 else []
        smaller += ["float32"] if dtype == torch.float64 else []
        raise torch.OutOfMemoryError(
            f"{what}: {math.prod(shape) * dtype.itemsize:,} bytes ({sizes} of {dtype}) do not fit on {device}; try "
            f"{' or '.join((*smaller, 'the CPU'))}"
        ) from error


def allocated(
    what: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device, batch: int = 1
) -> torch.Tensor:
    """New memory on a device, as `memory_for` names it."""
    with memory_for(what, shape, dtype, device, batch):
        return torch.empty(shape, dtype=dtype, device=device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many a device has; one of the largest, where it is made up."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 132


_uploads: dict[tuple[int, torch.device, torch.dtype | None], torch.Tensor] = {}
# What captured graphs read at each replay, by id.
_captured: dict[int, torch.Tensor] = {}


def uploaded(array: np.ndarray, device: torch.device, dtype: torch.dtype | None = torch.int64) -> torch.Tensor:
    """A read-only array on a device, of its own dtype where that is None.

    Copied when first asked for, and kept there as long as the array is, or for good where a graph reads it.

    Raises
    ------
    RuntimeError
        Where it would be copied while a graph is captured.
    """
    if array.flags.writeable:
        raise ValueError("the array may change; freeze it first")
    key = (id(array), device, dtype)
    found = _uploads.get(key)
    if found is None:
        _before_captures(f"an array of a plan or pattern is not on {device}", device)
        # A tensor of a mode would be one for later callers too, who are in none.
        with torch.inference_mode(False), _disable_current_modes():
            given = torch.from_numpy(np.array(array))
            with memory_for("an array of a plan or pattern", array.shape, dtype or given.dtype, device):
                found = given.to(device, dtype)
        found.made_on = _stream_on(device)  # type: ignore[attr-defined]
        _uploads[key] = found
        weakref.finalize(array, _uploads.pop, key, None)
    _keep(found)
    return found


def _keep(tensor: torch.Tensor) -> None:
    """Let an upload live as long as something that is queued reads it: on a stream not its own, or in a graph."""
    made_on = getattr(tensor, "made_on", None)
    if made_on is None:
        return
    if _capturing(tensor.device):
        _captured[id(tensor)] = tensor
    elif _stream_on(tensor.device) != made_on:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _before_captures(missing: str, device: torch.device) -> None:
    if _capturing(device):
        raise RuntimeError(f"{missing} yet, and a CUDA graph is being captured: run the same once before the capture")


def _stream_on(device: torch.device) -> int:
    """The handle of a device's current stream."""
    return int(torch._C._cuda_getCurrentRawStream(device.index)) if device.type == "cuda" else 0


def instances(template: str, *choices: Iterable[str]) -> tuple[str, ...]:
    """A kernel's instances for each combination of template arguments.

    Examples
    --------
    >>> instances("scale", ("float", "double"), ("int",))
    ('scale<float, int>', 'scale<double, int>')
    """
    return tuple(f"{template}<{', '.join(chosen)}>" for chosen in itertools.product(*choices))
