"""Compiled Jacobians and Hessians on a device, against autograd and against the CPU's machine code."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import _nvrtc
from benchmarks._noted_launches import NotingBackend
from benchmarks._problems import PROBLEMS, SparseFunction
from jacsparse import SparseJacobian, prepare_hessian, prepare_jacobian
from jacsparse.codegen import device_code
from jacsparse.runtime import KernelFile, Launch, backend
from tests.cuda.harness import DEVICE, ON_GPU, Fibers, emulated
from tests.helpers import FLOAT, dense, drawn
from tests.jacobians.drawn_hessians import Drawn, drawn_functions
from tests.jacobians.test_drawn_functions import OneToThree, by_autograd
from tests.jacobians.test_drawn_hessians import expected_at
from tests.jacobians.test_prepared import FUNCTIONS

DRAWS = 50 if os.environ.get("JACSPARSE_TESTS") == "full" else 6
#: Equations and small sizes, and how many kernels of a call wait for each other.
EQUATIONS = {
    "gray_scott": (5, 1), "cahn_hilliard": (7, 1), "kuramoto_sivashinsky": (300, 1), "upwind_advection": (3, 1),
    "shallow_water": (37, 7), "power_flow": (29, 2), "oregonator": (41, 1), "brusselator": (6, 1), "burgers": (33, 1),
    "heat": (9, 1),
}  # fmt: skip
on_fibers = pytest.mark.skipif(ON_GPU, reason="its tensors are on the CPU")


def equation(name: str, dtype: torch.dtype = FLOAT, batch: int = 1) -> SparseFunction:
    problem = PROBLEMS[name](EQUATIONS[name][0], batch)
    moved = (each.to(DEVICE, dtype) if isinstance(each, torch.Tensor) else each for each in problem.args)
    return SparseFunction(problem.f, tuple(moved), problem.argnums, problem.batched)


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype = FLOAT) -> None:
    """Equal but for roundings of a few dozen operators."""
    assert actual.shape == expected.shape
    difference = (actual.cpu().double() - expected.double()).abs().amax()
    assert difference <= 300 * torch.finfo(dtype).eps * max(1e-2, expected.abs().amax().item())


def matrices(jacobian: SparseJacobian, batch: int) -> torch.Tensor:
    jacobian = SparseJacobian(jacobian.pattern, jacobian.values.detach().cpu().expand(-1, batch))
    return torch.stack([jacobian.todense(sample) for sample in range(batch)])


def kernels_of(prepared: Any) -> device_code.DeviceCode:
    code = prepared._first.evaluator.fused._code
    assert isinstance(code, device_code.DeviceCode)
    return code


@on_fibers
@pytest.mark.parametrize("method", ["products", "compressed"])
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "constant"])
def test_functions(name: str, method: str) -> None:
    f, shape = FUNCTIONS[name]
    with emulated():
        prepared = prepare_jacobian(f, drawn(3, *shape), method=method, batched=True, compile=True)
        points = [drawn(3, *shape, seed=seed) for seed in (0, 1)]
        actual = [prepared(x) for x in points]
    assert kernels_of(prepared)
    for x, jacobian in zip(points, actual, strict=True):
        close(matrices(jacobian, 3), dense(f, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", EQUATIONS)
def test_equations(name: str, dtype: torch.dtype) -> None:
    problem, batch = equation(name, dtype), 1
    with emulated():
        prepared = prepare_jacobian(problem.f, *problem.args, **problem.options, compile=True)
        (values,) = {prepared.values(*problem.args) for _ in range(1)}
    assert "compiled: the whole call" in repr(prepared) and values.dtype == dtype
    assert len(kernels_of(prepared)._launches) <= EQUATIONS[name][1]
    args = [each.cpu().double() if isinstance(each, torch.Tensor) else each for each in problem.args]
    expected = dense(problem.f, *args, argnums=problem.argnums, batched=problem.batched)
    close(matrices(SparseJacobian(prepared.pattern, values), batch), expected, dtype)


@on_fibers
@settings(max_examples=DRAWS)
@given(function=drawn_functions())
def test_drawn_functions(function: Drawn) -> None:
    f, points = OneToThree(function), [function.input(seed) for seed in range(2)]
    expected = [by_autograd(f, x) for x in points]
    assume(all(each is not None for each in expected))
    try:
        on_cpu = prepare_jacobian(f, points[0], compile=True)
    except (jacsparse_errors := (ValueError, TypeError)):
        assume(False)
    fused = on_cpu._first.evaluator.fused is not None
    with emulated():
        prepared = prepare_jacobian(f, points[0], compile=True)
        actual = [prepared(x) for x in points]
    assert (prepared._first.evaluator.fused is not None) == fused or not fused
    for x, jacobian, matrix in zip(points, actual, expected, strict=True):
        assert matrix is not None and jacobian.pattern == on_cpu.pattern
        assert (matrices(jacobian, len(x)) - matrix).abs().max() <= 1e-9 * max(1.0, matrix.abs().max().item())
        if fused:
            close(jacobian.values, on_cpu.values(x))
