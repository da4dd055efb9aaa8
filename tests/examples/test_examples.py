"""The worked examples in small, compared with NumPy, SciPy and dense matrices."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.integrate
import scipy.optimize
import torch
from jacsparse.models import load_data
from scipy.spatial.transform import Rotation

import examples
from examples import dynamic_sparse_training
from examples.equations import brusselator, initial_values
from examples.implicit_euler import odeint
from examples.least_squares import levenberg_marquardt
from examples.physics_informed import by_gauss_newton, exact, network, solution
from examples.posterior_variance import Uncertainty, denoiser, dense_variance, images
from examples.radau import solve_by_radau, ways
from examples.scenes import Scene, by_scipy, synthetic
from jacsparse.sparse import SparseLayer, SparseModel


def reference_brusselator(y: np.ndarray, n: int) -> np.ndarray:
    """The Brusselator point by point, flat."""
    u, v = y.reshape(2, n, n)
    result = np.empty((2, n, n))
    for i in range(n):
        for j in range(n):
            around = ((i + 1) % n, j), ((i - 1) % n, j), (i, (j + 1) % n), (i, (j - 1) % n)
            reaction = u[i, j] ** 2 * v[i, j]
            for number, (w, change) in enumerate([(u, 1 + reaction - 4.4 * u[i, j]), (v, 3.4 * u[i, j] - reaction)]):
                result[number, i, j] = change + 10 * n**2 * (sum(w[place] for place in around) - 4 * w[i, j])
    return result.ravel()


def test_brusselator() -> None:
    x = torch.rand(3, 2, 5, 5, dtype=torch.float64)
    expected = np.stack([reference_brusselator(sample.numpy().ravel(), 5) for sample in x]).reshape(x.shape)
    assert np.allclose(brusselator(x).numpy(), expected, rtol=0, atol=1e-11)


def test_implicit_euler() -> None:
    n, start = 4, initial_values(4)
    y, times = start.numpy().ravel(), torch.tensor([0.0, 0.01], dtype=start.dtype)
    solution = scipy.optimize.root(lambda x: x - y - 0.01 * reference_brusselator(x, n), y, tol=1e-12)
    of_state = lambda _, x: brusselator(x)  # noqa: E731
    first, one = odeint(of_state, start, times)
    assert torch.equal(first, start)
    assert solution.success and np.allclose(one.numpy().ravel(), solution.x, rtol=0, atol=1e-8)
    fine = scipy.integrate.solve_ivp(
        lambda t, x: reference_brusselator(x, n), (0.0, 0.1), y, method="BDF", rtol=1e-9, atol=1e-10
    )
    errors = [
        np.abs(odeint(of_state, start, 10 * times, steps=steps)[-1].numpy().ravel() - fine.y[:, -1]).max()
        for steps in (10, 20, 40)
    ]
    # A method of first order.
    assert errors[2] < 0.75 * errors[1] < 0.75**2 * errors[0]
    with pytest.raises(ArithmeticError, match=r"Newton's method does not settle"):
        odeint(lambda _, x: x**2 + 1, torch.zeros(1, dtype=start.dtype), 90 * times)


def test_implicit_euler_is_differentiable_and_sees_the_time() -> None:
    """``y' = -a t y``: each step divides by ``1 + h a t``."""
    a = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    y0 = torch.tensor([2.0, 1.0], dtype=torch.float64, requires_grad=True)
    times = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    states = odeint(lambda t, y: -a * t * y, y0, times)
    expected = torch.stack([y0, y0 / (1 + 0.25 * a), y0 / (1 + 0.25 * a) / (1 + 0.5 * a)])
    assert torch.allclose(states, expected, rtol=1e-8)
    for actual, reference in zip(*(torch.autograd.grad(x.sum(), (a, y0)) for x in (states, expected)), strict=True):
        assert torch.allclose(actual, reference, rtol=1e-8)


def test_radau_takes_the_same_steps_by_each_jacobian() -> None:
    start = initial_values(6)
    ours, *others = [solve_by_radau(start, 0.5, **options) for options in ways(start).values()]
    fine = scipy.integrate.solve_ivp(
        lambda t, x: reference_brusselator(x, 6), (0.0, 0.5), start.numpy().ravel(), method="BDF", rtol=1e-8, atol=1e-9
    )
    for each in (ours, *others):
        assert each.success and len(each.t) == len(ours.t)
        # Errors add up over the steps, each within the tolerance.
        assert np.abs(each.y[:, -1] - fine.y[:, -1]).max() <= len(each.t) * 1e-4 * np.abs(fine.y).max()


