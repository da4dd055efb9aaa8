"""Where kernels are compiled, cached and run.

A kernel is a Numba function over a range of rows, ``kernel(first, last, *arrays)``. It holds no lock and writes
only what its rows own, so any split of the rows over any number of threads gives the same bits. `run_rows` makes that
split by work, and runs it on as many threads as PyTorch uses: on PyTorch's own OpenMP threads where its runtime lets
us, for they wait awake, and others would compete with them for the cores. A forked child, which has none of them, uses
plain threads. Either way any number of callers may run kernels at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.core import config as numba_config
from numba.extending import intrinsic

# Private: where a PyTorch lacks one, what is public does, and costs more.
try:
    from torch._compile import _disable_dynamo as _disable
except ImportError:
    _disable = torch.compiler.disable
try:
    from torch._C._dynamo.eval_frame import get_eval_frame_callback as _frames_seen_by
except ImportError:

    def _frames_seen_by() -> object:  # type: ignore[misc]
        return None


__all__ = [
    "cache_directory",
    "flushing",
    "inlined",
    "kernel",
    "kernel_cache",
    "plan_sources",
    "run_rows",
    "split",
    "threads",
    "uncompiled",
]

# Below this many elementary operations (about 100 µs), waking a thread costs more than it saves.
SERIAL_WORK = 80_000
# Elementary operations that a row takes beside those of its entries.
ROW_WORK = 4
# Elements that a flat loop handles in the time of one elementary operation.
SIMD = 8
# Ranges per thread: a slow thread then hands over its last ones instead of being waited for.
RANGES_PER_THREAD = 4

# The folders that hold kernels, and those that decide what is in a plan; where a place is another in a checkout than
# where the package is installed, both.
_KERNELS = ("patterns", "spgemm", "jacsparse/recurrence", "recurrence")
_PLANS = ("patterns", "spgemm", "jacsparse", ".")


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


@functools.cache
def kernel_cache() -> Path | None:
    """Where compiled kernels are kept, or None where nothing can be written.

    The directory's name is a digest of all kernel sources together: an edit to any of them, a kernel's callee in
    another file included, starts a fresh one.
    """
    directory = cache_directory() / "kernels" / _digest(_KERNELS)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError:
        return None
    return directory


@functools.cache
def plan_sources() -> str:
    """A digest of all sources that decide what is in a plan: of rules, structures, products and orders."""
    return _digest(_PLANS)


def _digest(folders: Sequence[str]) -> str:
    """Of the sources in folders, named from the one above this file's."""
    here = Path(__file__).parent
    sources = {path.resolve() for folder in folders for path in (here.parent / folder).glob("*.py")}
    digest = hashlib.blake2b(digest_size=10)
    for path in sorted(sources | {Path(__file__).resolve()}):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` at its first call, without the GIL, and keep the machine code in `kernel_cache`."""
    directory = kernel_cache()
    if directory is None:
        return numba.njit(nogil=True, error_model="numpy")(function)
    # Numba reads the directory once, while it decorates; other users of Numba keep theirs.
    before, numba_config.CACHE_DIR = numba_config.CACHE_DIR, str(directory)
    try:
        compiled = numba.njit(nogil=True, error_model="numpy", cache=True)(function)
    finally:
        numba_config.CACHE_DIR = before
    _forgive(compiled._cache)
    return compiled


def _forgive(cache: Any) -> None:
    """Make a damaged file of Numba's cache, or a full disk, no error: a kernel is then compiled once more."""
    load, save, flush = cache.load_overload, cache.save_overload, cache.flush

    def load_or_none(*arguments: Any) -> Any:
        try:
            return load(*arguments)
        except Exception:
            # What is damaged raises anything.
            with contextlib.suppress(Exception):
                flush()
            return None

    def save_or_not(*arguments: Any) -> None:
        with contextlib.suppress(OSError):
            save(*arguments)

    cache.load_overload, cache.save_overload = load_or_none, save_or_not


@intrinsic
def _changed_mode(typing_context: Any, kept: Any, added: Any) -> Any:
    """Keep some bits of this thread's floating-point mode, and set others; the mode that it had."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
        mode = cgutils.alloca_once(builder, word)

        def call(operation: str) -> None:
            kind = ir.FunctionType(ir.VoidType(), [pointer])
            function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.sse.{operation}")
            builder.call(function, [builder.bitcast(mode, pointer)])

        call("stmxcsr")
        before = builder.load(mode)
        builder.store(builder.or_(builder.and_(before, args[0]), args[1]), mode)
        call("ldmxcsr")
        return before

    return types.uint32(types.uint32, types.uint32), generate


@kernel
def _change_mode(kept: int, added: int) -> Any:
    return _changed_mode(np.uint32(kept), np.uint32(added))


#: All bits of the mode; and the one by which results below the smallest normal number are zeros.
_ALL, _FLUSHING = 0xFFFFFFFF, 1 << 15


def flushing(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a kernel whose results are zeros where they are below the smallest normal number.

    Many processors take a hundred times as long for an operation that has such a result. Only those of the x86
    architecture have a mode that this sets; on others they stay, and cost nothing more on most.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return compiled

    @functools.wraps(compiled)
    def flushed(*args: Any) -> None:
        before = _change_mode(_ALL, _FLUSHING)
        try:
            compiled(*args)
        finally:
            _change_mode(0, before)

    return flushed


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` into each kernel that calls it."""
    return numba.njit(forceinline=True, error_model="numpy")(function)


def threads() -> int:
    """How many threads kernels run on: PyTorch's number."""
    return int(torch.get_num_threads())


