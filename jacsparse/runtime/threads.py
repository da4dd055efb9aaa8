"""Kernels on as many threads as PyTorch uses.

`run_rows` splits a kernel's rows by work and runs the ranges on PyTorch's own OpenMP threads where its runtime lets us:
they wait awake, others would compete with them for the cores, and a compiled kernel needs no Python there. A forked
child, which has none of them, uses plain threads. Either way any number of callers may run kernels at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import interception
from .arrays import frozen
from .native_calls import Body, NativeSequence, native_call

# Fewer elementary operations than this (about 100 µs) run on one thread: waking others costs more than it saves.
SERIAL_WORK = 80_000
# Elementary operations of a row, beside those of its entries.
ROW_WORK = 4
# Elements that a vectorised loop handles in the time of one elementary operation.
SIMD = 8
# Ranges per thread: more than one, so that no thread waits long for a slow one.
RANGES_PER_THREAD = 4


def thread_count() -> int:
    """The number of threads that kernels run on: `torch.get_num_threads`."""
    return int(torch.get_num_threads())


def _library() -> ctypes.CDLL:
    """PyTorch's library, by which functions of its OpenMP runtime are found, whichever that is; OSError without one."""
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


@functools.cache
def _openmp() -> Callable[..., Any] | None:
    """``GOMP_parallel(body, argument, threads, flags)`` of PyTorch's OpenMP runtime; None where it has none."""
    try:
        parallel = _library().GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes, parallel.restype = (Body, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return parallel


@functools.cache
def _barrier() -> int | None:
    """The address of ``GOMP_barrier()``, by which OpenMP's threads wait for each other; None where there is none."""
    try:
        barrier = _library().GOMP_barrier
    except (OSError, AttributeError):
        return None
    return ctypes.cast(barrier, ctypes.c_void_p).value


@functools.cache
def _counts_of_this_thread() -> tuple[Callable[[int], object], Callable[[int], int]] | None:
    """What set the numbers of threads of OpenMP and of MKL, which returns the former, for the calling thread alone."""
    with contextlib.suppress(OSError, AttributeError):
        library = _library()
        return library.omp_set_num_threads, library.MKL_Set_Num_Threads_Local
    return None


@contextlib.contextmanager
def on_this_thread() -> Iterator[None]:
    """A context in which PyTorch's operators run on the calling thread alone, where its runtimes let us.

    ``torch.set_num_threads`` would also count for threads that begin meanwhile.
    """
    counts, before = _counts_of_this_thread(), thread_count()
    if counts is None or before == 1:
        yield
        return
    set_openmp, set_mkl = counts
    set_openmp(1)
    of_mkl = set_mkl(1)
    try:
        yield
    finally:
        set_openmp(before)
        set_mkl(of_mkl)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=max(1, (os.cpu_count() or 1) - 1), thread_name_prefix="jacsparse")


def _after_fork() -> None:
    """Forget OpenMP and the pool: a forked child has their objects, but none of their threads."""
    global _openmp
    _openmp = functools.cache(lambda: None)
    _pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _on_each(workers: int, task: Callable[[], None]) -> None:
    """Call `task` on `workers` threads at once, this one included."""
    parallel = _openmp()
    if parallel is not None:
        errors: list[BaseException] = []

        def body(_: Any) -> None:
            try:
                task()
            except BaseException as error:
                errors.append(error)

        parallel(Body(body), None, workers, 0)
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


@dataclass(frozen=True, eq=False)
class RowWork:
    """A running total of rows' work, for kernels that run on the same rows again and again: it is split once.

    Parameters
    ----------
    total : ndarray of int, shape (rows + 1,)
        As `run_rows` takes it.
    """

    total: np.ndarray
    _ends: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False)

    def ends(self, parts: int) -> np.ndarray:
        """The bounds of at most `parts` ranges of rows."""
        if parts not in self._ends:
            self._ends[parts] = frozen(np.array(split(self.total, parts), dtype=np.int64))
        return self._ends[parts]


