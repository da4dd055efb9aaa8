"""Times asdex's Jacobians; runs in a process and an environment of its own, which has asdex."""

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
from _equations import EQUATIONS, Library  # type: ignore[import-not-found]

jax.config.update("jax_enable_x64", True)

#: The least seconds of a block of calls.
BLOCK = 5e-4
JAX = Library(jnp, lambda x, places, values: x.at[places].add(values), lambda u: jnp.pad(u, 1))


def main() -> None:
    """Print JSON of the first call and then, for each number of seconds that is read, JSON of the times of later ones.

    Arguments: problem, size, batch, mode (``fwd``, ``rev`` or asdex's choice, ``auto``), and a file for the first
    call's values with the rows and columns of a sample.
    """
    name, size, batch, mode, path = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
    equation = EQUATIONS[name]
    f_of_arrays, samples = equation.on(JAX, size), [equation.arrays(size, sample) for sample in range(batch)]
    ends = np.cumsum([array.size for array in samples[0]])

    def f(x: Any) -> Any:
        """The function of a flat vector: JAX cannot number the elements of large matrices of grids."""
        arrays = zip(jnp.split(x, ends[:-1]), samples[0], strict=True)
        return f_of_arrays(*(part.reshape(array.shape) for part, array in arrays), *equation.numbers).reshape(-1)

    x = jnp.asarray(np.stack([np.concatenate([array.reshape(-1) for array in sample]) for sample in samples]))
    begin = time.perf_counter()
    coloring = asdex.jacobian_coloring(f, x[0], **({} if mode == "auto" else {"mode": mode}))
    of_one = asdex.jacobian_from_coloring(f, coloring)
    # The values alone: positions would be copied at each call.
    jacobian = jax.jit(lambda x: of_one(x[0]).data) if batch == 1 else jax.jit(jax.vmap(lambda x: of_one(x).data))
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
