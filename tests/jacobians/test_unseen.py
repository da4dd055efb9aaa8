"""What a function does by no call of an operator: values are right, or the call is refused."""

from __future__ import annotations

import copy
import functools
import gc
import math
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jacsparse.patterns import Full, Pattern
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import checkpoint

from jacsparse import (
    PreparedJacobian,
    UnsupportedOperatorError,
    hessian,
    jacobian,
    jacobian_pattern,
    prepare_hessian,
    prepare_jacobian,
)
from tests.helpers import FLOAT, Straight, assert_equal, dense, drawn


def in_thread(f: Callable[..., Any], *args: Any) -> Any:
    """What a function returns in a thread of its own."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(f(*args)))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize("begins", [torch.square, torch.cumsum])
def test_derivatives_of_another_thread_are_refused(begins: Any) -> None:
    inner = begins if begins is torch.square else lambda x: torch.cumsum(x, 0)
    calls: list[Callable[..., Any]] = [jacobian, jacobian_pattern, prepare_jacobian]
    for call in calls:
        with pytest.raises(UnsupportedOperatorError, match=r"what another thread computes of the input .* calls"):
            call(lambda x: x * in_thread(inner, x), drawn(4))
    with pytest.raises(UnsupportedOperatorError, match="what another thread computes of the input"):
        hessian(lambda x: (x * in_thread(inner, x)).sum(), drawn(4))


def test_what_another_thread_made_before_the_call() -> None:
    """Each thread numbers autograd's nodes anew."""
    p, x = drawn(4).requires_grad_(), drawn(4, seed=1)
    for _ in range(50):
        weight = p.sin() * 2
    f = lambda x: x**2 * weight  # noqa: E731
    expected = (2 * x * weight).detach()
    for call in (in_thread, lambda f, *args: f(*args)):
        for _ in range(4):
            values = call(jacobian, f, x).values[:, 0]
            assert torch.allclose(values, expected, rtol=1e-14)
    values = in_thread(lambda: jacobian(f, x, create_graph=True).values)
    (gradient,) = torch.autograd.grad(values.sum(), p)
    assert torch.allclose(gradient, 4 * x * p.cos().detach(), rtol=1e-14)


@pytest.mark.parametrize("n", [4, 200_000])
def test_a_prepared_jacobian_within_a_prepared_function_is_refused(n: int) -> None:
    x = torch.linspace(1, 2, n, dtype=FLOAT)
    inner = prepare_jacobian(lambda x: x**3, x)
    f = lambda x: x * inner(x.detach()).values[:, 0]  # noqa: E731
    with pytest.raises(UnsupportedOperatorError, match="asks what a tensor holds"):
        prepare_jacobian(f, x)
    for _ in range(4):
        assert torch.allclose(jacobian(f, x).values[:, 0], 3 * x**2, rtol=1e-14)
        x = x + 1


def test_a_given_pattern_with_complex_numbers() -> None:
    spectrum = lambda x: torch.fft.rfft(x).abs() ** 2  # noqa: E731
    x = drawn(5)
    for method in ("auto", "compressed"):
        for at in (x, torch.ones(5, dtype=FLOAT)):
            prepared = prepare_jacobian(spectrum, at, pattern=Pattern.of(Full(3, 5)), method=method)
            assert_equal(prepared(x), dense(spectrum, x, batched=False))
    total = lambda x: (torch.fft.rfft(x) * torch.arange(3)).abs().pow(3).sum()  # noqa: E731
    prepared = prepare_hessian(total, x, pattern=Pattern.of(Full(5, 5)))
    assert torch.allclose(prepared(2 * x).todense(), torch.autograd.functional.hessian(total, 2 * x), rtol=1e-10)


def test_functions_of_functions() -> None:
    f = lambda x: torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))  # noqa: E731
    for call in (jacobian, prepare_jacobian):
        with pytest.raises(UnsupportedOperatorError, match=r"as torch.cond, is no operator .*, line \d+"):
            call(f, drawn(3))


class Other(torch.Tensor):
    pass