#: The work of rows: a running total, or the number of elements of a flat loop.
Work = np.ndarray | RowWork | int


def _ends(work: Work, parts: int) -> np.ndarray:
    """The bounds of at most `parts` ranges of rows."""
    return work.ends(parts) if isinstance(work, RowWork) else np.array(split(work, parts), dtype=np.int64)


def run_rows(kernel: Callable[..., Any], work: Work, *args: Any, lanes: int = 1) -> None:
    """Call ``kernel(first, last, *args)`` on ranges that cover all rows.

    Parameters
    ----------
    kernel : callable
        Compiled by `kernel`; must write only what belongs to its rows.
    work : ndarray of int, shape (rows + 1,), RowWork or int
        Running total of the rows' work, in elementary operations for one lane; or the number of elements
        of a flat loop.
    *args
        Passed on.
    lanes : int
        How many samples each elementary operation handles.
    """
    if interception.active is not None:
        interception.active(functools.partial(_run_rows, kernel, work, args, lanes))
    else:
        _run_rows(kernel, work, args, lanes)


def _run_rows(kernel: Callable[..., Any], work: Work, args: tuple[Any, ...], lanes: int) -> None:
    rows = _rows(work)
    if _operations(work, lanes) < SERIAL_WORK or rows < 2 or (workers := thread_count()) == 1:
        kernel(0, rows, *args)
        return
    ends = _ends(work, RANGES_PER_THREAD * workers)
    if (parallel := _openmp()) is not None and (native := native_call(kernel, args)) is not None:
        native(parallel, workers, ends, args)
        return
    ranges = iter(list(pairwise(ends.tolist())))

    def drain() -> None:
        # `next` on a shared list iterator is atomic: each range is taken once, by whoever is free.
        for first, last in ranges:
            kernel(first, last, *args)

    _on_each(workers, drain)


def _rows(work: Work) -> int:
    if isinstance(work, int):
        return work
    return len(work.total if isinstance(work, RowWork) else work) - 1


def _operations(work: Work, lanes: int) -> int:
    """Elementary operations of all rows and lanes."""
    if isinstance(work, int):
        return lanes * (work // SIMD)
    total = work.total if isinstance(work, RowWork) else work
    return lanes * (int(total[-1]) + ROW_WORK * (len(total) - 1))


@dataclass(frozen=True)
class KernelRun:
    """What `run_rows` is called with."""

    kernel: Callable[..., Any]
    work: Work
    args: tuple[Any, ...]
    lanes: int = 1


class KernelSequence:
    """Runs of kernels one after the other, for which threads are started once where they need no Python.

    Parameters
    ----------
    runs : sequence of KernelRun
        Arrays among their arguments stay where they are.
    """

    def __init__(self, runs: Sequence[KernelRun]) -> None:
        self.runs = tuple(runs)
        self._is_light = sum(_operations(run.work, run.lanes) for run in self.runs) < SERIAL_WORK
        #: By numbers of threads, the sequence; None where a kernel needs Python.
        self._native: dict[int, NativeSequence | None] = {}

    def __call__(self) -> None:
        """Run all; not from several threads at once."""
        parallel, workers = _openmp(), 1 if self._is_light else thread_count()
        if parallel is not None and interception.active is None:
            if workers not in self._native:
                self._native[workers] = self._for_threads(workers)
            if (native := self._native[workers]) is not None:
                native(parallel, workers)
                return
        for run in self.runs:
            run_rows(run.kernel, run.work, *run.args, lanes=run.lanes)

    def _for_threads(self, workers: int) -> NativeSequence | None:
        calls, barrier = [], _barrier()
        for run in self.runs:
            native = native_call(run.kernel, run.args)
            if native is None or barrier is None:
                return None
            parts = RANGES_PER_THREAD * workers if workers > 1 and _rows(run.work) > 1 else 1
            calls.append((native, _ends(run.work, parts), run.args))
        return NativeSequence(calls, barrier or 0)
