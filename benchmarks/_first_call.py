"""Times the first Jacobian in a process that has imported all: the problem, its size, the batch, and the way."""

from __future__ import annotations

import json
import sys
import time

import torch

# Naming a function imports its package.
from jacsparse import jacobian, prepare_jacobian

from ._problems import PROBLEMS


def main() -> None:
    """Print the seconds as JSON; the way is ``jacobian``, or ``compiled`` for a prepared one that is compiled."""
    torch.set_num_threads(1)
    name, size, batch, way = sys.argv[1:]
    problem = PROBLEMS[name](int(size), int(batch))
    begin = time.perf_counter()
    if way == "compiled":
        prepare_jacobian(problem.f, *problem.args, **problem.options, compile=True).values(*problem.args)
    else:
        jacobian(problem.f, *problem.args, **problem.options)
    print(json.dumps({"first": time.perf_counter() - begin}))


if __name__ == "__main__":
    main()