def reference_residuals(scene: Scene, cameras: np.ndarray, points: np.ndarray) -> np.ndarray:
    rows = []
    for camera, point, pixels in zip(scene.camera, scene.point, scene.pixels.numpy(), strict=True):
        vector, translation, focal = np.split(cameras[camera], [3, 6])
        x, y, z = Rotation.from_rotvec(vector).apply(points[point]) + translation
        rows.append(focal * np.array([x, y]) / z - pixels)
    return np.array(rows)


def test_bundle_adjustment() -> None:
    scene = synthetic(4, 12)
    (cameras, points), costs = levenberg_marquardt(scene.residuals, (scene.cameras, scene.points))
    r = reference_residuals(scene, cameras.numpy(), points.numpy())
    # Rounding of an angle's sine near 0, times the focal length.
    assert np.allclose(scene.residuals(cameras, points).numpy(), r, rtol=0, atol=1e-9)
    assert np.isclose(0.5 * (r**2).sum(), costs[-1], rtol=1e-9) and costs == sorted(costs, reverse=True)
    assert np.isclose(costs[-1], by_scipy(scene, ftol=1e-9).cost, rtol=1e-6)


def test_least_squares_where_a_step_would_raise_the_sum() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([10 * (x[1:] - x[:-1] ** 2), 1 - x[:-1]])

    start = torch.tensor([-1.2, 1.0], dtype=torch.float64)
    (x,), costs = levenberg_marquardt(f, [start])
    assert np.allclose(x, 1, rtol=0, atol=1e-6) and costs == sorted(costs, reverse=True)


def test_physics_informed_network() -> None:
    net, points = network(), torch.linspace(0, 1, 32, dtype=torch.float64)
    places = torch.linspace(0, 1, 101, dtype=torch.float64)
    parameters = by_gauss_newton(net, points, 60)
    u = solution(net, parameters, places)
    first = solution(net, {name: each.detach() for name, each in net.named_parameters()}, places)
    assert u[0] == u[-1] == 0
    assert (u - exact(places)).abs().max() < 0.05 < (first - exact(places)).abs().max()


def test_posterior_variances() -> None:
    clean = images(3, 6)
    net = denoiser(clean, noise=0.3, steps=5)
    uncertainty = Uncertainty(net, clean, noise=0.3, prior=1.0)
    image = images(1, 6, seed=1)[0]
    expected = dense_variance(net, clean, image, 0.3, 1.0)
    assert torch.allclose(uncertainty.variance(image), expected, rtol=1e-12, atol=0)


SMALL: dict[str, dict[str, Any]] = {
    "bundle_adjustment": {"cameras": 4, "points": 12},
    "dynamic_sparse_training": {"epochs": 1},
    "implicit_euler": {"n": 4, "end": 0.02},
    "posterior_variance": {"size": 4, "steps": 2},
    "physics_informed": {"steps": 4, "adam_steps": 2},
    "radau": {"n": 4, "end": 0.1},
    "ways_back": {"epochs": 1, "images": 128},
}


@pytest.mark.parametrize("name", SMALL)
def test_main_prints_a_table(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main: Callable[..., None] = importlib.import_module(f"examples.{name}").main
    main(**SMALL[name])
    assert "time" in capsys.readouterr().out


def test_each_example_runs_here() -> None:
    modules = {module.name for module in pkgutil.iter_modules(examples.__path__)}
    # The demo and the one of several processes have files of tests of their own.
    assert modules - {"cluster", "demo", "equations", "least_squares", "scenes"} == set(SMALL)


def test_dynamic_sparse_training() -> None:
    data = load_data("digits")
    few = dataclasses.replace(data, train_inputs=data.train_inputs[:128], train_labels=data.train_labels[:128])
    still, moved = (dynamic_sparse_training.train(few, epochs=3, every=2, share=share) for share in (0.0, 0.3))
    assert isinstance(still, SparseModel) and isinstance(moved, SparseModel)
    changed = 0
    for before, after in zip(still.model.modules(), moved.model.modules(), strict=True):
        if isinstance(before, SparseLayer):
            assert len(before.values) == len(after.values) == int(after.mask.sum())
            changed += int((before.mask != after.mask).sum())
    assert changed > 100
