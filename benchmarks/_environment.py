"""The hardware and the versions that a figure depends on, without a host name or a path."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import jacsparse
from jacsparse.runtime import machine_memory

_PACKAGES = (
    *("torch", "numpy", "numba", "scipy", "mkl", "python-graphblas"),
    *("cupy-cuda12x", "cupy-cuda13x", "nvmath-python", "onnxruntime", "openvino"),
)
# Instruction sets of vector units, which decide how fast numbers move.
_VECTOR_UNITS = (
    *("sse4.2", "avx", "avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512vnni", "amx-tile"),
    *("neon", "sve", "sve2"),
)


def environment() -> dict[str, Any]:
    """Hardware, versions, threads and load of the machine, as plain values."""
    return {
        "cpu": _cpu_model(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(machine_memory(torch.device("cpu")) / 2**30, 1),
        "vector_units": _vector_units(),
        "gpu": _gpu() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.machine()}",
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "versions": {
            "python": platform.python_version(),
            "jacsparse": f"{jacsparse.__version__}, sources {_sources()}",
            **{name: version for name in _PACKAGES if (version := _version(name))},
        },
    }


def cores() -> int:
    """The number of cores on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _sources() -> str:
    """A digest of the library's sources, which may change within one version."""
    packages = (jacsparse, jacsparse.patterns, jacsparse.spgemm, jacsparse.models)
    paths = {path for package in packages for path in Path(package.__path__[0]).rglob("*")}
    sources = sorted(
        path.name.encode() + b"\0" + path.read_bytes() for path in paths if path.suffix in (".py", ".cu", ".cuh")
    )
    return hashlib.blake2b(b"".join(sources), digest_size=6).hexdigest()


def hardware(device: str, machine: Mapping[str, Any]) -> str:
    """The name of a machine's device in file names: ``cpu``, the GPU's name, or ``cuda`` if there is no GPU.

    Examples
    --------
    >>> hardware("cuda", {"gpu": {"name": "NVIDIA H200"}})
    'nvidia-h200'
    """
    gpu = machine.get("gpu") if device == "cuda" else None
    name = str(gpu.get("name", "")) if isinstance(gpu, dict) else ""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or device


def _gpu() -> dict[str, Any]:
    """PyTorch's current GPU, its driver and its libraries; unknown values are None."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    driver, clock, memory_clock = _nvidia_smi("driver_version", "clocks.max.sm", "clocks.max.memory")
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "cache_mib": round(getattr(properties, "L2_cache_size", 0) / 2**20, 1) or None,
        "clock": clock,
        "memory_clock": memory_clock,
        "driver": driver,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


@functools.cache
def _nvidia_smi(*fields: str) -> list[str | None]:
    """The driver's values of the first GPU, such as ``1980 MHz``, or None; the query takes a second."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return [None] * len(fields)
    values = [value.strip() for value in answer.split(",")]
    if len(values) != len(fields):
        return [None] * len(fields)
    return [None if value.startswith("[") else value for value in values]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _vector_units() -> list[str]:
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    return [name for name in _VECTOR_UNITS if features.get(name)]
