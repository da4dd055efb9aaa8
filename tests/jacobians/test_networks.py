"""Whole networks as users bring them: their Jacobians, gradients and FLOP."""

from __future__ import annotations

import pytest
import torch
from jacsparse.models import build
from torch import nn

import jacsparse
from jacsparse.stages import Stage
from tests.drawn_networks import NETWORKS

CASES = {**NETWORKS, "resnet56": (lambda: build("resnet56"), (3, 32, 32))}
#: Those whose Jacobians take long. Smaller ones here and in other tests have the same operators.
LARGE = dict.fromkeys(("densenet121", "mobilenet_v3_small", "squeezenet", "resnet56"), pytest.mark.full)


def model_and_input(name: str) -> tuple[nn.Module, torch.Tensor]:
    """In eval mode, float64, with running statistics that are no constants; and two samples."""
    build_it, shape = CASES[name]
    model = build_it().eval().double()
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("running_var"):
            buffer.uniform_(0.5, 2)
        elif buffer_name.endswith("running_mean"):
            buffer.normal_(0, 0.1)
    return model, torch.randn(2, *shape, dtype=torch.float64)


@pytest.mark.parametrize("name", [pytest.param(name, marks=LARGE.get(name, ())) for name in CASES])
def test_network(name: str) -> None:
    model, x = model_and_input(name)
    verified = jacsparse.verify(model, x[:1])
    assert not verified.failed and max(check.difference for check in verified.checks) < 1e-12
    check_scan(model, x)


@pytest.mark.parametrize("name", CASES)
def test_flop(name: str) -> None:
    model, x = model_and_input(name)
    report = jacsparse.count_flop(model, tuple(x.shape[1:]), schedule="auto")
    assert [step.kind for step in report.steps] == ["mv"] * len(report.steps)
    # A step meets what of the gradient before it may be other than zero.
    assert report.input_gradient is not None
    assert 0 < report.total <= sum(step.executed or 0 for step in report.steps)
    if name == "densenet121":
        return
    observed = jacsparse.count_flop(model, tuple(x.shape[1:]), schedule="linear", structure="observed", inputs=x[:1])
    assert 0 < observed.total <= report.total
    assert 0 < observed.baseline_total <= report.baseline_total


@pytest.mark.parametrize("name", ["resnet56", "encoder_layer"])
def test_going_linearly_makes_no_matrix(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At batch 16 those of ResNet-56's blocks would take 9.5 GB."""
    model, x = model_and_input(name)

    def refuse(self: Stage) -> None:
        raise AssertionError(f"{self} is asked for its matrix")

    monkeypatch.setattr(Stage, "pattern", property(refuse))
    check_scan(model, x)
    jacsparse.count_flop(model, tuple(x.shape[1:]), schedule="auto")


@pytest.mark.parametrize("schedule", ["blelloch:1", "blelloch", "balanced:4"])
@pytest.mark.parametrize("name", ["resnet8", "encoder_layer"])
def test_scan_by_products(name: str, schedule: str) -> None:
    if name == "resnet8":
        model, x = build("resnet8").eval().double(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    else:
        model, x = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True).eval().double(), torch.randn(3, 4, 8).double()
    check_scan(model, x, schedule)
    report = jacsparse.count_flop(model, tuple(x.shape[1:]), schedule=schedule)
    assert report.total > 0


def check_scan(model: nn.Module, x: torch.Tensor, schedule: str = "auto") -> None:
    """Output and all gradients of nn.Scan are the module's own."""
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    y = model(leaves[0])
    gradient = torch.randn_like(y)
    y.backward(gradient)
    expected = {key: p.grad for key, p in model.named_parameters()}
    model.zero_grad()
    scan = jacsparse.nn.Scan(model, schedule=schedule)
    ours = scan(leaves[1])
    ours.backward(gradient)
    assert torch.equal(ours, y)
    close(leaves[1].grad, leaves[0].grad)
    for key, p in model.named_parameters():
        assert (p.grad is None) == (expected[key] is None), key
        if p.grad is not None:
            close(p.grad, expected[key])


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    exact = expected.dtype == torch.float64
    largest = expected.abs().max().item() if expected.numel() else 0.0
    assert torch.allclose(actual, expected, rtol=1e-9 if exact else 1e-3, atol=(1e-12 if exact else 1e-4) * largest)
