"""The kernels of values, run fiber by fiber on the CPU, against the CPU's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import jacsparse
from tests.cuda.harness import DEVICE, emulated
from tests.helpers import by_products

DTYPES = [torch.float32, torch.float64]
OPERATORS = {
    "convolution": (nn.Conv2d(2, 3, 3, padding=1), (2, 6, 5)),
    "grouped, strided": (nn.Conv2d(4, 4, 3, stride=2, groups=2), (4, 7, 7)),
    "one by one": (nn.Conv2d(3, 2, 1), (3, 2, 2)),
    "ReLU": (nn.ReLU(), (3, 4, 5)),
    "ReLU, one element": (nn.ReLU(), (1,)),
    "max-pooling": (nn.MaxPool2d(2), (2, 6, 6)),
    "max-pooling, overlapping": (nn.MaxPool2d(3, 1, 1), (2, 5, 5)),
    "average pooling": (nn.AvgPool2d(2), (2, 4, 4)),
    "linear": (nn.Linear(6, 4), (6,)),
    "batch normalisation": (nn.BatchNorm2d(3).eval(), (3, 4, 4)),
    "chain": (
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 5)),
        (2, 6, 6),
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [0, 1, 3, 33])
@pytest.mark.parametrize("name", OPERATORS)
def test_jacobians(name: str, batch: int, dtype: torch.dtype) -> None:
    module, shape = OPERATORS[name]
    module, x = module.to(dtype), torch.randn(batch, *shape, dtype=dtype)
    expected = jacsparse.jacobian(module, x)
    with emulated():
        way = by_products if batch else jacsparse.jacobian
        actual = way(copy.deepcopy(module).to(DEVICE), x.to(DEVICE))
        applied = actual.vjp(torch.ones(batch, actual.shape[0], dtype=dtype, device=DEVICE)).cpu()
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    assert actual.pattern == expected.pattern
    torch.testing.assert_close(actual.values.cpu(), expected.values, **tolerance)
    reference = expected.vjp(torch.ones(batch, expected.shape[0], dtype=dtype))
    torch.testing.assert_close(applied.reshape(reference.shape), reference, **tolerance)


@pytest.mark.parametrize("schedule", ["linear", "blelloch", "blelloch:1"])
@pytest.mark.parametrize("batch", [1, 3, 33])
def test_scans(batch: int, schedule: str) -> None:
    module, shape = OPERATORS["chain"]
    module, gradients = copy.deepcopy(module).double().to(DEVICE), []
    for runner in (jacsparse.nn.Scan(module, schedule=schedule), module):
        x = torch.randn(batch, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        x = x.to(DEVICE).requires_grad_()
        with emulated():
            gradients.append(torch.autograd.grad(runner(x).square().sum(), [x, *module.parameters()]))
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_a_nan_and_a_zero() -> None:
    x = torch.tensor([[0.0, -0.0, float("nan"), float("inf"), -1.0]])
    with emulated():
        assert by_products(nn.ReLU(), x.to(DEVICE)).values.flatten().tolist() == [0, 0, 1, 1, 0]
    assert jacsparse.jacobian(nn.ReLU(), x).values.flatten().tolist() == [0, 0, 1, 1, 0]
