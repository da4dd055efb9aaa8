"""Starting the ranks of a test as processes."""

import contextlib
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit status, None where it had to be killed, what it printed, and after how long."""

    status: int | None
    output: str
    seconds: float


def run_ranks(
    module: str, *arguments: str, count: int, seconds: float = 120, stopped: int | None = None
) -> list[Ended]:
    """Run a module as several ranks on this machine, as torchrun does, until all but the `stopped` one have ended."""
    # The store is the launcher's, so that it outlives the ranks.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(count),
        "OMP_NUM_THREADS": "1",
    }
    begin, command = time.monotonic(), [sys.executable, "-m", module, *arguments]
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    ended = []
    for rank, process in enumerate(processes):
        limit = 0.0 if rank == stopped else max(0.0, begin + seconds - time.monotonic())
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(limit)
    for process in processes:
        status = process.poll()
        process.kill()
        ended.append(Ended(status, process.communicate()[0], time.monotonic() - begin))
    return ended
