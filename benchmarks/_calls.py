"""The calls that are measured: their times on CUDA devices, by events and as replays of graphs, and their memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import torch

from jacsparse.runtime import MEMORY_POOL

Call: TypeAlias = Callable[[], object]

GRAPH = "CUDA graph"
#: The modes in which calls are timed, by device: on CUDA one by one, and as replays of a graph without their launches.
MODES = {"cpu": ("",), "cuda": ("eager", GRAPH)}

# The least seconds between two events, whose resolution is half a microsecond.
_BLOCK = 5e-3
# Runs before a capture, in which libraries choose algorithms and allocate memory.
_WARM_UP = 3


def labelled(label: str, mode: str) -> str:
    """The label of a call in a mode.

    Examples
    --------
    >>> labelled("forward pass", "eager"), labelled("forward pass", "")
    ('forward pass, eager', 'forward pass')
    """
    return f"{label}, {mode}" if mode else label


def in_mode(make: Callable[[], Call], mode: str) -> Call:
    """A call in one of `MODES`; its first run calls `make`, captures a graph if needed, and raises their errors."""
    prepared = functools.cache(functools.partial(captured, make) if mode == GRAPH else make)
    return lambda: prepared()()


def ready(call: Call) -> Callable[[], Call]:
    """A function for `in_mode` that returns an existing call."""
    return lambda: call


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run the body on one thread of PyTorch's, as each worker runs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def block_times(function: Call, seconds: float) -> tuple[list[float], int]:
    """Mean seconds of the runs in each block, and the number of runs; blocks run for about `seconds` on the device.

    A block is as many calls as fill 5 ms between two events. Calls follow one another without waiting for the device:
    if launching takes longer than running, the times are those of launching.
    """
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def block(number: int) -> float:
        begin.record()
        for _ in range(number):
            function()
        end.record()
        end.synchronize()
        return max(1e-9, 1e-3 * float(begin.elapsed_time(end)))

    number = math.ceil(_BLOCK / min(_BLOCK, block(1)))
    blocks = [block(number)]
    while sum(blocks) < seconds:
        blocks.append(block(number))
    return [block / number for block in blocks], number * len(blocks)


def captured(make: Callable[[], Call]) -> Call:
    """The function that `make` returns, captured once as a CUDA graph: a call replays it. RuntimeError if that fails.

    `make` runs on the stream of the capture, so that autograd runs backward passes on this stream, too.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function = make()
        for _ in range(_WARM_UP):
            function()
        # A failed capture makes PyTorch's allocator unfit for others: a run beforehand finds what would fail.
        torch.cuda.set_sync_debug_mode("error")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            function()
    except RuntimeError as error:
        # The end of the capture fails, too; its own message says less.
        raise RuntimeError(f"its capture failed: {error.__context__ or error}") from error
    return functools.partial(_replay, graph, function)


def _replay(graph: torch.cuda.CUDAGraph, function: Call) -> None:
    """Replay a graph; as long as this can be called, there is the function whose memory the graph reads and writes."""
    graph.replay()


def full_precision() -> None:
    """Make all libraries compute in full float32: cuDNN would round the factors of its products to 10 bits."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_memory(function: Callable[[], object]) -> int:
    """Bytes by which resident memory rises while a function runs; OSError or AttributeError if the system hides it.

    Linux with the GNU C library shows it, and lets a process reset its peak.
    """
    gc.collect()
    # The function could use freed memory that the pool or the C library holds, which would not be counted.
    MEMORY_POOL.clear()
    ctypes.CDLL(None).malloc_trim(0)
    _CLEAR.write_text("5", encoding="utf-8")
    before = _kibibytes("VmRSS")
    function()
    return 1024 * max(0, _kibibytes("VmHWM") - before)


def _kibibytes(name: str) -> int:
    line = next(line for line in _STATUS.read_text(encoding="utf-8").splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1])
