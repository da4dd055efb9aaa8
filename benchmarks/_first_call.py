"""Times the first Jacobian in a process that has imported all: the problem, its size, the batch."""

from __future__ import annotations

import json
import sys
import time

import torch

import jacsparse

from ._problems import PROBLEMS


def main() -> None:
    """Print the seconds as JSON."""
    torch.set_num_threads(1)
    problem = PROBLEMS[sys.argv[1]](int(sys.argv[2]), int(sys.argv[3]))
    # Naming the function imports its package.
    jacobian = jacsparse.jacobian
    begin = time.perf_counter()
    jacobian(problem.f, *problem.args, argnums=problem.argnums, batched=problem.batched)
    print(json.dumps({"first": time.perf_counter() - begin}))


if __name__ == "__main__":
    main()
