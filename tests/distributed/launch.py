"""Ranks of a test as processes: ``python -m tests.distributed.launch MODULE CASE ...`` forks them."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
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
    """Run a function of a module as several ranks on this machine, until all but the `stopped` one have ended.

    Parameters
    ----------
    module : str
        The module, which one process imports and then forks: that takes less time than as many imports.
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
        "OMP_NUM_THREADS": "1",
    }
    plan = json.dumps([module, *arguments, count, seconds, stopped])
    command = [sys.executable, "-m", "tests.distributed.launch", plan]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **shared}, stdout=subprocess.PIPE, check=True)
    return [Ended(**fields) for fields in json.loads(done.stdout)]


def _fork(module: str, case: str, *rest: str | int | float | None) -> list[Ended]:
    *arguments, count, seconds, stopped = rest
    function, begin = getattr(importlib.import_module(module), case), time.monotonic()
    values = [int(argument) if argument.isdecimal() else argument for argument in arguments]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, str(rank)) for rank in range(count)]
        children = {_forked(rank, output, function, values): rank for rank, output in enumerate(outputs)}
        statuses: dict[int, int] = {}
        while set(range(count)) - {stopped} - set(statuses) and time.monotonic() < begin + seconds:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                statuses[children[pid]] = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(0.02)
        for pid, rank in children.items():
            if rank not in statuses:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        took = time.monotonic() - begin
        return [Ended(statuses.get(rank), output.read_text(), took) for rank, output in enumerate(outputs)]


def _forked(rank, output, function, arguments):
    """Run a function as a rank in a child process, whose number is returned."""
    pid = os.fork()
    if pid:
        return pid
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    file = os.open(output, os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    status = 1
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        function(*arguments)
        dist.destroy_process_group()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    print(json.dumps([asdict(ended) for ended in _fork(*json.loads(sys.argv[1]))]))
