"""Times asdex's Jacobian of the Brusselator; runs in a process and an environment of its own, which has asdex."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import asdex
import jax
import jax.numpy as jnp

jax.config.update("jax_enable_x64", True)


def brusselator(x: Any, n: int) -> Any:
    """The right-hand side on an n × n grid with periodic boundaries, flat."""
    u, v = x.reshape(2, n, n)
    uuv = u * u * v

    def laplacian(w: Any) -> Any:
        near = jnp.roll(w, 1, 0) + jnp.roll(w, -1, 0) + jnp.roll(w, 1, 1) + jnp.roll(w, -1, 1)
        return (near - 4 * w) * n**2

    rows = [1 + uuv - 4.4 * u + 10.0 * laplacian(u), 3.4 * u - uuv + 10.0 * laplacian(v)]
    return jnp.stack(rows).reshape(-1)


def main() -> None:
    """Print the seconds of the first call and of later ones as JSON; arguments: n, the batch, the seconds to take."""
    n, batch, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    x = jnp.asarray([[(7 * i + 3 * sample) % 11 / 11 for i in range(2 * n * n)] for sample in range(batch)])
    start = time.perf_counter()
    of_one = asdex.jacobian(lambda x: brusselator(x, n), x[0])
    jacobian = jax.jit((lambda x: of_one(x[0]).data) if batch == 1 else jax.vmap(lambda x: of_one(x).data))
    jacobian(x).block_until_ready()
    first = time.perf_counter() - start
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        jacobian(x).block_until_ready()
        times.append(time.perf_counter() - start)
    print(json.dumps({"first": first, "times": times}))


if __name__ == "__main__":
    main()
