"""Discretised equations: alike in NumPy and PyTorch, and with autograd's Jacobians."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import jacsparse
from benchmarks._equations import EQUATIONS
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
}


def sum_at(values: np.ndarray, places: np.ndarray, count: int) -> np.ndarray:
    return np.bincount(places, values, count)


def test_each_equation_has_a_size_here() -> None:
    assert list(SIZES) == list(EQUATIONS)


@pytest.mark.parametrize("name", SIZES)
def test_libraries_compute_the_same(name: str) -> None:
    equation, size = EQUATIONS[name], SIZES[name]
    state, problem = equation.state(size), PROBLEMS[name](size, 1)
    expected, actual = equation.function(np, size, sum_at)(state), problem.f(*problem.args)
    assert actual.shape == state.shape == expected.shape and actual.dtype == torch.float64
    assert np.allclose(actual.numpy(), expected, rtol=1e-12, atol=1e-12 * np.abs(expected).max())


@pytest.mark.parametrize("name", SIZES)
def test_jacobians_are_those_of_autograd(name: str) -> None:
    problem = PROBLEMS[name](SIZES[name], 1)
    (x,) = problem.args
    expected = torch.func.jacrev(problem.f)(x).reshape(x.numel(), x.numel())
    prepared = jacsparse.prepare_jacobian(problem.f, x, batched=problem.batched)
    for actual in (prepared(x), jacsparse.jacobian(problem.f, x, batched=problem.batched)):
        assert torch.allclose(actual.todense(), expected, rtol=1e-12, atol=1e-12 * float(expected.abs().max()))
    assert 0 < prepared.pattern.nnz < x.numel() ** 2


def test_power_leaves_a_bus_by_admittances() -> None:
    """``S = V conj(Y V)`` with the matrix of the buses' admittances."""
    from benchmarks._equations import _network

    size, network = 6, _network(6)
    source, target, admittance = network["source"], network["target"], network["g"] + 1j * network["b"]
    matrix = np.zeros((size, size), dtype=complex)
    np.add.at(matrix, (source, target), -admittance)
    np.add.at(matrix, (source, source), admittance)
    angle, magnitude = state = EQUATIONS["power_flow"].state(size)
    voltage = magnitude * np.exp(1j * angle)
    power = voltage * np.conj(matrix @ voltage)
    actual = EQUATIONS["power_flow"].function(np, size, sum_at)(state) + network["injected"]
    assert np.allclose(actual, [power.real, power.imag], rtol=0, atol=1e-12)
