"""CUDA kernels: C++ templates, whose instances are compiled at their first launch.

A `.cu` file lies in a folder ``kernels/`` beside the Python module that launches it and that lists the template
instances. A launch checks its arguments against the kernel's parameters, which are read from the file.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from . import interception
from .cupy_backend import CupyBackend
from .device_memory import fresh_uploads

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

#: Template arguments of most kernels: element types of values, and of index arrays.
REAL, INDEX = ("float", "double"), ("int", "long long")
#: Threads of a block, by default.
THREADS = 256
#: The most blocks of a grid in each direction, and the most threads of a block.
_GRID, _BLOCK = (2**31 - 1, 65_535, 65_535), 1024

#: All files of kernels, by their names.
KERNEL_FILES: dict[str, KernelFile] = {}


def c_type(dtype: torch.dtype) -> str:
    """A tensor's element type, as kernels spell it.

    Examples
    --------
    >>> c_type(torch.int64)
    'long long'
    """
    return _TYPES[dtype]


def index_type(*arrays: np.ndarray) -> torch.dtype:
    """int64 where one of the index arrays is, else int32."""
    return torch.int64 if any(array.dtype == np.int64 for array in arrays) else torch.int32


def blocks(count: int, size: int = THREADS) -> int:
    """The number of blocks of `size` that cover `count`."""
    return -(-count // size)


class Parameter(NamedTuple):
    """A kernel's parameter: its name, whether it is a pointer, and its type or that of the elements it points to."""

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

    def of(self, values: Iterable[Any]) -> Launch:
        """The launch with these values for its arguments of None."""
        rest, arguments = iter(values), []
        for argument in self.arguments:
            value = next(rest) if argument is None else argument
            arguments.append(np.int64(value) if isinstance(value, int) else value)
        return self._replace(arguments=arguments)


class Backend(Protocol):
    """Runs kernels; compares by identity, as launches are kept for it."""

    def __hash__(self) -> int:
        """One of the object itself."""

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's work is done by kernels of this backend."""

    def launch(self, launch: Launch) -> None:
        """Run one kernel."""

    def record(self, launch: Launch) -> Callable[..., None]:
        """A launch that is called with what its arguments of None are: tensors, None, or integers of 64 bits.

        It holds its tensors, which live until what it queued or captured is done.
        """


_KERNEL = re.compile(
    r"template\s*<(?P<template>[^>]*)>\s*__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s+)?(?P<name>\w+)\s*"
    r"\((?P<parameters>[^)]*)\)"
)

_INCLUDE = re.compile(r'#include "([^"]+)"')


