"""Prepared Jacobians whose rows share their entries."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from jacsparse import prepare_jacobian
from jacsparse.jacobians.products import GroupedProducts


def autoencoder(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3, 2, 1), nn.Tanh(), nn.Conv2d(4, 6, 3, 2, 1), nn.Tanh(),
        nn.ConvTranspose2d(6, 4, 2, 2), nn.Tanh(), nn.ConvTranspose2d(4, 1, 2, 2), nn.Sigmoid(),
    )  # fmt: skip
    return module.to(dtype)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("batch", [1, 3, 17])
def test_values_are_those_of_autograd(batch: int, compile: bool) -> None:
    module, x = autoencoder(torch.float64), torch.randn(batch, 1, 16, 16, dtype=torch.float64)
    prepared = prepare_jacobian(module, x, compile=compile, method="products")
    assert isinstance(prepared._first.evaluator, GroupedProducts)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.1)
    x = torch.randn_like(x)
    jacobian = prepared(x)
    for sample in range(batch):
        dense = torch.autograd.functional.jacobian(module, x[sample : sample + 1]).reshape(256, 256)
        torch.testing.assert_close(jacobian.todense(sample), dense)
