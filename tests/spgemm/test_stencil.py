"""Stencils against SciPy in float64: values and vectors of drawn pairs of convolutions with a diagonal between them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from jacsparse.spgemm import Stencil
from torch import nn
from torch.nn.utils import prune

import jacsparse
from jacsparse import SparseJacobian, plan_product

CONVOLUTIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def convolution(draw: st.DrawFn, channels: int, axes: int) -> nn.Module:
    groups = draw(st.sampled_from([1, 1, channels]))
    kernel, padding, dilation = (
        tuple(draw(st.integers(low, high)) for _ in range(axes)) for low, high in ((1, 3), (0, 3), (1, 2))
    )
    out = groups * draw(st.integers(1, 3))
    layer = CONVOLUTIONS[axes](channels, out, kernel, 1, padding, dilation, groups, bias=False, dtype=torch.float64)
    if draw(st.booleans()):
        prune.l1_unstructured(layer, "weight", draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])))
    return layer  # type: ignore[no-any-return]


@st.composite
def factors(draw: st.DrawFn) -> tuple[SparseJacobian, SparseJacobian]:
    """Jacobians of two convolutions, one after the other, or both transposed."""
    torch.manual_seed(draw(st.integers(0, 99)))
    channels, axes = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    x = torch.randn(1, channels, *(draw(st.integers(3, 7)) for _ in range(axes)), dtype=torch.float64)
    first = convolution(draw, channels, axes)
    for axis, size in enumerate(x.shape[2:]):
        if size + 2 * first.padding[axis] <= first.dilation[axis] * (first.kernel_size[axis] - 1):
            first = CONVOLUTIONS[axes](channels, channels, 1, bias=False, dtype=torch.float64)
            break
    y = first(x).detach()
    second = CONVOLUTIONS[axes](y.shape[1], 2, draw(st.integers(1, 3)), padding=2, bias=False, dtype=torch.float64)
    left, right = jacsparse.jacobian(second, y), jacsparse.jacobian(first, x)
    return (right.T, left.T) if draw(st.booleans()) else (left, right)


@given(factors(), st.integers(1, 5), st.booleans())
def test_drawn_products(pair: tuple[SparseJacobian, SparseJacobian], batch: int, scaled: bool) -> None:
    a, b = pair
    stencil = Stencil(a.pattern, b.pattern)
    rng = np.random.default_rng(0)
    d = torch.from_numpy(rng.standard_normal((a.shape[1], batch if scaled else 1)))
    diagonal = d if scaled else torch.ones_like(d)
    grids = stencil.multiply(a.values, d if scaled else None, b.values)
    values = stencil.values(grids, d.shape[1])
    plan = plan_product(a.pattern, b.pattern, method="rowwise")
    assert stencil.flop == plan.flop and np.array_equal(stencil.pattern.indices, plan.pattern.indices)
    x = torch.from_numpy(rng.standard_normal((b.shape[1], d.shape[1])))
    y = stencil.matvec(grids, x)
    for sample in range(d.shape[1]):
        expected = a.to_scipy() @ (diagonal[:, sample].numpy()[:, None] * b.to_scipy().toarray())
        ours = plan.pattern.to_scipy(values[:, sample].numpy()).toarray()
        assert np.abs(ours - expected).max(initial=0) <= 1e-12 * max(1, np.abs(expected).max(initial=0))
        product = expected @ x[:, sample].numpy()
        assert np.abs(y[:, sample].numpy() - product).max(initial=0) <= 1e-12 * max(1, np.abs(product).max(initial=0))
