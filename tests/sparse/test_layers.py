"""Sparse layers against masked dense ones."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

from jacsparse import sparsify
from jacsparse.nn import SparseConv1d, SparseConv2d, SparseLinear

from ..helpers import close

#: Kernel, stride, padding, dilation, groups, rows, columns, and a padding mode.
CONVOLUTIONS = [
    (3, 1, 1, 1, 1, 4, 4, "zeros"),
    ((3, 2), (2, 1), (1, 2), 1, 2, 7, 19, "zeros"),
    (3, 2, "valid", (1, 2), 3, 9, 8, "zeros"),
    ((2, 5), 1, "same", 1, 1, 3, 17, "zeros"),
    (1, (1, 3), 2, 1, 1, 5, 9, "zeros"),
    (3, 1, 1, 1, 1, 5, 5, "circular"),
]
#: Kernel, stride, padding, dilation, groups, length, and a padding mode.
SEQUENCES = [
    (3, 1, 1, 1, 1, 9, "zeros"),
    (4, 3, 2, 2, 2, 21, "zeros"),
    (2, 1, "same", 3, 1, 8, "zeros"),
    (1, 2, "valid", 1, 3, 40, "zeros"),
    (5, 1, 2, 1, 1, 6, "reflect"),
    (3, 2, 1, 1, 2, 7, "circular"),
]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}


def masked(layer: nn.Module, share: float, seed: int = 0) -> nn.Module:
    """A layer of which a drawn mask leaves a share of the weights."""
    with torch.no_grad():
        drawn = torch.rand(layer.weight.shape, generator=torch.Generator().manual_seed(seed))
        prune.custom_from_mask(layer, "weight", drawn < share)
    return layer


def convolution(case: tuple, dtype: torch.dtype, share: float) -> nn.Module:
    kernel, stride, padding, dilation, groups, _, _, mode = case
    layer = nn.Conv2d(3 * groups, 2 * groups, kernel, stride, padding, dilation, groups, padding_mode=mode, dtype=dtype)
    return masked(layer, share)


def sparse(layer: nn.Module) -> SparseConv2d | SparseLinear:
    classes = {nn.Conv1d: SparseConv1d, nn.Conv2d: SparseConv2d}
    return classes.get(type(layer), SparseLinear).from_dense(layer)


def agree(dense: nn.Module, layer: SparseConv2d | SparseLinear, x: torch.Tensor) -> None:
    """Assert that outputs and all gradients are alike."""
    tolerance = TOLERANCES[x.dtype]
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    expected, y = dense(inputs[0]), layer(inputs[1])
    close(y, expected, tolerance)
    gradient = torch.randn(expected.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1))
    x_expected, w_expected, *b_expected = torch.autograd.grad(
        expected, [inputs[0], dense.weight_orig, *([] if dense.bias is None else [dense.bias])], gradient
    )
    x_gradient, w_gradient, *b_gradient = torch.autograd.grad(
        y, [inputs[1], layer.values, *([] if layer.bias is None else [layer.bias])], gradient
    )
    for actual, wanted in zip([x_gradient, *b_gradient], [x_expected, *b_expected], strict=True):
        close(actual, wanted, tolerance)
    close(w_gradient, w_expected[layer.mask][order(layer)], tolerance)


def order(layer: SparseConv2d | SparseLinear) -> torch.Tensor:
    """By the place of a value in `values`, its place among the mask's entries in C order."""
    numbered = copy.deepcopy(layer)
    numbered.load_state_dict(
        numbered.state_dict()
        | {"weight_orig": torch.arange(layer.mask.numel(), dtype=torch.float64).view(layer.mask.shape)}
    )
    return numbered.values.detach().argsort().argsort()


@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.parametrize(("batch", "dtype"), [(1, torch.float64), (5, torch.float64)])
def test_convolution(case: tuple, batch: int, dtype: torch.dtype) -> None:
    dense = convolution(case, dtype, 0.3)
    agree(dense, sparse(dense), torch.randn(batch, dense.in_channels, *case[5:7], dtype=dtype))


