"""The kernels on a GPU under NVIDIA's Compute Sanitizer: accesses out of bounds, and races in shared memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from jacsparse import patterns, recurrence, spgemm  # noqa: F401  (importing them lists their kernels)
from jacsparse.runtime import KERNEL_FILES
from tests.cuda.sets import SETS

TOOL = shutil.which("compute-sanitizer")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(TOOL is None, reason="compute-sanitizer is not installed: nothing was checked"),
]

#: A kernel that is told of more elements than there are.
OVERRUN = """
import torch
import jacsparse.patterns
from jacsparse.runtime import KERNEL_FILES
_FILE = KERNEL_FILES["values.cu"]
x, place = torch.zeros(3, device="cuda"), torch.zeros(3, dtype=torch.int32, device="cuda")
_FILE.launch("take<float, int>", [4], [256], x, place, 1000, x, device=x.device)
torch.cuda.synchronize()
"""


def checked(tool: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run Python under a tool that looks at our kernels; 66 where it finds something."""
    kernels = sorted({instance.partition("<")[0] for file in KERNEL_FILES.values() for instance in file.instances})
    command = [str(TOOL), "--tool", tool, "--error-exitcode", "66"]
    # PyTorch asks for functions that a driver need not have.
    command += ["--report-api-errors", "no"] if tool == "memcheck" else []
    command += [word for kernel in kernels for word in ("--kernel-name", f"kernel_substring={kernel}")]
    # What PyTorch takes from memory of its own has no bounds that the tool knows.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.run(
        [*command, sys.executable, *arguments],
        capture_output=True,
        encoding="utf-8",
        env=environment,
        cwd=Path(__file__).parents[2],
        timeout=600,
        check=False,
    )


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_nothing_is_found(tool: str, name: str) -> None:
    result = checked(tool, ["-m", "tests.cuda.sets", name])
    assert result.returncode == 0 and "ran on cuda" in result.stdout, (result.stdout + result.stderr)[-4000:]


def test_an_overrun_is_found() -> None:
    result = checked("memcheck", ["-c", OVERRUN])
    assert result.returncode != 0 and "Invalid __global__" in result.stdout, (result.stdout + result.stderr)[-4000:]
