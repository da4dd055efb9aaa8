"""``jacsparse doctor``: say what is installed and what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

# Distributions, their purpose and how to get them.
_OPTIONAL = (
    ("matplotlib", "figures", "pip install 'jacsparse[plot]'"),
    ("scikit-learn", "the digits data set", "pip install 'jacsparse[data]'"),
    ("librosa", "audio features", "pip install 'jacsparse[audio]'"),
    ("mkl", "a peer of the benchmarks", "pip install 'jacsparse[bench]'"),
    ("python-graphblas", "a peer of the benchmarks", "pip install 'jacsparse[bench]'"),
)


def doctor(
    compile: Annotated[
        bool, typer.Option("--compile", help="First compile the kernels that most calls run, so that they need not.")
    ] = False,
) -> None:
    """Say what is installed, what is missing and how to get it."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    for line in (*(_compiled() if compile else ()), *_versions(), *_machine(), *_caches(), *_optional()):
        # Rich would read "[plot]" in a string as markup.
        table.add_row(*map(Text, line))
    Console().print(table)


def _compiled() -> Iterator[tuple[str, str]]:
    """Small calls of each kind, and the seconds of processor time that each took."""
    import torch

    for dtype in (torch.float32, torch.float64):
        for what, call in _small_calls(dtype).items():
            begin = time.process_time()
            call()
            yield "compiled", f"{what} in {dtype}: {time.process_time() - begin:.1f} s of one core"


def _small_calls(dtype: Any) -> dict[str, Callable[[], None]]:
    import torch
    from torch import nn

    import jacsparse

    def difference(u: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(u[..., 1:], (0, 1)) - 2 * u - u**3 + 1

    x, u = torch.rand(2, 1, 8, 8, dtype=dtype), torch.rand(2, 1000, dtype=dtype)

    def layers() -> None:
        network = nn.Sequential(
            nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32, 4)
        )
        for module in (network.to(dtype), network[0]):
            J = jacsparse.jacobian(module, x)
            J.vjp(J.jvp(x))

    def functions() -> None:
        jacsparse.jacobian(difference, u[0])
        jacsparse.prepare_jacobian(difference, u, batched=True)(u)
        jacsparse.hessian(lambda u: (u[1:] * u[:-1] ** 2).sum(), u[0])

    def systems() -> None:
        J = jacsparse.jacobian(difference, u, batched=True)
        J @ J.gram()
        J.outer() + J
        for samples in (u, u.reshape(500, 4)):
            jacsparse.newton(difference, torch.zeros_like(samples), batched=True)

    def recurrent() -> None:
        for layer in (jacsparse.nn.RNN, jacsparse.nn.GRU, jacsparse.nn.LSTM):
            layer(3, 20).to(dtype)(torch.rand(100, 16, 3, dtype=dtype))[0].sum().backward()

    return {"Jacobians of layers": layers, "of functions": functions, "systems": systems, "recurrent layers": recurrent}


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
