"""What ranks send, in processes over loopback, against the formulas of the page on clusters."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from examples.cluster import traffic
from tests.distributed.launch import ROOT, run_ranks


def compare(steps: int, batch: int, width: int) -> None:
    """Runs on each rank."""
    rows = traffic(steps, batch, width)
    assert len(rows) == 6 and all(row.formula == row.sent for row in rows), rows
    print("all equal")


@pytest.mark.parametrize("count", [2, 3])
def test_bytes_are_those_of_the_formulas(count: int) -> None:
    for rank in run_ranks(__name__, "compare", "7", "3", "5", count=count):
        assert rank.status == 0 and "all equal" in rank.output, rank.output


def test_the_batch_script_runs_two_processes(tmp_path: Path) -> None:
    """With stand-ins for Slurm's commands, on this machine as the only node."""
    for name, line in {"srun": 'exec "$@"', "scontrol": "echo 127.0.0.1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    slurm = {"SLURM_CPUS_PER_TASK": "2", "SLURM_JOB_NODELIST": "here", "SLURM_NNODES": "1", "SLURM_JOB_ID": "1"}
    paths = os.pathsep.join((str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, **slurm, "PROCESSES": "2", "PORT": str(port), "PATH": paths}
    command = ["bash", str(ROOT / "docs/how-to/cluster.sbatch"), "-m", "examples.cluster"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", timeout=240)
    assert result.returncode == 0, result.stderr
    assert all(f"bytes from rank {rank} of 2, gloo" in result.stdout for rank in (0, 1)), result.stdout
