"""The Brusselator, two substances that react and diffuse on a periodic square."""

from __future__ import annotations

import torch


def brusselator(x: torch.Tensor, diffusion: float = 10.0) -> torch.Tensor:
    """The time derivatives of both substances on an n × n grid: ``(..., 2, n, n)`` to the same shape.

    Source: Hairer and Wanner, Solving Ordinary Differential Equations II, section IV.10, without the forcing term.
    """
    u, v = x.unbind(-3)
    uuv, n = u * u * v, x.shape[-1]

    def laplacian(w: torch.Tensor) -> torch.Tensor:
        return (w.roll(1, -2) + w.roll(-1, -2) + w.roll(1, -1) + w.roll(-1, -1) - 4 * w) * n**2

    return torch.stack([1 + uuv - 4.4 * u + diffusion * laplacian(u), 3.4 * u - uuv + diffusion * laplacian(v)], -3)


def initial_values(n: int) -> torch.Tensor:
    """The book's concentrations at time 0, ``(2, n, n)`` in float64."""
    axis = torch.arange(n, dtype=torch.float64) / n
    x, y = torch.meshgrid(axis, axis, indexing="ij")
    return torch.stack([22 * (y * (1 - y)) ** 1.5, 27 * (x * (1 - x)) ** 1.5])
