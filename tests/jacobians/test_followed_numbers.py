"""Prepared Jacobians at other numbers: always those of the function, which runs where its arithmetic cannot be told."""

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
from jacsparse.tracing import Arithmetic
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


#: Functions of a vector and a number whose arithmetic is followed.
FOLLOWED: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "factor": lambda x, c: c * x**2,
    "term": lambda x, c: (x + c) ** 2 - (c - x).exp(),
    "divisor": lambda x, c: x.sin() / c,
    "in place": lambda x, c: (x * 1.0).mul_(c).sin(),
    "arithmetic": lambda x, c: (1 - c) ** 2 / (abs(-c) + 3) * x**2 + 2**c * x + c // 0.7 * x + c % 0.3 * x,
    "other numbers": lambda x, c: x * 2.0 * c + (x * 3.0).exp() * (c + c * c),
    "weights": lambda x, c: (WEIGHT * c) * x**2,
    "NumPy": lambda x, c: x * np.exp(-c) + np.float64(2.0) * c * x**2 + x * np.sin(c) ** 2,
    "called by name": lambda x, c: torch.mul(x**2, other=c) + shifted(x, by=c),
    "steps": steps,
    "two tensors": lambda x, c: torch.cat([x * c, x**2 * (c + 1)]),
}

#: Those that run at each change.
RUN: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "math": lambda x, c: x**2 * math.sin(c),
    "branch": lambda x, c: x**2 * (c if c > 1 else 3 * c),
    "checked branch": lambda x, c: x**2 * (c if isinstance(c, float) and c > 1 else 3 * c),
    "other type": lambda x, c: x**2 * (c * c if type(c) is float else 2 * c),
    "maximum": lambda x, c: x**2 * max(c, 1.0),
    "tensor": lambda x, c: x**2 * torch.tensor(c, dtype=x.dtype),
    "array": lambda x, c: x**2 * torch.from_numpy(np.full(5, c)),
    "array times number": lambda x, c: x**2 * torch.from_numpy(np.ones(5) * c),
    "text": lambda x, c: x**2 * float(f"{c}"),
    "key": lambda x, c: x**2 * {2.0: 5.0}.get(c, 7.0),
    "rounded": lambda x, c: x**2 * round(c, 1),
    "converted": lambda x, c: x**2 * float(c),
    "method": lambda x, c: x**2 * c.real,
    "complex": lambda x, c: x**2 * abs((c - 3) ** 0.5),
    "type": lambda x, c: x**2 * (c if type(c) is float and c > 2.2 else 3 * c),
    "attribute": lambda x, c: x**2 * (c if getattr(c, "value", c) > 2.2 else 3 * c),
    "handler": handler,
}

NUMBERS = (2.0, 0.5, 2.5, -1.5, 2.0, 1.0, 0.25)


@pytest.mark.parametrize("name", [*FOLLOWED, *RUN])
def test_values_are_the_functions(name: str) -> None:
    f = (FOLLOWED | RUN)[name]
    counted = Counted(f)
    prepared = jacsparse.prepare_jacobian(counted, X, NUMBERS[0], batched=False)
    runs = []
    for c in NUMBERS:
        before = counted.runs[0]
        assert_equal(prepared(X + c, c), dense(f, X + c, c, batched=False))
        runs.append(counted.runs[0] - before)
    # The first change runs it three times; what cannot be followed then runs once at each change.
    if name in FOLLOWED:
        assert runs == [0, 3, *[0] * (len(NUMBERS) - 2)]
    else:
        assert runs[0] == 0
        assert all(runs[1:])


@pytest.mark.parametrize(
    "f",
    [
        lambda x, c: x**c,
        lambda x, c: x**2 * torch.full((5,), c, dtype=x.dtype),
        lambda x, c: x**2 * torch.zeros(5, dtype=x.dtype).fill_(c),
        lambda x, c: torch.where(x > 0, x**2, c),
        lambda x, c: torch.nn.functional.leaky_relu(x, c),
        lambda x, c: (x**2).clamp(max=c),
        lambda x, c: torch.add(x, x**2, alpha=c),
    ],
)
def test_numbers_that_are_parts_of_the_program(f: Callable[[torch.Tensor, float], torch.Tensor]) -> None:
    prepared = jacsparse.prepare_jacobian(f, X.abs(), 2.0, batched=False)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="makes other calls than when it was prepared"):
            prepared(X.abs(), 3.0)
        assert_equal(prepared(X.abs(), 2.0), dense(f, X.abs(), 2.0, batched=False))


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


@pytest.mark.parametrize(
    ("f", "number", "error"),
    [
        (lambda x, c: x**2 * (1 / c), 0.0, pytest.raises(ZeroDivisionError)),
        # A root of a negative number is complex.
        (lambda x, c: x**2 * (c + 1) ** 0.5, -2.0, pytest.raises(RuntimeError, match="makes other calls")),
    ],
)
def test_an_error_of_the_function_is_raised(f: Callable[..., torch.Tensor], number: float, error: Any) -> None:
    prepared = jacsparse.prepare_jacobian(f, X, 1.0, batched=False)
    prepared(X, 2.0), prepared(X, 4.0)
    with error:
        prepared(X, number)
    assert_equal(prepared(X, 0.5), dense(f, X, 0.5, batched=False))


def test_other_tensors_among_the_arguments() -> None:
    counted = Counted(lambda x, y, c: x**2 * y * c)
    prepared = jacsparse.prepare_jacobian(counted, X, WEIGHT, 1.0, batched=False)
    before = counted.runs[0]
    for c in (2.0, 3.0, 4.0):
        assert_equal(prepared(X, WEIGHT + c, c), dense(counted.f, X, WEIGHT + c, c, batched=False))
    assert counted.runs[0] - before == 3


