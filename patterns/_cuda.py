"""CUDA kernels: files of templates, compiled by CuPy when first used, launched on PyTorch's current stream.

A `.cu` file lies in a folder ``kernels/`` beside the Python that launches it, which names the template instances that
there are. What a launch passes is checked against the kernel's own parameters, as they stand in the file. Memory is
PyTorch's; index arrays of plans and patterns are copied to a device once (`uploaded`).
"""

from __future__ import annotations

import functools
import itertools
import re
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

__all__ = [
    "FILES",
    "INDEX",
    "REAL",
    "THREADS",
    "KernelFile",
    "Launch",
    "Parameter",
    "blocks",
    "c_type",
    "index_type",
    "instances",
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
_SCALARS = {"int": np.int32, "long long": np.int64, "float": np.float32, "double": np.float64, "bool": np.bool_}

#: What most templates are made for: elements of values, and of index arrays.
REAL, INDEX = ("float", "double"), ("int", "long long")
#: Of a block, where nothing asks for another number.
THREADS = 256

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
    """Of a kernel: what it points to, or is, and its name."""

    type: str
    pointer: bool
    name: str


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
        """The file's text, after what all of them share."""
        common = Path(__file__).parent / "kernels" / "common.cuh"
        return f'{common.read_text()}\n#line 1 "{self.path.name}"\n{self.path.read_text()}'

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
            found.append(Parameter(values.get(kind, kind), "*" in words, words[-1]))
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
        """
        parameters = self.parameters[instance]
        if len(arguments) != len(parameters):
            raise TypeError(f"{instance} takes {len(parameters)} arguments, not {len(arguments)}")
        checked = [_checked(instance, *both) for both in zip(parameters, arguments, strict=True)]
        grid_sizes, block_sizes = ((*given, 1, 1)[:3] for given in (grid, block))
        if 0 in grid_sizes:
            return
        _backend.launch(Launch(self, instance, grid_sizes, block_sizes, checked, shared, device))


def _checked(instance: str, parameter: Parameter, value: Any) -> Any:
    if not parameter.pointer:
        return _SCALARS[parameter.type](value)
    if value is None:
        return None
    if c_type(value.dtype) != parameter.type or not value.is_contiguous():
        raise TypeError(
            f"{instance}: {parameter.name} points to {parameter.type}, and the tensor is of {value.dtype}, strides "
            f"{value.stride()}"
        )
    return value


class _CupyBackend:
    def on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def launch(self, launch: Launch) -> None:
        device, shared = launch.device, launch.shared
        cupy = _cupy(device)
        number = torch.cuda.current_device() if device.index is None else device.index
        with cupy.cuda.Device(number):
            kernel = _compiled(launch.file, number).get_function(launch.instance)
            if shared > 48 * 1024:
                kernel.max_dynamic_shared_size_bytes = shared
            stream = torch.cuda.current_stream(number).cuda_stream
            with cupy.cuda.ExternalStream(stream, number):
                kernel(launch.grid, launch.block, tuple(map(_plain, launch.arguments)), shared_mem=shared)


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
        Where it is not installed, or does not fit the driver; the message says what to install.
    """
    version = (torch.version.cuda or "12").partition(".")[0]
    remedy = f"pip install cupy-cuda{version}x"
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            f"the tensors are on {device}, where kernels need CuPy: {remedy}, or move them with .cpu()"
        ) from error
    try:
        cupy.cuda.runtime.getDeviceCount()
        cupy.cuda.nvrtc.getVersion()
    except Exception as error:
        raise RuntimeError(
            f"CuPy {cupy.__version__} cannot run here ({error}); PyTorch's CUDA is {torch.version.cuda}: {remedy}"
        ) from error
    return cupy


@functools.cache
def _compiled(file: KernelFile, device: int) -> Any:
    """All instances of a file, for the device that is CuPy's current one."""
    cupy = _cupy(torch.device("cuda", device))
    return cupy.RawModule(code=file.source, options=("-std=c++17",), name_expressions=file.instances)


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


_uploads: dict[tuple[int, torch.device, torch.dtype | None], torch.Tensor] = {}


def uploaded(array: np.ndarray, device: torch.device, dtype: torch.dtype | None = torch.int64) -> torch.Tensor:
    """A read-only array on a device, of its own dtype where that is None.

    Copied when first asked for, and kept there as long as the array is.
    """
    if array.flags.writeable:
        raise ValueError("the array may change; freeze it first")
    key = (id(array), device, dtype)
    found = _uploads.get(key)
    if found is None:
        found = torch.from_numpy(np.array(array)).to(device, dtype)
        _uploads[key] = found
        weakref.finalize(array, _uploads.pop, key, None)
    return found


def instances(template: str, *choices: Iterable[str]) -> tuple[str, ...]:
    """A kernel's instances for each combination of template arguments.

    Examples
    --------
    >>> instances("scale", ("float", "double"), ("int",))
    ('scale<float, int>', 'scale<double, int>')
    """
    return tuple(f"{template}<{', '.join(chosen)}>" for chosen in itertools.product(*choices))
