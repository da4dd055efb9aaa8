"""Every operator's pattern and values against autograd, in float64, on drawn configurations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from jacsparse.patterns import Convolution, Pattern, Pooling
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune

import jacsparse
from tests.helpers import autograd_jacobian

sizes = st.integers(1, 7)
seeds = st.integers(0, 2**31 - 1)


def pair(low: int, high: int) -> st.SearchStrategy:
    """One number for both axes, or one for each."""
    numbers = st.integers(low, high)
    return numbers | st.tuples(numbers, numbers)


def fits(module: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether PyTorch takes such an input, and gives it a gradient."""
    try:
        module(torch.zeros((1, *shape), dtype=torch.float64))
    except RuntimeError:
        return False
    if not isinstance(module, nn.MaxPool2d):
        return True
    # A dilated window may lie wholly in the padding; PyTorch's backward then writes outside its tensor.
    spread = functional.max_pool2d(
        torch.zeros((1, *shape)) - 1,
        module.kernel_size,
        module.stride,
        module.padding,
        module.dilation,
        module.ceil_mode,
    )
    return bool(torch.isfinite(spread).all())


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    groups = draw(st.integers(1, 3))
    into, out = groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 3))
    padding = draw(pair(0, 3) | st.sampled_from(["same", "valid"]))
    stride = 1 if padding == "same" else draw(pair(1, 3))
    module = nn.Conv2d(
        into, out, draw(pair(1, 4)), stride, padding, draw(pair(1, 3)), groups, draw(st.booleans()), dtype=torch.float64
    )
    return module, (into, draw(sizes), draw(sizes))