@dataclass(frozen=True, eq=False)
class KernelFile:
    """A file of kernels, and the instances of its templates.

    Parameters
    ----------
    path : Path
        The file.
    instances : tuple of str
        Each as C++ spells it, ``scale<float, int>``.
    name : str, optional
        What it is listed by in `KERNEL_FILES`, the file's own name if left out; empty for a file that is not listed.
    headers : mapping of str to callable
        By their names, what prints the text of headers that are included and that are no files.
    """

    path: Path
    instances: tuple[str, ...]
    name: str | None = None
    headers: Mapping[str, Callable[[], str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name != "":
            KERNEL_FILES[self.name or self.path.name] = self

    @functools.cached_property
    def source(self) -> str:
        """The text to compile: ``common.cuh``, then the file with its includes expanded."""
        common = Path(__file__).parent / "common.cuh"
        parts = [common.read_text(encoding="utf-8"), f'#line 1 "{self.path.name}"']
        for number, line in enumerate(self.path.read_text(encoding="utf-8").splitlines(), 1):
            included = _INCLUDE.fullmatch(line)
            if included:
                name = included[1]
                printed = self.headers.get(
                    name, lambda name=name: (self.path.parent / name).read_text(encoding="utf-8")
                )
                parts += [f'#line 1 "{name}"', printed(), f'#line {number + 1} "{self.path.name}"']
            else:
                parts.append(line)
        return "\n".join((*parts, ""))

    @functools.cached_property
    def _templates(self) -> dict[str, tuple[list[str], str]]:
        return {
            match["name"]: ([part.split()[-1] for part in match["template"].split(",")], match["parameters"])
            for match in _KERNEL.finditer(self.source)
        }

    @functools.cached_property
    def parameters(self) -> dict[str, tuple[Parameter, ...]]:
        """The parameters of each instance."""
        return {instance: self._parameters(instance) for instance in self.instances}

    def _parameters(self, instance: str) -> tuple[Parameter, ...]:
        name, _, arguments = instance.removesuffix(">").partition("<")
        names, text = self._templates[name]
        values = dict(zip(names, (part.strip() for part in arguments.split(",")), strict=True))
        parameters = []
        for part in text.split(","):
            words = part.replace("*", " * ").split()
            kind = " ".join(word for word in words[:-1] if word not in ("const", "*", "__restrict__"))
            kind, pointer = values.get(kind, kind), "*" in words
            parameters.append(Parameter(words[-1], pointer, (_DTYPES if pointer else _SCALARS)[kind]))
        return tuple(parameters)

    def launch(
        self,
        instance: str,
        grid: Sequence[int],
        block: Sequence[int],
        *arguments: Any,
        device: torch.device,
        shared: int = 0,
    ) -> None:
        """Run a kernel on PyTorch's current stream of a device; an empty grid does nothing.

        What runs often, with the same sizes, takes a `record`.

        Parameters
        ----------
        instance : str
            One of `instances`.
        grid, block : sequence of int
            Up to three sizes each.
        *arguments
            For each parameter: a tensor on the device or None for a pointer, else a number.
        device : torch.device
            The device.
        shared : int
            Bytes of dynamic shared memory.

        Raises
        ------
        TypeError
            Where the arguments do not fit the kernel's parameters.
        ValueError
            Where the grid or block is larger than CUDA allows.
        """
        _check_sizes(instance, grid, block)
        parameters = self.parameters[instance]
        if len(arguments) != len(parameters):
            raise TypeError(f"{instance} takes {len(parameters)} arguments, not {len(arguments)}")
        checked = [_checked(instance, *pair) for pair in zip(parameters, arguments, strict=True)]
        if 0 in grid:
            return
        launch = Launch(self, instance, (*grid, 1, 1)[:3], (*block, 1, 1)[:3], checked, shared, device)
        if interception.active is not None:
            interception.active(functools.partial(_backend.launch, launch))
        else:
            _backend.launch(launch)

    def record(
        self,
        instance: str,
        grid: Sequence[int],
        block: Sequence[int],
        *,
        device: torch.device,
        shared: int = 0,
        **constants: Any,
    ) -> Callable[..., None]:
        """A launch that is made once: a call with what changes costs a microsecond or two, and checks nothing.

        Parameters
        ----------
        instance, grid, block, device, shared
            As of `launch`.
        **constants
            What stays: numbers and tensors, by the names of the kernel's parameters.

        Returns
        -------
        callable
            Takes the other arguments, in the order of the kernel's parameters, of which they are the last ones: for a
            pointer a tensor of its type on the device, or None; for a ``long long`` an int. With an empty grid it does
            nothing. Dtypes, devices, strides and signs that are not in memory are the caller's care.

        Raises
        ------
        TypeError
            Where a constant does not fit its parameter or has none, or a parameter of fewer than 64 bits has no number;
            where a constant stands behind what is left out.
        ValueError
            As of `launch`.
        """
        _check_sizes(instance, grid, block)
        parameters, arguments = self.parameters[instance], []
        for parameter in parameters:
            constant = constants.pop(parameter.name, None)
            if constant is None and not parameter.pointer and parameter.type is not np.int64:
                raise TypeError(
                    f"{instance} takes a number {parameter.name}, and a record leaves out those of 64 bits alone"
                )
            arguments.append(None if constant is None else _checked(instance, parameter, constant))
        if constants:
            raise TypeError(f"{instance} takes no constant {', '.join(constants)}")
        left_out = [argument is None for argument in arguments]
        if left_out != sorted(left_out) or not any(left_out):
            raise TypeError(f"{instance}: what a record leaves out must be the last parameters, and one at least")
        if 0 in grid:
            return _nothing
        return _backend.record(Launch(self, instance, (*grid, 1, 1)[:3], (*block, 1, 1)[:3], arguments, shared, device))


def _checked(instance: str, parameter: Parameter, value: Any) -> Any:
    """An argument as its parameter takes it."""
    name, pointer, kind = parameter
    if not pointer:
        return kind(value)
    is_tensor = isinstance(value, torch.Tensor)
    if value is None or (is_tensor and value.dtype is kind and value.is_contiguous()):
        return value
    actual = f"the tensor is of {value.dtype}, strides {value.stride()}" if is_tensor else f"{value!r} is no tensor"
    raise TypeError(f"{instance}: {name} points to {c_type(kind)}, and {actual}")


def _check_sizes(instance: str, grid: Sequence[int], block: Sequence[int]) -> None:
    if any(size > most for size, most in zip(grid, _GRID, strict=False)) or math.prod(block) > _BLOCK:
        raise ValueError(f"{instance}: CUDA has no grid of {tuple(grid)} blocks of {tuple(block)} threads")


def _nothing(*_: Any) -> None:
    """A launch of no blocks."""


_backend: Backend = CupyBackend()


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


def active_backend() -> Backend:
    """What runs kernels now: records belong to it."""
    return _backend


@contextlib.contextmanager
def backend(other: Backend) -> Iterator[None]:
    """Run kernels by another backend, as tests do where there is no GPU; it has its own copies of index arrays."""
    global _backend
    before, _backend = _backend, other
    try:
        with fresh_uploads():
            yield
    finally:
        _backend = before


def instances(template: str, *choices: Iterable[str]) -> tuple[str, ...]:
    """A kernel's instances for each combination of template arguments.

    Examples
    --------
    >>> instances("scale", ("float", "double"), ("int",))
    ('scale<float, int>', 'scale<double, int>')
    """
    return tuple(f"{template}<{', '.join(chosen)}>" for chosen in itertools.product(*choices))