@pytest.mark.parametrize("case", SEQUENCES)
@pytest.mark.parametrize(("batch", "dtype"), [(1, torch.float64), (5, torch.float64), (16, torch.float32)])
def test_convolution_of_sequences(case: tuple, batch: int, dtype: torch.dtype) -> None:
    kernel, stride, padding, dilation, groups, length, mode = case
    dense = masked(
        nn.Conv1d(3 * groups, 2 * groups, kernel, stride, padding, dilation, groups, padding_mode=mode, dtype=dtype),
        0.4,
    )
    layer, x = sparse(dense), torch.randn(batch, 3 * groups, length, dtype=dtype)
    agree(dense, layer, x)
    close(layer(x[0]), dense(x[0]), TOLERANCES[dtype])
    close(layer._by_operators(x), dense(x), TOLERANCES[dtype])
    assert layer(x[:0]).shape == dense(x[:0]).shape
    again = layer.to_dense()
    assert type(again) is nn.Conv1d and repr(again) == repr(dense)
    close(again(x), dense(x), TOLERANCES[dtype])
    assert set(layer.state_dict()) == set(dense.state_dict())


def test_sequences_that_do_not_fit() -> None:
    layer = SparseConv1d(3, 2, 3, mask=torch.ones(2, 3, 3))
    assert repr(layer) == "SparseConv1d(3, 2, kernel_size=(3,), stride=(1,), bias=True, 18 of 18 weights left)"
    with pytest.raises(ValueError, match=r"shape \(1, 4, 9\); expected \(batch, 3, length\)"):
        layer(torch.ones(1, 4, 9))
    with pytest.raises(ValueError, match="the kernel reaches over 3 columns"):
        layer(torch.ones(1, 3, 2))
    with pytest.raises(TypeError, match=r"expected a torch.nn.Conv1d"):
        SparseConv1d.from_dense(nn.Conv2d(3, 2, 3))


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (0,)])
def test_transposed_linear(shape: tuple[int, ...]) -> None:
    layer = masked(pytest.importorskip("transformers.pytorch_utils").Conv1D(30, 20).double(), 0.2)
    x = torch.randn(*shape, 20, dtype=torch.float64)
    agree(layer, sparse(layer), x)
    close(sparse(layer)._by_operators(x), layer(x), 1e-12)
    again, other = sparse(layer).to_dense(), sparse(masked(type(layer)(30, 20).double(), 0.6))
    close(again(x), layer(x), 1e-12)
    assert torch.equal(again.weight_mask, layer.weight_mask)
    other.load_state_dict(layer.state_dict())
    close(other(x), layer(x), 1e-12)


@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.parametrize("batch", [1, 5])
def test_gradients_that_are_asked_for_alone(case: tuple, batch: int) -> None:
    layer = sparse(convolution(case, torch.float64, 0.3))
    x = torch.randn(batch, layer.in_channels, *case[5:7], dtype=torch.float64, requires_grad=True)
    inputs, y = [x, *layer.parameters()], layer(x)
    gradient = torch.randn_like(y)
    together = torch.autograd.grad(y, inputs, gradient)
    for each, expected in zip(inputs, together, strict=True):
        for other in inputs:
            other.requires_grad_(other is each)
        close(torch.autograd.grad(layer(x), each, gradient)[0], expected, 1e-12)


_PAIRS = st.tuples(*[st.integers(1, 3)] * 2)


