"""Compiled Jacobians and Hessians on a device, against autograd."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks._problems import PROBLEMS, SparseFunction
from jacsparse import SparseJacobian, prepare_hessian, prepare_jacobian
from jacsparse.codegen import DeviceCode
from tests.cuda.harness import DEVICE, ON_GPU, emulated
from tests.helpers import FLOAT, dense, drawn

#: Equations with small sizes, and the most kernels of a call that wait for each other.
EQUATIONS = {
    "gray_scott": (5, 1), "cahn_hilliard": (7, 1), "kuramoto_sivashinsky": (300, 1), "upwind_advection": (3, 1),
    "shallow_water": (37, 7), "power_flow": (29, 2), "oregonator": (41, 1), "brusselator": (6, 1), "burgers": (33, 1),
    "heat": (9, 2),
}  # fmt: skip
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


@pytest.mark.parametrize("size", [2, 255, 256, 257, 1000])
def test_points_that_fill_blocks_and_that_do_not(size: int) -> None:
    """One run, several runs, and points by themselves, in one launch."""

    def f(x: torch.Tensor) -> torch.Tensor:
        halves = torch.cat([x[:, ::2].sin(), x[:, 1::2].exp()], 1)
        return torch.cat([x * x.roll(1, 1), halves.roll(3, 1) * x, x.flip(1)[:, : size // 2] ** 3], 1)

    check(f, [drawn(1, size, seed=seed).float() for seed in (0, 1)])


#: Functions that jump where a number differs from itself by a rounding, as PyTorch's maximum of numbers and a loop's.
JUMPS: dict[str, Function] = {
    "a maximum": lambda u: (0.3 * u).exp().amax(-1),
    "a norm": lambda u: torch.linalg.vector_norm(u.exp(), float("inf"), -1),
    "comparisons": lambda u: (lambda v: torch.where(v >= v.amax(-1, keepdim=True), v * v, v.sin()))(u.exp()),
    "comparisons with what is sorted": lambda u: (lambda v: v * (v == v.sort(-1)[0][:, -1:]))(u.tanh()),
    "differences": lambda u: (lambda v: v.relu() + v.sign() * v.abs())(u.exp() - u.exp().amax(-1, keepdim=True)),
}


@pytest.mark.parametrize("method", ["products", "compressed"])
@pytest.mark.parametrize("name", JUMPS)
def test_numbers_are_compared_as_they_were_rounded(name: str, method: str) -> None:
    """Where PyTorch computes one side of a comparison from what loops compute too."""
    f, x = JUMPS[name], drawn(400, 4)
    check(f, [x], method=method)
    prepared = prepare_jacobian(f, x, batched=True, compile=True, method=method)
    close(matrices(prepared(x), len(x)), dense(f, x))


def energy(u: torch.Tensor) -> torch.Tensor:
    return (u[1:] * u[:-1].exp()).sum() + (u.sin() ** 3).sum()


@pytest.mark.parametrize("method", ["products", "compressed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hessians(dtype: torch.dtype, method: str) -> None:
    x = drawn(300).to(DEVICE, dtype)
    with emulated():
        prepared = prepare_hessian(energy, x, compile=True, method=method, gradient=True, value=True)
        hessian, gradient, value = prepared(x)
    kernels_of(prepared)
    at = x.cpu().double().requires_grad_()
    close(matrices(hessian, 1), torch.autograd.functional.hessian(energy, at)[None], dtype)
    close(gradient, torch.autograd.grad(energy(at), at)[0], dtype)
    close(value, energy(at).detach(), dtype)


def test_gradients_of_values() -> None:
    f = lambda u: u[1:] * u[:-1].exp() + u[1:].sin()  # noqa: E731
    x, weights = drawn(70).to(DEVICE).requires_grad_(), torch.linspace(-1, 2, 138).to(DEVICE)[:, None]
    with emulated():
        prepared = prepare_jacobian(f, x, compile=True, create_graph=True)
        (actual,) = torch.autograd.grad((prepared(x).values * weights).sum(), x)
    kernels_of(prepared)
    at = x.detach().cpu().requires_grad_()
    jacobian = torch.autograd.functional.jacobian(f, at, create_graph=True)
    rows, columns = prepared.pattern.to_scipy().tocoo().coords
    (expected,) = torch.autograd.grad((jacobian[rows, columns][:, None] * weights.cpu()).sum(), at)
    close(actual, expected)


class _NoWaits(TorchDispatchMode):
    """Raises where an operator waits for the device."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "_to_copy", "unique"), name
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A context in which whatever waits for the device raises."""

    def wait(*_: Any, **__: Any) -> None:
        raise AssertionError("waits for the device")

    with monkeypatch.context() as patch, _NoWaits():
        for name in ("cpu", "item", "tolist", "numpy", "__bool__", "__float__", "__int__"):
            patch.setattr(torch.Tensor, name, wait)
        yield


def test_calls_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where the function reads indices, parameters, and calls that are left to PyTorch; Hessians neither."""
    x, index = drawn(6).to(DEVICE), torch.tensor([4, 0, 3, 1, 1, 2]).to(DEVICE)
    scale = nn.Parameter(drawn(6).to(DEVICE))
    with emulated():
        calls = [
            prepare_jacobian(lambda u, i: u[index] * u[i] * scale, x, index, compile=True),
            prepare_jacobian(lambda u, i: (u.reshape(2, 3) @ u.reshape(3, 2)).exp(), x, index, compile=True),
            prepare_hessian(lambda u, i: (u[index] ** 3 * u).sum(), x, index, compile=True),
        ]
        for prepared in calls:
            kernels_of(prepared)
            prepared(x, index)
            with no_waits(monkeypatch):
                prepared(x, index)


