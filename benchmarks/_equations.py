"""Discretised equations, each written once for NumPy, JAX and PyTorch; NumPy is all that is imported.

An equation takes a library's namespace as `xp`: the libraries agree on the functions' names and on the order of their
arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["EQUATIONS", "Equation"]


@dataclass(frozen=True)
class Equation:
    """A function of a state, and the state at which it is differentiated.

    Attributes
    ----------
    function : callable
        ``function(xp, size, sum_at)`` is a function from states to arrays of the same shape. ``sum_at(values, places,
        count)`` sums values by their places: the libraries have different names for it.
    state : callable
        ``state(size)`` is a state in float64 that lies on no kink.
    """

    function: Callable[[Any, int, Callable[..., Any]], Callable[[Any], Any]]
    state: Callable[[int], np.ndarray]


def gray_scott(xp: Any, size: int, sum_at: Any) -> Callable[[Any], Any]:
    """Two species that react and diffuse on a periodic square of size × size points.

    ``u' = a Δu - u v² + F (1 - u)`` and ``v' = b Δv + u v² - (F + k) v``; Pearson, Complex patterns in a simple system,
    1993, on his square of side 2.5.
    """
    a, b, feed, kill, points = 2e-5, 1e-5, 0.04, 0.06, (size / 2.5) ** 2

    def f(x: Any) -> Any:
        u, v = x
        uvv = u * v * v
        of_u = a * points * _neighbours(xp, u) - uvv + feed * (1 - u)
        of_v = b * points * _neighbours(xp, v) + uvv - (feed + kill) * v
        return xp.stack([of_u, of_v])

    return f


def cahn_hilliard(xp: Any, size: int, sum_at: Any) -> Callable[[Any], Any]:
    """Two phases that separate on a periodic square of size × size points: ``u' = Δ(u³ - u - ε² Δu)``.

    An interface is about two points wide.
    """
    points, epsilon = size**2, 1.5 / size

    def f(u: Any) -> Any:
        potential = u * u * u - u - epsilon**2 * points * _neighbours(xp, u)
        return points * _neighbours(xp, potential)

    return f


def kuramoto_sivashinsky(xp: Any, size: int, sum_at: Any) -> Callable[[Any], Any]:
    """``u' = -u u_x - u_xx - u_xxxx`` on a periodic line of `size` points, two of them per unit of length."""
    h = 0.5

    def f(u: Any) -> Any:
        curvature = (xp.roll(u, 1, 0) - 2 * u + xp.roll(u, -1, 0)) / h**2
        fourth = (xp.roll(curvature, 1, 0) - 2 * curvature + xp.roll(curvature, -1, 0)) / h**2
        return -u * (xp.roll(u, -1, 0) - xp.roll(u, 1, 0)) / (2 * h) - curvature - fourth

    return f


def upwind_advection(xp: Any, size: int, sum_at: Any) -> Callable[[Any], Any]:
    """``u' = -Σ (u - c) ∂u`` over the axes of a periodic cube of size³ points, by differences against the flow.

    The velocity ``u - c`` depends on the state, and its sign tells from which side the flow comes.
    """

    def f(u: Any) -> Any:
        change = 0.0
        for axis, c in enumerate((0.25, 0.5, 0.75)):
            velocity = u - c
            slope = xp.where(velocity > 0, u - xp.roll(u, 1, axis), xp.roll(u, -1, axis) - u)
            change = change - velocity * slope * size
        return change

    return f


def shallow_water(xp: Any, size: int, sum_at: Any) -> Callable[[Any], Any]:
    """Depth and momentum on a periodic line of `size` cells, in finite volumes of second order.

    A cell's state is reconstructed by minmod-limited slopes, and Rusanov's flux passes through each face between the
    states on both its sides; LeVeque, Finite Volume Methods for Hyperbolic Problems, 2002, sections 6.9 and 12.5.
    """
    gravity, dry = 9.81, 1e-6

    def f(x: Any) -> Any:
        behind, ahead = x - xp.roll(x, 1, 1), xp.roll(x, -1, 1) - x
        slope = (xp.sign(behind) + xp.sign(ahead)) / 2 * xp.minimum(xp.abs(behind), xp.abs(ahead))
        left, right = x + slope / 2, xp.roll(x - slope / 2, -1, 1)
        (of_left, fast_left), (of_right, fast_right) = flow(left), flow(right)
        flux = (of_left + of_right) / 2 - xp.maximum(fast_left, fast_right) * (right - left) / 2
        return (xp.roll(flux, 1, 1) - flux) * size

    def flow(state: Any) -> tuple[Any, Any]:
        """The flux at a state, and the speed of its fastest wave."""
        depth, momentum = state
        velocity = xp.where(depth > dry, momentum / depth, 0.0)
        flux = xp.stack([momentum, momentum * velocity + gravity / 2 * depth * depth])
        return flux, xp.abs(velocity) + xp.sqrt(gravity * depth)

    return f