@st.composite
def _cases(draw: st.DrawFn) -> tuple[nn.Module, torch.Tensor]:
    """A masked convolution and its input, both dtypes, of any batch up to 70."""
    kernel, stride, dilation = draw(st.tuples(*[st.integers(1, 4)] * 2)), draw(_PAIRS), draw(_PAIRS)
    groups, channels, outputs = (draw(st.integers(1, most)) for most in (3, 3, 3))
    padding = tuple(draw(st.integers(0, reach * (size - 1) + 1)) for reach, size in zip(dilation, kernel, strict=True))
    sizes = [
        draw(st.integers(max(1, reach * (size - 1) + 1 - 2 * border), 21))
        for reach, size, border in zip(dilation, kernel, padding, strict=True)
    ]
    dtype = draw(st.sampled_from([torch.float64, torch.float32]))
    layer = nn.Conv2d(
        channels * groups, outputs * groups, kernel, stride, padding, dilation, groups, draw(st.booleans()), dtype=dtype
    )
    masked(layer, draw(st.sampled_from([0.05, 0.3, 0.9])), draw(st.integers(0, 99)))
    shape = draw(st.integers(1, 70)), channels * groups, *sizes
    x = np.random.default_rng(draw(st.integers(0, 99))).standard_normal(shape)
    return layer, torch.from_numpy(x).to(dtype)


@settings(max_examples=10)
@given(_cases())
def test_drawn(case: tuple[nn.Module, torch.Tensor]) -> None:
    dense, x = case
    agree(dense, sparse(dense), x)


@pytest.mark.full
@settings(max_examples=400)
@given(_cases())
def test_many_drawn(case: tuple[nn.Module, torch.Tensor]) -> None:
    dense, x = case
    agree(dense, sparse(dense), x)


@pytest.mark.parametrize("batch", [2, 3, 16, 31, 70])
@pytest.mark.parametrize("share", [0.0, 0.05, 1.0])
def test_batches_and_shares(batch: int, share: float) -> None:
    dense = convolution(CONVOLUTIONS[0], torch.float64, share)
    agree(dense, sparse(dense), torch.randn(batch, 3, 4, 4, dtype=torch.float64))


@pytest.mark.parametrize("batch", [1, 17])
def test_float32(batch: int) -> None:
    dense = convolution(CONVOLUTIONS[0], torch.float32, 0.3)
    agree(dense, sparse(dense), torch.randn(batch, 3, 4, 4))


@pytest.mark.parametrize("shape", [(), (1,), (7,), (70,), (3, 5)])
def test_linear(shape: tuple[int, ...]) -> None:
    dense = masked(nn.Linear(20, 30, bias=len(shape) != 1, dtype=torch.float64), 0.2)
    agree(dense, sparse(dense), torch.randn(*shape, 20, dtype=torch.float64))


def test_one_sample_without_a_batch() -> None:
    dense = convolution(CONVOLUTIONS[0], torch.float64, 0.3)
    x = torch.randn(3, 4, 4, dtype=torch.float64)
    close(sparse(dense)(x), dense(x), 1e-12)


def test_batch_of_none() -> None:
    dense = convolution(CONVOLUTIONS[0], torch.float64, 0.3)
    layer = sparse(dense)
    y = layer(torch.zeros(0, 3, 4, 4, dtype=torch.float64))
    y.sum().backward()
    assert y.shape == (0, 2, 4, 4) and not layer.values.grad.any()
    assert sparse(masked(nn.Linear(3, 2), 0.5))(torch.zeros(0, 3)).shape == (0, 2)


def test_second_derivatives() -> None:
    layer = sparse(convolution(CONVOLUTIONS[0], torch.float64, 0.3))
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, requires_grad=True)

    def output(x: torch.Tensor, values: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"values": values, "bias": bias}, x)

    assert torch.autograd.gradgradcheck(output, (x, layer.values, layer.bias))


def test_second_derivatives_from_one_number_for_all_weights() -> None:
    dense = convolution(CONVOLUTIONS[0], torch.float64, 0.3)
    layer, x = sparse(dense), torch.randn(2, 3, 4, 4, dtype=torch.float64, requires_grad=True)

    def derivative(of: nn.Module, weight: torch.Tensor) -> torch.Tensor:
        gradients = torch.autograd.grad(of(x).square().sum(), [weight, of.bias], create_graph=True)
        return torch.autograd.grad(sum(each.sum() for each in gradients), x)[0]

    close(derivative(layer, layer.values), derivative(dense, dense.weight_orig), 1e-12)


