"""Recorded calls against the functions that made them, at other inputs in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from jacsparse.tracing import Value, calls_of, key_of
from tests.helpers import drawn

aten = torch.ops.aten


def written_after_use(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    first, second = x.sin(), x.sin()
    second.add_(y)
    return [first, second, x.sin()]


def written_parts(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    (first, _), (second, places) = x.sort(1), x.sort(1)
    second.mul_(y)
    return [first, second, places]


def written_views(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    z = torch.zeros_like(x)
    z[:, 1:].copy_(y[:, 1:])
    z.view(-1)[::2] += 1
    return [z * x, z.T, x.view(-1).view(3, 5)]


def fills(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    ones = torch.ones_like(x)
    return [
        x * ones,
        (ones + ones) * y.T.contiguous().T,
        torch.cat([ones, y]),
        torch.where(x > 0, torch.zeros_like(x), y),
    ]


def read_from_elsewhere(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    return [x + CONSTANT, (x + CONSTANT).exp() * y, CONSTANT]


CONSTANT = drawn(3, 5, seed=7)


@pytest.mark.parametrize("function", [written_after_use, written_parts, written_views, fills, read_from_elsewhere])
def test_calls_at_other_inputs(function: Callable[..., Sequence[torch.Tensor]]) -> None:
    calls = calls_of(function, [drawn(3, 5), drawn(3, 5, seed=1)])
    alike, rest = calls.apart(calls.inputs[:1])
    for seed in range(2, 5):
        x, y = drawn(3, 5, seed=seed), drawn(3, 5, seed=seed + 10)
        copies = x.clone(), y.clone()
        # What is apart is computed once, and serves several calls.
        of_y = alike(y)
        for results in (calls(x, y), rest(x, y, *of_y), rest(x, y, *of_y)):
            for actual, expected in zip(results, function(x, y), strict=True):
                torch.testing.assert_close(actual, expected, rtol=1e-14, atol=0)
        assert torch.equal(x, copies[0]) and torch.equal(y, copies[1])


def test_equal_calls_are_made_once_and_views_of_views_not() -> None:
    calls = calls_of(lambda x: [x.view(-1).view(5, 3).sin() * x.reshape(5, 3).sin(), x.detach().clone()], [drawn(3, 5)])
    assert [step.target for step in calls.steps] == [aten.view.default, aten.sin.default, aten.mul.Tensor]
    assert calls.outputs[1] is calls.inputs[0]


def test_known_results_are_inputs() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        values, places = x.sort(1)
        return [values.exp() + x.sin(), places]

    sort = key_of(aten.sort.default, (Value(0), 1), {})
    known = {sort: [Value(1), Value(2)], key_of(aten.sin.default, (Value(0),), {}): [Value(3)]}
    x = drawn(3, 5)
    calls = calls_of(function, [x], [Value(0)], known=known)
    assert [step.target for step in calls.steps] == [aten.exp.default, aten.add.Tensor]
    assert [each.source for each in calls.inputs] == [Value(number) for number in range(4)]
    values, places = x.sort(1)
    for actual, expected in zip(calls(x, values, places, x.sin()), function(x), strict=True):
        assert torch.equal(actual, expected)
