"""A physics-informed network for Poisson's equation, trained by damped Gauss-Newton steps: tens in place of thousands.

The residual of ``-u'' = f`` at collocation points is a function of the parameters, through two derivatives of the
network; its Jacobian by them comes from the same call as any other. ``python -m examples.physics_informed`` compares
with the analytic solution.
"""

from __future__ import annotations

import math
import time

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from jacsparse.terminal import console, new_table, short_time

from .least_squares import levenberg_marquardt

Parameters = dict[str, torch.Tensor]


def network(width: int = 16) -> nn.Module:
    """A network with one hidden layer, from a place to a number, in float64."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1)).double()


def exact(x: torch.Tensor) -> torch.Tensor:
    """The solution on [0, 1], which is 0 at both ends."""
    return (math.pi * x).sin() + 0.3 * (3 * math.pi * x).sin()


def source(x: torch.Tensor) -> torch.Tensor:
    """The right-hand side ``f = -u''`` of that solution."""
    return math.pi**2 * ((math.pi * x).sin() + 2.7 * (3 * math.pi * x).sin())


def solution(net: nn.Module, parameters: Parameters, x: torch.Tensor) -> torch.Tensor:
    """The network's solution at one place or at several, ``(...,)``; a factor makes it 0 at both ends."""
    return x * (1 - x) * functional_call(net, parameters, (x[..., None],))[..., 0]


def residuals(net: nn.Module, parameters: Parameters, x: torch.Tensor) -> torch.Tensor:
    """``-u'' - f`` at each place."""
    return -vmap(grad(grad(lambda x: solution(net, parameters, x))))(x) - source(x)


def by_gauss_newton(net: nn.Module, points: torch.Tensor, steps: int) -> Parameters:
    """The network's parameters after steps of Levenberg and Marquardt."""
    names, parameters = zip(*net.named_parameters(), strict=True)

    def f(*parameters: torch.Tensor) -> torch.Tensor:
        return residuals(net, dict(zip(names, parameters, strict=True)), points)

    start = [parameter.detach() for parameter in parameters]
    return dict(zip(names, levenberg_marquardt(f, start, iterations=steps)[0], strict=True))


def by_adam(net: nn.Module, points: torch.Tensor, steps: int) -> Parameters:
    """The network's parameters after steps of Adam, for comparison."""
    parameters = {name: parameter.detach().clone().requires_grad_() for name, parameter in net.named_parameters()}
    optimizer = torch.optim.Adam(parameters.values(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        residuals(net, parameters, points).square().mean().backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def main(steps: int = 100, adam_steps: int = 1000) -> None:
    """Print the residuals and the error after both trainings, and on the way."""
    net, points = network(), torch.linspace(0, 1, 64, dtype=torch.float64)
    places = torch.linspace(0, 1, 1001, dtype=torch.float64)
    table = new_table("Poisson's equation by a network of 49 parameters")
    for column in ("training", "steps", "largest residual", "largest error", "time"):
        table.add_column(column, justify="right")
    runs = [("Gauss-Newton", by_gauss_newton, count) for count in (0, steps // 4, steps // 2, steps)]
    with console().status("training") as status:
        for label, way, count in [*runs, ("Adam", by_adam, adam_steps)]:
            status.update(f"{label}, {count} steps")
            begin = time.perf_counter()
            parameters = way(net, points, count)
            seconds = short_time(time.perf_counter() - begin)
            residual = residuals(net, parameters, places).abs().max()
            error = (solution(net, parameters, places) - exact(places)).abs().max()
            table.add_row(label, str(count), f"{residual:.1e}", f"{error:.1e}", seconds)
    console().print(table)


if __name__ == "__main__":
    main()