def hooked(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.register_hook(lambda gradient: 2 * gradient)
    return y * x


def test_remedies() -> None:
    for call in (jacobian, prepare_jacobian):
        with pytest.raises(UnsupportedOperatorError, match=r"a .*hook.* remove it"):
            call(hooked, drawn(4))


def test_tensors_of_another_class() -> None:
    for f in (lambda x: x * drawn(4).as_subclass(Other), lambda x: x.as_subclass(Other).sin() * x):
        for seed in range(3):
            x = drawn(4, seed=seed)
            expected = torch.autograd.functional.jacobian(lambda x: f(x).as_subclass(torch.Tensor), x)  # noqa: B023
            assert_equal(jacobian(f, x), expected[None])


def test_hessians_through_checkpoints() -> None:
    part = lambda x: (x.sin() * x.roll(1)).exp()  # noqa: E731
    f = lambda x: (checkpoint(part, x.cos(), use_reentrant=False) * x.roll(2)).sum()  # noqa: E731
    prepared = prepare_hessian(f, drawn(4))
    for seed in range(4):
        x = drawn(4, seed=seed)
        expected = torch.autograd.functional.hessian(lambda x: (part(x.cos()) * x.roll(2)).sum(), x)
        for H in (hessian(f, x), prepared(x)):
            assert torch.allclose(H.todense(), expected, rtol=0, atol=1e-13)


def test_remedies_of_second_derivatives() -> None:
    inner = lambda x: jacobian(torch.sin, x, create_graph=True).values[:, 0]  # noqa: E731
    with pytest.raises(UnsupportedOperatorError, match="values of a Jacobian are not differentiated by rules"):
        jacobian(inner, drawn(4))


@pytest.mark.parametrize("compile", [False, True])
def test_roots_of_minus_infinity(compile: bool) -> None:
    x = torch.full((1,), -math.inf, dtype=FLOAT)
    for f in (torch.sqrt, lambda x: x**0.5, lambda x: x**-0.5, lambda x: x**1.5):
        prepared = prepare_jacobian(f, drawn(1), compile=compile)
        assert torch.allclose(prepared(x).todense(), dense(f, x, batched=False)[0], rtol=0, atol=0, equal_nan=True)


PARTS: dict[str, Callable[[torch.Tensor], object]] = {
    "real": lambda z: z.real.mul_(2.0),
    "imag": lambda z: z.imag[1:].zero_(),
    "view_as_real": lambda z: torch.view_as_real(z).mul_(2.0),
    "conj": lambda z: z.conj().mul_(2.0),
    "view_as_complex": lambda z: torch.view_as_complex(torch.view_as_real(z) * 1).mul_(2.0),
}


@pytest.mark.parametrize("name", PARTS)
def test_writes_to_parts_of_complex_numbers(name: str) -> None:
    """Autograd holds a lock meanwhile, for which a look at its nodes would wait forever."""

    def f(x: torch.Tensor) -> torch.Tensor:
        z = torch.fft.rfft(x)
        PARTS[name](z)
        return z.abs() ** 2

    for call in (jacobian, prepare_jacobian, functools.partial(prepare_jacobian, pattern=Pattern.of(Full(3, 5)))):
        with pytest.raises(UnsupportedOperatorError, match=r"writes to a part.* of a complex.*, line \d+; compute new"):
            call(f, drawn(5))


SIZES: dict[str, Callable[..., torch.Tensor]] = {
    "nonzero": lambda x, v: x / (v > 0).nonzero().shape[0],
    "masked_select": lambda x, v: x * v.masked_select(v > 0).numel(),
    "unique": lambda x, v: x * len(v.unique()),
    "slice": lambda x, v: x[: len(v.nonzero())],
    "to_sparse": lambda x, v: x * v.to_sparse().values().sum(),
    "mask": lambda x, v: x * v[v > 0].sum(),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_depend_on_what_may_change(name: str) -> None:
    f, x, v = SIZES[name], drawn(4), torch.tensor([1.0, -1.0, 2.0, 0.0], dtype=FLOAT)
    with pytest.raises(UnsupportedOperatorError, match=r"depends on what a tensor of floats holds.*call jacsparse"):
        prepare_jacobian(lambda x: f(x, v), x)
    with pytest.raises(UnsupportedOperatorError, match="depends on what a tensor of floats holds"):
        prepare_jacobian(f, x, v)
    for _ in range(4):
        v = v.roll(1) + 1
        assert_equal(jacobian(f, x, v), dense(f, x, v, batched=False))


@pytest.mark.parametrize("method", ["auto", "products", "compressed"])
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("begin", [0.0, 1.0])
def test_lazy_negatives(method: str, compile: bool, begin: float) -> None:
    f = lambda x, t: x.sin() * torch.fft.fft(t).conj().imag * t.roll(1)  # noqa: E731
    x, t = drawn(4), torch.tensor([1.0, 2.0, 4.0, 3.0], dtype=FLOAT)
    prepared = prepare_jacobian(f, x, begin * t.flip(0), method=method, compile=compile)
    assert_equal(prepared(x, t), dense(f, x, t, batched=False))


def test_an_array_that_is_written_to_later() -> None:
    array, x = np.ones(4), drawn(4)
    f = lambda x, a: x * torch.from_numpy(a)  # noqa: E731
    prepared = prepare_jacobian(f, x, array)
    for number in (5.0, 7.0, 9.0):
        array[:] = number
        assert (prepared(x, np.ones(4)).values == 1).all()
        assert (prepared(x, array).values == number).all()
        assert (prepared(x, np.full(4, 5.0)).values == 5).all()


def test_numbers_whose_tensors_have_another_dtype() -> None:
    x = drawn(2)
    square = lambda x, k: x * (k * k)  # noqa: E731
    for kind in (torch.tensor(300.0, dtype=torch.float16), np.float16(300)):
        with np.errstate(over="ignore"):
            assert torch.isinf(prepare_jacobian(square, x, kind)(x, kind).values).all()
    with pytest.raises(ValueError, match="prepared for"):
        prepare_jacobian(square, x, 2.0)(x, torch.tensor(300.0, dtype=torch.float16))


def test_memory_of_the_input_under_another_name() -> None:
    for f in (lambda x: x * nn.Parameter(x.detach()), lambda x: x * x.detach().as_subclass(torch.Tensor)):
        prepared = prepare_jacobian(f, drawn(4))
        for x in (drawn(4), drawn(4, seed=1)):
            assert torch.equal(jacobian(f, x).values[:, 0], x) and torch.equal(prepared(x).values[:, 0], x)


def at_a_boundary(x: torch.Tensor) -> torch.Tensor:
    x[0] = 0.0
    x[-1] = x[1]
    return torch.cat([x[1:] * x[:-1], x**2])


def scaled_inside(x: torch.Tensor) -> torch.Tensor:
    x[1:3] *= 2.0
    return x.sin() * x.roll(1)


@pytest.mark.parametrize("f", [at_a_boundary, scaled_inside])
def test_writes_to_the_argument(f: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The argument is a view of the run's input, whose node autograd makes anew where it is used after a write."""
    on_copy = lambda x: f(x * 1)  # noqa: E731
    prepared = prepare_jacobian(f, drawn(4))
    for call in range(5):
        x = drawn(4, seed=call)
        for jacobian_of in (functools.partial(jacobian, f), prepared):
            assert_equal(jacobian_of(x), dense(on_copy, x, batched=False))
        assert torch.equal(x, drawn(4, seed=call))
    expected = torch.autograd.functional.hessian(lambda x: on_copy(x).sin().sum(), x)
    assert torch.allclose(hessian(lambda x: f(x).sin().sum(), x).todense(), expected, rtol=1e-13)


def through_views(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(2, 2, dtype=x.dtype)
    y[0][1] += x[2]
    y[1][:1] *= 3 * x[:1]
    return y.flatten() * x


def to_views_of_views(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[1:][1:] += x[2:]
    inner = y[1:][:2]
    inner *= x[:2]
    return y * x


def through_a_view_between(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    v = y[1:]
    w = v[1:]
    w += x[2:]
    v[1:] = w.clone()
    return y.sin()


@pytest.mark.parametrize("f", [through_views, to_views_of_views, through_a_view_between])
def test_writes_to_views_of_views(f: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A look at the node of such a view makes it anew."""
    prepared = prepare_jacobian(f, drawn(4))
    for call in range(4):
        x = drawn(4, seed=call)
        for jacobian_of in (functools.partial(jacobian, f), prepared):
            assert_equal(jacobian_of(x), dense(f, x, batched=False))
    expected = torch.autograd.functional.hessian(lambda x: f(x).sin().sum(), x)
    assert torch.allclose(hessian(lambda x: f(x).sin().sum(), x).todense(), expected, rtol=1e-13, atol=1e-15)


def test_values_of_numbers_that_make_programs_are_told(caplog: pytest.LogCaptureFixture) -> None:
    f = lambda x, t: x * math.exp(-t)  # noqa: E731
    prepared, x = prepare_jacobian(f, drawn(3), 0.0, static_argnums=1), drawn(3)
    with caplog.at_level("WARNING", "jacsparse"):
        for number in range(7):
            prepared(x, 0.1 * (number + 1))
        assert not caplog.records
        assert_equal(prepared(x, 0.9), dense(f, x, 0.9, batched=False))
    assert "8 values of constants" in caplog.text


def test_shapes_of_programs() -> None:
    f = lambda x, k: (2 * x).reshape(k, -1)  # noqa: E731
    prepared = prepare_jacobian(f, torch.ones(4), 2, value=True, static_argnums=1)
    for number in (4, 2, 1):
        J, y = prepared(torch.ones(4), number)
        assert J.jvp(torch.ones(1, 4)).shape[1:] == y.shape == (number, 4 // number)


def test_parameters_that_are_gone() -> None:
    module = nn.Sequential(nn.Linear(3, 3, dtype=FLOAT), nn.Tanh())
    prepared, x = prepare_jacobian(module, drawn(2, 3)), drawn(2, 3)
    bias, module[0].bias = module[0].bias, None
    with pytest.raises(ValueError, match=r"parameter or buffer .* is a NoneType by now; prepare one"):
        prepared(x)
    module[0].bias = bias
    linear, module[0] = module[0], nn.Identity()
    with pytest.raises(ValueError, match=r"is gone: .* 'weight'; prepare one"):
        prepared(x)
    module[0] = linear
    assert_equal(prepared(x), dense(module, x))
    module.float()
    with pytest.raises(ValueError, match=r"^Sequential\.0\.weight is torch\.float32 \(3, 3\)"):
        prepared(x)


def test_memory_that_is_taken() -> None:
    for f in (lambda x: x * pickle.loads(pickle.dumps(drawn(4))), lambda x: x * copy.deepcopy(x.detach())):
        with pytest.raises(UnsupportedOperatorError):
            prepare_jacobian(f, drawn(4))


def test_arguments_that_read_alike() -> None:
    a, b = drawn(3), drawn(3, seed=1)
    prepared = prepare_jacobian(lambda x, d: x * d["a"] + d["b"], a, {"a": a, "b": b})
    with pytest.raises(ValueError, match="others of the order of keys, the containers or the strides"):
        prepared(a, {"b": b, "a": a})


def test_a_file_of_another_mask_is_refused(tmp_path: Path) -> None:
    x, file = torch.zeros(3, dtype=FLOAT), tmp_path / "prepared.npz"
    mask = torch.tensor([True, False, True])
    f = lambda mask: lambda x: torch.where(mask, x**2, 0.0)  # noqa: E731
    prepare_jacobian(f(mask), x, method="compressed").save(file)
    PreparedJacobian.load(file, f(mask), x)
    with pytest.raises(ValueError, match="not of this function"):
        PreparedJacobian.load(file, f(~mask), x)


def test_functions_of_parameters_alone() -> None:
    """As weights that are rounded for a network's forward pass."""
    weight = drawn(4).requires_grad_()
    f = lambda x: x**2 * Straight.apply(3 * weight)  # noqa: E731
    prepared = prepare_jacobian(f, drawn(4))
    for seed in range(1, 3):
        x = drawn(4, seed=seed)
        with torch.no_grad():
            weight.add_(1)
        for J in (jacobian(f, x), prepared(x)):
            assert torch.equal(J.values[:, 0], (2 * x * (3 * weight).round()).detach())
    of_values = jacobian(f, x, create_graph=True).values.sum()
    assert torch.allclose(torch.autograd.grad(of_values, weight)[0], 6 * x)
    with pytest.raises(UnsupportedOperatorError, match=r"Straight is a torch.autograd.Function .*, line \d+"):
        prepare_jacobian(f, drawn(4), create_graph=True)


def test_graphs_hold_no_nodes_of_autograd() -> None:
    def count() -> int:
        gc.collect()
        # An object may stand for one that is gone.
        return sum(issubclass(type(each), BackwardCFunction) for each in gc.get_objects())

    weight, before = drawn(4).requires_grad_(), count()
    jacobian(lambda x: x * Straight.apply(3 * weight), drawn(4))
    assert count() == before
