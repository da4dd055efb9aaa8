"""What was slow to make, kept on disk between runs.

A shelf is a folder of the cache directory, a file on it the arrays that one key stands for. Files appear whole or not
at all and are never written to again, so any number of processes may use a shelf at once; what is damaged, which an
archive's checksums tell, counts as missing. Plans have a limit: beyond it, those go that were used longest ago.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from . import _archive
from ._runtime import cache_directory, plan_sources

__all__ = ["SHELVES", "clear", "find", "keep", "plan_limit", "remembered", "used"]

#: Compiled kernels, plans, and features of sounds.
SHELVES = ("kernels", "plans", "features")
#: Seconds of work below which nothing is kept on disk.
SLOW = 0.02
#: Bytes a second that a disk is taken to read: what is made faster than that is not kept there.
READ = 1e9
#: MiB of plans where the environment does not say.
LIMIT = 1024

Arrays = dict[str, np.ndarray]


def find(shelf: str, key: str) -> Arrays | None:
    """What was kept; None where there is nothing, or it is damaged."""
    place = _place(shelf, key)
    try:
        content = _archive.read(place, shelf)
    except (OSError, ValueError):
        return None
    with contextlib.suppress(OSError):
        os.utime(place)
    return {name: array for name, array in content.items() if isinstance(array, np.ndarray)}


def keep(shelf: str, key: str, arrays: Arrays) -> None:
    """Write it down, in the place of what was kept before.

    Raises
    ------
    OSError
        Where that cannot be done; what was there before is still there then.
    """
    place = _place(shelf, key)
    place.parent.mkdir(parents=True, exist_ok=True)
    _archive.write(place, shelf, arrays)


def remembered(key: str, make: Callable[[], Arrays]) -> Arrays:
    """Of a plan: what `make` made in this run or an earlier one. It is kept where that is faster than to make it.

    A key stands for the sources too: what another version of a rule has made is not found.
    """
    limit = plan_limit()
    if not limit:
        return make()
    key = f"{plan_sources()} {key}"
    found = find("plans", key)
    if found is not None:
        return found
    start = time.perf_counter()
    made = make()
    seconds = time.perf_counter() - start
    if seconds > SLOW and sum(array.nbytes for array in made.values()) < min(seconds * READ, limit / 4):
        # Where nothing can be written, plans are made in each run.
        with contextlib.suppress(OSError):
            keep("plans", key, made)
            _trim(cache_directory() / "plans", limit)
    return made


def plan_limit() -> int:
    """Bytes of plans on disk, at most; 0 for none at all: ``$JACSPARSE_CACHE_MIB``, or `LIMIT`.

    Raises
    ------
    ValueError
        Where the environment holds no natural number.
    """
    chosen = os.environ.get("JACSPARSE_CACHE_MIB") or str(LIMIT)
    if not chosen.isdecimal():
        raise ValueError(f"JACSPARSE_CACHE_MIB is {chosen!r}; expected MiB of plans on disk, or 0 for none")
    return int(chosen) * 2**20


def used(shelf: str) -> tuple[int, int]:
    """Files on a shelf, and their bytes."""
    files = _files(cache_directory() / shelf)
    return len(files), sum(size for _, size, _ in files)


def clear() -> None:
    """Remove all that is kept on disk; it is made again when it is needed."""
    for shelf in SHELVES:
        shutil.rmtree(cache_directory() / shelf, ignore_errors=True)


def _place(shelf: str, key: str) -> Path:
    name = hashlib.blake2b(key.encode(), digest_size=20).hexdigest()
    return cache_directory() / shelf / f"{name}.npz"


def _files(folder: Path) -> list[tuple[float, int, Path]]:
    """Time of the last use, bytes and place of each file under a folder, those that nobody finished included."""
    files = []
    for inside, _, names in os.walk(folder):
        for path in (Path(inside, name) for name in names):
            # Another process may remove it meanwhile.
            with contextlib.suppress(FileNotFoundError):
                about = path.stat()
                files.append((about.st_mtime, about.st_size, path))
    return sorted(files)


def _trim(folder: Path, limit: int) -> None:
    """Remove the files that were used longest ago, until the others keep within the limit."""
    files = _files(folder)
    total = sum(size for _, size, _ in files)
    for _, size, path in files:
        if total <= limit:
            return
        # Where it cannot be removed, by its reader on some systems, it goes another time.
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            total -= size
