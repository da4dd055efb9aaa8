"""Discretised equations: alike in NumPy and PyTorch, and with autograd's Jacobians."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import jacsparse
from benchmarks._equations import EQUATIONS, Library
from benchmarks._problems import PROBLEMS

#: Sizes at which stencils do not overlap.
SIZES = {
    "gray_scott": 4,
    "cahn_hilliard": 5,
    "kuramoto_sivashinsky": 7,
    "upwind_advection": 3,
    "shallow_water": 6,
    "power_flow": 7,
    "oregonator": 5,
    "brusselator": 4,
    "burgers": 6,
    "heat": 4,
    "bundle": 5,
    "graph_network": 6,
}


def add_at(x: np.ndarray, places: np.ndarray, values: np.ndarray) -> np.ndarray:
    x = x.copy()
    np.add.at(x, places, values)
    return x


NUMPY = Library(np, add_at, lambda u: np.pad(u, 1))


def test_each_equation_has_a_size_here() -> None:
    assert list(SIZES) == list(EQUATIONS)


@pytest.mark.parametrize("name", SIZES)
def test_libraries_compute_the_same(name: str) -> None:
    equation, size = EQUATIONS[name], SIZES[name]
    batch = 2 if equation.batched else 1
    problem, f = PROBLEMS[name](size, batch), equation.on(NUMPY, size)
    actual = problem.f(*problem.args)
    assert actual.dtype == torch.float64
    for sample, of_sample in enumerate(actual if equation.batched else [actual]):
        expected = f(*equation.arrays(size, sample), *equation.numbers)
        assert of_sample.shape == expected.shape
        assert np.allclose(of_sample.numpy(), expected, rtol=1e-12, atol=1e-12 * np.abs(expected).max())


@pytest.mark.parametrize("name", SIZES)
def test_jacobians_are_those_of_autograd(name: str) -> None:
    problem = PROBLEMS[name](SIZES[name], 1)
    options = {"argnums": problem.argnums, "batched": problem.batched}
    derivatives = torch.func.jacrev(problem.f, problem.argnums)(*problem.args)
    rows = problem.f(*problem.args).numel()
    each = derivatives if isinstance(derivatives, tuple) else (derivatives,)
    expected = torch.cat([derivative.reshape(rows, -1) for derivative in each], 1)
    prepared = jacsparse.prepare_jacobian(problem.f, *problem.args, **options)
    for actual in (prepared(*problem.args), jacsparse.jacobian(problem.f, *problem.args, **options)):
        assert torch.allclose(actual.todense(), expected, rtol=1e-12, atol=1e-12 * float(expected.abs().max()))
    assert 0 < prepared.pattern.nnz < expected.numel()


def test_power_leaves_a_bus_by_admittances() -> None:
    """``S = V conj(Y V)`` with the matrix of the buses' admittances."""
    from benchmarks._equations import _network

    size, network = 6, _network(6)
    source, target, admittance = network["source"], network["target"], network["g"] + 1j * network["b"]
    matrix = np.zeros((size, size), dtype=complex)
    np.add.at(matrix, (source, target), -admittance)
    np.add.at(matrix, (source, source), admittance)
    (state,) = EQUATIONS["power_flow"].arrays(size, 0)
    angle, magnitude = state
    voltage = magnitude * np.exp(1j * angle)
    power = voltage * np.conj(matrix @ voltage)
    actual = EQUATIONS["power_flow"].on(NUMPY, size)(state) + network["injected"]
    assert np.allclose(actual, [power.real, power.imag], rtol=0, atol=1e-12)
