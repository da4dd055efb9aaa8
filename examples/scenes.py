"""Scenes of bundle adjustment: cameras and points, and where the cameras see the points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.optimize
import torch

import jacsparse


@dataclass(frozen=True)
class Scene:
    """Cameras, points, and pixels in which cameras see points.

    Attributes
    ----------
    cameras : Tensor, (cameras, 7)
        Of each, a rotation vector in radians, a translation and a focal length in pixels.
    points : Tensor, (points, 3)
        Places in the scene.
    camera, point : Tensor, (observations,)
        Which camera sees which point.
    pixels : Tensor, (observations, 2)
        Where it sees the point.
    """

    cameras: torch.Tensor
    points: torch.Tensor
    camera: torch.Tensor
    point: torch.Tensor
    pixels: torch.Tensor

    def pattern(self) -> jacsparse.Pattern:
        """Which residual depends on which camera and which point."""
        return jacsparse.jacobian_pattern(self.residuals, self.cameras, self.points, argnums=(0, 1))

    def residuals(self, cameras: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
        """Projections of points by cameras less the pixels, ``(observations, 2)``."""
        rotation, translation, focal = cameras[self.camera].split([3, 3, 1], 1)
        x = _rotated(points[self.point], rotation) + translation
        return focal * x[:, :2] / x[:, 2:] - self.pixels


def _rotated(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Vectors turned by rotation vectors, by the formula of Rodrigues."""
    angle = rotation.square().sum(1, keepdim=True).sqrt()
    axis = rotation / angle
    along = axis * (axis * x).sum(1, keepdim=True)
    return along + (x - along) * angle.cos() + _cross(axis, x) * angle.sin()


def _cross(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # With torch.linalg.cross, which is no one operator to the library, a Jacobian takes 10 times as long.
    return a.roll(-1, 1) * b.roll(1, 1) - a.roll(1, 1) * b.roll(-1, 1)


def synthetic(cameras: int, points: int, *, views: int = 4, noise: float = 0.5, seed: int = 0) -> Scene:
    """A cloud of points, each seen by as many cameras as `views`, with noise in pixels, and a poor first guess."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    depth = torch.tensor([0.0, 0.0, 6.0], dtype=torch.float64)
    truth = torch.cat([0.3 * normal(cameras, 3), depth + 0.3 * normal(cameras, 3), 500 + 20 * normal(cameras, 1)], 1)
    cloud = normal(points, 3).clamp(-2, 2)
    camera = torch.rand((points, cameras), generator=generator).argsort(1)[:, :views].flatten()
    point = torch.arange(points).repeat_interleave(views)
    blank = Scene(truth, cloud, camera, point, torch.zeros(len(camera), 2, dtype=torch.float64))
    pixels = blank.residuals(truth, cloud) + noise * normal(len(camera), 2)
    guess = truth + torch.cat([0.02 * normal(cameras, 6), 5 * normal(cameras, 1)], 1)
    return Scene(guess, cloud + 0.05 * normal(points, 3), camera, point, pixels)


def by_scipy(scene: Scene, *, sparsity: Any = None, **options: Any) -> Any:
    """SciPy's least squares, its Jacobian by differences of groups of columns, with its pattern or ours."""
    start = torch.cat([scene.cameras.flatten(), scene.points.flatten()])
    sizes = [scene.cameras.numel(), scene.points.numel()]

    def f(x: np.ndarray) -> np.ndarray:
        cameras, points = torch.from_numpy(x).split(sizes)
        return scene.residuals(cameras.reshape(-1, 7), points.reshape(-1, 3)).flatten().numpy()

    if sparsity is None:
        sparsity = scene.pattern().to_scipy()
    return scipy.optimize.least_squares(f, start.numpy(), jac_sparsity=sparsity, x_scale="jac", **options)
