"""Made-up data of the problems whose Jacobians are compared, for programs in PyTorch and in JAX: NumPy alone."""

from __future__ import annotations

import numpy as np


def field(shape: tuple[int, ...], sample: int = 0) -> np.ndarray:
    """Values between 0 and 1 on a grid."""
    return (7 * np.arange(np.prod(shape)) + 3 * sample) % 11 / 11


def scene(cameras: int, points: int, views: int) -> dict[str, np.ndarray]:
    """Cameras before a cloud of points, each of which is seen by a few of them.

    ``cameras`` has rows of a rotation vector, a translation and a focal length; ``camera_of`` and ``point_of`` tell the
    camera and the point of each observation.
    """
    rng = np.random.default_rng(0)
    poses = np.concatenate(
        [rng.normal(0, 0.1, (cameras, 5)), rng.uniform(4, 6, (cameras, 1)), np.ones((cameras, 1))], 1
    )
    return {
        "cameras": poses,
        "points": rng.normal(0, 1, (points, 3)),
        "camera_of": np.stack([rng.choice(cameras, views, replace=False) for _ in range(points)]).reshape(-1),
        "point_of": np.repeat(np.arange(points), views),
        "seen": rng.normal(0, 0.2, (points * views, 2)),
    }


def graph(nodes: int, edges: int, features: int) -> dict[str, np.ndarray]:
    """A graph's edges by their ends, its nodes' features, and the weights of a layer of messages."""
    rng = np.random.default_rng(0)
    return {
        "source": rng.integers(0, nodes, edges),
        "target": rng.integers(0, nodes, edges),
        "features": rng.normal(0, 1, (nodes, features)),
        "weights": rng.normal(0, 0.3, (2, features, features)),
    }
