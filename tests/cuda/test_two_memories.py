"""Compiled Jacobians whose arguments are in another memory than what is prepared of them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks._problems import PROBLEMS
from jacsparse import prepare_hessian, prepare_jacobian
from tests.cuda.harness import ON_GPU
from tests.cuda.two_memories import NOTED, Tensor, two_memories
from tests.helpers import drawn

pytestmark = [
    pytest.mark.skipif(ON_GPU, reason="a GPU has a memory of its own"),
    pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="PyTorch 2.6 makes no such tensors"),
]
INDEX = torch.tensor([2, 0, 1])


def energy(u: torch.Tensor) -> torch.Tensor:
    return (u[1:] * u[:-1].exp()).sum()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(2, 3, 3), nn.Sigmoid(), nn.Conv1d(3, 2, 2)).double()


CASES: dict[str, tuple[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]]] = {
    "hessian": (prepare_hessian, energy, (drawn(9),), {"gradient": True, "value": True}),
    "colours of a hessian": (prepare_hessian, energy, (drawn(9),), {"method": "compressed"}),
    "arguments": (prepare_jacobian, lambda a, b, t: a * b[1:] * t, (drawn(4), drawn(5), 0.5), {"argnums": (0, 1)}),
    "index": (prepare_jacobian, lambda a, i: a[i] * a.exp(), (drawn(3), INDEX), {"value": True}),
    "products": (prepare_jacobian, lambda a: (a.reshape(3, 3) @ a.reshape(3, 3).T).sin(), (drawn(9),), {}),
    "softmax": (prepare_jacobian, lambda a: (a[:, 1:] - a[:, :-1]).softmax(1) * a[:, :1], (drawn(3, 5),),
                {"batched": True}),
    "dtypes": (prepare_jacobian, lambda a: a.float().sin().double() * a.roll(1), (drawn(9),), {}),
    "network": (prepare_jacobian, network(), (drawn(3, 2, 7),), {}),
    "colours of a network": (prepare_jacobian, network(), (drawn(3, 2, 7),), {"method": "compressed"}),
    **{
        name: (prepare_jacobian, problem.f, problem.args, problem.options)
        for name in ("gray_scott", "power_flow", "burgers", "bundle")
        for problem in [PROBLEMS[name](9, 1)]
    },
}  # fmt: skip


def moved(value: Any) -> Any:
    """The same in the device's memory: a tensor, a function that holds some, or a module."""
    if isinstance(value, torch.Tensor):
        return Tensor(value)
    if isinstance(value, functools.partial):
        return functools.partial(
            value.func, *value.args, **{name: moved(each) for name, each in value.keywords.items()}
        )
    if isinstance(value, nn.Module):
        value = copy.deepcopy(value)
        for part in value.modules():
            for name, weight in part._parameters.items():
                part._parameters[name] = Tensor(weight.detach()).requires_grad_()  # type: ignore[assignment, union-attr]
    return value


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_copied_and_nothing_waits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, f, args, options = CASES[name]
    expected = prepare(f, *args, **options, compile=True).values(*args)
    with two_memories(monkeypatch):
        prepared = prepare(moved(f), *map(moved, args), **options, compile=True)
        arguments = [*map(moved, args)]
        prepared(*arguments)
        NOTED.clear()
        prepared(*arguments)
        actual = prepared.values(*arguments)
    assert not NOTED
    assert isinstance(actual, Tensor) and prepared._first.evaluator.fused is not None
    # Machine code and g++'s code are not contracted alike.
    torch.testing.assert_close(actual.host, expected, rtol=1e-12, atol=1e-14)
