"""Calls that are timed: how they are made and, on CUDA devices, timed by events and replayed as graphs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

__all__ = ["GRAPH", "MODES", "Call", "block_times", "captured", "full_precision", "in_mode", "labelled", "ready"]

Call: TypeAlias = Callable[[], object]

GRAPH = "CUDA graph"
#: How calls are timed, by device: on CUDA as they come, and without their launches as replays of a graph.
MODES = {"cpu": ("",), "cuda": ("eager", GRAPH)}

# Seconds between two events at least, of which one resolves half a microsecond.
_BLOCK = 5e-3
# Runs before a capture, in which libraries choose algorithms and allocate what they keep.
_WARM_UP = 3


def labelled(label: str, mode: str) -> str:
    """What is called in a mode.

    Examples
    --------
    >>> labelled("forward pass", "eager"), labelled("forward pass", "")
    ('forward pass, eager', 'forward pass')
    """
    return f"{label}, {mode}" if mode else label


def in_mode(make: Callable[[], Call], mode: str) -> Call:
    """A call in one of `MODES` that is made, and captured, when it first runs: what fails then is its first run.

    Parameters
    ----------
    make : callable
        Makes the call.
    mode : str
        How it is to run.
    """
    return _Deferred(functools.partial(captured, make) if mode == GRAPH else make)


def ready(call: Call) -> Callable[[], Call]:
    """What makes a call that is there already, for `in_mode`."""
    return lambda: call


class _Deferred:
    def __init__(self, make: Callable[[], Call]) -> None:
        self._make = make

    @functools.cached_property
    def _call(self) -> Call:
        return self._make()

    def __call__(self) -> None:
        self._call()


def block_times(function: Call, seconds: float) -> tuple[list[float], int]:
    """How long runs of a function take on the device, for about so many seconds: means of blocks, and all runs.

    A block is as many calls as fill 5 ms between two events. Calls follow one another without waiting for the device:
    where launching takes longer than running does, the times are those of launching.
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
    """A function as a CUDA graph that was captured once: calling it replays the graph.

    Parameters
    ----------
    make : callable
        Makes the function. It runs on the stream of the capture, where autograd then runs the backward pass of what it
        computes.

    Raises
    ------
    RuntimeError
        Where it cannot be captured; the message says why.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function = make()
        for _ in range(_WARM_UP):
            function()
        # A capture that fails leaves PyTorch's allocator unfit for others: what would fail it is looked for beforehand.
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
        # The end of the capture fails too, and says less.
        raise RuntimeError(f"its capture failed: {error.__context__ or error}") from error
    return _Replay(graph, function)


@dataclass(frozen=True, eq=False)
class _Replay:
    """A graph, and the function that holds the memory that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    function: Call

    def __call__(self) -> None:
        self.graph.replay()


def full_precision() -> None:
    """Keep everybody's float32 arithmetic float32: cuDNN would round the factors of its products to 10 bits."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
