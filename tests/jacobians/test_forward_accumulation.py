"""Loops of many small calls, by forward accumulation, against autograd's Jacobians in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch

from jacsparse import hessian, jacobian
from jacsparse.jacobians import forward_accumulation, unprepared
from jacsparse.jacobians.evaluator import Evaluator
from jacsparse.jacobians.forward_accumulation import ForwardAccumulation
from tests.helpers import drawn

Function = Callable[[torch.Tensor], torch.Tensor]
STEPS, WEIGHT = 40, drawn(2)


def running(x: torch.Tensor) -> torch.Tensor:
    states, s = [], x[0]
    for each in x[1:]:
        s = 0.9 * s + torch.sin(each)
        states.append(s)
    return torch.stack(states)


def diffused(x: torch.Tensor) -> torch.Tensor:
    for _ in range(STEPS):
        x = x + 0.01 * (torch.roll(x, 1) - 2 * x + torch.roll(x, -1) - x**3)
    return x


def written(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for i in range(1, len(x)):
        out[i] = x[i - 1] ** 2 + out[i - 1]
    return out


def apart(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for i in range(1, len(x)):
        out[i] = x[i - 1].exp()
    return out


def periods(x: torch.Tensor) -> torch.Tensor:
    n = len(x) // 2
    k, c, out = x[:n].abs() + 0.5, x[n:].abs() + 0.5, []
    for t in range(n):
        following = k[t + 1] if t < n - 1 else k[0] * 0 + 1
        out.append(1 / c[t] - 0.96 / c[(t + 1) % n] * (0.3 * following**-0.7 + 0.9))
        out.append(following - k[t] ** 0.3 - 0.9 * k[t] + c[t])
    return torch.stack(out)


def of_pairs(x: torch.Tensor) -> torch.Tensor:
    """Each step has operands of several shapes, numbers of its own, and a factor that no step shares."""
    y = x.reshape(2, -1)
    for step in range(STEPS):
        y = torch.where(y > 0.3, y * y[:, :1], y / (step + 2)) - torch.atan2(y, y.flip(0) + 3.0) * (step % 3)
        y = y.tanh()
    return y.T


def of_powers(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[i : i + 2].abs() ** (0.5 + i % 2) for i in range(len(x))])


def beside_constants(x: torch.Tensor) -> torch.Tensor:
    weights, x = torch.linspace(0.0, 2.0, STEPS, dtype=x.dtype), x[:5]
    return torch.stack([torch.lerp(x, x.square(), weight).mul(weight) for weight in weights])


def moved(x: torch.Tensor) -> torch.Tensor:
    """No arithmetic: elements, and zeros."""
    pieces = [torch.stack([x[i], x[-i], torch.zeros_like(x[0])]) for i in range(STEPS)]
    return torch.stack(pieces).flip(0)


LOOPS = [running, diffused, written, apart, periods, of_pairs, of_powers, beside_constants, moved]


def way_of(f: Function, x: torch.Tensor) -> Evaluator:
    """The way to the values that a first call takes."""
    unprepared.plan_of.cache_clear()
    with patch.object(unprepared, "evaluator_of", wraps=unprepared.evaluator_of) as chosen:
        jacobian(f, x)
    ((function,), _) = chosen.call_args
    (way,) = unprepared.plan_of(function.chain)._ways.values()
    return way


def expected(f: Function, x: torch.Tensor) -> torch.Tensor:
    return torch.func.jacrev(f)(x).reshape(-1, x.numel())


@pytest.mark.parametrize("f", LOOPS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_values(f: Function, dtype: torch.dtype) -> None:
    x = drawn(50)
    assert isinstance(way_of(f, x.to(dtype)), ForwardAccumulation)
    # The second call finds the way of the first one.
    for each in (x, drawn(50, seed=1)):
        values = jacobian(f, each.to(dtype)).todense()
        assert values.dtype == dtype
        of_double = expected(f, each.to(dtype).double())
        bound = 200 * STEPS * torch.finfo(dtype).eps * (1 + of_double.abs().max())
        assert (values - of_double).abs().max() <= bound


@pytest.mark.parametrize("f", LOOPS, ids=lambda f: f.__name__)
def test_patterns_are_those_of_products(f: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn(50)
    pattern = jacobian(f, x).pattern
    monkeypatch.setattr(forward_accumulation, "FEWEST", math.inf)
    assert not isinstance(way_of(f, x), ForwardAccumulation)
    assert jacobian(f, x).pattern == pattern


def test_steps_share_how_rules_see_their_calls() -> None:
    edges = list(way_of(diffused, drawn(50)).function.chain.edges)
    # Sums and differences have two operands, and those of one line are alike; two views are around all steps.
    assert len(edges) == 13 * STEPS + 2
    assert len({id(edge.call) for edge in edges}) == len({id(edge.pattern) for edge in edges}) == 9 + 2


def test_numbers_are_those_of_the_run() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        for factor in factors:
            x = (x * factor + torch.tensor(factor, dtype=x.dtype) * x.sin()) / (factor + 3)
        return x

    x = drawn(5)
    for seed in range(3):
        factors = drawn(STEPS, seed=seed).tolist()
        assert torch.allclose(jacobian(f, x).todense(), expected(f, x), rtol=1e-12, atol=0)
    assert isinstance(way_of(f, x), ForwardAccumulation)


def test_guaranteed_zeros_stay_zero_beside_infinite_derivatives() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        roots = [x[i].sqrt() + x[i + 1] for i in range(STEPS)]
        return torch.stack([roots[i] * roots[i + 1] for i in range(STEPS - 1)])

    x = torch.zeros(STEPS + 1, dtype=torch.float64)
    x[1::2] = 4
    J = jacobian(f, x)
    assert isinstance(way_of(f, x), ForwardAccumulation)
    roots, slopes = x.sqrt()[:-1] + x[1:], 0.5 / x.sqrt()
    diagonals = roots[1:] * slopes[:-2], roots[1:] + roots[:-1] * slopes[1:-1], roots[:-1]
    assert slopes.isinf().any()
    # Autograd has NaN there, of its zero gradients of other outputs.
    assert torch.equal(J.values.reshape(-1, 3), torch.stack(diagonals, 1))


def test_hessian() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        total = x[0] ** 2
        for i in range(1, len(x)):
            total = total + (x[i] - x[i - 1] ** 2) ** 2 + x[i].cos()
        return total

    x = drawn(30)
    H = hessian(f, x)
    assert torch.allclose(H.todense(), torch.autograd.functional.hessian(f, x), rtol=1e-12, atol=1e-12)
    assert H.pattern.nnz == 3 * len(x) - 2


@pytest.mark.parametrize(
    ("f", "size"),
    [
        # Few calls; calls that all differ; calls on many elements; and a matrix.
        (lambda x: (x[1:] * x[:-1]).sin(), 50),
        (lambda x: torch.cat([x[i:].sin().mul(x[i:]) for i in range(STEPS)]), 50),
        (lambda x: sum(x.sin() * number for number in range(100)), 1000),
        (lambda x: running(x.reshape(-1, 2) @ WEIGHT), 100),
    ],
)
def test_other_ways(f: Function, size: int) -> None:
    assert not isinstance(way_of(f, drawn(size)), ForwardAccumulation)