def test_a_function_stores_numbers() -> None:
    last = {}

    def f(x: torch.Tensor, c: float) -> torch.Tensor:
        last["c"] = c
        return x**2 * c

    prepared = jacsparse.prepare_jacobian(f, X, 1.0, batched=False)
    for c in (2.0, 3.0):
        prepared(X, c)
        assert type(last["c"]) is float


def test_what_a_function_checks_is_checked() -> None:
    def f(x: torch.Tensor, step: float) -> torch.Tensor:
        if isinstance(step, float) and step <= 0:
            raise ValueError(f"step is {step}; expected a positive number")
        return x**2 * step

    prepared = jacsparse.prepare_jacobian(f, X, 1.0, batched=False)
    prepared(X, 2.0), prepared(X, 4.0)
    with pytest.raises(ValueError, match=r"step is -1.0; expected a positive number"):
        prepared(X, -1.0)


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, 0.0])
def test_numbers_that_are_none(number: float) -> None:
    prepared = jacsparse.prepare_jacobian(FOLLOWED["factor"], X, 1.0, batched=False)
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
    halves = jacsparse.prepare_jacobian(lambda x, c: x * (7 // c if isinstance(c, int) else 7 / c), X, 2, batched=False)
    for c in (2.0, 2):
        assert_equal(halves(X, c), torch.diag(torch.full_like(X, 3.5 if type(c) is float else 3))[None])


def test_zeros_have_signs() -> None:
    state = [0.0]

    def f(x: torch.Tensor, a: float, b: float) -> torch.Tensor:
        return np.copysign(1.0, a) * x + (x**2 / b).detach() * x + np.copysign(3.0, state[0]) * x

    prepared = jacsparse.prepare_jacobian(f, X, 0.0, 1.0, batched=False)
    for a in (-0.0, 0.0, -0.0):
        for b in (2.0, -0.0, 0.0, -0.0):
            for state[0] in (0.0, -0.0):
                constant = (-1 if str(a) == "-0.0" else 1) + (-3 if str(state[0]) == "-0.0" else 3)
                expected = constant + X**2 * (0.5 if b else math.copysign(math.inf, b))
                torch.testing.assert_close(prepared(X, a, b).values[:, 0], expected, rtol=1e-12, atol=0)


def test_what_else_the_function_reads_may_change() -> None:
    state = {"scale": 2.0, "weight": WEIGHT}

    def f(x: torch.Tensor, c: float) -> torch.Tensor:
        return x**2 * c * state["scale"] * state["weight"]

    prepared = jacsparse.prepare_jacobian(f, X, 1.0, batched=False)
    changes: list[tuple[str, Any]] = [("scale", 3.0), ("weight", WEIGHT + 1), ("scale", 0.5), ("weight", WEIGHT)]
    for number, (key, value) in enumerate(changes):
        for c in (number + 0.5, number + 0.75, number + 0.25):
            assert_equal(prepared(X, c), dense(f, X, c, batched=False))
        state[key] = value
        assert_equal(prepared(X, 2.0), dense(f, X, 2.0, batched=False))


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


def test_numbers_that_a_function_stores_are_numbers() -> None:
    # Elements of arrays are not watched for changes.
    stored = np.zeros(1, dtype=object)

    def f(x: torch.Tensor, c: float) -> torch.Tensor:
        stored[0] = -c
        return x**2 * c

    prepared = jacsparse.prepare_jacobian(f, X, 1.0, batched=False)
    prepared(X, 2.0)
    last = stored[0]
    assert last < -1.5
    assert f"{last + 2:.2f}" == f"{float(last) + 2:.2f}" == f"{2 + np.add(last, 0):.2f}"
    assert torch.equal(X * last, X * float(last))
    assert prepared._run.arithmetic is not None
    assert prepared._run.arithmetic.evaluate([5.0]) == [5.0, -5.0]


def test_a_function_that_stores_its_arguments_gets_numbers() -> None:
    stored: dict[str, float] = {}

    def f(x: torch.Tensor, c: float) -> torch.Tensor:
        stored["last"] = c
        return x**2 * c

    prepared = jacsparse.prepare_jacobian(f, X, 1.0, batched=False)
    for c in (2.0, 3.0, 4.0):
        assert_equal(prepared(X, c), torch.diag(2 * c * X)[None])
        assert (type(stored["last"]), stored["last"]) == (float, c)


def test_a_power_that_gets_complex_is_the_functions_error() -> None:
    prepared = jacsparse.prepare_jacobian(lambda x, c: x**2 * (c - 1) ** 0.5, X, 2.0, batched=False)
    assert_equal(prepared(X, 5.0), torch.diag(4 * X)[None])
    with pytest.raises(RuntimeError, match="makes other calls"):
        prepared(X, 0.0)
    assert_equal(prepared(X, 10.0), torch.diag(6 * X)[None])


def test_operands_of_all_kinds() -> None:
    arithmetic = Arithmetic([2.0, 3.0])
    a, b = arithmetic.numbers
    results: list[Any] = [a + 1, 1 + a, a - b, 5 - a, a * b, 2 * a, a / b, 1 / a, a // b]
    results += [7 // a, a % b, 7 % a, a**b, 2**b]
    results += [-a, +a, abs(a), np.float64(2) * a, a * np.int64(3), np.add(a, b), np.hypot(a, 4.0)]
    values = arithmetic.evaluate([5.0, 4.0])
    expected = [6, 6, 1, 0, 20, 10, 1.25, 0.2, 1, 1, 1, 2, 625, 16, -5, 5, 5, 10, 15, 9, math.hypot(5, 4)]
    assert [values[result.place] for result in results] == pytest.approx(expected)
