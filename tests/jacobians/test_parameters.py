"""Jacobians by the parameters of modules, compared with torch.func.jacrev."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev
from torch.utils import _pytree

import jacsparse

MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(3, 4), (2, 3)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, groups=2, dilation=2, padding=1), (3, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(0, 1), bias=False), (2, 2, 6, 5)),
    "conv2d, one sample": (lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 4, 3)),
    "conv3d": (lambda: nn.Conv3d(2, 2, 2, groups=2), (1, 2, 3, 3, 2)),
    "transposed": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), (2, 4, 5)),
    "transposed2d": (lambda: nn.ConvTranspose2d(2, 3, (1, 3), stride=(3, 1), padding=(1, 2), dilation=2), (2, 2, 3, 4)),
    "layer norm": (lambda: nn.LayerNorm([2, 5]), (3, 2, 5)),
    "layer norm without bias": (lambda: nn.LayerNorm(5, bias=False), (3, 5)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 3)),
    "batch norm": (lambda: nn.BatchNorm2d(3).eval(), (2, 3, 2, 2)),
    "batch norm of this batch": (lambda: nn.BatchNorm1d(3, track_running_stats=False), (4, 3)),
    "prelu": (lambda: nn.PReLU(3), (2, 3, 4)),
    "one prelu": (nn.PReLU, (2, 3)),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True), (2, 3, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("argnums", [0, (1, 0)])
def test_by_parameters(name: str, argnums: Any) -> None:
    build, shape = MODULES[name]
    module, x = build().double(), torch.randn(shape, dtype=torch.float64)
    parameters = {key: torch.randn_like(parameter) for key, parameter in module.named_parameters()}

    def f(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(module, parameters, (x,))  # type: ignore[no-any-return]

    parts = _pytree.tree_leaves(jacrev(f, argnums)(parameters, x))
    expected = torch.cat([part.reshape(f(parameters, x).numel(), -1) for part in parts], 1)
    prepared = jacsparse.prepare_jacobian(f, parameters, x, argnums=argnums, batched=False)
    for actual in (jacsparse.jacobian(f, parameters, x, argnums=argnums, batched=False), prepared(parameters, x)):
        assert (actual.todense() - expected).abs().max() <= 1e-12 * expected.abs().max()