@st.composite
def max_pools(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    kernel = draw(pair(1, 4))
    low = min(kernel) if isinstance(kernel, tuple) else kernel
    module = nn.MaxPool2d(
        kernel,
        draw(st.none() | pair(1, 4)),
        draw(st.integers(0, low // 2)),
        draw(pair(1, 3)),
        ceil_mode=draw(st.booleans()),
    )
    return module, (draw(st.integers(1, 3)), draw(sizes), draw(sizes))


@st.composite
def average_pools(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    kernel = draw(pair(1, 4))
    low = min(kernel) if isinstance(kernel, tuple) else kernel
    module = nn.AvgPool2d(
        kernel,
        draw(st.none() | pair(1, 4)),
        draw(st.integers(0, low // 2)),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.none() | st.integers(1, 5)),
    )
    return module, (draw(st.integers(1, 3)), draw(sizes), draw(sizes))


@st.composite
def adaptive_pools(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    size = draw(st.integers(1, 9) | st.tuples(st.none() | st.integers(1, 9), st.none() | st.integers(1, 9)))
    return nn.AdaptiveAvgPool2d(size), (draw(st.integers(1, 3)), draw(sizes), draw(sizes))


@st.composite
def linears(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    into = draw(st.integers(1, 9))
    return nn.Linear(into, draw(st.integers(1, 9)), draw(st.booleans()), dtype=torch.float64), (into,)


@st.composite
def batch_norms(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    channels, axes = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[axes]
    module = kind(channels, affine=draw(st.booleans()), dtype=torch.float64).eval()
    module.running_mean.normal_()
    module.running_var.uniform_(0.1, 3)
    if module.affine:
        nn.init.normal_(module.weight)
    return module, (channels, *(draw(st.integers(1, 4)) for _ in range(axes)))


shapes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)
amounts, positive, inplace = st.floats(-2, 2), st.floats(0.1, 2), st.booleans()


@st.composite
def prelus(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    shape = draw(shapes)
    return nn.PReLU(draw(st.sampled_from([1, shape[0]])), draw(amounts), dtype=torch.float64), shape


#: Elementwise, but for PReLU, which has a weight for each channel.
ACTIVATIONS = {
    nn.CELU: st.builds(nn.CELU, positive, inplace),
    nn.ELU: st.builds(nn.ELU, positive, inplace),
    nn.GELU: st.builds(nn.GELU, st.sampled_from(["none", "tanh"])),
    nn.Hardshrink: st.builds(nn.Hardshrink, positive),
    nn.Hardsigmoid: st.builds(nn.Hardsigmoid, inplace),
    nn.Hardswish: st.builds(nn.Hardswish, inplace),
    nn.Hardtanh: st.builds(lambda low, width: nn.Hardtanh(low, low + width), amounts, positive),
    nn.LeakyReLU: st.builds(nn.LeakyReLU, positive, inplace),
    nn.LogSigmoid: st.builds(nn.LogSigmoid),
    nn.Mish: st.builds(nn.Mish, inplace),
    nn.ReLU6: st.builds(nn.ReLU6, inplace),
    nn.RReLU: st.builds(lambda low, width: nn.RReLU(low, low + width).eval(), positive, positive),
    nn.SELU: st.builds(nn.SELU, inplace),
    nn.Sigmoid: st.builds(nn.Sigmoid),
    nn.SiLU: st.builds(nn.SiLU, inplace),
    nn.Softplus: st.builds(nn.Softplus, positive, positive),
    nn.Softshrink: st.builds(nn.Softshrink, positive),
    nn.Softsign: st.builds(nn.Softsign),
    nn.Tanh: st.builds(nn.Tanh),
    nn.Tanhshrink: st.builds(nn.Tanhshrink),
    nn.Threshold: st.builds(nn.Threshold, amounts, amounts, inplace),
}

DROPOUTS = (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout)

OPERATORS = {
    **{kind.__name__: st.tuples(modules, shapes) for kind, modules in ACTIVATIONS.items()},
    "PReLU": prelus(),
    "conv2d": convolutions(),
    "max_pool2d": max_pools(),
    "avg_pool2d": average_pools(),
    "adaptive_avg_pool2d": adaptive_pools(),
    "linear": linears(),
    "batch_norm": batch_norms(),
    "relu": st.tuples(st.builds(nn.ReLU, st.booleans()), shapes),
    "flatten": st.tuples(st.just(nn.Flatten()), shapes),
    "identity": st.tuples(st.just(nn.Identity()), shapes),
    "unflatten": st.tuples(st.builds(lambda size: nn.Unflatten(1, (2, size)), st.integers(1, 4)), shapes).map(
        lambda case: (case[0], (2 * case[0].unflattened_size[1], *case[1][1:]))
    ),
    "dropout": st.tuples(st.sampled_from(DROPOUTS).map(lambda kind: kind().eval()), shapes),
}


def drawn_input(shape: tuple[int, ...], batch: int, seed: int) -> torch.Tensor:
    """Normal numbers, rounded for some seeds, so that ties and zeros occur."""
    x = torch.randn((batch, *shape), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x.round() if seed % 3 == 0 else x


def check_values(module: nn.Module, x: torch.Tensor) -> None:
    """All that is asked of an operator's Jacobian, and of its transpose, at each sample."""
    jacobian = jacsparse.jacobian(module, x)
    pattern = jacsparse.jacobian_pattern(module, x.shape[1:])
    assert jacobian.pattern == pattern
    records = jacsparse.chain(module, x.shape[1:]).run(x)
    transposed = records[0].transposed_jacobian() if records else jacobian.T
    inside = torch.from_numpy(pattern.to_scipy().toarray())
    for number, sample in enumerate(x):
        expected = autograd_jacobian(module, sample)
        found = jacobian.todense(number)
        assert not (expected[~inside] != 0).any(), "an entry is missing from the pattern"
        limit = 1e-12 * expected.abs().max() if expected.numel() else 0
        assert ((found - expected).abs() <= limit).all()
        assert torch.equal(transposed.todense(number), found.T)


@pytest.mark.parametrize("operator", OPERATORS)
@given(data=st.data())
def test_operator_equals_autograd(operator: str, data: st.DataObject) -> None:
    module, shape = data.draw(OPERATORS[operator])
    assume(fits(module, shape))
    check_values(module, drawn_input(shape, data.draw(st.sampled_from([1, 1, 3])), data.draw(seeds)))


@given(convolutions() | linears(), st.floats(0, 1), st.booleans(), seeds)
def test_pruned_weights_leave_no_entry(
    case: tuple[nn.Module, tuple[int, ...]], share: float, mask: bool, seed: int
) -> None:
    module, shape = case
    assume(fits(module, shape))
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(module.weight.shape, generator=generator) >= share
    if mask:
        prune.custom_from_mask(module, "weight", kept)
    else:
        with torch.no_grad():
            module.weight.mul_(kept)
    pattern = jacsparse.jacobian_pattern(module, shape)
    # All kept weights differ from zero: the pattern is exactly what autograd finds.
    expected = autograd_jacobian(module, drawn_input(shape, 1, 1)[0])
    assert torch.equal(torch.from_numpy(pattern.to_scipy().toarray()), expected != 0)
    assert pattern.nnz == int((expected != 0).sum())
    check_values(module, drawn_input(shape, 2, seed))
    unpruned = jacsparse.jacobian_pattern(module, shape, pruned=False)
    assert unpruned.nnz >= pattern.nnz and unpruned.to_scipy().multiply(pattern.to_scipy()).nnz == pattern.nnz


@given(convolutions() | average_pools().filter(lambda case: case[0].divisor_override is None) | adaptive_pools())
def test_pattern_of_linear_operators_is_tight(case: tuple[nn.Module, tuple[int, ...]]) -> None:
    module, shape = case
    assume(fits(module, shape))
    expected = autograd_jacobian(module, torch.zeros(shape, dtype=torch.float64)) != 0
    assert torch.equal(torch.from_numpy(jacsparse.jacobian_pattern(module, shape).to_scipy().toarray()), expected)


@given(max_pools())
def test_max_pooling_pattern_is_tight(case: tuple[nn.Module, tuple[int, ...]]) -> None:
    module, shape = case
    assume(fits(module, shape))
    size = int(torch.tensor(shape).prod())
    # One spike for each position: every window that holds it passes its gradient there.
    spikes = torch.eye(size, dtype=torch.float64).reshape(size, *shape)
    reached = torch.stack([autograd_jacobian(module, spike)[:, number] for number, spike in enumerate(spikes)], dim=1)
    assert torch.equal(torch.from_numpy(jacsparse.jacobian_pattern(module, shape).to_scipy().toarray()), reached != 0)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (nn.Dropout1d, (9, 3)),
        (nn.Dropout2d, (9, 3, 2)),
        (nn.Dropout3d, (9, 3, 2, 1)),
        (nn.AlphaDropout, (9, 3)),
        (nn.FeatureAlphaDropout, (9, 3)),
    ],
)
def test_active_dropout_of_other_kinds(kind: type[nn.Module], shape: tuple[int, ...]) -> None:
    (record,) = jacsparse.chain(kind(0.5), shape).run(torch.randn(3, *shape, dtype=torch.float64))
    (expected,) = torch.autograd.grad(record.output.sum(), record.input, retain_graph=True)
    found = record.transposed_jacobian().values
    assert torch.equal(found, expected.reshape(3, -1).T) and len(found.unique()) == 2


def test_active_dropout_has_the_jacobian_of_its_own_draw() -> None:
    module = nn.Dropout(0.5)
    (record,) = jacsparse.chain(module, (40,)).run(torch.zeros(3, 40, dtype=torch.float64))
    (expected,) = torch.autograd.grad(
        record.output, record.input, torch.ones(3, 40, dtype=torch.float64), retain_graph=True
    )
    assert torch.equal(record.transposed_jacobian().values, expected.T)
    assert {0.0, 2.0} == set(expected.flatten().tolist())


def test_relu_passes_a_nan_as_autograd_does() -> None:
    x = torch.tensor([[float("nan"), 1.0, -1.0, 0.0, -0.0, float("inf")]], dtype=torch.float64)
    assert torch.equal(jacsparse.jacobian(nn.ReLU(), x).todense(), autograd_jacobian(nn.ReLU(), x[0]))


@pytest.mark.parametrize("batch", [1, 2, 17])
def test_values_have_the_batch_innermost(batch: int) -> None:
    x = torch.randn(batch, 2, 5, 4)
    for module, shared in ((nn.Conv2d(2, 3, 2), True), (nn.ReLU(), False), (nn.MaxPool2d(2), False)):
        jacobian = jacsparse.jacobian(module, x)
        assert jacobian.values.shape == (jacobian.pattern.nnz, 1 if shared else batch)
        assert jacobian.values.is_contiguous() and jacobian.values.dtype == x.dtype


def test_max_pooling_with_a_window_in_the_padding_alone() -> None:
    module = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2, stride=1, padding=1, dilation=3))
    with pytest.raises(jacsparse.UnsupportedOperatorError, match=r"^1: a window .* lies wholly in the padding"):
        jacsparse.jacobian_pattern(module, (1, 2, 2))


def test_empty_batch() -> None:
    x = torch.zeros(0, 2, 4, 4)
    assert jacsparse.jacobian(nn.ReLU(), x).values.shape == (32, 0)
    assert jacsparse.jacobian(nn.MaxPool2d(2), x).values.shape == (32, 0)
    assert jacsparse.jacobian(nn.Conv2d(2, 2, 1), x).values.shape == (64, 1)


@given(convolutions() | max_pools())
def test_structure_knows_counts_and_digest_without_indices(case: tuple[nn.Module, tuple[int, ...]]) -> None:
    module, shape = case
    assume(fits(module, shape))
    pattern = jacsparse.jacobian_pattern(module, shape)
    assert isinstance(pattern.structure, (Convolution, Pooling))
    for structure, matrix in (
        (pattern.structure, pattern.to_scipy()),
        (pattern.T.structure, pattern.to_scipy().T.tocsr()),
    ):
        assert structure.nnz == matrix.nnz and structure.shape == matrix.shape
        assert structure.row_counts().tolist() == matrix.sum(axis=1, dtype=int).tolist()
        assert structure.column_counts().tolist() == matrix.sum(axis=0, dtype=int).tolist()
        indptr, indices = structure.csr()
        assert Pattern(structure.shape, indptr, indices) == Pattern.from_scipy(matrix)
    assert pattern.digest == jacsparse.jacobian_pattern(module, shape).digest != pattern.T.digest
