"""Loops as CUDA kernels, which run on the CPU here, against autograd and against the CPU's machine code."""

from __future__ import annotations

import operator
import os
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings

from jacsparse import UnsupportedOperatorError, VerificationError, prepare_hessian, prepare_jacobian
from jacsparse.codegen import device_code
from jacsparse.runtime import KernelFile, active_backend, backend
from tests.cuda import nvrtc
from tests.cuda.fibers import COMPILER
from tests.cuda.harness import emulated
from tests.cuda.test_compiled_jacobians import Function, check, close, equation, kernels_of, matrices
from tests.helpers import dense, drawn
from tests.jacobians.drawn_hessians import Drawn, drawn_functions
from tests.jacobians.test_drawn_functions import OneToThree, by_autograd
from tests.jacobians.test_drawn_hessians import expected_at
from tests.jacobians.test_prepared import FUNCTIONS

from .test_codegen import ELEMENTWISE, long_sums, uneven, written

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to compile the kernels with")
DRAWS = 50 if os.environ.get("JACSPARSE_TESTS") == "full" else 5
try:
    nvrtc.library()
    NVRTC = ""
except ImportError as error:
    NVRTC = str(error)


@pytest.mark.parametrize("method", ["products", "compressed"])
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "constant"])
def test_functions(name: str, method: str) -> None:
    f, shape = FUNCTIONS[name]
    check(f, [drawn(3, *shape, seed=seed) for seed in (0, 1)], method=method)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("f", "size"), [(uneven, 5), (long_sums, 6), (written, 6)], ids=["uneven", "long", "written"])
def test_rows_and_sums(f: Function, size: int, batch: int, dtype: torch.dtype) -> None:
    check(f, [drawn(batch, size, seed=seed).to(dtype) for seed in (0, 1)])


@pytest.mark.parametrize("order", [[3, 3, 0, 1, 1, 2, 5], [6, 2, 5, 0, 4, 1, 3]])
def test_places_of_64_bits(order: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_code, "index_dtype", lambda *_: np.int64)
    prepared = check(lambda x: x[:, order] * x.sin(), [drawn(2, 7)])
    assert kernels_of(prepared).runs[device_code.TABLES].dtype == np.int64


def test_several_dtypes() -> None:
    weights = torch.linspace(0.5, 1.5, 5)
    mask = torch.tensor([True, False, True, True, False])
    f = lambda x: torch.where(mask & (x > 0.9), x.float().sin() * weights, x.exp()).double() * x  # noqa: E731
    x = drawn(2, 5)
    with emulated():
        actual = prepare_jacobian(f, x, batched=True, compile=True)(x)
    # What is computed in float32 is rounded as there.
    close(matrices(actual, 2), dense(f, x), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_elementwise_operators(dtype: torch.dtype) -> None:
    """All that loops know, at ties, infinities and no numbers too, are what machine code computes of them."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([each(x) for each in ELEMENTWISE.values()])

    at = torch.cat([torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e30, 0.5]), drawn(9) - 1]).to(dtype)
    on_cpu = prepare_jacobian(f, drawn(16).to(dtype), compile=True, batched=False)
    expected, _ = on_cpu._first.evaluator.fused({0: at})  # type: ignore[misc]
    with emulated():
        actual = prepare_jacobian(f, drawn(16).to(dtype), compile=True, batched=False).values(at)
    # Sums of logarithms cancel.
    bounds = {"rtol": 1e2 * torch.finfo(dtype).eps, "atol": 1e-3 * torch.finfo(dtype).eps}
    torch.testing.assert_close(actual, expected, **bounds, equal_nan=True)


@settings(max_examples=DRAWS, deadline=None)
@given(function=drawn_functions())
def test_drawn_functions(function: Drawn) -> None:
    """Their Jacobians and Hessians by each method, and gradients of their values."""
    f, points = OneToThree(function), [function.input(seed) for seed in range(2)]
    for prepare, of, reference in ((prepare_jacobian, f, by_autograd), (prepare_hessian, function, expected_at)):
        expected = [reference(of, x) for x in points]
        assume(all(each is not None for each in expected))
        for method, create_graph in (("auto", False), ("compressed", False), ("auto", True)):
            options: dict[str, Any] = {"method": method, "create_graph": create_graph, "batched": True, "compile": True}
            try:
                on_cpu = prepare(of, points[0], **options)  # type: ignore[operator]
            except (UnsupportedOperatorError, VerificationError, ValueError):
                continue
            with emulated():
                prepared = prepare(of, points[0], **options)  # type: ignore[operator]
                leaves = [x.clone().requires_grad_(create_graph) for x in points]
                actual = [prepared(x) for x in leaves]
            if on_cpu._first.evaluator.fused is not None:
                kernels_of(prepared)
            for x, jacobian, matrix in zip(leaves, actual, expected, strict=True):
                difference = (matrices(jacobian, len(x)) - matrix).abs()
                assert not difference.numel() or difference.max() <= 1e-9 * max(1.0, matrix.abs().max().item())
                values = on_cpu.values(x)
                close(jacobian.values.detach(), values.detach())
                assert jacobian.values.requires_grad == values.requires_grad
                if values.requires_grad:
                    sums = (each.sin().sum() for each in (jacobian.values, values))
                    close(*(torch.autograd.grad(each, x, materialize_grads=True)[0] for each in sums))


def test_equal_programs_share_kernels() -> None:
    device_code._file.cache_clear()
    with emulated():
        one, other = (prepare_jacobian(lambda u: u[1:] * u[:-1].exp(), drawn(6), compile=True) for _ in range(2))
    assert kernels_of(one) is not kernels_of(other) and device_code._file.cache_info().misses == 1


@pytest.mark.skipif(bool(NVRTC), reason=NVRTC)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kernels_compile_without_spills(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[KernelFile] = []

    def noted(*args: Any) -> KernelFile:
        files.append(KernelFile(*args))
        return files[-1]

    device_code._file.cache_clear()
    monkeypatch.setattr(device_code, "KernelFile", noted)

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([each(x) for each in ELEMENTWISE.values()])

    with emulated():
        prepare_jacobian(f, drawn(16).to(dtype), compile=True, batched=False)
        problem = equation("shallow_water", dtype)
        prepare_jacobian(problem.f, *problem.args, compile=True)
    assert len(files) == 2
    for file in files:
        for instance, resources in nvrtc.compile_file(file, "sm_90").items():
            assert resources.spilled == 0 and 0 < resources.registers <= 255, instance


def test_without_cupy_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnTheCpu(type(active_backend())):  # type: ignore[misc]
        on_device = staticmethod(operator.attrgetter("is_cpu"))

    monkeypatch.setitem(sys.modules, "cupy", None)
    for name, answer in (("current_device", 0), ("is_current_stream_capturing", False)):
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    with backend(OnTheCpu()), pytest.raises(ImportError, match=r"need CuPy: pip install 'jacsparse\[gpu"):
        prepare_jacobian(lambda u: u[1:] * u[:-1].exp(), drawn(6), compile=True)