def test_indices_are_compared_once_for_each_version(monkeypatch: pytest.MonkeyPatch) -> None:
    x, index = drawn(3).to(DEVICE), torch.tensor([2, 0, 1]).to(DEVICE)
    with emulated():
        prepared = prepare_jacobian(lambda u: u[index] * u.exp(), x, compile=True)
        expected = prepared.values(x)
        index.copy_(torch.tensor([2, 0, 1]))
        assert torch.equal(prepared.values(x), expected)
        index[0] = 1
        with pytest.raises(ValueError, match="holds other elements than when this Jacobian was prepared"):
            prepared.values(x)


def test_values_that_are_not_finite_are_told_by_a_later_call(caplog: pytest.LogCaptureFixture) -> None:
    x = drawn(5).to(DEVICE)
    with emulated(), caplog.at_level(logging.WARNING, "jacsparse"):
        prepared = prepare_jacobian(lambda u: u.sqrt() * u.roll(1), x, compile=True)
        assert not prepared.values(0 * x).isfinite().all() and not caplog.records
        if ON_GPU:
            torch.cuda.synchronize()
        prepared.values(x)
        assert "values that are not finite as products" in caplog.text
        caplog.clear()
        prepared.values(x)
        assert not caplog.records


def test_threads_share_a_compiled_jacobian() -> None:
    """Also where one has another number of samples, for which a program is made meanwhile."""
    f = lambda u: u.exp().roll(1, -1) * u + (u @ u.new_ones(30, 30)).sin()  # noqa: E731
    points = [drawn(batch, 30, seed=seed).to(DEVICE) for seed, batch in enumerate((3, 3, 2))]
    with emulated():
        prepared = prepare_jacobian(f, points[0], batched=True, compile=True)
        expected = [prepare_jacobian(f, x, batched=True, compile=True).values(x) for x in points]

        def differ(first: int) -> bool:
            order = [(first + turn) % len(points) for turn in range(12)]
            return any(not torch.equal(prepared.values(points[each]), expected[each]) for each in order)

        with ThreadPoolExecutor(2) as threads:
            assert not any(threads.map(differ, (0, 1)))
    kernels_of(prepared)


def test_without_compile_nothing_is_fused() -> None:
    with emulated():
        prepared = prepare_jacobian(lambda u: u[1:] * u[:-1].exp(), drawn(6).to(DEVICE))
    assert prepared._first.evaluator.fused is None
