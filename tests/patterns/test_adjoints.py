"""Backward passes as operators of their own."""

from __future__ import annotations

import torch

import jacsparse

aten = torch.ops.aten


def test_a_window_s_backward_pass_depends_on_the_gradient_alone() -> None:
    gradient = torch.randn(1, 2, 2, 2, dtype=torch.float64)

    def f(x: torch.Tensor) -> torch.Tensor:
        image = x.reshape(1, 2, 4, 4)
        return aten.avg_pool2d_backward(gradient, image, [2, 2], [2, 2], [0, 0], False, True, None) + image

    x = torch.randn(32, dtype=torch.float64)
    jacobian = jacsparse.jacobian(f, x)
    assert jacobian.pattern.nnz == 32
    assert torch.equal(jacobian.todense(), torch.eye(32, dtype=torch.float64))
