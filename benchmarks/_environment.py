"""What a figure depends on besides the code: hardware and versions. No host name, and no path."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import jacsparse

__all__ = ["environment"]

_PACKAGES = ("torch", "numpy", "numba", "scipy", "mkl", "sparse_dot_mkl", "python-graphblas")
# Vector units: what decides how fast numbers move.
_VECTOR = (
    "sse4.2",
    "avx",
    "avx2",
    "fma",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512vnni",
    "amx-tile",
    "neon",
    "sve",
    "sve2",
)


def environment() -> dict[str, Any]:
    """Hardware, versions, threads and how busy the machine is, as plain values."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
        "vector_units": _vector_units(),
        "gpu": torch.cuda.get_device_name(0) if cuda else None,
        "system": f"{platform.system()} {platform.machine()}",
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "versions": {
            "python": platform.python_version(),
            "jacsparse": jacsparse.__version__,
            **{name: version for name in _PACKAGES if (version := _version(name))},
        },
    }


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


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None


def _vector_units() -> list[str]:
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    return [name for name in _VECTOR if features.get(name)]
