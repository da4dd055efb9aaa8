"""Fused loops, compiled and interpreted, against sums of what PyTorch computes, and against autograd."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from jacsparse import PreparedJacobian, SparseJacobian, prepare_hessian, prepare_jacobian
from jacsparse.codegen import calls_of_elements, elements, kernels, operations
from jacsparse.codegen.operand import ArithmeticOperand
from tests.helpers import FLOAT, assert_equal, dense, drawn
from tests.jacobians.test_prepared import FUNCTIONS, brusselator, heat

Function = Callable[..., torch.Tensor]


def by_pytorch(f: Function, x: torch.Tensor, **options: Any) -> PreparedJacobian:
    """A prepared Jacobian whose local derivatives PyTorch computes."""
    leaving = lambda *args, leaves: calls_of_elements.CallsOfElements(*args, leaves=True)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jacsparse.jacobians.fused_values.CallsOfElements", leaving)
        return prepare_jacobian(f, x, **options)


def uneven(x: torch.Tensor) -> torch.Tensor:
    """Rows of no term, a constant, and one to four terms."""
    padded = nn.functional.pad(x, (1, -1), value=2.0)
    rows = [x[:, :2] ** 2, x[:, 1:4].sin().cumsum(1), x[:, 2:] * 3.0, 0 * x[:, :1], padded * x]
    return torch.cat(rows, 1)


def long_sums(x: torch.Tensor) -> torch.Tensor:
    """Entries of two dozen terms, whose factors other operators made."""
    weights = torch.linspace(0.5, 1.5, 12, dtype=x.dtype)[:, None]
    return ((x.exp()[:, None] * weights).sin() * x[:, None] ** 3).sum(1)


def written(x: torch.Tensor) -> torch.Tensor:
    """Writes through views, over what others have read."""
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, :-1].sin()
    z = y - x
    y.view(len(x), -1, 2)[:, :, 0].add_(x[:, 1::2]).mul_(2.0)
    y[:, 0].copy_(x[:, 3])
    return y * z.masked_fill_(x > 1.0, 2.0)


def kinks(x: torch.Tensor) -> torch.Tensor:
    """Operators with kinks and ties."""
    y = x.roll(1, 1)
    parts = [
        *(torch.maximum(x, y), torch.minimum(x, y), torch.fmax(x, y), x.abs() * y, x.relu() * y, x.clamp(-1, 1) * y),
        *(x.sign() * y, torch.where(x > y, x * x, y), nn.functional.leaky_relu(x) * y, x.clamp_min(0.0).sqrt()),
    ]
    return torch.stack(parts, 1)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("f", "shape", "method"),
    [
        (brusselator, (2, 5, 4), "products"),
        (uneven, (5,), "products"),
        (long_sums, (6,), "products"),
        (written, (6,), "products"),
        (heat, (9,), "compressed"),
        (nn.Conv1d(2, 3, 3), (2, 6), "compressed"),
    ],
    ids=["brusselator", "uneven", "long sums", "written", "compressed", "shared"],
)
def test_equals_the_program(f: Function, shape: tuple[int, ...], method: str, dtype: torch.dtype, batch: int) -> None:
    x = drawn(batch, *shape).to(dtype)
    f = f.to(dtype) if isinstance(f, nn.Module) else f
    program = by_pytorch(f, x, method=method, batched=True)
    for compile in (False, True):
        prepared = prepare_jacobian(f, x, method=method, compile=compile, batched=True)
        for shift in (0.0, 0.3):
            expected, actual = program.values(x + shift), prepared.values(x + shift)
            assert actual.shape == expected.shape
            assert actual.dtype == dtype
            # Roundings of a few dozen operators.
            assert (actual - expected).abs().amax() <= 1e2 * torch.finfo(dtype).eps * expected.abs().amax()


@pytest.mark.parametrize("f", [brusselator, long_sums], ids=["brusselator", "long sums"])
def test_numbers_of_elements_are_as_wide_as_needed(monkeypatch: pytest.MonkeyPatch, f: Function) -> None:
    x, dtypes = drawn(2, 2, 5, 4) if f is brusselator else drawn(2, 6), []
    expected = prepare_jacobian(f, x, compile=True, batched=True).values(x)
    compute = elements.ElementGraph.compute

    def noted(graph: elements.ElementGraph, *args: Any) -> np.ndarray:
        dtypes.append(graph.dtype)
        return compute(graph, *args)

    monkeypatch.setattr(elements.ElementGraph, "compute", noted)
    monkeypatch.setattr(elements, "index_dtype", lambda nnz, *_: np.int32 if nnz < 100 else np.int64)
    assert torch.equal(prepare_jacobian(f, x, compile=True, batched=True).values(x), expected)
    assert np.int64 in dtypes


@pytest.mark.parametrize(
    "x", [[0.0, 0.0, 1.0, 1.0, -1.0, 2.0], [float("nan"), 1.0, float("inf"), 0.0, -2.0, 3.0]], ids=["ties", "infinite"]
)
def test_kinks_are_those_of_the_program(x: list[float]) -> None:
    at = torch.tensor([x], dtype=FLOAT)
    expected = by_pytorch(kinks, drawn(1, 6), batched=True).values(at)
    for compile in (False, True):
        prepared = prepare_jacobian(kinks, drawn(1, 6), compile=compile, batched=True)
        # Not every square root of PyTorch's is the nearest number: on some processors the next one is returned.
        few = 4 * torch.finfo(FLOAT).eps
        torch.testing.assert_close(prepared.values(at), expected, rtol=few, atol=0.0, equal_nan=True)


#: Each operator that loops know, in as few operands as it takes.
ELEMENTWISE: dict[str, Function] = {
    "abs": torch.abs, "cos": torch.cos, "div": lambda x: 1.5 / (x + 3), "exp": torch.exp,
    "fmax": lambda x: x.fmax(x * x),
    "leaky relu": lambda x: nn.functional.leaky_relu(x, 0.2), "log": lambda x: x.abs().log(), "pow": lambda x: x**2.5,
    "cube": lambda x: x**3, "inverse square": lambda x: x**-2, "pow of numbers": lambda x: 1.7**x,
    "pow of tensors": lambda x: x.abs() ** x.roll(1), "rsqrt": lambda x: x.rsqrt(), "sigmoid": torch.sigmoid,
    "silu": nn.functional.silu, "softplus": nn.functional.softplus, "tan": torch.tan, "tanh": torch.tanh,
    "threshold": lambda x: nn.functional.threshold(x, 0.1, 20.0), "sqrt": torch.sqrt, "sign": lambda x: x.sign() * x,
    "truth": lambda x: torch.where((x > 0) & ~(x.roll(1) > 0.5) | (x < -1) ^ (x.roll(2) >= 0), x.sin(), x * x),
    "nan": lambda x: torch.where(x.isnan(), 2 * x.roll(1), x.exp()), "clamp": lambda x: x.sin().clamp(-0.2, 0.4) * x,
    "clamp between tensors": lambda x: x.clamp(x.roll(1), x.roll(2).exp()) * x.clamp(max=1),
    "of truth": lambda x: (x > 0.2) * x * x, "to truth": lambda x: x.sin().bool() * x * x,
    "masked": lambda x: (x * x).masked_fill(x.roll(1) > 0, 2.0) * x,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_operators_are_pytorch_s(name: str, dtype: torch.dtype) -> None:
    """At more points than a block has, negative zeros, infinities and NaN among them."""
    f, n = ELEMENTWISE[name], 2 * kernels.BLOCK + 3
    x, at = drawn(n).to(dtype), drawn(n, seed=1).to(dtype)
    at[:6] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e30])
    interpreted, expected = prepare_jacobian(f, x, batched=False), by_pytorch(f, x, batched=False).values(at)
    assert interpreted._first.evaluator.fused is not None
    # Sums of logarithms cancel.
    torch.testing.assert_close(
        interpreted.values(at), expected, rtol=1e2 * torch.finfo(dtype).eps, atol=0, equal_nan=True
    )
    assert torch.equal(interpreted.values(at).isfinite(), expected.isfinite())


@pytest.mark.parametrize("name", operations._EMITTERS)
def test_each_function_that_is_called_is_an_instruction(name: str) -> None:
    applied, emitter, value = list[str](), Mock(), ArithmeticOperand()
    value.emitter = emitter
    emitter.value.return_value = emitter.select.return_value = value
    emitter.apply.side_effect = lambda name, *operands: applied.append(name) or value
    write = operations._EMITTERS[name]
    write(emitter, *[value] * (len(inspect.signature(write).parameters) - 1))
    translated = ("and", "not", "xor", ">", ">=")
    assert [name for name in applied if name not in (*kernels.OPCODES, *translated)] == []


#: It is the imaginary part of a conjugate, and not computed yet.
NEGATIVE = torch.view_as_complex(drawn(6, 2, seed=1)).conj().imag


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(
    "f",
    [
        lambda x: (x.reshape(2, 3).t().sin() * 2.0).t().view(-1) * x,
        lambda x: torch.where((x * x).view(torch.int64).view(FLOAT) > 1, x.exp(), x * x),
        lambda x: x.sin() * NEGATIVE,
    ],
    ids=["view of other strides", "view as another dtype", "negative"],
)
def test_elements_that_move(f: Function, compile: bool) -> None:
    prepared = prepare_jacobian(f, drawn(6), method="products", batched=False, compile=compile)
    assert_equal(prepared(drawn(6, seed=2)), dense(f, drawn(6, seed=2), batched=False))


def test_several_dtypes_are_left_to_pytorch() -> None:
    f = lambda x: (x.double().sin() * x.roll(1)).float()  # noqa: E731
    x = drawn(8).float()
    prepared, compiled = (prepare_jacobian(f, x, batched=False, compile=flag) for flag in (False, True))
    assert prepared._first.evaluator.fused._by_pytorch is not None  # type: ignore[union-attr]
    for jacobian in (prepared(x), compiled(x)):
        torch.testing.assert_close(jacobian.todense(), dense(f, x, batched=False)[0])


@pytest.mark.parametrize("compile", [False, True])
def test_expressions_of_many_steps(compile: bool) -> None:
    def f(x: torch.Tensor, c: float) -> torch.Tensor:
        y, weight = x, torch.linspace(0.5, 1.0, 5, dtype=x.dtype)
        for _ in range(300):
            weight, c = 0.99 * weight + 0.01, 0.9 * c + 0.1
        for _ in range(30):
            y = (y * 1.1).sin()
        return x * y * weight * c

    prepared = prepare_jacobian(f, drawn(5), 2.0, batched=False, compile=compile)
    assert_equal(prepared(drawn(5, seed=1), 3.0), dense(f, drawn(5, seed=1), 3.0, batched=False))


def test_takes_what_the_function_reads_now() -> None:
    scale = torch.tensor([1.0, 2.0, 3.0], dtype=FLOAT)
    f = lambda x, step: (x * scale).sin() * step / 3.0  # noqa: E731
    compiled, x = prepare_jacobian(f, drawn(2, 3), 1.0, compile=True, batched=True), drawn(2, 3, seed=1)
    for step in (1.0, 2.5):
        scale *= step
        assert_equal(compiled(x, step), dense(f, x, step))


def test_fills_are_not_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    def filled(x: torch.Tensor) -> torch.Tensor:
        y = 2 * x
        y[:, 0].fill_(2.5)
        y[:, 2:4].zero_()
        return y * x

    def without_leaving(*args: Any, leaves: bool) -> calls_of_elements.CallsOfElements:
        assert not leaves
        return calls_of_elements.CallsOfElements(*args, leaves=leaves)

    monkeypatch.setattr("jacsparse.jacobians.fused_values.CallsOfElements", without_leaving)
    prepared, x = prepare_jacobian(filled, drawn(2, 5), batched=True), drawn(2, 5, seed=1)
    assert_equal(prepared(x), dense(filled, x))


def test_takes_any_memory() -> None:
    compiled = prepare_jacobian(lambda x: x.sin() * x.roll(1), drawn(6), batched=False, compile=True)
    x = drawn(12, seed=1)
    for other in (x[::2], torch.view_as_complex(x.reshape(6, 2)).conj().imag, x[:6].clone().requires_grad_()):
        expected = prepare_jacobian(lambda x: x.sin() * x.roll(1), other.detach(), batched=False)(other)
        assert torch.equal(compiled(other).values, expected.values)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("kinds", [1, elements.MOST_KINDS])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_equals_autograd(name: str, kinds: int, compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elements, "MOST_KINDS", kinds)
    f, shape = FUNCTIONS[name]
    prepared = prepare_jacobian(f, drawn(2, *shape), compile=compile, batched=True)
    for seed in (1, 2):
        x = drawn(2, *shape, seed=seed)
        jacobian = prepared(x)
        values = jacobian.values.expand(-1, len(x))
        assert_equal(SparseJacobian(jacobian.pattern, values), dense(f, x))


@pytest.mark.parametrize("compile", [False, True])
def test_threads_give_the_same_bits(compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jacsparse.jacobians.fused_values.SERIAL_WORK", 0)
    monkeypatch.setattr("jacsparse.runtime.threads.SERIAL_WORK", 0)
    x, threads = drawn(1, 2, 40, 40), torch.get_num_threads()
    prepared = prepare_jacobian(brusselator, x, compile=compile, batched=True)
    try:
        torch.set_num_threads(1)
        alone = prepared.values(x)
        torch.set_num_threads(2)
        assert torch.equal(prepared.values(x), alone)
    finally:
        torch.set_num_threads(threads)


def test_leaky_relu_is_compiled() -> None:
    compiled = prepare_jacobian(
        lambda x: nn.functional.leaky_relu(x * x - 1.0, 0.2), drawn(6), batched=False, compile=True
    )
    fused = compiled._first.evaluator.fused
    assert fused is not None and fused._by_pytorch is None
    x = drawn(6, seed=1)
    assert_equal(compiled(x), dense(lambda x: nn.functional.leaky_relu(x * x - 1.0, 0.2), x, batched=False))


def test_operators_of_others_are_not_known_by_their_names() -> None:
    """``test_codegen::square`` is another function than ``aten::square``."""
    schema = "(Tensor w) -> Tensor"
    square = torch.library.custom_op("test_codegen::square", lambda w: w * w + 1, mutates_args=(), schema=schema)
    square.register_fake(torch.empty_like)
    weight = drawn(5)
    f = lambda x: x**2 * square(weight)  # noqa: E731
    compiled = prepare_jacobian(f, drawn(5), batched=False, compile=True)
    for factor in (1.0, 3.0):
        weight.copy_(factor * drawn(5, seed=2))
        x = drawn(5, seed=1)
        assert_equal(compiled(x), dense(lambda x: x**2 * (weight**2 + 1), x, batched=False))


def test_no_entries() -> None:
    """The local derivatives that there are reach no entry."""
    f = lambda x: nn.functional.pad(x, (0, 3)).square()[:, 1:]  # noqa: E731
    for method in ("auto", "products", "compressed"):
        jacobian = prepare_jacobian(f, drawn(2, 1), method=method, compile=True, batched=True)(drawn(2, 1, seed=1))
        assert jacobian.shape == (3, 1) and jacobian.pattern.nnz == 0


def test_says_what_it_compiles(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="jacsparse"):
        prepare_jacobian(heat, drawn(2, 7), compile=True, batched=True)
    assert "compiled" in caplog.text


def test_seeds_in_parts_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jacsparse.jacobians.compressed.PART_BYTES", 1)
    with pytest.raises(ValueError, match=r"compile is True, and the seeds of its colours take too much memory"):
        prepare_jacobian(heat, drawn(2, 7), method="compressed", compile=True, batched=True)


def test_products_of_stages_are_not_compiled() -> None:
    network = nn.Sequential(nn.Linear(20, 20), nn.Softmax(1)).double()
    with pytest.raises(ValueError, match=r"Sequential: compile is True, and products of .* pass method='compressed'"):
        prepare_jacobian(network, drawn(2, 20), method="products", compile=True, batched=True)


def observed(x: torch.Tensor) -> torch.Tensor:
    """Two residuals of each observation, a row of seven numbers, by intermediate results that both read."""
    angle = (x[:, :3] ** 2).sum(1, keepdim=True).sqrt()
    turned = x[:, 3:6] * angle.cos() + x[:, :3] / angle * angle.sin() * (x[:, :3] * x[:, 3:6]).sum(1, keepdim=True)
    return (x[:, 6:] * turned[:, :2] / (turned[:, 2:] + 9) + x[:1, :2].sin()).exp()


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_memory_between_loops_does_not_grow_with_the_rows(dtype: torch.dtype, compile: bool) -> None:
    x = drawn(20_011, 7).to(dtype)
    prepared = prepare_jacobian(observed, x, batched=False, compile=compile)
    fused = prepared._first.evaluator.fused
    assert fused is not None
    assert not fused._left
    before, jacobians = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            jacobians.append(prepared(x))
    finally:
        torch.set_num_threads(before)
    # All rows read the sines of the first one. The rest would take several times the memory of the values.
    assert fused._bytes < jacobians[0].values.nbytes // 20
    for jacobian in jacobians:
        assert_products_are_autograd_s(observed, jacobian, x)


def test_scattered_rows_are_in_no_tiles() -> None:
    """Each tile would store single elements here and there."""
    order = torch.randperm(20_000, generator=torch.Generator().manual_seed(0))
    f = lambda x: (x.sin() * x.roll(1))[order].reshape(-1, 2).prod(1) * x[:10_000]  # noqa: E731
    x = drawn(20_000)
    for compile in (False, True):
        assert_products_are_autograd_s(f, prepare_jacobian(f, x, batched=False, compile=compile)(x), x)


def assert_products_are_autograd_s(f: Function, jacobian: SparseJacobian, x: torch.Tensor) -> None:
    """That the products with two random gradients are autograd's."""
    y, pull_back = torch.func.vjp(f, x)
    for seed in (1, 2):
        gradient = drawn(*y.shape, seed=seed).to(x.dtype)
        expected, actual = pull_back(gradient)[0], jacobian.vjp(gradient[None])[0]
        assert (actual.reshape(x.shape) - expected).abs().amax() <= 1e4 * torch.finfo(
            x.dtype
        ).eps * expected.abs().amax()


