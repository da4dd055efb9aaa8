"""Compiles instances of kernels for the GPU, in a process of its own; CuPy keeps them on disk, for other processes."""

from __future__ import annotations

import json
import sys
import time

import torch

# Importing them lists their kernels.
from jacsparse import patterns, recurrence, spgemm  # noqa: F401
from jacsparse.runtime import KERNEL_FILES, Launch, active_backend

from ._noted_launches import Instance
from ._rows import reason


def main() -> None:
    """Read instances as JSON, and print a line of JSON for each: its name, its seconds, and why it does not compile."""
    for each in json.load(sys.stdin):
        instance, begin = Instance(*each), time.perf_counter()
        try:
            _compile(instance)
            problem = ""
        except Exception as error:
            problem = reason(error)
        line = {"name": instance.name, "seconds": time.perf_counter() - begin, "problem": problem}
        print(json.dumps(line), flush=True)


def _compile(instance: Instance) -> None:
    """Make a record, which compiles; nobody runs it."""
    file = KERNEL_FILES[instance.file]
    nothing = [None] * len(file.parameters[instance.name])
    device = torch.device("cuda", torch.cuda.current_device())
    active_backend().record(Launch(file, instance.name, (1, 1, 1), (32, 1, 1), nothing, instance.shared, device))


if __name__ == "__main__":
    main()
