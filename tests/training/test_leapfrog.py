"""Leapfrogging against autograd, and its predicted times against the paper's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import jacsparse
from tests.example_models import lenet, small
from tests.helpers import close


def feed_forward(layers: int, features: int = 5) -> nn.Sequential:
    torch.manual_seed(layers)
    return nn.Sequential(
        *[part for _ in range(layers) for part in (nn.Linear(features, features), nn.Sigmoid())]
    ).double()


class Residual(nn.Module):
    def __init__(self, channels: int, inplace: bool) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.activation = nn.LeakyReLU(0.3, inplace=inplace)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(x + self.second(self.activation(self.first(x)).tanh()))


def pruned() -> nn.Module:
    module = feed_forward(6)
    for layer in module[::2]:
        prune.random_unstructured(layer, "weight", 0.6)
    return module


def frozen() -> nn.Module:
    module = feed_forward(6)
    for layer in (module[0], module[6]):
        layer.requires_grad_(False)
    module[4].bias.requires_grad_(False)
    return module


def twice() -> nn.Module:
    layer = nn.Linear(5, 5)
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(5, 5), layer, nn.Tanh(), layer)


def parametrised() -> nn.Module:
    return nn.Sequential(*[parametrizations.weight_norm(nn.Linear(5, 5)) for _ in range(3)])


class Gate(nn.Module):
    """An operator whose argument is a parameter's function, and one that overwrites its operand."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale.exp()).mul_(2).tanh_() + x


class Constant(nn.Module):
    """Its derivative is zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(1e3, 2e3)


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(6, 2, 7, 0.0, batch_first=True)


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions, ReLU, max-pooling": (lenet, (3, 32, 32)),
    "normalisation, in place, dilation": (small, (2, 9, 9)),
    "residual blocks": (lambda: nn.Sequential(*[Residual(3, False) for _ in range(4)]), (3, 5, 4)),
    "residual blocks in place": (lambda: nn.Sequential(*[Residual(2, True) for _ in range(3)]), (2, 3, 5)),
    "pruned": (pruned, (5,)),
    "frozen": (frozen, (5,)),
    "a layer used twice": (twice, (5,)),
    "parametrised": (parametrised, (5,)),
    "gates": (lambda: nn.Sequential(Gate(), nn.Linear(5, 5), nn.LayerNorm(5), Gate(), nn.PReLU(5)), (5,)),
    "attention": (lambda: nn.Sequential(*[encoder() for _ in range(3)]), (4, 6)),
    "a single layer": (lambda: nn.Linear(5, 2), (5,)),
    "no parameters": (lambda: nn.Sequential(nn.Tanh(), nn.Flatten()), (2, 3)),
    "no stages": (nn.Flatten, (2, 3)),
    "a vanishing gradient": (lambda: nn.Sequential(nn.Linear(5, 5), Constant(), nn.Linear(5, 2)), (5,)),
}  # fmt: skip


def gradients(module: nn.Module, backward: Callable[[], torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients of the input and of all parameters."""
    module.zero_grad()
    return [backward(), *(parameter.grad for parameter in module.parameters())]


def check(module: nn.Module, x: torch.Tensor, threads: int) -> None:
    """The gradients by leapfrogging are autograd's."""
    gradient = torch.randn_like(module(x).detach())

    def by_autograd() -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        module(leaf).backward(gradient)
        assert leaf.grad is not None
        return leaf.grad

    def leapfrogging() -> torch.Tensor:
        return jacsparse.leapfrog_backward(module, x, gradient, threads=threads)

    for ours, reference in zip(gradients(module, leapfrogging), gradients(module, by_autograd), strict=True):
        assert (ours is None) == (reference is None)
        if ours is not None and reference is not None:
            close(ours, reference, 1e-12)


@pytest.mark.parametrize("layers", range(1, 21))
def test_gradients_are_autograd_s(layers: int) -> None:
    for threads in range(1, 9):
        check(feed_forward(layers), torch.randn(3, 5, dtype=torch.float64), threads)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("name", MODULES)
def test_any_chain(name: str, threads: int) -> None:
    torch.manual_seed(0)
    build, shape = MODULES[name]
    module = build().double()
    for batch in (0, 1, 4):
        check(module, torch.randn(batch, *shape, dtype=torch.float64), threads)