def power_flow(xp: Any, size: int, sum_at: Any) -> Callable[[Any], Any]:
    """What the balances of active and reactive power miss at `size` buses, by their voltages' angles and magnitudes.

    What leaves a bus by a line of series admittance ``g + j b`` is ``g V² - V W (g cos θ + b sin θ)`` and
    ``-b V² - V W (g sin θ - b cos θ)``, where W is the other bus's magnitude and θ the difference of the angles.
    """
    network = _network(size)
    source, target, g, b, injected = (xp.asarray(network[name]) for name in ("source", "target", "g", "b", "injected"))

    def f(x: Any) -> Any:
        angle, magnitude = x
        theta, v = angle[source] - angle[target], magnitude[source]
        product, cosine, sine = v * magnitude[target], xp.cos(theta), xp.sin(theta)
        active = g * v * v - product * (g * cosine + b * sine)
        reactive = -b * v * v - product * (g * sine - b * cosine)
        return xp.stack([sum_at(active, source, size), sum_at(reactive, source, size)]) - injected

    return f


def oregonator(xp: Any, size: int, sum_at: Any) -> Callable[[Any], Any]:
    """Three species that react and diffuse on a line of `size` points through whose ends nothing flows.

    The reaction is OREGO of Hairer and Wanner, Solving Ordinary Differential Equations II, section IV.10.
    """
    diffusion = xp.asarray(np.array([[1e-2], [1e-3], [1e-2]]) * size**2)

    def f(x: Any) -> Any:
        u, v, w = x
        reaction = [77.27 * (v + u * (1 - 8.375e-6 * u - v)), (w - (1 + u) * v) / 77.27, 0.161 * (u - w)]
        padded = xp.concatenate([x[:, :1], x, x[:, -1:]], 1)
        return xp.stack(reaction) + diffusion * (padded[:, 2:] - 2 * x + padded[:, :-2])

    return f


def _neighbours(xp: Any, u: Any) -> Any:
    """The differences from the four neighbours on a periodic grid, summed: Δ times the square of the spacing."""
    return xp.roll(u, 1, 0) + xp.roll(u, -1, 0) + xp.roll(u, 1, 1) + xp.roll(u, -1, 1) - 4 * u


def _network(size: int) -> dict[str, np.ndarray]:
    """A random tree of buses with half as many lines besides; each line appears once in each direction."""
    rng = np.random.default_rng(size)
    others = rng.integers(0, size, size // 2)
    one = np.concatenate([np.arange(1, size), others])
    other = np.concatenate([rng.integers(0, np.arange(1, size)), (others + rng.integers(1, size, size // 2)) % size])
    g, b = rng.uniform(1, 5, len(one)), -rng.uniform(5, 20, len(one))
    return {
        "source": np.concatenate([one, other]),
        "target": np.concatenate([other, one]),
        "g": np.concatenate([g, g]),
        "b": np.concatenate([b, b]),
        "injected": rng.normal(0, 1, (2, size)),
    }


def _uniform(*shape: int, low: Any = 0.0, high: Any = 1.0) -> np.ndarray:
    return np.random.default_rng(0).uniform(low, high, shape)


#: By name; a size is a grid's side, or the number of points, cells or buses.
EQUATIONS: dict[str, Equation] = {
    "gray_scott": Equation(gray_scott, lambda n: _uniform(2, n, n)),
    "cahn_hilliard": Equation(cahn_hilliard, lambda n: _uniform(n, n, low=-1.0)),
    "kuramoto_sivashinsky": Equation(kuramoto_sivashinsky, lambda n: _uniform(n, low=-1.0)),
    "upwind_advection": Equation(upwind_advection, lambda n: _uniform(n, n, n)),
    "shallow_water": Equation(shallow_water, lambda n: _uniform(2, n, low=[[1.0], [-1.0]], high=[[2.0], [1.0]])),
    "power_flow": Equation(power_flow, lambda n: _uniform(2, n, low=[[-0.3], [0.95]], high=[[0.3], [1.05]])),
    "oregonator": Equation(oregonator, lambda n: _uniform(3, n)),
}
