"""CUDA's run-time compiler, which reports registers and spills of kernels and needs neither driver nor device."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jacsparse.runtime import KernelFile

_REMEDY = "pip install nvidia-cuda-nvrtc"


@dataclass(frozen=True)
class Resources:
    """The resources that a kernel takes on one architecture."""

    #: Registers of a thread.
    registers: int
    #: Bytes that a thread stores to and loads from local memory for want of registers.
    spilled: int
    #: Bytes of a block's static shared memory.
    shared: int


@functools.cache
def library() -> Any:
    """NVRTC through ``ctypes``; ImportError if it is not installed."""
    import importlib.util

    # NVRTC's own wheel has it, and so has one that comes with PyTorch for CUDA; the newest is taken. That of CUDA 12.4
    # also changes the encoding of the thread's locale.
    paths: list[Path] = []
    spec = importlib.util.find_spec("nvidia")
    for home in (spec.submodule_search_locations or []) if spec else []:
        paths += [path for path in Path(home).glob("*/lib/libnvrtc.so.*") if "builtins" not in path.name]
    for path in sorted(paths, key=_version, reverse=True):
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            continue
    raise ImportError(f"NVRTC is not installed: {_REMEDY}")


def _version(path: Path) -> list[int]:
    """The version at the end of a library's name, as 13 of ``libnvrtc.so.13``."""
    return [int(part) for part in path.name.partition(".so.")[2].split(".") if part.isdigit()]


def compile_file(file: KernelFile, architecture: str) -> dict[str, Resources]:
    """The resources of all instances of a file, compiled for an architecture such as ``sm_90``.

    Raises
    ------
    ImportError
        If NVRTC is not installed.
    RuntimeError
        If the file does not compile; the message is the compiler's.
    """
    nvrtc = library()
    program = ctypes.c_void_p()
    _check(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), file.source.encode(), None, 0, None, None))
    try:
        lowered = {}
        for instance in file.instances:
            _check(nvrtc, nvrtc.nvrtcAddNameExpression(program, instance.encode()))
        options = [f"--gpu-architecture={architecture}", "-std=c++17", "--ptxas-options=-v"]
        status = nvrtc.nvrtcCompileProgram(program, len(options), _strings(options))
        log = _log(nvrtc, program)
        if status:
            raise RuntimeError(f"{file.path.name} does not compile for {architecture}:\n{log}")
        for instance in file.instances:
            name = ctypes.c_char_p()
            _check(nvrtc, nvrtc.nvrtcGetLoweredName(program, instance.encode(), ctypes.byref(name)))
            assert name.value is not None
            lowered[name.value.decode()] = instance
        return {lowered[name]: resources for name, resources in _resources(log).items()}
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _strings(texts: Sequence[str]) -> Any:
    return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))


def _log(nvrtc: Any, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, text)
    return text.value.decode()


def _check(nvrtc: Any, status: int) -> None:
    if status:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(nvrtc.nvrtcGetErrorString(status).decode())


_ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers(?P<memory>[^\n]*)",
    re.DOTALL,
)


def _resources(log: str) -> dict[str, Resources]:
    """The resources of each kernel, by its lowered name, from the compiler's log."""
    resources = {}
    for entry in _ENTRY.finditer(log):
        shared = re.search(r"(\d+) bytes smem", entry["memory"])
        spilled = int(entry["stores"]) + int(entry["loads"])
        resources[entry["name"]] = Resources(int(entry["registers"]), spilled, int(shared[1]) if shared else 0)
    return resources
