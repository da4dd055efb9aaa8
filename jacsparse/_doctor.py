"""What jacsparse finds on this machine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil

__all__ = ["report"]

# Distribution, what it is for and how to get it.
_OPTIONAL = (
    ("matplotlib", "figures", "pip install 'jacsparse[plot]'"),
    ("scikit-learn", "the digits data set", "pip install 'jacsparse[data]'"),
    ("librosa", "audio features", "pip install 'jacsparse[audio]'"),
    ("mkl", "a peer of the benchmarks", "pip install 'jacsparse[bench]'"),
    ("python-graphblas", "a peer of the benchmarks", "pip install 'jacsparse[bench]'"),
)


def report() -> None:
    """Print versions, threads, devices, caches, what is missing and how to get it."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    for line in (*_versions(), *_machine(), *_caches(), *_optional()):
        # Text, not a string: "[plot]" is no markup.
        table.add_row(*map(Text, line))
    Console().print(table)


def _versions() -> list[tuple[str, str]]:
    names = ("jacsparse", "torch", "numpy", "scipy", "numba")
    return [("Python", platform.python_version()), *((name, _version(name) or "not installed") for name in names)]


def _version(name: str) -> str | None:
    if name == "jacsparse":
        from ._version import __version__

        return __version__
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _machine() -> list[tuple[str, str]]:
    import torch

    from .patterns._runtime import threads

    lines = [("threads", f"{threads()} (torch.set_num_threads changes it)")]
    if torch.cuda.is_available():
        lines += [(f"GPU {number}", torch.cuda.get_device_name(number)) for number in range(torch.cuda.device_count())]
    else:
        built = torch.version.cuda
        lines.append(("GPU", "none that PyTorch sees" if built else "none: this PyTorch is built for the CPU alone"))
    return lines


def _caches() -> list[tuple[str, str]]:
    from .patterns._runtime import cache_directory, kernel_cache
    from .patterns._store import SHELVES, plan_limit, used

    kernels = kernel_cache()
    if kernels is None:
        return [("cache", f"{cache_directory()} cannot be written: kernels are compiled anew in each process; "
                 "set JACSPARSE_CACHE_DIR to a folder that can")]  # fmt: skip
    free = shutil.disk_usage(kernels).free
    sizes = {shelf: _size(*used(shelf)) for shelf in SHELVES}
    most = plan_limit() // 2**20
    limit = f"of at most {most:,} MiB" if most else "no more are kept"
    return [
        ("cache", f"{cache_directory()}, {free / 2**30:.0f} GiB free (jacsparse clear-cache empties it)"),
        ("compiled kernels", sizes["kernels"]),
        ("plans", f"{sizes['plans']}, {limit} (JACSPARSE_CACHE_MIB)"),
        ("features of sounds", sizes["features"]),
    ]


def _size(files: int, nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB in {files:,} files"


def _optional() -> list[tuple[str, str]]:
    lines = []
    for name, purpose, remedy in _OPTIONAL:
        lines.append((name, _version(name) or f"not installed ({purpose}): {remedy}"))
    return [*lines, ("CuPy", _cupy())]


def _cupy() -> str:
    """Whether it runs, where there is a device to run on; else whether it is there."""
    import torch

    from .patterns import _cuda

    if torch.cuda.is_available():
        try:
            return str(_cuda._cupy(torch.device("cuda", 0)).__version__)
        except (ImportError, RuntimeError) as error:
            return str(error)
    return "installed" if importlib.util.find_spec("cupy") else f"not installed (CUDA kernels): {_cuda.extra()}"
