"""Functions whose sparse Jacobians people need, each written once for NumPy, JAX and PyTorch; NumPy alone is imported.

A function takes a `Library` as `xp`: the libraries agree on the functions' names and on the order of their arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Library:
    """A library of arrays: its namespace, and what the libraries do not agree on."""

    namespace: Any
    #: ``add_at(x, places, values)`` is `x` with values added at places of its first axis, also several at one.
    add_at: Callable[[Any, Any, Any], Any]
    #: ``border(x)`` has zeros around the last two axes.
    border: Callable[[Any], Any]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.namespace, name)


@dataclass(frozen=True)
class Equation:
    """A function of arrays, and the arrays at which it is differentiated by all of them."""

    #: ``function(xp, *arrays, *numbers, **constants)``.
    function: Callable[..., Any]
    #: ``arrays(size, sample)`` are float64 arrays that lie on no kink.
    arrays: Callable[[int, int], tuple[np.ndarray, ...]]
    #: Arrays and numbers by which it is not differentiated.
    constants: Callable[[int], dict[str, Any]] = lambda size: {}
    numbers: tuple[float, ...] = ()
    #: Whether samples may lie side by side on an axis before the others.
    batched: bool = False

    def on(self, xp: Any, size: int) -> Callable[..., Any]:
        """The function of arrays, and of the numbers, in a library."""
        constants = {name: xp.asarray(array) for name, array in self.constants(size).items()}
        return functools.partial(self.function, xp, **constants)


def gray_scott(xp: Any, x: Any) -> Any:
    """Two species that react and diffuse on a periodic square of size × size points.

    ``u' = a Δu - u v² + F (1 - u)`` and ``v' = b Δv + u v² - (F + k) v``; Pearson, Complex patterns in a simple system,
    1993, on his square of side 2.5.
    """
    a, b, feed, kill, points = 2e-5, 1e-5, 0.04, 0.06, (x.shape[-1] / 2.5) ** 2
    u, v = x
    uvv = u * v * v
    of_u = a * points * _neighbours(xp, u) - uvv + feed * (1 - u)
    of_v = b * points * _neighbours(xp, v) + uvv - (feed + kill) * v
    return xp.stack([of_u, of_v])


def cahn_hilliard(xp: Any, u: Any) -> Any:
    """Two phases that separate on a periodic square of size × size points: ``u' = Δ(u³ - u - ε² Δu)``.

    An interface is about two points wide.
    """
    size = u.shape[-1]
    points, epsilon = size**2, 1.5 / size
    potential = u * u * u - u - epsilon**2 * points * _neighbours(xp, u)
    return points * _neighbours(xp, potential)


def kuramoto_sivashinsky(xp: Any, u: Any) -> Any:
    """``u' = -u u_x - u_xx - u_xxxx`` on a periodic line of `size` points, two of them per unit of length."""
    h = 0.5
    curvature = (xp.roll(u, 1, 0) - 2 * u + xp.roll(u, -1, 0)) / h**2
    fourth = (xp.roll(curvature, 1, 0) - 2 * curvature + xp.roll(curvature, -1, 0)) / h**2
    return -u * (xp.roll(u, -1, 0) - xp.roll(u, 1, 0)) / (2 * h) - curvature - fourth


def upwind_advection(xp: Any, u: Any) -> Any:
    """``u' = -Σ (u - c) ∂u`` over the axes of a periodic cube of size³ points, by differences against the flow.

    The velocity ``u - c`` depends on the state, and its sign tells from which side the flow comes.
    """
    change = 0.0
    for axis, c in enumerate((0.25, 0.5, 0.75)):
        velocity = u - c
        slope = xp.where(velocity > 0, u - xp.roll(u, 1, axis), xp.roll(u, -1, axis) - u)
        change = change - velocity * slope * u.shape[0]
    return change


