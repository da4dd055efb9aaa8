"""Jacobians that take what the function's own run computed instead of computing it again."""

from __future__ import annotations

import functools
import gc
import importlib
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import jacsparse
from jacsparse import prepare_jacobian
from jacsparse.jacobians.choice import evaluator_of
from jacsparse.jacobians.traced_function import TracedFunction
from jacsparse.stages import chain_of
from jacsparse.tracing import traced
from tests.helpers import assert_equal, dense, drawn

W = drawn(6, 6)
SPARSE = W.relu().to_sparse()


def network() -> nn.Module:
    module = nn.Sequential(
        *(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3),
            nn.BatchNorm2d(4, affine=False),
        ),
        *(nn.Tanh(), nn.Flatten(), nn.Linear(16, 3), nn.Softmax(1)),
    )
    for part in module:
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean, part.running_var = drawn(4), drawn(4, seed=1).abs() + 0.5
    return module.double().eval()


def unseen(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = (x @ W).exp()
    return (x @ W).sigmoid() * scale + x.detach().cos() * x


def written(x: torch.Tensor) -> torch.Tensor:
    y = (x @ W).cos()
    y.mul_(2).add_(x)
    return y.sin()


def angle(y: float) -> torch.Tensor:
    return torch.atan2(torch.full((6,), y, dtype=W.dtype), torch.full((6,), -1.0, dtype=W.dtype))


FUNCTIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]] = {
    "network": (network(), (2, 4, 4)),
    "elementwise": (lambda x: (x.exp() * 3.0).sigmoid().cumsum(1) / 2.0, (6,)),
    "numbers": (lambda x: ((x @ W) * 2.0).tanh() + ((x @ W) * 3.0).tanh(), (6,)),
    "results of one call": (lambda x: torch.cat(x.exp().split(2, 1)[::-1], 1).tanh().max(1, keepdim=True)[0] * x, (6,)),
    "unseen by autograd": (unseen, (6,)),
    "zeros with signs": (lambda x: (x.sin() * angle(0.0)).exp() + (x.exp() * angle(-0.0)).sin(), (6,)),
    "written to": (written, (6,)),
    "sparse matrix": (lambda x: torch.sparse.mm(SPARSE, x.exp().T).T.sin(), (6,)),
}


