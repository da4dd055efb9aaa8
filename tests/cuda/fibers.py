"""Compiles CUDA kernels with g++ against `fibers.h` and calls them through ctypes; needs NumPy alone.

``FIBER_SANITIZER`` chooses the build: none, ``address`` (with undefined behaviour) or ``thread``. Sanitized builds load
only into a process that has the sanitizer preloaded: `sanitized` starts one. ``FIBER_ORDER`` chooses in which order
threads and blocks run: 0 ascending, 1 descending, other numbers shuffled.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
_COMMON = ("-std=c++20", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-gnu-unique")
# Lines are all that a report names of debugging information.
_SANITIZED = {
    "": ("-O2",),
    "address": ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"),
    "thread": ("-O1", "-g1", "-fsanitize=thread"),
    # Loads and stores call what `traffic.cpp` has.
    "traffic": (
        "-O2", "-fsanitize=kernel-address",
        *(f"--param=asan-{name}=0" for name in ("instrumentation-with-call-threshold", "stack", "globals")),
    ),
}  # fmt: skip


#: Enough to show what depends on one: ascending, descending, and two shuffles.
ORDERS = ("0", "1", "2", "3")


class KernelError(RuntimeError):
    """What was found while a kernel ran."""


@functools.cache
def library(name: str, code: str, sanitizer: str) -> Path:
    """A shared library of kernels."""
    flags, objects = (*_SANITIZED[sanitizer], f"-I{HERE}", "-shared"), [_object("fibers")]
    if sanitizer == "traffic":
        objects.append(_object("traffic"))
    return _built(f"{name}-{sanitizer or 'plain'}", ".so", code, flags, objects)


@functools.cache
def _object(name: str) -> Path:
    """An object file that is not instrumented: fibers tell sanitizers of themselves."""
    return _built(name, ".o", (HERE / f"{name}.cpp").read_text(encoding="utf-8"), ("-O2", f"-I{HERE}", "-c"))


def _built(name: str, suffix: str, code: str, flags: Sequence[str], objects: Sequence[Path] = ()) -> Path:
    """What g++ makes of the code and of the object files; kept from run to run, by what it is made of."""
    digest = hashlib.blake2b(digest_size=10)
    header = (HERE / "fibers.h").read_text(encoding="utf-8")
    for part in (code, header, *flags, *_COMMON, *(file.name for file in objects)):
        digest.update(part.encode() + b"\0")
    import platformdirs

    folder = Path(os.environ.get("JACSPARSE_CACHE_DIR") or platformdirs.user_cache_path("jacsparse")) / "fibers"
    path = folder / f"{name}-{digest.hexdigest()}{suffix}"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / f"{path.stem}.lock"
    with lock.open("w") as file:
        # Of several processes that need it at once, one compiles.
        fcntl.flock(file, fcntl.LOCK_EX)
        if not path.exists():
            _compile(name, path, code, flags, objects)
        lock.unlink(missing_ok=True)
    return path


def _compile(name: str, path: Path, code: str, flags: Sequence[str], objects: Sequence[Path]) -> None:
    work = path.with_name(f"{path.stem}-{os.getpid()}")
    work.mkdir(exist_ok=True)
    try:
        (work / "code.cpp").write_text(code, encoding="utf-8")
        # A sanitizer's library, preloaded, would be loaded into the compiler too.
        environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
        command = [COMPILER, *_COMMON, *flags, "code.cpp", *objects, "-o", "built"]
        subprocess.run(command, check=True, capture_output=True, encoding="utf-8", env=environment, cwd=work)
        (work / "built").replace(path)
    except subprocess.CalledProcessError as error:
        raise KernelError(f"{name} does not compile:\n{error.stderr}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


_BOUNDED = re.compile(r"(template <[^>]*>)\s*__global__ void\s+__launch_bounds__\(([^()]*),\s*\d+\)\s*(\w+)")


def generated(source: str, instances: Sequence[str]) -> str:
    """The file that g++ compiles: a launcher for each instance, by its number, and the bound of its blocks."""
    bounded = {name for _, _, name in _BOUNDED.findall(source)}
    source = _BOUNDED.sub(r"\1 constexpr std::size_t \3_bound = \2; \1 __global__ void \3", source)
    launchers = []
    for number, instance in enumerate(instances):
        name, _, types = instance.partition("<")
        bound = f"{name}_bound<{types}" if name in bounded else "1024"
        launchers.append(f"constexpr std::size_t bound_{number} = {bound};\nFIBER_LAUNCHER({number}, {instance})")
    # In an anonymous namespace: AddressSanitizer then guards what templates hold.
    return "\n".join(('#include "fibers.h"', "namespace {", source, "}", *launchers, ""))


@functools.cache
def compiled(name: str, source: str, instances: tuple[str, ...]) -> dict[str, Any]:
    """Functions ``(arguments, grid, block, shared)``, by instance."""
    path = library(name, generated(source, instances), os.environ.get("FIBER_SANITIZER", ""))
    loaded = ctypes.CDLL(str(path))
    return {instance: declare(getattr(loaded, f"launch_{number}")) for number, instance in enumerate(instances)}


def declare(launcher: Any) -> Any:
    """A library's launcher, with the types of its arguments."""
    sizes = ctypes.POINTER(ctypes.c_uint)
    launcher.argtypes = (ctypes.POINTER(ctypes.c_void_p), sizes, sizes, ctypes.c_size_t)
    launcher.restype = ctypes.c_char_p
    return launcher


def call(function: Any, grid: Sequence[int], block: Sequence[int], arguments: Sequence[Any], shared: int = 0) -> None:
    """Run a kernel; arguments are NumPy scalars, arrays, tensors or None.

    Raises
    ------
    KernelError
        Where its threads wait for ever, or use a collective wrongly.
    """
    cells: list[Any] = []
    for argument in arguments:
        if hasattr(argument, "data_ptr"):
            cells.append(ctypes.c_uint64(argument.data_ptr()))
        elif argument is None:
            cells.append(ctypes.c_uint64(0))
        elif argument.ndim:
            cells.append(ctypes.c_uint64(argument.ctypes.data))
        else:
            cells.append((ctypes.c_char * argument.nbytes).from_buffer_copy(argument.tobytes()))
    pointers = (ctypes.c_void_p * max(1, len(cells)))(*(ctypes.addressof(cell) for cell in cells))
    three = ctypes.c_uint * 3
    failure = function(pointers, three(*grid), three(*block), shared)
    if failure:
        raise KernelError(failure.decode())


def sanitized(kind: str, arguments: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments under a sanitizer, ``address`` or ``thread``; all it says is in stdout."""
    name = {"address": "libasan.so", "thread": "libtsan.so"}[kind]
    command = [str(COMPILER), f"-print-file-name={name}"]
    library = subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout.strip()
    settings = {
        "LD_PRELOAD": os.path.realpath(library),
        "FIBER_SANITIZER": kind,
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        # At its end it would wait a second for other threads.
        "TSAN_OPTIONS": "report_signal_unsafe=0:halt_on_error=1:atexit_sleep_ms=0",
        "PYTHONPATH": str(HERE.parent.parent),
        # Their threads are no business of the kernels'.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        **environment,
    }
    command = [sys.executable, *arguments]
    if kind == "thread" and (setarch := shutil.which("setarch")):
        # ThreadSanitizer may find no room for its shadow where addresses are drawn from all 32 bits.
        command = [setarch, "-R", *command]
    output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run(command, **output, env={**os.environ, **settings}, timeout=1800, check=False)