def shallow_water(xp: Any, x: Any) -> Any:
    """Depth and momentum on a periodic line of `size` cells, in finite volumes of second order.

    A cell's state is reconstructed by minmod-limited slopes, and Rusanov's flux passes through each face between the
    states on both its sides; LeVeque, Finite Volume Methods for Hyperbolic Problems, 2002, sections 6.9 and 12.5.
    """
    gravity, dry = 9.81, 1e-6

    def flow(state: Any) -> tuple[Any, Any]:
        """The flux at a state, and the speed of its fastest wave."""
        depth, momentum = state
        velocity = xp.where(depth > dry, momentum / depth, 0.0)
        flux = xp.stack([momentum, momentum * velocity + gravity / 2 * depth * depth])
        return flux, xp.abs(velocity) + xp.sqrt(gravity * depth)

    behind, ahead = x - xp.roll(x, 1, 1), xp.roll(x, -1, 1) - x
    slope = (xp.sign(behind) + xp.sign(ahead)) / 2 * xp.minimum(xp.abs(behind), xp.abs(ahead))
    left, right = x + slope / 2, xp.roll(x - slope / 2, -1, 1)
    (of_left, fast_left), (of_right, fast_right) = flow(left), flow(right)
    flux = (of_left + of_right) / 2 - xp.maximum(fast_left, fast_right) * (right - left) / 2
    return (xp.roll(flux, 1, 1) - flux) * x.shape[1]


def power_flow(xp: Any, x: Any, *, source: Any, target: Any, g: Any, b: Any, injected: Any) -> Any:
    """What the balances of active and reactive power miss at `size` buses, by their voltages' angles and magnitudes.

    What leaves a bus by a line of series admittance ``g + j b`` is ``g V² - V W (g cos θ + b sin θ)`` and
    ``-b V² - V W (g sin θ - b cos θ)``, where W is the other bus's magnitude and θ the difference of the angles.
    """
    angle, magnitude = x
    theta, v = angle[source] - angle[target], magnitude[source]
    product, cosine, sine = v * magnitude[target], xp.cos(theta), xp.sin(theta)
    active = g * v * v - product * (g * cosine + b * sine)
    reactive = -b * v * v - product * (g * sine - b * cosine)
    nothing = xp.zeros_like(injected[0])
    return xp.stack([xp.add_at(nothing, source, power) for power in (active, reactive)]) - injected


def oregonator(xp: Any, x: Any, *, diffusion: Any) -> Any:
    """Three species that react and diffuse on a line of `size` points through whose ends nothing flows.

    The reaction is OREGO of Hairer and Wanner, Solving Ordinary Differential Equations II, section IV.10.
    """
    u, v, w = x
    reaction = [77.27 * (v + u * (1 - 8.375e-6 * u - v)), (w - (1 + u) * v) / 77.27, 0.161 * (u - w)]
    padded = xp.concatenate([x[:, :1], x, x[:, -1:]], 1)
    return xp.stack(reaction) + diffusion * (padded[:, 2:] - 2 * x + padded[:, :-2])


def brusselator(xp: Any, x: Any) -> Any:
    """The 2-D Brusselator of ``examples/equations.py`` on a periodic grid of size × size points."""
    u, v = xp.moveaxis(x, -3, 0)
    uuv, diffusion = u * u * v, 10.0 * x.shape[-1] ** 2
    of_u = 1 + uuv - 4.4 * u + diffusion * _neighbours(xp, u)
    return xp.stack([of_u, 3.4 * u - uuv + diffusion * _neighbours(xp, v)], -3)


def burgers(xp: Any, u: Any, viscosity: float) -> Any:
    """The viscous Burgers' equation on a periodic line, by central differences; the viscosity is an argument."""
    ahead, behind, n = xp.roll(u, -1, -1), xp.roll(u, 1, -1), u.shape[-1]
    return viscosity * (ahead - 2 * u + behind) * n**2 - u * (ahead - behind) * (n / 2)


def heat(xp: Any, u: Any) -> Any:
    """Heat in a square whose conductivity depends on the temperature; the border is at 0."""
    u = xp.border(u)
    k = 1 + u * u
    across = (k[..., 1:-1, 1:] + k[..., 1:-1, :-1]) * (u[..., 1:-1, 1:] - u[..., 1:-1, :-1])
    along = (k[..., 1:, 1:-1] + k[..., :-1, 1:-1]) * (u[..., 1:, 1:-1] - u[..., :-1, 1:-1])
    return across[..., 1:] - across[..., :-1] + along[..., 1:, :] - along[..., :-1, :]