# What an OpenMP thread runs; its argument is not used.
_Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@functools.cache
def _openmp() -> Callable[..., Any] | None:
    """``GOMP_parallel(body, argument, threads, flags)`` of the OpenMP runtime that PyTorch runs on, if it has one."""
    try:
        # Looked up through the library that needs it, which finds whichever runtime this is.
        parallel = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes, parallel.restype = (_Body, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return parallel


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=max(1, (os.cpu_count() or 1) - 1), thread_name_prefix="jacsparse")


def _after_fork() -> None:
    """A forked child has the team's and the pool's objects, but none of their threads."""
    global _openmp
    _openmp = functools.cache(lambda: None)
    _pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _on_each(workers: int, task: Callable[[], None]) -> None:
    """Call `task` on so many threads at once, this one among them."""
    parallel = _openmp()
    if parallel is not None:
        errors: list[BaseException] = []

        def body(_: Any) -> None:
            try:
                task()
            except BaseException as error:
                errors.append(error)

        parallel(_Body(body), None, workers, 0)
        if errors:
            raise errors[0]
        return
    helpers = [_pool().submit(task) for _ in range(workers - 1)]
    try:
        task()
    finally:
        for helper in helpers:
            # A helper that has not begun has nothing left to do.
            if not helper.cancel():
                helper.result()


def split(work: np.ndarray | int, parts: int) -> list[int]:
    """Bounds of at most `parts` ranges of rows with about equal work.

    Parameters
    ----------
    work : ndarray of int, shape (rows + 1,), or int
        Running total of the rows' work, starting at 0; or the number of rows that are all alike.
    parts : int
        How many ranges at most.

    Examples
    --------
    >>> split(np.array([0, 8, 9, 10, 16]), 2)
    [0, 1, 4]
    >>> split(10, 3)
    [0, 3, 6, 10]
    """
    if isinstance(work, int):
        return [work * part // parts for part in range(parts + 1)]
    rows = len(work) - 1
    targets = int(work[-1]) * np.arange(1, parts) // parts
    inner = np.searchsorted(work, targets, side="left")
    return sorted({0, rows, *inner.tolist()})


def run_rows(kernel: Callable[..., Any], work: np.ndarray | int, *args: Any, lanes: int = 1) -> None:
    """Call ``kernel(first, last, *args)`` on ranges that cover all rows.

    Parameters
    ----------
    kernel : callable
        Compiled by `kernel`; must write only what belongs to its rows.
    work : ndarray of int, shape (rows + 1,), or int
        Running total of the rows' work, in elementary operations for one lane; or the number of elements
        of a flat loop.
    *args
        Passed on.
    lanes : int
        How many samples each elementary operation handles.
    """
    if isinstance(work, int):
        rows, total = work, work // SIMD
    else:
        rows = len(work) - 1
        total = int(work[-1]) + ROW_WORK * rows
    if total * lanes < SERIAL_WORK or rows < 2 or (workers := threads()) == 1:
        kernel(0, rows, *args)
        return
    bounds = split(work, RANGES_PER_THREAD * workers)
    ranges = iter(list(pairwise(bounds)))

    def drain() -> None:
        # `next` on a shared list iterator is atomic: each range is taken once, by whoever is free.
        for first, last in ranges:
            kernel(first, last, *args)

    _on_each(workers, drain)


Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Decorator: torch.compile leaves the function as it is.

    As torch.compiler.disable, which imports the compiler at once, for seconds: this only where something is compiled.
    Where the caller's frame was too often compiled anew and is now run as it is, the frames that it calls still are.
    """
    apart = _disable(function)

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        compiles = torch.compiler.is_dynamo_compiling() or _frames_seen_by() is not None
        return (apart if compiles else function)(*arguments, **options)

    return call  # type: ignore[return-value]
