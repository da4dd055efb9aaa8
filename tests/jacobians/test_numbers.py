"""Prepared Jacobians at other numbers: tensors without axes to the function, or constants by `static_argnums`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import jacsparse
from tests.helpers import assert_equal, dense, drawn

X = drawn(5)
WEIGHT = drawn(5, seed=1)


class Counted:
    """A function that counts its runs, in an array, whose elements are not watched for changes."""

    def __init__(self, f: Callable[..., torch.Tensor]) -> None:
        self.f, self.runs = f, np.zeros(1, dtype=int)

    def __call__(self, *args: Any) -> torch.Tensor:
        self.runs[0] += 1
        return self.f(*args)


def steps(x: torch.Tensor, c: float) -> torch.Tensor:
    for _ in range(1500):
        c = 0.999 * c + 0.001
    return x * x * c


def shifted(x: torch.Tensor, *, by: float) -> torch.Tensor:
    return x.sin() * by


def handler(x: torch.Tensor, c: float) -> torch.Tensor:
    try:
        large = c > 2.2
    except:  # noqa: E722
        large = False
    return x**2 * (c if large else 3 * c)


#: Functions of a vector and a number, which may be a tensor.
TENSORS: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "factor": lambda x, c: c * x**2,
    "term": lambda x, c: (x + c) ** 2 - (c - x).exp(),
    "divisor": lambda x, c: x.sin() / c,
    "in place": lambda x, c: (x * 1.0).mul_(c).sin(),
    "arithmetic": lambda x, c: (1 - c) ** 2 / (abs(-c) + 3) * x**2 + 2**c * x + c // 0.7 * x + c % 0.3 * x,
    "other numbers": lambda x, c: x * 2.0 * c + (x * 3.0).exp() * (c + c * c),
    "weights": lambda x, c: (WEIGHT * c) * x**2,
    "called by name": lambda x, c: torch.mul(x**2, other=c) + shifted(x, by=c),
    "steps": steps,
    "tensor": lambda x, c: x**2 * torch.tensor(c, dtype=x.dtype),
    "method": lambda x, c: x**2 * c.real,
    "two tensors": lambda x, c: torch.cat([x * c, x**2 * (c + 1)]),
}

#: Those that need the number's value, or ask for its type.
NUMBERS_ALONE: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "NumPy": lambda x, c: x * np.exp(-c) + np.float64(2.0) * c * x**2 + x * np.sin(c) ** 2,
    "math": lambda x, c: x**2 * math.sin(c),
    "branch": lambda x, c: x**2 * (c if c > 1 else 3 * c),
    "checked branch": lambda x, c: x**2 * (c if isinstance(c, float) and c > 1 else 3 * c),
    "other type": lambda x, c: x**2 * (c * c if type(c) is float else 2 * c),
    "maximum": lambda x, c: x**2 * max(c, 1.0),
    "array": lambda x, c: x**2 * torch.from_numpy(np.full(5, c)),
    "array times number": lambda x, c: x**2 * torch.from_numpy(np.ones(5) * c),
    "text": lambda x, c: x**2 * float(f"{c}"),
    "key": lambda x, c: x**2 * {2.0: 5.0}.get(c, 7.0),
    "rounded": lambda x, c: x**2 * round(c, 1),
    "converted": lambda x, c: x**2 * float(c),
    "complex": lambda x, c: x**2 * abs((c - 3) ** 0.5),
    "type": lambda x, c: x**2 * (c if type(c) is float and c > 2.2 else 3 * c),
    "attribute": lambda x, c: x**2 * (c if getattr(c, "value", c) > 2.2 else 3 * c),
    "handler": handler,
}

NUMBERS = (2.0, 0.5, 2.5, -1.5, 2.0, 1.0, 0.25)


@pytest.mark.parametrize("name", [*TENSORS, *NUMBERS_ALONE])
def test_values_are_the_functions(name: str) -> None:
    f = (TENSORS | NUMBERS_ALONE)[name]
    counted, static = Counted(f), 1 if name in NUMBERS_ALONE else ()
    prepared = jacsparse.prepare_jacobian(counted, X, NUMBERS[0], batched=False, static_argnums=static)
    runs = []
    for c in NUMBERS:
        before = counted.runs[0]
        assert_equal(prepared(X + c, c), dense(f, X + c, c, batched=False))
        runs.append(counted.runs[0] - before)
    # Another constant makes a program of its own, by one run, and is found again.
    new = [c not in NUMBERS[: max(1, n)] for n, c in enumerate(NUMBERS)]
    assert runs == [int(name in NUMBERS_ALONE and each) for each in new]


@pytest.mark.parametrize("name", NUMBERS_ALONE)
def test_what_needs_a_numbers_value_is_refused(name: str) -> None:
    with pytest.raises((ValueError, jacsparse.UnsupportedOperatorError, jacsparse.VerificationError)) as caught:
        jacsparse.prepare_jacobian(NUMBERS_ALONE[name], X, 2.5, batched=False)
    assert "static_argnums" in " ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


@pytest.mark.parametrize(
    "f",
    [
        lambda x, c: x**c,
        lambda x, c: x**2 * torch.zeros(5, dtype=x.dtype).fill_(c),
        lambda x, c: torch.where(x > 0, x**2, c),
        lambda x, c: (x**2).clamp(max=c),
    ],
)
def test_operators_that_take_a_tensor_for_a_number(f: Callable[[torch.Tensor, float], torch.Tensor]) -> None:
    prepared = jacsparse.prepare_jacobian(f, X.abs(), 2.0, batched=False)
    for c in (2.0, 3.0, 2.0):
        assert_equal(prepared(X.abs(), c), dense(f, X.abs(), c, batched=False))


@pytest.mark.parametrize(
    "f",
    [
        lambda x, c: x**2 * torch.full((5,), c, dtype=x.dtype),
        lambda x, c: torch.nn.functional.leaky_relu(x, c),
        lambda x, c: torch.add(x, x**2, alpha=c),
    ],
)
def test_operators_that_take_numbers_alone(f: Callable[[torch.Tensor, float], torch.Tensor]) -> None:
    with pytest.raises(jacsparse.UnsupportedOperatorError, match="static_argnums"):
        jacsparse.prepare_jacobian(f, X, 2.0, batched=False)
    prepared = jacsparse.prepare_jacobian(f, X, 2.0, batched=False, static_argnums=1)
    for c in (2.0, 3.0, 2.0):
        assert_equal(prepared(X, c), dense(f, X, c, batched=False))


@settings(max_examples=30)
@given(st.floats(-5, 5), st.floats(-5, 5))
def test_two_numbers(a: float, b: float) -> None:
    def f(x: torch.Tensor, p: dict[str, Any]) -> torch.Tensor:
        return p["a"] * x**2 + x.exp() * (p["b"] - p["a"] * p["b"]) + p["scale"] * x

    prepared = jacsparse.prepare_jacobian(f, X, {"a": 1.0, "b": 1.0, "scale": 3}, batched=False)
    for p in ((1.0, 2.0), (b, a), (a, b), (a, a), (b, b)):
        arguments = {"a": p[0], "b": p[1], "scale": 3}
        assert_equal(prepared(X, arguments), dense(f, X, arguments, batched=False))
    arguments = {"a": a, "b": b, "scale": 4}
    assert_equal(prepared(X, arguments), dense(f, X, arguments, batched=False))


def test_other_tensors_among_the_arguments() -> None:
    counted = Counted(lambda x, y, c: x**2 * y * c)
    prepared = jacsparse.prepare_jacobian(counted, X, WEIGHT, 1.0, batched=False)
    before = counted.runs[0]
    for c in (2.0, 3.0, 4.0):
        assert_equal(prepared(X, WEIGHT + c, c), dense(counted.f, X, WEIGHT + c, c, batched=False))
    assert counted.runs[0] == before


def test_what_a_function_checks_is_checked() -> None:
    def f(x: torch.Tensor, step: float) -> torch.Tensor:
        if isinstance(step, float) and step <= 0:
            raise ValueError(f"step is {step}; expected a positive number")
        return x**2 * step

    prepared = jacsparse.prepare_jacobian(f, X, 1.0, batched=False, static_argnums=1)
    prepared(X, 2.0), prepared(X, 4.0)
    with pytest.raises(ValueError, match=r"step is -1.0; expected a positive number"):
        prepared(X, -1.0)


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, 0.0])
def test_numbers_that_are_none(number: float) -> None:
    prepared = jacsparse.prepare_jacobian(TENSORS["factor"], X, 1.0, batched=False)
    for c in (2.0, number, 3.0, number):
        expected = (2 * X * c).tolist()
        torch.testing.assert_close(
            prepared(X, c).values[:, 0], torch.tensor(expected, dtype=X.dtype), equal_nan=True, rtol=1e-12, atol=0
        )


def test_integers_and_numbers_in_turn() -> None:
    prepared = jacsparse.prepare_jacobian(lambda x, a, b: a * x**2 - b * x, X, 2.0, 1.0, batched=False)
    for a, b in (
        (2, 1.0),
        (2, 3.0),
        (2, 4.0),
        (2.0, 4.0),
        (2.0, 5.0),
        (5.0, 5.0),
        (5, 5.0),
        (5, 5),
        (5.0, 6.0),
        (1.0, 6),
    ):
        assert_equal(prepared(X, a, b), torch.diag(2 * a * X - b)[None])
    f = lambda x, c: x * (7 // c if isinstance(c, int) else 7 / c)  # noqa: E731
    halves = jacsparse.prepare_jacobian(f, X, 2, batched=False, static_argnums=-1)
    for c in (2.0, 2):
        assert_equal(halves(X, c), torch.diag(torch.full_like(X, 3.5 if type(c) is float else 3))[None])


def test_zeros_have_signs() -> None:
    def f(x: torch.Tensor, a: float, b: float) -> torch.Tensor:
        return np.copysign(1.0, a) * x + (x**2 / b).detach() * x

    prepared = jacsparse.prepare_jacobian(f, X, 0.0, 1.0, batched=False, static_argnums=(1,))
    for a in (-0.0, 0.0, -0.0):
        for b in (2.0, -0.0, 0.0, -0.0):
            expected = (-1 if str(a) == "-0.0" else 1) + X**2 * (0.5 if b else math.copysign(math.inf, b))
            torch.testing.assert_close(prepared(X, a, b).values[:, 0], expected, rtol=1e-12, atol=0)


def test_hessians_too() -> None:
    counted = Counted(lambda x, c: (c * (x[1:] - x[:-1] ** 2) ** 2).sum())
    prepared = jacsparse.prepare_hessian(counted, X, 1.0)
    for c in (2.0, 3.0, -3.0, 4.0):
        expected = torch.func.hessian(lambda x, c=c: counted.f(x, c))(X)
        assert_equal(prepared(X, c), expected[None])


@pytest.mark.parametrize(
    "gradient",
    [
        lambda f, x: torch.func.grad(f)(x),
        lambda f, x: torch.autograd.grad(f(x), x, create_graph=True)[0],
    ],
)
def test_numbers_in_backward_passes(gradient: Callable[..., torch.Tensor]) -> None:
    def f(x: torch.Tensor, a: float, b: float) -> torch.Tensor:
        return gradient(lambda x: (b // 0.7 * (x + a) ** 3).sum(), x)

    prepared = jacsparse.prepare_jacobian(f, X, 1.0, 2.0, batched=False)
    # PyTorch keeps the factor for its backward pass; at first it does not change.
    for a, b in ((2.0, 2.0), (3.0, 2.0), (3.0, 4.0), (3.0, 5.5)):
        assert_equal(prepared(X, a, b), torch.diag(6 * (b // 0.7) * (X + a))[None])


def test_a_power_that_gets_complex() -> None:
    prepared = jacsparse.prepare_jacobian(lambda x, c: x**2 * (c - 1) ** 0.5, X, 5.0, static_argnums=1)
    assert_equal(prepared(X, 10.0), torch.diag(6 * X)[None])
    with pytest.raises(jacsparse.UnsupportedOperatorError, match="complex"):
        prepared(X, 0.0)
    assert_equal(prepared(X, 5.0), torch.diag(4 * X)[None])


@pytest.mark.parametrize("first", [0.5, 2, np.float32(0.5), np.float64(0.5), np.int64(2)])
def test_numbers_and_tensors_without_axes_in_turn(first: Any) -> None:
    for f in (TENSORS["factor"], lambda x, c: x**2 * c + (x * c).sin(), lambda x, c: x.sum() * c * x):
        prepared = jacsparse.prepare_jacobian(f, X, first, batched=False, value=True)
        for c in (0.1, 3, np.float32(0.1), np.float64(0.25), torch.tensor(0.1), torch.tensor(-1.0, dtype=X.dtype), 3e9):
            jacobian, y = prepared(X, c)
            assert_equal(jacobian, dense(f, X, float(c), batched=False))
            assert y.dtype == X.dtype and torch.allclose(y, f(X, float(c)), rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_without_axes_are_no_numbers(dtype: torch.dtype) -> None:
    prepared = jacsparse.prepare_jacobian(TENSORS["factor"], X, torch.tensor(0.5, dtype=dtype), batched=False)
    assert_equal(prepared(X, torch.tensor(2.0, dtype=dtype)), dense(TENSORS["factor"], X, 2.0, batched=False))
    for other in (0.5, torch.tensor(0.5, dtype=torch.float16), torch.tensor(2)):
        with pytest.raises(ValueError, match="prepare one for these"):
            prepared(X, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_keep_their_dtype(dtype: torch.dtype) -> None:
    x = X.to(dtype)
    for f in (lambda x, c: x.sum() * c, lambda x, c: (x / c, c * x[0], (c + 1) ** 2 * x)):
        for c in (0.5, 3):
            J, y = jacsparse.prepare_jacobian(f, x, c, value=True)(x, c)
            assert {part.dtype for part in (J.values, *(y if isinstance(y, list | tuple) else [y]))} == {dtype}
            expected = torch.cat([part.reshape(-1, 5) for part in torch.atleast_1d(dense(f, x, c, batched=False))])
            assert (J.todense() - expected).abs().amax() <= 4 * torch.finfo(dtype).eps * expected.abs().amax()


def test_a_tensor_of_a_number_has_a_dtype() -> None:
    for make in (torch.tensor, torch.as_tensor, torch.asarray):
        with pytest.raises(jacsparse.UnsupportedOperatorError, match=r"makes a number torch.float32, .*; pass a dtype"):
            jacsparse.prepare_jacobian(lambda x, c, make=make: x * (make(c) - 0.125), X, 0.5)
        prepared = jacsparse.prepare_jacobian(lambda x, c, make=make: x * make(c, dtype=x.dtype), X, 0.5)
        assert_equal(prepared(X, 0.1), torch.diag(torch.full_like(X, 0.1))[None])
        prepared = jacsparse.prepare_jacobian(lambda x, c, make=make: x * make(c), X.float(), 0.5)
        assert_equal(prepared(X.float(), 0.1), torch.diag(torch.full_like(X.float(), 0.1))[None])


def test_arguments_that_are_constants() -> None:
    f = lambda x, axis, c: c * x.cumsum(axis)  # noqa: E731
    x = drawn(3, 4)
    prepared = jacsparse.prepare_jacobian(f, x, 0, 2.0, batched=False, static_argnums=1)
    assert_equal(prepared(x, 0, 3.0), dense(f, x, 0, 3.0, batched=False))
    with pytest.raises(ValueError, match=r"with these constants, is another than that for which it was prepared"):
        prepared(x, 1, 3.0)
    for static, error, message in (
        (0, ValueError, "static_argnums is 0, and argument 0 is one to differentiate by"),
        (3, ValueError, r"static_argnums is 3; the call has 3 arguments, numbered 0 to 2"),
        ("c", TypeError, "static_argnums is 'c'; expected an integer or a tuple of integers"),
        (True, TypeError, "static_argnums is True"),
        ((1, 1), ValueError, r"static_argnums is \(1, 1\); it names an argument twice"),
    ):
        with pytest.raises(error, match=message):
            jacsparse.prepare_jacobian(f, x, 0, 2.0, static_argnums=static)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="argument 2 holds a tensor, which is read at each call"):
        jacsparse.prepare_jacobian(f, x, 0, torch.tensor(2.0), static_argnums=(1, 2))
    hessian = jacsparse.prepare_hessian(lambda x, n: (x**n).sum(), X, 3, static_argnums=1)
    for n in (3, 4):
        assert_equal(hessian(X, n), torch.diag(n * (n - 1) * X ** (n - 2))[None])


def test_a_buffer_without_axes_of_another_dtype() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self, scale: torch.Tensor) -> None:
            super().__init__()
            self.register_buffer("scale", scale)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    for before, now in ((2, 2.5), (0.5, 2 + 3j), (0.5, torch.tensor(1e300, dtype=X.dtype))):
        module = Scaled(torch.tensor(before))
        prepared = jacsparse.prepare_jacobian(module, X[None])
        module.scale = torch.as_tensor(now)
        with pytest.raises(ValueError, match=r"Scaled.scale is torch\.\w+ \(\) on cpu; this Jacobian is prepared for"):
            prepared(X[None])


def test_texts_of_numbers_and_tensors() -> None:
    f = lambda x, c: x * 2 * c if "-" in str(c) else x * c  # noqa: E731
    prepared = jacsparse.prepare_jacobian(f, X, 1.0, batched=False, static_argnums=1)
    for c in (1.0, -1.0, 2.0):
        assert_equal(prepared(X, c), dense(f, X, c, batched=False))
    for text in (str, repr, "{}".format, "%s".__mod__):
        with pytest.raises(
            jacsparse.UnsupportedOperatorError, match=r"makes a text of a tensor, .*, line \d+.*; leave"
        ):
            jacsparse.prepare_jacobian(lambda x, text=text: x * 2 if "-" in text(2 * x) else x, X, batched=False)
    # Of what is the same in each call.
    constant = lambda x: x * len(str(torch.arange(3)))  # noqa: E731
    assert_equal(jacsparse.prepare_jacobian(constant, X, batched=False)(X), dense(constant, X, batched=False))


@pytest.mark.parametrize(
    "aux",
    [
        lambda c: isinstance(c, float),
        lambda c: {"text": [repr(c)]},
        lambda c: 2 * c,
        lambda c: torch.arange(3) * c,
        lambda c: (torch.full((2,), 3.0) * c, "constant", None),
        lambda c: (torch.tensor(1) * c).dtype,
        lambda c: str(c).encode() if isinstance(c, float) else b"",
    ],
)
def test_numbers_beside_the_result(aux: Callable[[float], Any]) -> None:
    f = lambda x, c: (x * c, aux(c))  # noqa: E731
    prepared = jacsparse.prepare_jacobian(f, X, 2.0, has_aux=True, batched=False, static_argnums=1)
    for c in (2.0, 3.0, 2.5):
        assert_equal(prepared(X, c)[0], torch.diag(torch.full_like(X, c))[None])
        assert repr(prepared(X, c)[1]) == repr(aux(c))


def test_tensors_of_numbers_beside_the_result() -> None:
    f = lambda x, c: (x * c, (2 * c, torch.full((2,), 3.0, dtype=x.dtype) * c, "constant"))  # noqa: E731
    prepared = jacsparse.prepare_jacobian(f, X, 2.0, has_aux=True, batched=False)
    for c in (2.0, 3.0, 2.5):
        _, (number, tensor, text) = prepared(X, c)
        assert float(number) == 2 * c and tensor.tolist() == [3 * c] * 2 and text == "constant"


def test_integers_and_masks_of_tensors_beside_the_result() -> None:
    f = lambda x, c: (2 * x, (c > 1, (3 * c).int(), c.argmax()))  # noqa: E731
    prepared = jacsparse.prepare_jacobian(f, X, X, has_aux=True, batched=False)
    assert all(map(torch.equal, prepared(X, X.flip(0))[1], f(X, X.flip(0))[1]))


def test_divisors_of_coarser_numbers() -> None:
    for divisor in (torch.tensor(3.0), torch.linspace(1, 3, 5)):
        for f in (lambda x, d: x / d, lambda x, d: (x * 1).div_(d) * x):
            expected = dense(f, X, divisor, batched=False)
            for method in ("products", "compressed"):
                prepared = jacsparse.prepare_jacobian(f, X, divisor, batched=False, method=method)
                assert torch.allclose(prepared(X, divisor).todense(), expected, rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, c: x * 5 if c in {0.5, 1.0} else x * c,
        lambda x, c: x * {0.5: 7.0}.get(c, c),
        lambda x, c: x * len({c, 2.0}),
        lambda x, c: x * c if c in [1.0, 0.5] else 2 * x,
    ],
)
def test_numbers_that_are_looked_up(f: Callable[[torch.Tensor, float], torch.Tensor]) -> None:
    with pytest.raises((ValueError, jacsparse.UnsupportedOperatorError), match="static_argnums"):
        jacsparse.prepare_jacobian(f, X, 5.0, batched=False)
    prepared = jacsparse.prepare_jacobian(f, X, 5.0, batched=False, static_argnums=1)
    for c in (5.0, 0.5, 2.0, 1.0):
        assert_equal(prepared(X, c), dense(f, X, c, batched=False))
