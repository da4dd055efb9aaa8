"""Times asdex's Jacobians; runs in a process and an environment of its own, which has asdex."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
import timeit
from collections.abc import Callable
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import asdex
import jax
import jax.numpy as jnp
import numpy as np
from _equations import EQUATIONS  # type: ignore[import-not-found]
from _problem_data import field, graph, scene  # type: ignore[import-not-found]

jax.config.update("jax_enable_x64", True)

#: The least seconds of a block of calls.
BLOCK = 5e-4
#: A function of a flat vector, and samples of it: JAX cannot number the elements of large matrices of grids.
Flat = tuple[Callable[[Any], Any], Any]


def brusselator(size: int, batch: int) -> Flat:
    """The right-hand side on a size × size grid with periodic boundaries."""

    def f(x: Any) -> Any:
        u, v = x.reshape(2, size, size)
        uuv = u * u * v

        def laplacian(w: Any) -> Any:
            near = jnp.roll(w, 1, 0) + jnp.roll(w, -1, 0) + jnp.roll(w, 1, 1) + jnp.roll(w, -1, 1)
            return (near - 4 * w) * size**2

        rows = [1 + uuv - 4.4 * u + 10.0 * laplacian(u), 3.4 * u - uuv + 10.0 * laplacian(v)]
        return jnp.stack(rows).reshape(-1)

    return f, _samples((2, size, size), batch)


def burgers(size: int, batch: int) -> Flat:
    """Central differences on a periodic line."""

    def f(u: Any) -> Any:
        ahead, behind = jnp.roll(u, -1), jnp.roll(u, 1)
        return 0.01 * (ahead - 2 * u + behind) * size**2 - u * (ahead - behind) * (size / 2)

    return f, _samples((size,), batch)


def heat(size: int, batch: int) -> Flat:
    """Heat in a square whose conductivity depends on the temperature; the border is at 0."""

    def f(x: Any) -> Any:
        u = jnp.pad(x.reshape(size, size), 1)
        k = 1 + u * u
        across = (k[1:-1, 1:] + k[1:-1, :-1]) * (u[1:-1, 1:] - u[1:-1, :-1])
        along = (k[1:, 1:-1] + k[:-1, 1:-1]) * (u[1:, 1:-1] - u[:-1, 1:-1])
        return (across[:, 1:] - across[:, :-1] + along[1:] - along[:-1]).reshape(-1)

    return f, _samples((size, size), batch)


def bundle(size: int, batch: int) -> Flat:
    """Residuals of a bundle adjustment, of 4 observations of each point, by all cameras and points."""
    data = scene(max(4, size // 25), size, 4)
    camera_of, point_of, seen, count = data["camera_of"], data["point_of"], data["seen"], data["cameras"].size

    def f(x: Any) -> Any:
        camera, point = x[:count].reshape(-1, 7)[camera_of], x[count:].reshape(-1, 3)[point_of]
        axis = camera[:, :3]
        angle = jnp.sqrt((axis**2).sum(1, keepdims=True))
        unit = axis / angle
        turned = point * jnp.cos(angle) + jnp.cross(unit, point) * jnp.sin(angle)
        turned = turned + unit * (unit * point).sum(1, keepdims=True) * (1 - jnp.cos(angle)) + camera[:, 3:6]
        return (camera[:, 6:] * turned[:, :2] / turned[:, 2:] - seen).reshape(-1)

    return f, jnp.asarray(np.concatenate([data["cameras"].reshape(-1), data["points"].reshape(-1)]))[None]


def graph_network(size: int, batch: int) -> Flat:
    """A layer of messages on a graph of four edges a node, 8 features each."""
    data = graph(size, 4 * size, 8)
    source, target, (own, sent) = data["source"], data["target"], data["weights"]

    def f(x: Any) -> Any:
        h = x.reshape(size, 8)
        return h.at[target].add(jnp.tanh(h[target] @ own + h[source] @ sent)).reshape(-1)

    return f, jnp.asarray(data["features"].reshape(1, -1))


def _samples(shape: tuple[int, ...], batch: int) -> Any:
    return jnp.asarray(np.stack([field(shape, sample) for sample in range(batch)]))


def _discretised(name: str, size: int) -> Flat:
    """An equation of `_equations` at its state."""
    equation = EQUATIONS[name]
    state = equation.state(size)
    f = equation.function(jnp, size, lambda values, places, count: jnp.zeros(count).at[places].add(values))
    return lambda x: f(x.reshape(state.shape)).reshape(-1), jnp.asarray(state.reshape(1, -1))


def main() -> None:
    """Print JSON of the first call and then, for each number of seconds that is read, JSON of the times of later ones.

    Arguments: problem, size, batch, mode (``fwd``, ``rev`` or asdex's choice, ``auto``), and a file for the first
    call's values with the rows and columns of a sample.
    """
    name, size, batch, mode, path = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
    problems = {function.__name__: function for function in (brusselator, burgers, heat, bundle, graph_network)}
    f, x = problems[name](size, batch) if name in problems else _discretised(name, size)
    x = x.reshape(len(x), -1)
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
