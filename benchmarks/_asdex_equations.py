"""Times asdex's Jacobian of a discretised equation, in a process and an environment of its own, which has asdex."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
import timeit
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import asdex
import jax
import jax.numpy as jnp
import numpy as np
from _equations import EQUATIONS  # type: ignore[import-not-found]

jax.config.update("jax_enable_x64", True)

#: The least seconds of a block of calls.
BLOCK = 5e-4


def sum_at(values: Any, places: Any, count: int) -> Any:
    """Values summed by their places."""
    return jnp.zeros(count).at[places].add(values)


def main() -> None:
    """Print JSON of the first call and then, for each number of seconds that is read, JSON of the times of later ones.

    Arguments: equation, size, mode, and a file for the first call's values with their rows and columns.
    """
    name, size, mode, path = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    equation = EQUATIONS[name]
    f, state = equation.function(jnp, size, sum_at), equation.state(size)
    # JAX cannot number the elements of large matrices whose rows and columns are grids.
    x = jnp.asarray(state.reshape(-1))

    def flat(x: Any) -> Any:
        return f(x.reshape(state.shape)).reshape(-1)

    begin = time.perf_counter()
    coloring = asdex.jacobian_coloring(flat, x, mode=mode)
    of_x = asdex.jacobian_from_coloring(flat, coloring)
    # The values alone: positions would be copied at each call.
    jacobian = jax.jit(lambda x: of_x(x).data)
    values = jacobian(x).block_until_ready()
    first = time.perf_counter() - begin
    pattern = coloring.sparsity
    np.savez(path, rows=pattern.rows, columns=pattern.cols, values=values)
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("asdex", "jax"))
    print(json.dumps({"first": first, "colors": coloring.num_colors, "versions": versions}), flush=True)
    timer = timeit.Timer(lambda: jacobian(x).block_until_ready())
    number = 1
    while timer.timeit(number) < BLOCK:
        number *= 2
    for line in sys.stdin:
        times: list[float] = []
        end = time.perf_counter() + float(line)
        while time.perf_counter() < end or len(times) < 3:
            times.append(timer.timeit(number) / number)
        print(json.dumps({"times": times, "runs": number * len(times)}), flush=True)


if __name__ == "__main__":
    main()
