"""Arrays that are kept on disk between runs.

A shelf is a folder of the cache directory, and each file on it holds the arrays of one key. Files appear whole or not
at all and are never written to again, so any number of processes may use a shelf at once. A damaged file, which an
archive's checksums tell, counts as missing. Results of symbolic phases (patterns of products, colourings) have
a limit: beyond it the least recently used ones are removed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from .archive import read_archive, write_archive

#: Symbolic results that are made in fewer seconds are not written.
SLOW = 0.02
#: Bytes that a disk reads in a second, about: what is made faster than it is read is not written.
READ = 1e9
#: MiB of symbolic results where the environment does not say.
LIMIT = 1024

Arrays = dict[str, np.ndarray]


def cache_directory() -> Path:
    """The directory of everything jacsparse keeps between runs: ``$JACSPARSE_CACHE_DIR``, else the user's cache."""
    chosen = os.environ.get("JACSPARSE_CACHE_DIR")
    if chosen:
        return Path(chosen)
    try:
        import platformdirs
    except ImportError:
        # A checkout that was never installed.
        return Path.home() / ".cache" / "jacsparse"
    return platformdirs.user_cache_path("jacsparse")


class Shelf:
    """A folder of the cache directory; every shelf that exists is one of `shelves`.

    Parameters
    ----------
    name : str
        The folder's name.
    contents : str
        What it holds, in words.
    """

    def __init__(self, name: str, contents: str) -> None:
        self.name, self.contents = name, contents
        _SHELVES.append(self)

    @property
    def folder(self) -> Path:
        """Where it is."""
        return cache_directory() / self.name

    def load(self, key: str) -> Arrays | None:
        """The arrays of a key; None where there are none, or the file is damaged."""
        path = self._path(key)
        try:
            content = read_archive(path, self.name)
        except (OSError, ValueError):
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return {name: array for name, array in content.items() if isinstance(array, np.ndarray)}

    def save(self, key: str, arrays: Arrays) -> None:
        """Write the arrays of a key; they replace its former ones.

        Raises
        ------
        OSError
            Where they cannot be written; the former ones stay.
        """
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_archive(path, self.name, arrays)

    def usage(self) -> tuple[int, int]:
        """The number of files, and their bytes."""
        files = self._files()
        return len(files), sum(size for _, size, _ in files)

    def clear(self) -> None:
        """Remove all files."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def trim(self, limit: int) -> None:
        """Remove the least recently used files until the others are at most `limit` bytes."""
        files = self._files()
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total <= limit:
                return
            # On some systems a file cannot be removed while a process reads it; a later call removes it.
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                total -= size

    def _path(self, key: str) -> Path:
        return self.folder / f"{hashlib.blake2b(key.encode(), digest_size=20).hexdigest()}.npz"

    def _files(self) -> list[tuple[float, int, Path]]:
        """Time of the last use, bytes and path of each file, unfinished ones included; oldest first."""
        files = []
        for folder, _, names in os.walk(self.folder):
            for path in (Path(folder, name) for name in names):
                # Another process may remove it meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    files.append((status.st_mtime, status.st_size, path))
        return sorted(files)


_SHELVES: list[Shelf] = []
KERNELS = Shelf("kernels", "compiled kernels")
SYMBOLIC = Shelf("symbolic", "results of symbolic phases")


def shelves() -> tuple[Shelf, ...]:
    """Every shelf of the packages imported so far."""
    return tuple(_SHELVES)


def cached_arrays(key: str, make: Callable[[], Arrays], *, packages: tuple[str, ...]) -> Arrays:
    """The result of a symbolic phase: from disk, or what `make` returns, which is written where that is worth it.

    Parameters
    ----------
    key : str
        What the result depends on, beside the packages.
    make : callable
        Makes the arrays.
    packages : tuple of str
        The packages whose sources decide what `make` returns: an edit to any of them starts afresh.
    """
    limit = symbolic_limit()
    if not limit:
        return make()
    key = f"{sources_digest(*packages)} {key}"
    arrays = SYMBOLIC.load(key)
    if arrays is not None:
        return arrays
    start = time.perf_counter()
    arrays = make()
    seconds = time.perf_counter() - start
    if seconds > SLOW and sum(array.nbytes for array in arrays.values()) < min(seconds * READ, limit / 4):
        # Where the disk is full or read-only, each run makes its results.
        with contextlib.suppress(OSError):
            SYMBOLIC.save(key, arrays)
            SYMBOLIC.trim(limit)
    return arrays


def symbolic_limit() -> int:
    """Bytes of symbolic results on disk, at most; 0 for none at all: ``$JACSPARSE_CACHE_MIB``, or `LIMIT`.

    Raises
    ------
    ValueError
        Where the environment holds no natural number.
    """
    chosen = os.environ.get("JACSPARSE_CACHE_MIB") or str(LIMIT)
    if not chosen.isdecimal():
        raise ValueError(f"JACSPARSE_CACHE_MIB is {chosen!r}; expected MiB of symbolic results on disk, or 0 for none")
    return int(chosen) * 2**20


@functools.cache
def sources_digest(*packages: str) -> str:
    """A digest of the Python sources of packages, those inside them included; of a module, of its file."""
    digest = hashlib.blake2b(digest_size=10)
    for path in sorted(path for package in packages for path in _sources(package)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _sources(package: str) -> list[Path]:
    spec = find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(f"there is no package {package}, whose sources a key of the cache is to stand for")
    if spec.submodule_search_locations is None:
        return [Path(str(spec.origin))]
    return [path for folder in spec.submodule_search_locations for path in Path(folder).rglob("*.py")]
