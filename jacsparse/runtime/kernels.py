"""Compile CPU kernels, and keep their machine code between runs.

A kernel is a Numba function over a range of rows, ``kernel(first, last, *arrays)``. It holds no lock and writes only
what its rows own, so any split of the rows over any number of threads gives the same bits.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.core import config as numba_config
from numba.core.compiler_lock import global_compiler_lock
from numba.core.runtime import rtsys
from numba.extending import intrinsic

from .disk_cache import KERNELS, sources_digest
from .messages import announce

#: The packages whose compiled functions kernels of all packages call.
_SHARED = ("jacsparse.codegen", "jacsparse.runtime")


@functools.cache
def kernel_cache(room: str) -> Path | None:
    """The directory of a package's compiled kernels, or None where nothing can be written.

    Its name is a digest of the package's sources together: an edit to any of them, the file of a kernel's callee
    included, starts a fresh one. So a kernel calls only compiled functions of its own package, and of `_SHARED` ones.

    Parameters
    ----------
    room : str
        Two levels of the package's name, as in ``jacsparse.spgemm``.
    """
    directory = KERNELS.folder / sources_digest(room, *_SHARED)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError:
        return None
    return directory


#: Nothing calls a kernel through the wrapper for C, which takes time to compile and to load.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` at its first call, without the GIL, and keep the machine code in `kernel_cache`."""
    room = ".".join(function.__module__.split(".")[:2])
    directory = kernel_cache(room)
    if directory is None:
        return numba.njit(**_OPTIONS)(function)
    # Numba reads the directory once, while it decorates; other users of Numba keep theirs.
    before, numba_config.CACHE_DIR = numba_config.CACHE_DIR, str(directory)
    try:
        compiled = numba.njit(cache=True, **_OPTIONS)(function)
    finally:
        numba_config.CACHE_DIR = before
    _forgive(compiled._cache)
    return compiled


def _forgive(cache: Any) -> None:
    """Let a damaged cache file, or a full disk, be no error: the kernel is compiled again."""
    load, save, flush = cache._load_overload, cache.save_overload, cache.flush

    def load_or_none(signature: Any, context: Any) -> Any:
        try:
            # Machine code needs Numba's memory alone. `cache.load_overload` would import all that Numba can compile.
            rtsys.initialize(context)
            loaded = load(signature, context)
        except Exception:
            # A damaged file may raise any exception.
            with contextlib.suppress(Exception):
                flush()
            loaded = None
        if loaded is None:
            _announce_compilation()
        return loaded

    def save_or_not(*arguments: Any) -> None:
        with contextlib.suppress(OSError):
            save(*arguments)

    cache.load_overload, cache.save_overload = load_or_none, save_or_not


@functools.cache
def _announce_compilation() -> None:
    """Tell once that kernels are compiled, which takes seconds where a machine has none yet."""
    announce(f"compiling kernels for this processor, once: later processes find them in {KERNELS.folder}")


def compiled_module(
    module: ir.Module, names: Sequence[str], *, optimize: bool = True, vectorize: bool = False
) -> tuple[object, list[int]]:
    """Compile functions of LLVM's as machine code for this processor.

    Parameters
    ----------
    module : Module
        The functions.
    names : sequence of str
        Of those that are called from outside.
    optimize : bool
        Whether the code is made fast, which takes the compiler five times as long.
    vectorize : bool
        Whether loops are vectorised too, which takes it twice as long again.

    Returns
    -------
    engine : object
        What holds the machine code.
    addresses : list of int
        Where the functions of these names begin.
    """
    # Numba's environment variables choose a processor for its kernels, and for this.
    cpu = numba_config.CPU_NAME or binding.get_host_cpu_name()
    features = numba_config.CPU_FEATURES
    if features is None:
        features = "" if numba_config.CPU_NAME else binding.get_host_cpu_features().flatten()
    with global_compiler_lock:
        parsed = binding.parse_assembly(str(module))
        level = 3 if optimize else 0
        target = binding.Target.from_default_triple().create_target_machine(
            cpu=cpu, features=features, opt=level, jit=True
        )
        if optimize:
            options = binding.create_pipeline_tuning_options(speed_level=level)
            options.loop_vectorization, options.slp_vectorization, options.loop_unrolling = vectorize, False, False
            builder = binding.create_pass_builder(target, options)
            builder.getModulePassManager().run(parsed, builder)
        engine = binding.create_mcjit_compiler(parsed, target)
        engine.finalize_object()
        return engine, [engine.get_function_address(name) for name in names]


@intrinsic
def _changed_mode(typing_context: Any, mask: Any, bits: Any) -> Any:
    """Set this thread's floating-point mode to ``mode & mask | bits``; return the former mode."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return changed_mode(builder, *args)

    return types.uint32(types.uint32, types.uint32), generate


def changed_mode(builder: Any, mask: Any, bits: Any) -> Any:
    """What sets the calling thread's floating-point mode to ``mode & mask | bits``, and the former mode."""
    word, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
    mode = cgutils.alloca_once(builder, word)

    def call(operation: str) -> None:
        kind = ir.FunctionType(ir.VoidType(), [pointer])
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.sse.{operation}")
        builder.call(function, [builder.bitcast(mode, pointer)])

    call("stmxcsr")
    before = builder.load(mode)
    builder.store(builder.or_(builder.and_(before, mask), bits), mode)
    call("ldmxcsr")
    return before


@kernel
def _change_mode(mask: int, bits: int) -> Any:
    return _changed_mode(np.uint32(mask), np.uint32(bits))


#: All bits of the mode; and the bit that flushes results below the smallest normal number to zero.
ALL, FLUSHING = 0xFFFFFFFF, 1 << 15


def flushing(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the kernel flushes results below the smallest normal number to zero.

    An operation with such a result takes many processors a hundred times as long. The mode is set on x86 alone; on
    other architectures the results stay, and on most of them cost nothing more.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return compiled

    @functools.wraps(compiled)
    def flushed(*args: Any) -> None:
        before = _change_mode(ALL, FLUSHING)
        try:
            compiled(*args)
        finally:
            _change_mode(0, before)

    flushed.compiled = compiled  # type: ignore[attr-defined]
    return flushed


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the function, which makes no array, is compiled into each kernel that calls it.

    It counts no references to its arrays: the caller has them, and counting takes longer than a short loop.
    """
    return numba.njit(forceinline=True, error_model="numpy", _nrt=False)(function)


def inlined_with_arrays(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: as `inlined`, for a function that makes arrays, or sorts one."""
    return numba.njit(forceinline=True, error_model="numpy")(function)
