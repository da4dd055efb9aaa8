"""Functions whose sparse Jacobians people need: discretised equations, least squares, and networks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jacsparse.models import build
from torch import nn

from examples import brusselator as equation

from ._equations import EQUATIONS, Equation
from ._problem_data import field, graph, scene


@dataclass(frozen=True)
class Problem:
    """A function with arguments, by which it is differentiated where `argnums` says so."""

    f: Callable[..., Any]
    args: tuple[Any, ...]
    argnums: int | tuple[int, ...] = 0
    batched: bool = False


def brusselator(size: int, batch: int) -> Problem:
    """The 2-D Brusselator on a periodic grid of size × size."""
    return Problem(equation, (_field((2, size, size), batch),), batched=True)


def burgers(size: int, batch: int) -> Problem:
    """The viscous Burgers' equation on a periodic line, by central differences; the viscosity is an argument."""
    return Problem(_burgers, (_field((size,), batch), 0.01), batched=True)


def _burgers(u: torch.Tensor, viscosity: float) -> torch.Tensor:
    ahead, behind, n = u.roll(-1, 1), u.roll(1, 1), u.shape[1]
    return viscosity * (ahead - 2 * u + behind) * n**2 - u * (ahead - behind) * (n / 2)


def heat(size: int, batch: int) -> Problem:
    """Heat in a square whose conductivity depends on the temperature; the border is at 0."""
    return Problem(_heat, (_field((size, size), batch),), batched=True)


def _heat(u: torch.Tensor) -> torch.Tensor:
    u = nn.functional.pad(u, (1, 1, 1, 1))
    k = 1 + u * u
    across = (k[:, 1:-1, 1:] + k[:, 1:-1, :-1]) * (u[:, 1:-1, 1:] - u[:, 1:-1, :-1])
    along = (k[:, 1:, 1:-1] + k[:, :-1, 1:-1]) * (u[:, 1:, 1:-1] - u[:, :-1, 1:-1])
    return across[:, :, 1:] - across[:, :, :-1] + along[:, 1:] - along[:, :-1]


def bundle(size: int, batch: int) -> Problem:
    """Residuals of a bundle adjustment, of 4 observations of each point, by all cameras and points."""
    data = {name: torch.from_numpy(array) for name, array in scene(max(4, size // 25), size, 4).items()}
    camera_of, point_of, seen = data["camera_of"], data["point_of"], data["seen"]

    def residuals(cameras: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
        camera, point = cameras[camera_of], points[point_of]
        axis, angle = camera[:, :3], (camera[:, :3] ** 2).sum(1, keepdim=True).sqrt()
        unit = axis / angle
        turned = point * angle.cos() + torch.linalg.cross(unit, point) * angle.sin()
        turned = turned + unit * (unit * point).sum(1, keepdim=True) * (1 - angle.cos()) + camera[:, 3:6]
        return camera[:, 6:] * turned[:, :2] / turned[:, 2:] - seen

    return Problem(residuals, (data["cameras"], data["points"]), argnums=(0, 1))


def graph_network(size: int, batch: int) -> Problem:
    """A layer of messages on a graph of four edges a node, 8 features each."""
    data = {name: torch.from_numpy(array) for name, array in graph(size, 4 * size, 8).items()}
    source, target, (own, sent) = data["source"], data["target"], data["weights"]

    def layer(h: torch.Tensor) -> torch.Tensor:
        return h.index_add(0, target, torch.tanh(h[target] @ own + h[source] @ sent))

    return Problem(layer, (data["features"],))


def autoencoder(size: int, batch: int) -> Problem:
    """A convolutional autoencoder of images of size × size, from one input channel to one output channel."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 8, 3, 2, 1), nn.Tanh(), nn.Conv2d(8, 16, 3, 2, 1), nn.Tanh(),
        nn.ConvTranspose2d(16, 8, 2, 2), nn.Tanh(), nn.ConvTranspose2d(8, 1, 2, 2),
    )  # fmt: skip
    return Problem(module.double(), (_field((1, size, size), batch),), batched=True)


def resnet8(size: int, batch: int) -> Problem:
    """ResNet-8 in inference."""
    torch.manual_seed(0)
    return Problem(build("resnet8").eval(), (_field((3, size, size), batch).float(),), batched=True)


def _discretised(equation: Equation, size: int, batch: int) -> Problem:
    """An equation of `_equations`, at one state whatever the batch."""
    return Problem(equation.function(torch, size, _sum_at), (torch.from_numpy(equation.state(size)),))


def _sum_at(values: torch.Tensor, places: torch.Tensor, count: int) -> torch.Tensor:
    return values.new_zeros(count).index_add(0, places, values)


def _field(shape: tuple[int, ...], batch: int) -> torch.Tensor:
    samples = [torch.from_numpy(field(shape, sample)) for sample in range(batch)]
    return torch.stack(samples).reshape(batch, *shape)


#: Those by name; a size is a grid's side, or the number of points, nodes or pixels of a side.
PROBLEMS: dict[str, Callable[[int, int], Problem]] = {
    **{
        function.__name__: function
        for function in (brusselator, burgers, heat, bundle, graph_network, autoencoder, resnet8)
    },
    **{name: functools.partial(_discretised, equation) for name, equation in EQUATIONS.items()},
}


def elements(problem: Problem) -> int:
    """The number of elements of one sample's dense Jacobian."""
    argnums = problem.argnums if isinstance(problem.argnums, tuple) else (problem.argnums,)
    columns = sum(problem.args[number].numel() for number in argnums)
    batch = len(problem.args[0]) if problem.batched else 1
    rows = math.prod(problem.f(*problem.args).shape)
    return columns // batch * rows // batch