def bundle(xp: Any, cameras: Any, points: Any, *, camera_of: Any, point_of: Any, seen: Any) -> Any:
    """Residuals of a bundle adjustment, of 4 observations of each point, by all cameras and points.

    ``cameras`` has rows of a rotation vector, a translation and a focal length; ``camera_of`` and ``point_of`` tell the
    camera and the point of each observation.
    """
    camera, point = cameras[camera_of], points[point_of]
    axis = camera[:, :3]
    angle = xp.sqrt((axis**2).sum(1))[:, None]
    unit, cosine = axis / angle, xp.cos(angle)
    turned = point * cosine + xp.linalg.cross(unit, point) * xp.sin(angle)
    turned = turned + unit * (unit * point).sum(1)[:, None] * (1 - cosine) + camera[:, 3:6]
    return camera[:, 6:] * turned[:, :2] / turned[:, 2:] - seen


def graph_network(xp: Any, h: Any, *, source: Any, target: Any, weights: Any) -> Any:
    """A layer of messages on a graph of four edges a node, 8 features each."""
    of_target, of_source = weights
    return xp.add_at(h, target, xp.tanh(h[target] @ of_target + h[source] @ of_source))


def _neighbours(xp: Any, u: Any) -> Any:
    """The differences from the four neighbours on a periodic grid, summed: Δ times the square of the spacing."""
    return xp.roll(u, 1, -2) + xp.roll(u, -1, -2) + xp.roll(u, 1, -1) + xp.roll(u, -1, -1) - 4 * u


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


def _cloud(size: int) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Cameras before a cloud of points, the points, and which four cameras see each of them where."""
    rng, cameras, views = np.random.default_rng(0), max(4, size // 25), 4
    poses = np.concatenate(
        [rng.normal(0, 0.1, (cameras, 5)), rng.uniform(4, 6, (cameras, 1)), np.ones((cameras, 1))], 1
    )
    points = rng.normal(0, 1, (size, 3))
    camera_of = np.stack([rng.choice(cameras, views, replace=False) for _ in range(size)]).reshape(-1)
    seen = rng.normal(0, 0.2, (size * views, 2))
    return poses, points, {"camera_of": camera_of, "point_of": np.repeat(np.arange(size), views), "seen": seen}


def _graph(size: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The features of a graph's nodes; its edges by their ends, and the weights of a layer of messages."""
    rng, features = np.random.default_rng(0), 8
    edges = {name: rng.integers(0, size, 4 * size) for name in ("source", "target")}
    nodes = rng.normal(0, 1, (size, features))
    return nodes, {**edges, "weights": rng.normal(0, 0.3, (2, features, features))}


def field(*shape: int, sample: int = 0) -> np.ndarray:
    """Values between 0 and 1 on a grid."""
    return ((7 * np.arange(np.prod(shape)) + 3 * sample) % 11 / 11).reshape(shape)


def _uniform(*shape: int, low: Any = 0.0, high: Any = 1.0) -> tuple[np.ndarray]:
    return (np.random.default_rng(0).uniform(low, high, shape),)


#: By name; a size is a grid's side, or the number of points, cells, buses or nodes.
EQUATIONS: dict[str, Equation] = {
    "gray_scott": Equation(gray_scott, lambda n, _: _uniform(2, n, n)),
    "cahn_hilliard": Equation(cahn_hilliard, lambda n, _: _uniform(n, n, low=-1.0)),
    "kuramoto_sivashinsky": Equation(kuramoto_sivashinsky, lambda n, _: _uniform(n, low=-1.0)),
    "upwind_advection": Equation(upwind_advection, lambda n, _: _uniform(n, n, n)),
    "shallow_water": Equation(shallow_water, lambda n, _: _uniform(2, n, low=[[1.0], [-1.0]], high=[[2.0], [1.0]])),
    "power_flow": Equation(
        power_flow, lambda n, _: _uniform(2, n, low=[[-0.3], [0.95]], high=[[0.3], [1.05]]), _network
    ),
    "oregonator": Equation(
        oregonator, lambda n, _: _uniform(3, n), lambda n: {"diffusion": np.array([[1e-2], [1e-3], [1e-2]]) * n**2}
    ),
    "brusselator": Equation(brusselator, lambda n, sample: (field(2, n, n, sample=sample),), batched=True),
    "burgers": Equation(burgers, lambda n, sample: (field(n, sample=sample),), numbers=(0.01,), batched=True),
    "heat": Equation(heat, lambda n, sample: (field(n, n, sample=sample),), batched=True),
    "bundle": Equation(bundle, lambda n, _: _cloud(n)[:2], lambda n: _cloud(n)[2]),
    "graph_network": Equation(graph_network, lambda n, _: _graph(n)[:1], lambda n: _graph(n)[1]),
}
