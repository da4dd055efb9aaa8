"""The memory that a function needs at its peak, beyond the memory in use before."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

from jacsparse.runtime import MEMORY_POOL

__all__ = ["peak_memory"]

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_memory(function: Callable[[], object]) -> int:
    """Bytes by which resident memory rises while a function runs; OSError or AttributeError if the system hides it.

    Linux with the GNU C library shows it, and lets a process reset its peak.
    """
    gc.collect()
    # The function could use freed memory that the pool or the C library holds, which would not be counted.
    MEMORY_POOL.clear()
    ctypes.CDLL(None).malloc_trim(0)
    _CLEAR.write_text("5", encoding="utf-8")
    before = _kibibytes("VmRSS")
    function()
    return 1024 * max(0, _kibibytes("VmHWM") - before)


def _kibibytes(name: str) -> int:
    line = next(line for line in _STATUS.read_text(encoding="utf-8").splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1])