def test_same_bits_for_any_number_of_threads() -> None:
    layer = sparse(masked(nn.Conv2d(32, 64, 3, padding=1), 0.1))
    x = torch.randn(33, 32, 8, 8, requires_grad=True)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 8):
            torch.set_num_threads(threads)
            y = layer(x)
            results.append([y, *torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], other, strict=True))


def test_denormals_and_what_is_no_number() -> None:
    dense = convolution(CONVOLUTIONS[0], torch.float64, 0.5)
    x = torch.randn(4, 3, 4, 4, dtype=torch.float64) * 1e-310
    close(sparse(dense)(x) - dense.bias.view(-1, 1, 1), dense(x) - dense.bias.view(-1, 1, 1), 1e-12)
    dense = convolution(CONVOLUTIONS[0], torch.float64, 1.0)
    x = torch.randn(4, 3, 4, 4, dtype=torch.float64)
    x[1, 0, 2, 2] = float("nan")
    assert torch.equal(sparse(dense)(x).isnan(), dense(x).isnan())


def test_state_dict_both_ways() -> None:
    dense, other = (convolution(CONVOLUTIONS[1], torch.float64, share) for share in (0.3, 0.6))
    layer = sparse(other)
    assert set(layer.state_dict()) == set(dense.state_dict())
    layer.load_state_dict(dense.state_dict())
    x = torch.randn(3, 6, 7, 19, dtype=torch.float64)
    close(layer(x), dense(x), 1e-12)
    other.load_state_dict(layer.state_dict())
    close(other(x), dense(x), 1e-12)
    plain = nn.Conv2d(6, 4, (3, 2), (2, 1), (1, 2), groups=2, dtype=torch.float64)
    with torch.no_grad():
        plain.weight.mul_(layer.mask)
    layer.load_state_dict(plain.state_dict())
    close(layer(x), plain(x), 1e-12)


def test_to_dense_keeps_what_is_frozen() -> None:
    dense = convolution(CONVOLUTIONS[1], torch.float64, 0.3)
    dense.weight_orig.requires_grad_(False)
    layer = sparse(dense)
    assert not layer.values.requires_grad
    again = layer.to_dense()
    assert not again.weight_orig.requires_grad and torch.equal(again.weight, dense.weight.detach())
    x = torch.randn(3, 6, 7, 19, dtype=torch.float64)
    layer(x).sum().backward()
    assert layer.values.grad is None and layer.bias.grad is not None


def test_masks_change_with_their_momentum() -> None:
    layer = SparseLinear(4, 3, mask=torch.eye(3, 4))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.ones(5, 4)).sum().backward()
    optimizer.step()
    before = layer.weight.detach().clone()
    layer.set_mask(torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 1]]), optimizer)
    assert torch.equal(layer.weight.detach(), before * layer.mask)
    assert optimizer.state[layer.values]["momentum_buffer"].tolist() == [5, 0, 5, 0]
    layer(torch.ones(5, 4)).sum().backward()
    optimizer.step()
    assert layer.weight.count_nonzero() == 4


@pytest.mark.parametrize("name", ["weight", "values"])
def test_pytorch_does_not_prune_what_is_left(name: str) -> None:
    layer = SparseLinear(4, 3, mask=torch.eye(3, 4))
    with pytest.raises(TypeError, match="give set_mask a mask with fewer, or prune the dense model"):
        prune.l1_unstructured(layer, name, 0.5)
    assert [each for each, _ in layer.named_parameters()] == ["values", "bias"]
    assert layer(torch.ones(5, 4)).shape == (5, 3)


