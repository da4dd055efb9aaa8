"""Standard deviations of an image-to-image network's output, pixel by pixel, by a linearised Laplace approximation.

With a Gaussian posterior of the parameters, of covariance Σ, the output's covariance is about ``J Σ Jᵀ``; only its
diagonal is asked for. Here Σ is diagonal, the inverse of ``diag(JᵀJ) / σ² + prior`` over the training images (Daxberger
et al., Laplace Redux, 2021). ``python -m examples.posterior_variance`` compares with dense matrices.
"""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.func import functional_call, jacrev

import jacsparse
from jacsparse.terminal import console, new_table, short_time

Parameters = dict[str, torch.Tensor]


class Uncertainty:
    """Variances of a trained network's output.

    Parameters
    ----------
    net : Module
        The network; its parameters are the mean of the posterior.
    images : Tensor, (images, *shape)
        What it was trained on.
    noise : float
        Standard deviation of the pixels of a target.
    prior : float
        Precision of the parameters before the training.
    """

    def __init__(self, net: nn.Module, images: torch.Tensor, *, noise: float, prior: float) -> None:
        self._parameters = {name: parameter.detach() for name, parameter in net.named_parameters()}
        self._jacobian = jacsparse.prepare_jacobian(
            lambda parameters, image: functional_call(net, parameters, (image,)),
            self._parameters,
            images[:1],
        )
        diagonals = [self._at(image).gram_diagonal()[:, 0] for image in images]
        self.covariance = 1 / (torch.stack(diagonals).sum(0) / noise**2 + prior)

    def variance(self, image: torch.Tensor) -> torch.Tensor:
        """The variance of each pixel of the output for one image, ``(pixels,)``, without the noise."""
        return self._at(image).outer_diagonal(self.covariance)[:, 0]

    def _at(self, image: torch.Tensor) -> jacsparse.SparseJacobian:
        """The Jacobian of the output by the parameters."""
        return self._jacobian(self._parameters, image[None])


def dense_variance(
    net: nn.Module, images: torch.Tensor, image: torch.Tensor, noise: float, prior: float
) -> torch.Tensor:
    """What `Uncertainty` computes, from dense matrices."""
    parameters = {name: parameter.detach() for name, parameter in net.named_parameters()}

    def matrix(image: torch.Tensor) -> torch.Tensor:
        parts = jacrev(lambda parameters: functional_call(net, parameters, (image[None],)).flatten())(parameters)
        return torch.cat([part.flatten(1) for part in parts.values()], 1)

    precision = sum((J := matrix(each)).T @ J for each in images) / noise**2 + prior * torch.eye(matrix(image).shape[1])
    covariance = torch.diag(1 / precision.diagonal())
    return (matrix(image) @ covariance @ matrix(image).T).diagonal()


def images(count: int, size: int, *, seed: int = 0) -> torch.Tensor:
    """Smooth images, ``(count, 1, size, size)`` in float64."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn((count, 1, 3, 3), generator=generator, dtype=torch.float64)
    return nn.functional.interpolate(coarse, (size, size), mode="bicubic", align_corners=True)


def denoiser(clean: torch.Tensor, *, noise: float, steps: int) -> nn.Module:
    """A small convolutional network that has learnt to take noise away from images."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(8, 1, 3, padding=1),
    ).double()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        (net(clean + noise * torch.randn_like(clean)) - clean).square().mean().backward()
        optimizer.step()
    return net


def main(size: int = 16, noise: float = 0.3, steps: int = 300) -> None:
    """Print standard deviations for an image like those of the training, and for brighter ones."""
    clean = images(32, size)
    with console().status("training"):
        net = denoiser(clean, noise=noise, steps=steps)
    uncertainty = Uncertainty(net, clean, noise=noise, prior=1.0)
    table = new_table(f"Standard deviations of a denoiser's {size} × {size} pixels")
    for column in ("image", "mean", "largest", "difference to dense", "time", "dense"):
        table.add_column(column, justify="right")
    for brightness in (1, 2, 4):
        image = brightness * images(1, size, seed=1)[0]
        begin = time.perf_counter()
        deviation = uncertainty.variance(image).sqrt()
        middle = time.perf_counter()
        expected = dense_variance(net, clean, image, noise, 1.0).sqrt()
        times = short_time(middle - begin), short_time(time.perf_counter() - middle)
        figures = (f"{deviation.mean():.3g}", f"{deviation.max():.3g}", f"{(deviation - expected).abs().max():.0e}")
        table.add_row(f"{brightness} times as bright", *figures, *times)
    console().print(table)


if __name__ == "__main__":
    main()
