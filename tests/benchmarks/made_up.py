"""A CUDA device that is made up: what PyTorch says of it, and events, streams and graphs that note what is asked."""

from __future__ import annotations

import contextlib
import inspect
import subprocess
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks import _environment


class Device:
    """What happened on it.

    Attributes
    ----------
    log : list of str
        In order.
    mode : str
        What happens where something waits for the device.
    capturing : bool
        Whether a graph is being captured.
    now : float
        Seconds that its work has taken.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.mode, self.capturing, self.now = "default", False, 0.0

    def synchronise(self) -> None:
        """What ``item()`` does."""
        if self.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        if self.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")


def device(monkeypatch: pytest.MonkeyPatch, smi: str = "1.2.3, 1980 MHz, 3201 MHz") -> Device:
    """Make PyTorch believe in one for the rest of a test; its memory is the CPU's."""
    gpu = Device()

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self) -> None:
            self.time = time.perf_counter() + gpu.now

        def synchronize(self) -> None:
            return

        def elapsed_time(self, end: Event) -> float:
            return 1e3 * (end.time - self.time)

    class Stream:
        cuda_stream = 7

        def wait_stream(self, other: Stream) -> None:
            assert isinstance(other, Stream)

    class Graph:
        def replay(self) -> None:
            gpu.log.append("replay")

    @contextlib.contextmanager
    def stream(chosen: Stream) -> Iterator[None]:
        gpu.log.append("stream")
        yield
        gpu.log.append("end of stream")

    @contextlib.contextmanager
    def graph(made_of: Graph, stream: Stream) -> Iterator[None]:
        assert isinstance(made_of, Graph) and isinstance(stream, Stream)
        gpu.log.append("capture")
        gpu.capturing = True
        try:
            yield
        except RuntimeError:
            # As capture_end does: its own error, in the context of the first.
            raise RuntimeError("capture was invalidated")  # noqa: B904
        finally:
            gpu.capturing = False

    def set_mode(mode: str) -> None:
        gpu.mode = mode

    properties = types.SimpleNamespace(
        name="Made Up H300", major=9, minor=9, multi_processor_count=7, total_memory=3 * 2**30
    )
    for name, value in {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_properties": lambda _: properties,
        "mem_get_info": lambda: (2**40, 2**40),
        "synchronize": lambda: None,
        "current_stream": lambda *_: Stream(),
        "set_sync_debug_mode": set_mode,
        "Event": Event,
        "Stream": Stream,
        "CUDAGraph": Graph,
        "stream": stream,
        "graph": graph,
        # Optimisers ask by either, in PyTorch built for CUDA; their parameters are on the CPU.
        "is_current_stream_capturing": lambda: False,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91234)

    run_program = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        if command[0] != "nvidia-smi":
            return run_program(command, **options)
        return types.SimpleNamespace(stdout=f"{smi}\n")

    monkeypatch.setattr(subprocess, "run", run)
    # Without what was said before.
    monkeypatch.setattr(_environment, "_nvidia_smi", inspect.unwrap(_environment._nvidia_smi))
    return gpu
