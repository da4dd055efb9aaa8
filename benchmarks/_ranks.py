"""Processes that form a group of ranks on this machine."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from jacsparse.runtime import destroy_process_groups

T = TypeVar("T")
Say: TypeAlias = Callable[[str], None]

# How long a rank waits for another.
_TIMEOUT = timedelta(minutes=5)


def on_ranks(task: Callable[[Say], T], count: int, say: Say) -> list[T]:
    """What a task returns on each of `count` new processes, with one thread of PyTorch's each, in a group of gloo's.

    Parameters
    ----------
    task : callable
        A function that can be pickled. It runs once in each process, with a function that shows a line about the
        progress.
    count : int
        The number of processes.
    say : callable
        Shows the lines of all processes.
    """
    context = multiprocessing.get_context("spawn")
    # The store is this process's, so that it outlives the ranks.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    shared = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(count),
    }
    lines = context.Queue()
    with ProcessPoolExecutor(count, context, _hear, (lines,)) as pool:
        # A rank waits for all others, so that no process runs two.
        futures = [pool.submit(_on_rank, task, {**shared, "RANK": str(rank)}) for rank in range(count)]
        while not all(future.done() for future in futures):
            with contextlib.suppress(queue.Empty):
                say(lines.get(timeout=0.1))
        return [future.result() for future in futures]


_lines: Any = None


def _hear(lines: Any) -> None:
    global _lines
    _lines = lines


def _on_rank(task: Callable[[Say], T], variables: dict[str, str]) -> T:
    os.environ.update(variables)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    try:
        return task(_lines.put)
    except BaseException:
        # The others need not wait for a rank that failed. One that is done stays until all are.
        destroy_process_groups()
        raise