def test_copies() -> None:
    layer = sparse(convolution(CONVOLUTIONS[0], torch.float64, 0.3))
    x = torch.randn(3, 3, 4, 4, dtype=torch.float64)
    y = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), y)


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (torch.ones(2, 3, 3, 2), ValueError, r"shape \(2, 3, 3, 2\); expected the weight's, \(2, 3, 3, 3\)"),
        (torch.full((2, 3, 3, 3), float("nan")), ValueError, "holds nan; expected zeros and ones"),
        (torch.full((2, 3, 3, 3), 0.5), ValueError, "holds 0.5"),
        (None, TypeError, "the mask is a NoneType"),
    ],
)
def test_masks_that_are_none(mask: torch.Tensor | None, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SparseConv2d(3, 2, 3, mask=mask) if mask is not None else SparseLinear(3, 2, mask=torch.ones(2, 3)).set_mask(
            mask
        )


def test_inputs_that_do_not_fit() -> None:
    layer = SparseConv2d(3, 2, 3, mask=torch.ones(2, 3, 3, 3))
    with pytest.raises(TypeError, match=r"x is torch.int64; expected float32 or float64: convert it by .float"):
        layer(torch.ones(1, 3, 4, 4, dtype=torch.int64))
    with pytest.raises(TypeError, match="leave sparse layers out of autocast"):
        layer(torch.ones(1, 3, 4, 4, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match=r"x is torch.float64 and the layer's values are torch.float32"):
        layer(torch.ones(1, 3, 4, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"x is on meta; SparseConv2d runs on the CPU alone"):
        layer(torch.ones(1, 3, 4, 4, device="meta"))
    with pytest.raises(ValueError, match=r"shape \(1, 4, 4, 4\); expected \(batch, 3, rows, columns\)"):
        layer(torch.ones(1, 4, 4, 4))
    with pytest.raises(ValueError, match="the kernel reaches over 3 rows, and the input of 2 × 4 has 2"):
        layer(torch.ones(1, 3, 2, 4))
    with pytest.raises(ValueError, match=r"the bias is pruned too; make that permanent by torch.nn.utils.prune.remove"):
        SparseLinear.from_dense(prune.l1_unstructured(nn.Linear(3, 2), "bias", 0.5))
    with pytest.raises(TypeError, match="the mask is a list"):
        SparseLinear(3, 2, mask=[1, 0])
    with pytest.raises(ValueError, match="the weight holds 1 NaN"):
        dense = nn.Conv2d(3, 2, 3)
        nn.init.constant_(dense.weight[0, 0, 0], 1.0)
        with torch.no_grad():
            dense.weight[0, 0, 0, 0] = float("nan")
        SparseConv2d.from_dense(dense)


@pytest.mark.parametrize(
    ("size", "kernel"), [((7, 28), 7), ((5, 28), (1, 9)), ((1, 99), (1, 3)), ((3, 37), 3), ((2, 38), 3)]
)
@pytest.mark.parametrize("batch", [1, 3])
def test_what_tiles_share_does_not_depend_on_their_order(
    size: tuple[int, int], kernel: int | tuple[int, int], batch: int
) -> None:
    """Threads may compute them in any; each element is one tile's alone."""
    torch.manual_seed(0)
    dense, x = nn.Conv2d(8, 6, kernel, padding="same"), torch.randn(batch, 8, *size)
    prune.random_unstructured(dense, "weight", 0.7)
    layer = SparseConv2d.from_dense(dense)
    with torch.no_grad():
        results = [layer(x)]
        close(results[0], dense(x), 1e-5)
        (convolution,) = layer._convolutions.values()
        tiles, forward = convolution.forward._tiles, convolution.forward
        for order in (slice(None), slice(None, None, -1)):
            forward._tiles = tiles._replace(table=np.ascontiguousarray(tiles.table[order]))
            results.append(layer(x))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    if size[1] % 2 == 0 and size[0] % 2 == 0:
        model = nn.Sequential(dense, nn.ReLU(), nn.MaxPool2d(2)).eval()
        close(sparsify(model, x, measure=False)(x), model(x), 1e-5)
