"""Calls while the default device is another one than the arguments': what the library makes is where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import jacsparse
from tests.helpers import assert_equal, dense, drawn

MATRIX = drawn(4, 4) + 4 * torch.eye(4, dtype=torch.float64)

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "elementwise": lambda x: torch.where(x > 0, x.sin(), x.exp())[:, 1:] * x[:, :-1],
    "solve": lambda x: torch.linalg.solve(MATRIX, x.T).T.tanh(),
    "softmax": lambda x: x.cumsum(1).softmax(1),
    "network": nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    ).double(),
}


@pytest.fixture
def elsewhere() -> Iterator[Callable[[], None]]:
    yield lambda: torch.set_default_device("meta")
    torch.set_default_device(None)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_jacobians(name: str, elsewhere: Callable[[], None]) -> None:
    f, x = FUNCTIONS[name], drawn(2, 4)
    expected, gradient = dense(f, x), drawn(*f(x).shape)
    leaf = x.clone().requires_grad_()
    (of_x,) = torch.autograd.grad(f(leaf), leaf, gradient)
    elsewhere()
    for _ in range(4):
        assert_equal(jacsparse.jacobian(f, x, batched=True), expected)
    for method in ("products", "compressed"):
        assert_equal(jacsparse.prepare_jacobian(f, x, method=method, batched=True)(x), expected)
    assert_equal(jacsparse.jacobian(f, leaf, batched=True, create_graph=True), expected)
    jacsparse.verify(f, x, batched=True)
    if isinstance(f, nn.Module):
        y = jacsparse.nn.Scan(f, schedule="blelloch")(leaf)
        (actual,) = torch.autograd.grad(y, leaf, gradient)
        assert (actual - of_x).abs().amax() <= 1e-12


def test_hessians(elsewhere: Callable[[], None]) -> None:
    f, x = lambda x: (x**3).sum() * x.sin().sum(), drawn(4)
    expected = torch.func.hessian(f)(x)[None]
    elsewhere()
    assert_equal(jacsparse.hessian(f, x), expected)
    assert_equal(jacsparse.prepare_hessian(f, x)(x), expected)
