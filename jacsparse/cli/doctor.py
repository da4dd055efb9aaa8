"""``jacsparse doctor``: say what is installed and what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil

# Distributions, their purpose and how to get them.
_OPTIONAL = (
    ("matplotlib", "figures", "pip install 'jacsparse[plot]'"),
    ("scikit-learn", "the digits data set", "pip install 'jacsparse[data]'"),
    ("librosa", "audio features", "pip install 'jacsparse[audio]'"),
    ("mkl", "a peer of the benchmarks", "pip install 'jacsparse[bench]'"),
    ("python-graphblas", "a peer of the benchmarks", "pip install 'jacsparse[bench]'"),
)


def doctor() -> None:
    """Say what is installed, what is missing and how to get it."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    for line in (*_versions(), *_machine(), *_caches(), *_optional()):
        # Rich would read "[plot]" in a string as markup.
        table.add_row(*map(Text, line))
    Console().print(table)


def _versions() -> list[tuple[str, str]]:
    from .._version import __version__

    names = ("torch", "numpy", "scipy", "numba")
    lines = [(name, _version(name) or "not installed") for name in names]
    return [("Python", platform.python_version()), ("jacsparse", __version__), *lines]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _machine() -> list[tuple[str, str]]:
    import torch

    from ..runtime import thread_count

    lines = [("threads", f"{thread_count()} (torch.set_num_threads changes it)")]
    if torch.cuda.is_available():
        lines += [(f"GPU {number}", torch.cuda.get_device_name(number)) for number in range(torch.cuda.device_count())]
    else:
        built = torch.version.cuda
        lines.append(("GPU", "none that PyTorch sees" if built else "none: this PyTorch is built for the CPU alone"))
    return lines


def _caches() -> list[tuple[str, str]]:
    from ..models import SOUNDS
    from ..runtime import SYMBOLIC, cache_directory, check_writable, shelves, symbolic_limit

    directory = cache_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        check_writable(directory / "file")
    except OSError:
        return [("cache", f"{directory} cannot be written: kernels are compiled anew in each process; "
                 "set JACSPARSE_CACHE_DIR to a folder that can")]  # fmt: skip
    free = shutil.disk_usage(directory).free
    lines = [("cache", f"{directory}, {free / 2**30:.0f} GiB free (jacsparse clear-cache empties it)")]
    most = symbolic_limit() // 2**20
    limit = f", of at most {most:,} MiB (JACSPARSE_CACHE_MIB)" if most else ", no more are kept (JACSPARSE_CACHE_MIB)"
    # The import above registers the shelf of sounds.
    assert SOUNDS in shelves()
    for shelf in shelves():
        files, nbytes = shelf.usage()
        size = f"{nbytes / 2**20:.1f} MiB in {files:,} files"
        lines.append((shelf.contents, size + limit if shelf is SYMBOLIC else size))
    return lines


def _optional() -> list[tuple[str, str]]:
    lines = [(name, _version(name) or f"not installed ({use}): {remedy}") for name, use, remedy in _OPTIONAL]
    return [*lines, ("CuPy", _cupy())]


def _cupy() -> str:
    """The version of CuPy, or why it does not run on the device; without a device, whether it is installed."""
    import torch

    from ..runtime import cupy_for, gpu_extra

    if torch.cuda.is_available():
        try:
            return str(cupy_for(torch.device("cuda", 0)).__version__)
        except (ImportError, RuntimeError) as error:
            return str(error)
    return "installed" if importlib.util.find_spec("cupy") else f"not installed (CUDA kernels): {gpu_extra()}"