@pytest.mark.parametrize("compile", [False, True])
def test_sums_along_axes(compile: bool) -> None:
    functions: list[Function] = [
        lambda x: (x * x).sum(1) * x[:, 0, 0, None],
        lambda x: (x.sin() * x).sum((0, -1), keepdim=True) * x,
        lambda x: (x**3).sum() * x,
        lambda x: (x**2).sum(dim=[]) * x[0, 0],
        lambda x: (x[:, :0] * 2).sum(1) + x[:, 0] ** 2,
        lambda x: (x.repeat(9, 1, 1) ** 2).sum() * x,
        lambda x: (x > 0).sum(1) * x[:, 0] ** 2,
        lambda x: (x * x).sum(1, dtype=torch.float32).double() * x[:, 0],
    ]
    x = drawn(2, 3, 4)
    for f in functions:
        J = prepare_jacobian(f, x, batched=False, compile=compile)
        at = drawn(2, 3, 4, seed=1)
        tolerance = 1e-12 if f is not functions[-1] else 1e-5
        torch.testing.assert_close(J(at).todense(), dense(f, at, batched=False)[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("method", ["auto", "products", "compressed"])
def test_nothing_is_compiled_where_there_is_no_entry(method: str) -> None:
    prepared = prepare_hessian(lambda u: (3 * u).sum(), drawn(4), method=method, compile=True)
    assert prepared(drawn(4)).pattern.nnz == 0 and "compiled: nothing" in repr(prepared)
