"""Whole Jacobians: every order of products, full and sparse, and what a SparseJacobian can do."""

from __future__ import annotations

import torch
from jacsparse.models import build, prune_weights
from torch import nn

import jacsparse


def test_pruned_vgg_11_equals_autograd() -> None:
    model = build("vgg11").eval()
    prune_weights(model, 0.97)
    x = torch.randn(1, 3, 32, 32)
    actual = jacsparse.jacobian(model.features, x)
    assert actual.shape == (512, 3072)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        gradient = torch.randn(1, 512, generator=generator)
        leaf = x.clone().requires_grad_()
        (expected,) = torch.autograd.grad(model.features(leaf), leaf, gradient.reshape(1, 512, 1, 1))
        assert (actual.vjp(gradient) - expected.flatten(1)).abs().max() < 1e-5 * expected.abs().max()


def test_a_hook_on_the_input_is_not_the_models() -> None:
    module = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 2)
    )
    x = torch.randn(1, 1, 6, 6, requires_grad=True)
    # The first calls may go another way than later ones, which rounds otherwise.
    *_, expected = (jacsparse.jacobian(module, x).todense(0) for _ in range(3))
    x.register_hook(lambda gradient: 2 * gradient)
    assert torch.equal(jacsparse.jacobian(module, x).todense(0), expected)
