"""Whole networks as users bring them: their Jacobians, gradients and FLOP."""

from __future__ import annotations

import pytest
import torch
from jacsparse.models import build
from torch import nn

import jacsparse
from tests.jacsparse.networks import NETWORKS

CASES = {**NETWORKS, "resnet56": (lambda: build("resnet56"), (3, 32, 32))}


def made(name: str) -> tuple[nn.Module, torch.Tensor]:
    """In eval mode, float64, with running statistics that are no constants; and two samples."""
    build_it, shape = CASES[name]
    model = build_it().eval().double()
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("running_var"):
            buffer.uniform_(0.5, 2)
        elif buffer_name.endswith("running_mean"):
            buffer.normal_(0, 0.1)
    return model, torch.randn(2, *shape, dtype=torch.float64)


@pytest.mark.parametrize("name", CASES)
def test_network(name: str) -> None:
    model, x = made(name)
    verified = jacsparse.verify(model, x[:1])
    assert not verified.failed and max(check.difference for check in verified.checks) < 1e-12
    check_scan(model, x)


def check_scan(model: nn.Module, x: torch.Tensor) -> None:
    """Output and all gradients of nn.Scan, which chooses its schedule, are the module's own."""
    given = [x.clone().requires_grad_() for _ in range(2)]
    y = model(given[0])
    gradient = torch.randn_like(y)
    y.backward(gradient)
    expected = {key: p.grad for key, p in model.named_parameters()}
    model.zero_grad()
    scan = jacsparse.nn.Scan(model)
    ours = scan(given[1])
    ours.backward(gradient)
    assert torch.allclose(ours, y, rtol=1e-12, atol=0)
    for key, p in model.named_parameters():
        assert torch.allclose(p.grad, expected[key], rtol=1e-9, atol=1e-12 * expected[key].abs().max().item()), key
    assert torch.allclose(given[1].grad, given[0].grad, rtol=1e-9, atol=1e-12 * given[0].grad.abs().max().item())
