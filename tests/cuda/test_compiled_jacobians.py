"""Compiled Jacobians and Hessians on a device, against autograd and against the CPU's machine code."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import _nvrtc
from benchmarks._problems import PROBLEMS, SparseFunction
from jacsparse import SparseJacobian, UnsupportedOperatorError, prepare_hessian, prepare_jacobian
from jacsparse.codegen import DeviceCode, device_code
from jacsparse.runtime import KernelFile, Launch, backend
from tests.codegen.test_codegen import ELEMENTWISE, kinks, long_sums, uneven, written
from tests.cuda.harness import DEVICE, ON_GPU, Fibers, emulated
from tests.helpers import FLOAT, dense, drawn
from tests.jacobians.drawn_hessians import Drawn, drawn_functions
from tests.jacobians.test_drawn_functions import OneToThree, by_autograd
from tests.jacobians.test_drawn_hessians import expected_at
from tests.jacobians.test_prepared import FUNCTIONS

DRAWS = 50 if os.environ.get("JACSPARSE_TESTS") == "full" else 5
#: Equations with small sizes, and the most kernels of a call that wait for each other.
EQUATIONS = {
    "gray_scott": (5, 1), "cahn_hilliard": (7, 1), "kuramoto_sivashinsky": (300, 1), "upwind_advection": (3, 1),
    "shallow_water": (37, 7), "power_flow": (29, 2), "oregonator": (41, 1), "brusselator": (6, 1), "burgers": (33, 1),
    "heat": (9, 2),
}  # fmt: skip
on_fibers = pytest.mark.skipif(ON_GPU, reason="its tensors are on the CPU")
Function = Callable[[torch.Tensor], torch.Tensor]


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype = FLOAT) -> None:
    """Equal but for the roundings of a few dozen operators."""
    assert actual.shape == expected.shape
    if expected.numel():
        difference = (actual.cpu().double() - expected.double()).abs().amax()
        assert difference <= 300 * torch.finfo(dtype).eps * max(1e-2, expected.abs().amax().item())


def matrices(jacobian: SparseJacobian, batch: int) -> torch.Tensor:
    values = jacobian.values.detach().cpu().expand(-1, batch)
    jacobian = SparseJacobian(jacobian.pattern, values)
    return torch.stack([jacobian.todense(sample) for sample in range(batch)])


def kernels_of(prepared: Any) -> DeviceCode:
    code = prepared._first.evaluator.fused._code
    assert isinstance(code, DeviceCode)
    return code


def check(f: Function, points: list[torch.Tensor], **options: Any) -> Any:
    """Compare a compiled Jacobian with autograd in float64, at each of some points; it is returned."""
    with emulated():
        prepared = prepare_jacobian(f, points[0].to(DEVICE), batched=True, compile=True, **options)
        actual = [prepared(x.to(DEVICE)) for x in points]
    kernels_of(prepared)
    for x, jacobian in zip(points, actual, strict=True):
        assert jacobian.values.dtype == x.dtype
        close(matrices(jacobian, len(x)), dense(f, x.double()), x.dtype)
    return prepared


@on_fibers
@pytest.mark.parametrize("method", ["products", "compressed"])
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "constant"])
def test_functions(name: str, method: str) -> None:
    f, shape = FUNCTIONS[name]
    check(f, [drawn(3, *shape, seed=seed) for seed in (0, 1)], method=method)


def equation(name: str, dtype: torch.dtype) -> SparseFunction:
    problem = PROBLEMS[name](EQUATIONS[name][0], 1)
    keywords = {name: each.to(DEVICE) for name, each in problem.f.keywords.items()}  # type: ignore[attr-defined]
    args = (each.to(DEVICE, dtype) if isinstance(each, torch.Tensor) else each for each in problem.args)
    f = lambda *args: problem.f(*args, **keywords)  # noqa: E731
    return SparseFunction(f, tuple(args), problem.argnums, problem.batched)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", EQUATIONS)
def test_equations(name: str, dtype: torch.dtype) -> None:
    problem = equation(name, dtype)
    with emulated():
        prepared = prepare_jacobian(problem.f, *problem.args, **problem.options, compile=True)
        jacobian = prepared(*problem.args)
    assert "compiled: the whole call" in repr(prepared) and jacobian.values.dtype == dtype
    assert len(kernels_of(prepared)._launches) <= EQUATIONS[name][1]
    args = [each.double() if isinstance(each, torch.Tensor) else each for each in problem.args]
    expected = dense(problem.f, *args, argnums=problem.argnums, batched=problem.batched)
    close(matrices(jacobian, 1), expected.cpu(), dtype)


@on_fibers
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("f", "size"), [(uneven, 5), (long_sums, 6), (written, 6)], ids=lambda each: str(each))
def test_rows_and_sums(f: Function, size: int, batch: int, dtype: torch.dtype) -> None:
    check(f, [drawn(batch, size, seed=seed).to(dtype) for seed in (0, 1)])


@pytest.mark.parametrize("size", [2, 255, 256, 257, 1000])
def test_points_that_fill_blocks_and_that_do_not(size: int) -> None:
    """One run, several runs, and points by themselves, in one launch."""
    def f(x: torch.Tensor) -> torch.Tensor:
        halves = torch.cat([x[:, ::2].sin(), x[:, 1::2].exp()], 1)
        return torch.cat([x * x.roll(1, 1), halves.roll(3, 1) * x, x.flip(1)[:, : size // 2] ** 3], 1)

    check(f, [drawn(1, size, seed=seed).float() for seed in (0, 1)])


@on_fibers
@pytest.mark.parametrize("order", [[3, 3, 0, 1, 1, 2, 5], [6, 2, 5, 0, 4, 1, 3]])
def test_places_of_64_bits(order: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_code, "index_dtype", lambda *_: np.int64)
    prepared = check(lambda x: x[:, order] * x.sin(), [drawn(2, 7)])
    assert kernels_of(prepared).runs[device_code.TABLES].dtype == np.int64


@on_fibers
def test_several_dtypes() -> None:
    weights = torch.linspace(0.5, 1.5, 5)
    mask = torch.tensor([True, False, True, True, False])
    f = lambda x: torch.where(mask & (x > 0.9), x.float().sin() * weights, x.exp()).double() * x  # noqa: E731
    x = drawn(2, 5)
    with emulated():
        actual = prepare_jacobian(f, x, batched=True, compile=True)(x)
    # What is computed in float32 is rounded as there.
    close(matrices(actual, 2), dense(f, x), torch.float32)


@on_fibers
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_elementwise_operators(dtype: torch.dtype) -> None:
    """All that loops know, by one program: their results are PyTorch's at ties, infinities and no numbers too."""
    special = [0.0, -0.0, 1.0, -1.0, 0.5, float("inf"), float("-inf"), float("nan"), 3.0]
    x = torch.tensor([special, special[::-1]], dtype=dtype)
