"""How much memory a function needs at its peak, beyond what is there before."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

__all__ = ["peak_memory"]

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_memory(function: Callable[[], object]) -> int:
    """Bytes by which resident memory rises while a function runs.

    Raises
    ------
    OSError, AttributeError
        Where the system does not tell: Linux with the GNU C library does, and lets a process begin its peak anew.
    """
    gc.collect()
    # What was freed but kept for later would be used again, and not be seen.
    ctypes.CDLL(None).malloc_trim(0)
    _CLEAR.write_text("5")
    before = _kibibytes("VmRSS")
    function()
    return 1024 * max(0, _kibibytes("VmHWM") - before)


def _kibibytes(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1])
