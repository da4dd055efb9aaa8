"""Times the first Jacobian in a process that has imported all: the problem, its size, the batch, and the way."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

# Naming a function imports its package.
from jacsparse import jacobian, prepare_jacobian

from ._problems import PROBLEMS, Problem


def _by_jacobian(problem: Problem) -> None:
    jacobian(problem.f, *problem.args, **problem.options)


def _compiled(problem: Problem) -> None:
    prepare_jacobian(problem.f, *problem.args, **problem.options, compile=True).values(*problem.args)


#: The ways by name.
WAYS: dict[str, Callable[[Problem], None]] = {"jacobian": _by_jacobian, "compiled": _compiled}


def main() -> None:
    """Print the seconds as JSON."""
    torch.set_num_threads(1)
    name, size, batch, way = sys.argv[1:]
    problem = PROBLEMS[name](int(size), int(batch))
    begin = time.perf_counter()
    WAYS[way](problem)
    print(json.dumps({"first": time.perf_counter() - begin}))


if __name__ == "__main__":
    main()