class _Function(nn.Module):
    def __init__(self, f: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.f(x)


def traced_function(f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> TracedFunction:
    trace = traced(_Function(f), x, cached=True)
    return TracedFunction(trace, chain_of(trace))


@pytest.mark.parametrize("method", ["products", "compressed"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_are_those_of_autograd(name: str, method: str) -> None:
    f, shape = FUNCTIONS[name]
    function = traced_function(f, drawn(3, *shape))
    evaluator = evaluator_of(function, method)
    for seed in (1, 2):
        x = drawn(3, *shape, seed=seed)
        trace = traced(_Function(f), x, cached=True)
        assert trace.graph is function.graph
        values = evaluator.values(trace)
        assert_equal(jacsparse.SparseJacobian(evaluator.pattern, values.detach()), dense(f, x))


def test_zeros_of_both_signs_are_other_calls() -> None:
    def f(x: torch.Tensor, y: float) -> torch.Tensor:
        return (x.sin() * angle(y)).exp()

    x = drawn(3, 6)
    for y in (0.0, -0.0):
        for _ in range(4):
            assert_equal(jacsparse.jacobian(f, x, y, batched=True), dense(f, x, y))


def test_a_network_is_not_computed_again() -> None:
    f, shape = FUNCTIONS["network"]
    evaluator = evaluator_of(traced_function(f, drawn(1, *shape)), "compressed")
    (only,) = evaluator._passes  # type: ignore[attr-defined]
    names = [str(step.target) for step in only.computed.calls.steps]
    assert not [
        name for name in names if name in ("aten.convolution.default", "aten.relu.default", "aten.addmm.default")
    ]
    # A derivative of batch normalisation for all modes would copy its input for each seed.
    assert not [name for name in names if "batch_norm" in name]


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(5), nn.BatchNorm2d(5, affine=False), nn.BatchNorm3d(5)])
@pytest.mark.parametrize("columns", [True, False])
def test_batch_normalisation_by_running_statistics_scales(layer: Any, columns: bool) -> None:
    layer = layer.double().eval()
    layer.running_mean, layer.running_var = drawn(5), drawn(5, seed=1).abs() + 0.5
    axes = {nn.BatchNorm1d: 1, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}[type(layer)]
    few, many = nn.Linear(2, 5, dtype=torch.float64), nn.Linear(5, 2, dtype=torch.float64)

    def wide(x: torch.Tensor) -> torch.Tensor:
        return layer(few(x).tanh().reshape(-1, 5, *[1] * axes)).flatten(1).exp()

    def narrow(x: torch.Tensor) -> torch.Tensor:
        return many(layer(x.tanh().reshape(-1, 5, *[1] * axes)).flatten(1).exp())

    f, x = (wide, drawn(3, 2)) if columns else (narrow, drawn(3, 5))
    prepared = jacsparse.prepare_jacobian(f, x, method="compressed", batched=True)
    assert_equal(prepared(x + 1), dense(f, x + 1))
    assert bool(prepared._first.evaluator.coloring.counts[0]) is columns  # type: ignore[attr-defined]


CONVOLUTIONS = [
    *(
        nn.Conv2d(c, o, 3, padding=1, stride=s)
        for c, o, s in [(1, 4, 1), (3, 6, 2), (4, 17, 1), (7, 16, 2), (8, 33, 1)]
    ),
    *(
        nn.Conv2d(9, 5, (2, 3), padding=(1, 0)),
        nn.Conv2d(9, 20, 1, stride=3),
        nn.Conv2d(3, 20, 3, dilation=2, padding=3),
    ),
    *(nn.Conv2d(4, 4, 3, groups=2), nn.Conv1d(3, 16, 3, padding=2), nn.Conv3d(2, 16, 2)),
    *(nn.ConvTranspose2d(3, 5, 3, stride=2, output_padding=1), nn.ConvTranspose1d(3, 16, 2, bias=False)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("layer", CONVOLUTIONS, ids=str)
def test_convolutions_of_many_vectors(layer: Any, rows: bool, dtype: torch.dtype) -> None:
    layer = layer.to(dtype)
    axes = layer.weight.ndim - 2
    shape = torch.Size((2, layer.in_channels, *(7, 6, 5)[:axes]))
    size = layer(torch.zeros(shape, dtype=dtype))[0].numel()
    narrow, wide = (drawn(*sizes).to(dtype) / size for sizes in ((size, 2), (2, shape[1:].numel())))

    def f(x: torch.Tensor) -> torch.Tensor:
        x = x if rows else (x @ wide).reshape(shape)
        y = layer(x.tanh()).flatten(1)
        return (y @ narrow if rows else y).sin()

    x = drawn(*shape if rows else (2, 2)).to(dtype)
    prepared = prepare_jacobian(f, x, method="compressed", batched=True)
    assert bool(prepared._first.evaluator.coloring.counts[1]) is rows  # type: ignore[attr-defined]
    tolerance = {} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(prepared(x + 1).todense(0), dense(f, x + 1)[0], **tolerance)
    torch.testing.assert_close(jacsparse.jacobian(f, x, batched=True).todense(1), dense(f, x)[1], **tolerance)


def test_rows_are_pulled_back_without_the_compiler_of_pytorch() -> None:
    code = """
import sys, torch, jacsparse
network, x = torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2)), torch.randn(1, 9)
# In PyTorch 2.6, vmap itself imports it.
torch.func.vmap(torch.sin)(x)
of_vmap = "sympy" in sys.modules
details = jacsparse.prepare_jacobian(network, x, method="compressed")._first.evaluator.details
print(details, ("sympy" in sys.modules) != of_vmap)
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True).stdout
    assert "0 colours of columns and 2 of rows" in printed and printed.endswith("False\n")


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_batch_normalisation_by_weights_that_depend_on_the_input(part: str) -> None:
    mean, variance = drawn(3), drawn(3, seed=1).abs() + 0.5

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.reshape(1, 3, 2)
        return nn.functional.batch_norm(y, mean, variance, **{part: y.sin().mean((0, 2))}).flatten()

    x = drawn(6)
    prepared = jacsparse.prepare_jacobian(f, x, batched=False, method="compressed")
    assert_equal(prepared(x + 1), dense(f, x + 1, batched=False))


def test_hessians_through_batch_normalisation() -> None:
    layer = nn.BatchNorm1d(4).double().eval()
    layer.running_mean, layer.running_var = drawn(4), drawn(4, seed=1)

    def f(x: torch.Tensor) -> torch.Tensor:
        return (layer(x.exp()) ** 3).sum()

    prepared = jacsparse.prepare_hessian(f, drawn(3, 4), method="compressed")
    expected = torch.func.hessian(f)(drawn(3, 4, seed=1)).reshape(1, 12, 12)
    assert_equal(prepared(drawn(3, 4, seed=1)), expected)


def test_batch_normalisation_of_few_bits() -> None:
    first, layer, last = nn.Linear(4, 4), nn.BatchNorm1d(4).eval(), nn.Linear(4, 4)
    first.weight.data, last.weight.data = drawn(4, 4).float(), drawn(4, 4, seed=1).float()

    def f(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return last(layer(first(x))).float()

    x = drawn(3, 4).float()
    expected = drawn(4, 4, seed=1) @ drawn(4, 4) / (1 + layer.eps) ** 0.5
    actual = jacsparse.prepare_jacobian(f, x, method="compressed", batched=True)(x).todense(0)
    # Each weight, result of a layer and sum of positive terms is rounded to 8 bits.
    torch.testing.assert_close(actual.double(), expected, rtol=8 * 2**-9, atol=0)


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("prepared", [False, True])
def test_nothing_keeps_the_tensors_of_a_run(prepared: bool, sums: bool) -> None:
    references: list[weakref.ref[torch.Tensor]] = []
    weight = drawn(6, 6)

    def f(x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ weight)
        references.append(weakref.ref(y))
        return (y + x).softmax(1) if sums else y * y

    x = drawn(3, 6)
    if not prepared:
        references.append(weakref.ref(x))
    call = prepare_jacobian(f, x, batched=True) if prepared else functools.partial(jacsparse.jacobian, f, batched=True)
    results = [call(x) for _ in range(4)]
    del x
    gc.collect()
    assert all(each() is None for each in references)
    assert_equal(results[-1], dense(f, drawn(3, 6)))


def test_the_first_call_chooses_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    unprepared = importlib.import_module("jacsparse.jacobians.unprepared")
    looked: list[int] = []
    evaluator_of = unprepared.evaluator_of
    monkeypatch.setattr(
        unprepared, "evaluator_of", lambda *args, **named: looked.append(1) or evaluator_of(*args, **named)
    )

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x * x.roll(1)).sin()

    for _ in range(4):
        x = drawn(7)
        assert_equal(jacsparse.jacobian(f, x), torch.func.jacrev(f)(x)[None])
        assert len(looked) == 1


def test_slopes_that_are_others_in_each_call() -> None:
    """Such a number is a constant of a way; beyond the most ways that are kept, products are taken."""
    x = drawn(5)
    for slope in (0.5, 0.25, 0.5, 0.125, 1.5, 2.5, 3.5, 0.0, -0.0, 0.5):
        f = functools.partial(lambda c, x: torch.nn.functional.leaky_relu(x * x.roll(1), c).sin() * c, slope)
        assert_equal(jacsparse.jacobian(f, x), torch.func.jacrev(f)(x)[None])


def test_expanded_operands_with_axes_of_one_element() -> None:
    """Their strides decide where an operator puts its result, whose view later calls take."""

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.reshape(1, -1, 1)
        return y.permute(1, 2, 0) * y.permute(2, 1, 0)

    for seed in range(4):
        x = drawn(5, seed=seed)
        assert_equal(jacsparse.jacobian(f, x), torch.func.jacrev(f)(x).reshape(1, 25, 5))


def test_another_way_is_looked_for_when_no_weight_is_zero_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    unprepared = importlib.import_module("jacsparse.jacobians.unprepared")
    looked: list[int] = []
    evaluator_of = unprepared.evaluator_of
    monkeypatch.setattr(
        unprepared, "evaluator_of", lambda *args, **named: looked.append(1) or evaluator_of(*args, **named)
    )
    layer = nn.Linear(4, 4, dtype=torch.float64)
    layer.weight.data[1] = 0.0

    def f(x: torch.Tensor) -> torch.Tensor:
        return layer(x).sin()

    for _ in range(4):
        jacsparse.jacobian(f, drawn(4))
    assert looked == [1]
    layer.weight.data[1] = 1.0
    for _ in range(4):
        x = drawn(4)
        assert_equal(jacsparse.jacobian(f, x), torch.func.jacrev(f)(x)[None])
    assert looked == [1, 1]


#: What a function reads; each call of `changed` makes another of them another one.
READ: dict[str, Any] = {}


def changed() -> None:
    generator = torch.Generator().manual_seed(len(READ.setdefault("before", [])))
    READ["before"].append(None)
    READ["mask"] = torch.rand(6, generator=generator) > 0.5
    READ["count"] = torch.randint(1, 5, (6,), generator=generator)
    READ["half"] = torch.rand(6, generator=generator).half()
    READ["number"] = float(torch.rand((), generator=generator))
    READ["scale"] = torch.rand((), generator=generator, dtype=torch.float64)
    READ["weight"] = torch.rand(6, generator=generator, dtype=torch.float64)


def drawing(x: torch.Tensor) -> torch.Tensor:
    READ["drawn"] = torch.rand(6, dtype=x.dtype)
    return x * x * READ["drawn"]


READING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mask": lambda x: torch.where(READ["mask"], x * x, x.sin()),
    "mask as a factor": lambda x: x * x * READ["mask"],
    "whole numbers": lambda x: x**3 / READ["count"],
    "half precision": lambda x: x.exp() * READ["half"].to(x.dtype),
    "a number": lambda x: (x * READ["number"]).sin(),
    "a number as a factor of entries": lambda x: x * x * READ["number"] + READ["number"] * x.roll(1),
    "a number that is compared": lambda x: x * x if READ["number"] > 0.5 else x.cos(),
    "a factor": lambda x: x * x * READ["scale"] + x.roll(1) * READ["weight"],
    "random numbers": drawing,
    "the state's own memory": lambda x: x.data * x + x.roll(1) ** 2,
    "a product of matrices": lambda x: (x @ W) ** 2,
}


@pytest.mark.parametrize("name", READING)
@pytest.mark.parametrize("every", [1, 3, 6])
def test_later_calls_compute_what_the_function_computes_now(name: str, every: int) -> None:
    f = READING[name]
    for number in range(12):
        if number % every == 0:
            changed()
        x = drawn(6, seed=number)
        jacobian = jacsparse.jacobian(f, x)
        # Random numbers and data are constants to autograd.
        fixed = (lambda x: x * x * READ["drawn"]) if f is drawing else f
        assert_equal(jacobian, torch.func.jacrev(fixed)(x)[None])


def test_a_prepared_jacobian_reads_captures_of_half_precision() -> None:
    factor = torch.rand(6).half()
    f = lambda x: (x * x) * factor.to(x.dtype)  # noqa: E731
    prepared = prepare_jacobian(f, drawn(6))
    factor.mul_(2)
    assert_equal(prepared(drawn(6)), dense(f, drawn(6), batched=False))


@pytest.mark.parametrize("shape", [(1, 40, 50), (1, 3000), (3, 7, 11, 13)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("prepared", [False, True])
def test_grids_of_several_dimensions(shape: tuple[int, ...], dtype: torch.dtype, prepared: bool) -> None:
    """Equations on grids of one to three dimensions, in planes and interleaved, equal autograd's Jacobian."""

    def f(u: torch.Tensor) -> torch.Tensor:
        out = u**3
        for axis in range(1, u.ndim):
            size = u.shape[axis]
            ahead, behind = u.narrow(axis, 1, size - 1), u.narrow(axis, 0, size - 1)
            flux = (1 + ahead * behind) * (ahead - behind)
            ends = torch.zeros_like(u.narrow(axis, 0, 1))
            out = out + torch.cat([flux, ends], axis) - torch.cat([ends, flux], axis)
        return torch.stack([out, out * u], -1)

    u = torch.rand(shape, dtype=dtype, generator=torch.Generator().manual_seed(0)) + 0.5
    of = functools.partial(jacsparse.jacobian, f, batched=True)
    of = prepare_jacobian(f, u, method="products", batched=True) if prepared else of
    v = torch.rand(shape, dtype=dtype)
    _, expected = torch.func.jvp(f, (u,), (v,))
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for _ in range(4):
        torch.testing.assert_close(of(u).jvp(v).reshape(expected.shape), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("compile", [False, True])
def test_all_rows_at_once_are_not_multiplied_by_an_identity(compile: bool) -> None:
    network, x = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 4)).double(), drawn(2, 7)
    prepared = prepare_jacobian(network, x, method="compressed", compile=compile)
    (of_rows,) = prepared._first.evaluator._passes
    products = [step for step in of_rows.computed.calls.steps if step.target is torch.ops.aten.mm.default]
    assert len(products) == 1
    for seed in range(2):
        assert_equal(prepared(drawn(2, 7, seed=seed)), dense(network, drawn(2, 7, seed=seed)))
    linear = nn.Linear(5, 3).double()
    values = prepare_jacobian(linear, drawn(2, 5), method="compressed", compile=compile).values(drawn(2, 5))
    expected = linear.weight.detach().clone()
    with torch.no_grad():
        linear.weight.zero_()
    assert torch.equal(values.reshape(3, 5), expected)
