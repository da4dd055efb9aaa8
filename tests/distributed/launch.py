"""Ranks of a test as processes."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from jacsparse.runtime import destroy_process_groups

ROOT = Path(__file__).parents[2]

# One process of all tests imports what ranks need, which takes seconds; each rank is forked from it.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["jacsparse.models", "jacsparse.nn", "tests.training.test_delayed_gradients"])


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit status, None where it had to be killed, what it printed, and after how long."""

    status: int | None
    output: str
    seconds: float


def run_ranks(
    module: str, *arguments: str, count: int, seconds: float = 120, stopped: int | None = None
) -> list[Ended]:
    """Run a function of a module as several ranks on this machine, until all but the `stopped` one have ended.

    Parameters
    ----------
    module : str
        The module, which each rank imports.
    *arguments : str
        The function's name, and its arguments; digits are numbers.
    """
    # The store is that of this process, so that it outlives the ranks.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(count),
    }
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, str(rank)) for rank in range(count)]
        processes = [
            _FORKS.Process(target=_run, args=(module, arguments, {**shared, "RANK": f"{rank}"}, output))
            for rank, output in enumerate(outputs)
        ]
        for process in processes:
            process.start()
        for rank, process in enumerate(processes):
            process.join(0.0 if rank == stopped else max(0.0, begin + seconds - time.monotonic()))
        statuses, took = [process.exitcode for process in processes], time.monotonic() - begin
        for process in processes:
            process.kill()
            process.join()
        return [
            Ended(status, output.read_text(encoding="utf-8"), took)
            for status, output in zip(statuses, outputs, strict=True)
        ]


def _run(module: str, arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
    with output.open("wb") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ.update(environment, LOCAL_RANK=environment["RANK"])
    # As OMP_NUM_THREADS, which comes too late here.
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    case, *values = (int(value) if value.isdecimal() else value for value in arguments)
    getattr(importlib.import_module(module), case)(*values)
    destroy_process_groups()


@contextlib.contextmanager
def one_rank() -> Iterator[dist.ProcessGroup]:
    """A context with a group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        destroy_process_groups()


def impatient_group(kind: str) -> dist.ProcessGroup:
    """A group of all ranks, which have begun, for a kind of fault: some are noticed by the group's timeout alone."""
    dist.barrier()
    group: dist.ProcessGroup = dist.new_group(timeout=timedelta(seconds=6 if kind in ("stop", "more") else 60))
    return group
