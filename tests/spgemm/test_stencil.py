"""Stencils against SciPy in float64: values and vectors of drawn pairs of convolutions with a diagonal between them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
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


@given(factors(), st.integers(1, 17), st.booleans())
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [1, 3, 16])
def test_threads_and_dtypes(dtype: torch.dtype, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    first, second = nn.Conv2d(4, 24, 3, padding=1), nn.Conv2d(24, 24, 3, padding=1)
    for layer in (first, second):
        prune.l1_unstructured(layer, "weight", 0.7)
    x = torch.randn(1, 4, 9, 11)
    a, b = jacsparse.jacobian(second, first(x).detach()), jacsparse.jacobian(first, x)
    stencil = Stencil(a.pattern, b.pattern)
    d, vectors = torch.randn(a.shape[1], batch, dtype=dtype), torch.randn(b.shape[1], batch, dtype=dtype)
    factors = a.values.to(dtype), d, b.values.to(dtype)
    assert stencil.fits(*factors)
    results = []
    try:
        for threads, past_caches in ((1, 2**24), (2, 2**24), (1, 0), (2, 0)):
            torch.set_num_threads(threads)
            monkeypatch.setattr("jacsparse.spgemm.stencil.PAST_CACHES", past_caches)
            grids = stencil.multiply(*factors)
            results.append((stencil.values(grids, batch), stencil.matvec(grids, vectors)))
    finally:
        torch.set_num_threads(1)
    (values, y), *others = results
    assert all(torch.equal(values, each) and torch.equal(y, product) for each, product in others)
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    for sample in range(batch):
        scaled = d[:, sample].double().numpy()[:, None] * b.to_scipy().toarray().astype(np.float64)
        expected = a.to_scipy().astype(np.float64) @ scaled
        ours = stencil.pattern.to_scipy(values[:, sample].double().numpy()).toarray()
        assert np.abs(ours - expected).max() <= bound * np.abs(expected).max()
        product = expected @ vectors[:, sample].double().numpy()
        assert np.abs(y[:, sample].double().numpy() - product).max() <= bound * np.abs(product).max()


def test_what_does_not_fit() -> None:
    a = jacsparse.jacobian(nn.Conv1d(1, 1, 3, padding=1), torch.zeros(1, 1, 6))
    stencil, d = Stencil(a.pattern, a.pattern), torch.ones(6, 2)
    assert stencil.fits(a.values, d, a.values) and stencil.fits(a.values, None, a.values)
    assert not stencil.fits(a.values, d * torch.inf, a.values) and not stencil.fits(a.values, d * torch.nan, a.values)
    assert not stencil.fits(a.values.repeat(1, 2), d, a.values)
    strided = jacsparse.jacobian_pattern(nn.Conv1d(1, 1, 2, stride=2), (1, 6))
    assert Stencil.of(strided, a.pattern) is None
    with pytest.raises(ValueError, match="a is no convolution without strides"):
        Stencil(strided, a.pattern)


def test_an_infinite_vector_meets_no_room() -> None:
    a = jacsparse.jacobian(nn.Conv1d(1, 1, 3, padding=1).double(), torch.zeros(1, 1, 6, dtype=torch.float64))
    stencil = Stencil(a.pattern, a.pattern)
    x = torch.zeros(6, 1, dtype=torch.float64)
    x[0] = torch.inf
    y = stencil.matvec(stencil.multiply(a.values, None, a.values), x)
    assert not torch.isfinite(y[:3]).any() and (y[3:] == 0).all()
