"""Whole models with sparse layers against the dense ones."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.flop_counter import FlopCounterMode

from jacsparse import jacobian
from jacsparse.sparse import SparseConv2d, SparseLinear, SparseModel, densify, sparsify

from ..helpers import close


def pruned(model: nn.Module, share: float = 0.3) -> nn.Module:
    """The model in float64, with drawn masks that leave a share of the weights."""
    model.double()
    for part in model.modules():
        if isinstance(part, (nn.Conv2d, nn.Linear)):
            with torch.no_grad():
                prune.custom_from_mask(part, "weight", torch.rand(part.weight.shape) < share)
    return model


class Residual(nn.Module):
    """Two branches that join, with batch normalisation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norms[0](self.first(x)))
        y = self.norms[1](self.second(y))
        y += x
        return torch.cat([y.relu(), torch.sigmoid(y) * y.relu()], dim=1)


class OwnReshape(nn.Module):
    """Leaves blocks in the middle, and goes on with what it made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        scaled = y * y.amax((2, 3), keepdim=True) if len(y) > 1 else y[:, :, 0:1]
        return self.linear(scaled.mean([2, 3]).view(y.size(0), -1)) - 2 * y.shape[1]


MODELS = {
    "pooled": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
        nn.Flatten(), nn.Linear(20, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Linear(6, 2),
    ),
    "residual": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, 2), Residual(4), nn.AvgPool2d(3), nn.Conv2d(8, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    ),
    "reshapes": OwnReshape,
}  # fmt: skip
SIZES = {"pooled": (8, 8), "residual": (7, 7), "reshapes": (5, 4)}


@pytest.mark.parametrize(
    ("name", "batch", "training"),
    [
        ("pooled", 1, False),
        ("pooled", 3, True),
        ("pooled", 16, True),
        ("residual", 1, True),
        ("residual", 3, False),
        ("residual", 8, True),
        ("reshapes", 1, False),
        ("reshapes", 3, True),
    ],
)
def test_model(name: str, batch: int, training: bool) -> None:
    model = pruned(MODELS[name]()).train(training)
    for part in model.modules():
        if isinstance(part, (nn.BatchNorm1d, nn.BatchNorm2d)):
            part.running_mean.normal_()
            part.running_var.uniform_(0.5, 2)
    x = torch.randn(batch, 3, *SIZES[name], dtype=torch.float64)
    sparse = sparsify(model, x, measure=False)
    assert all(layer.is_sparse for layer in sparse.report().layers) and sparse.training is training
    before = copy.deepcopy(sparse.state_dict())
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    expected, y = model(inputs[0]), sparse(inputs[1])
    close(y, expected, 1e-12)
    for output in (expected, y):
        (output * torch.arange(1, output.numel() + 1).view(output.shape)).sum().backward()
    close(inputs[1].grad, inputs[0].grad, 1e-12)
    dense = densify(sparse)
    for path, part in sparse.model.named_modules():
        if isinstance(part, (SparseConv2d, SparseLinear)):
            gradient = model.get_submodule(path).weight_orig.grad * part.mask
            actual = torch.zeros_like(gradient).flatten()
            actual[part._structure.places] = part.values.grad
            close(actual.view(gradient.shape), gradient, 1e-12)
    for other, tensor in dense.state_dict().items():
        if "running" in other:
            close(tensor, model.state_dict()[other], 1e-12)
    with torch.no_grad():
        close(sparse(x).detach(), model(x), 1e-12)
        model.load_state_dict(before)
        sparse.load_state_dict(model.state_dict())
        close(sparse(x), model(x), 1e-12)


@pytest.mark.parametrize(("batch", "window"), [(1, (2, 2)), (3, (3, 2)), (16, (2, 4)), (21, (2, 2))])
def test_weights_of_a_first_layer_that_is_pooled(batch: int, window: tuple[int, int]) -> None:
    dense = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1, bias=window != (3, 2)), nn.ReLU(), nn.MaxPool2d(window))
    model, x = pruned(dense).double(), torch.randn(batch, 3, 12, 8, dtype=torch.float64)
    sparse = sparsify(model, x, measure=False)
    weights = torch.randn(model(x).shape, dtype=torch.float64)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 8):
            torch.set_num_threads(threads)
            results.append(torch.autograd.grad((sparse(x) * weights).sum(), list(sparse.parameters())))
    finally:
        torch.set_num_threads(before)
    layer = model[0]
    leaves = [each for each in (layer.weight_orig, layer.bias) if each is not None]
    expected, *of_bias = torch.autograd.grad((model(x) * weights).sum(), leaves)
    for gradients in results:
        assert all(map(torch.equal, gradients, results[0]))
        close(gradients[0], expected.flatten()[sparse.model[0]._structure.places], 1e-12)
        for actual, reference in zip(gradients[1:], of_bias, strict=True):
            close(actual, reference, 1e-12)


def test_measured_choice_and_report() -> None:
    model = nn.Sequential(nn.Conv2d(16, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 2, 1))
    prune.l1_unstructured(model[1], "weight", 0.99)
    x = torch.randn(8, 16, 12, 12)
    sparse = sparsify(model, x)
    first, second, third = sparse.report().layers
    assert first.reason == third.reason == "nothing is pruned" and third.dense is None
    assert second.left == 369 and second.dense.fastest > 0 and second.sparse.fastest > 0
    text = str(sparse.report())
    assert "369 of 36864" in text and "whole model" in text and "forward and backward" in text
    with torch.no_grad():
        close(sparse(x), model(x), 1e-5)


def test_a_report_has_the_weights_that_are_left_now() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    sparse = sparsify(pruned(model), torch.randn(2, 3, 4, 4, dtype=torch.float64), measure=False)
    sparse.model[0].set_mask(torch.ones(4, 3, 3, 3))
    first, second = sparse.report().layers
    assert (first.left, first.total) == (108, 108) and second.left == sparse.model[3].values.numel() < second.total
    assert "108 of 108" in str(sparse.report())


def test_what_stays_dense() -> None:
    class Another(nn.Linear):
        pass

    tied = nn.Linear(4, 4)
    tied.weight = nn.Parameter(torch.eye(4))
    other = nn.Linear(4, 4)
    other.weight = tied.weight
    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(lambda *_: None)
    model = nn.Sequential(tied, other, hooked, Another(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in (hooked, *model[3:]):
        prune.l1_unstructured(layer, "weight", 0.5)
    prune.l1_unstructured(model[5], "bias", 0.5)
    sparse = sparsify(model, torch.ones(2, 4), measure=False)
    reasons = [layer.reason for layer in sparse.report().layers]
    assert reasons[0] == reasons[1] == "another layer has the same weight or bias"
    assert "hooks" in reasons[2] and "Another" in reasons[3] and sparse.report().layers[4].is_sparse
    assert "bias is pruned" in reasons[5]
    close(sparse(torch.ones(2, 4)), model(torch.ones(2, 4)), 1e-5)


def test_pruned_weights_that_have_no_sparse_layer() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.lstm, self.conv = nn.GRU(4, 4), nn.LSTM(4, 4), nn.ConvTranspose1d(4, 4, 3)
            self.embedding = nn.Embedding(20, 4, padding_idx=0)
            self.token = nn.Parameter(torch.zeros(1, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.lstm(self.gru(x + self.token)[0])[0]
            return self.conv(x.transpose(1, 2))

    model = Model()
    prune.l1_unstructured(model.gru, "weight_hh_l0", 0.5)
    with torch.no_grad():
        model.lstm.weight_ih_l0[:, :2] = 0
        model.conv.weight[0] = 0
    report = sparsify(model, torch.randn(5, 2, 4), measure=False).report()
    assert [(each.path, each.left, each.total, each.reason) for each in report.layers] == [
        ("gru", 72, 96, "GRU has no sparse layer"),
        ("lstm", 96, 128, "LSTM has no sparse layer"),
        ("conv", 36, 48, "ConvTranspose1d has no sparse layer"),
    ]
    assert "dense: GRU has no sparse layer" in str(report)


@pytest.mark.parametrize("batch", [1, 3])
def test_sequences_in_blocks(batch: int) -> None:
    model = nn.Sequential(
        nn.Conv1d(3, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(4, 4, 3, 2), nn.GELU(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 2),
    ).double()  # fmt: skip
    for place in (0, 4, 8):
        with torch.no_grad():
            prune.custom_from_mask(model[place], "weight", torch.rand(model[place].weight.shape) < 0.5)
    x = torch.randn(batch, 3, 20, dtype=torch.float64)
    sparse, results = sparsify(model, x), []
    assert [each.kind for each in sparse.report().layers] == ["Conv1d", "Conv1d", "Linear"]
    assert all(each.dense is not None for each in sparse.report().layers)
    sparse = sparsify(model, x, measure=False)
    for each in (sparse, model):
        at = x.clone().requires_grad_()
        y = each(at)
        y.square().sum().backward()
        results.append((y, at.grad))
    for ours, expected in zip(*results, strict=True):
        close(ours, expected, 1e-12)
    close(densify(sparse.eval())(x), model.eval()(x), 1e-12)


@pytest.mark.parametrize("batch", [1, 3, 37])
def test_flop_counter(batch: int) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(2), nn.Linear(4, 5), nn.Linear(5, 2),
    )  # fmt: skip
    x = torch.randn(batch, 3, 6, 6, dtype=torch.float64)
    sparse = sparsify(pruned(model), x, measure=False)
    left = [each.left for each in sparse.report().layers]
    forward = [2 * batch * count * positions for count, positions in zip(left, (36, 16, 4, 4), strict=True)]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        sparse(x)
    assert counter.get_total_flops() == sum(forward)
    with FlopCounterMode(display=False) as counter:
        sparse(x).sum().backward()
    # The input has no gradient.
    assert counter.get_total_flops() == 3 * sum(forward) - forward[0]
    counts = counter.get_flop_counts()
    assert sum(counts["SparseModel.model.0"].values()) == 2 * forward[0]
    y, expected = sparse(x), model(x)
    with FlopCounterMode(display=False):
        close(sparse(x), y, 1e-15)
    close(y, expected, 1e-12)


def test_a_layer_that_runs_twice() -> None:
    layer = nn.Linear(4, 4)
    prune.l1_unstructured(layer, "weight", 0.5)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    sparse = sparsify(model, torch.ones(2, 4), measure=False)
    assert sparse.model[0] is sparse.model[2]
    close(sparse(torch.ones(2, 4)), model(torch.ones(2, 4)), 1e-5)


def test_outputs_of_any_form() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: torch.Tensor) -> tuple[OrderedDict[str, torch.Tensor], torch.Tensor]:
            y = self.conv(x)
            return OrderedDict(y=y, positive=[y.relu()]), y.sum()

    model = pruned(Model())
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    named, total = sparsify(model, x, measure=False)(x)
    expected, expected_total = model(x)
    assert type(named) is OrderedDict
    close(named["y"], expected["y"], 1e-12)
    close(named["positive"][0], expected["positive"][0], 1e-12)
    close(total, expected_total, 1e-12)


@pytest.mark.parametrize("batch", [1, 5])
def test_pooling_of_equals_and_of_what_is_no_number(batch: int) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.ReLU(), nn.MaxPool2d(2), nn.MaxPool2d(3, 1, 1)).double()
    # The weights of the input with what is no number are left: a masked layer multiplies it by zeros too.
    with torch.no_grad():
        prune.custom_from_mask(model[0], "weight", torch.tensor([[1, 1], [1, 0], [1, 1]])[:, :, None, None])
    x = torch.randint(-1, 2, (batch, 2, 8, 8), dtype=torch.float64)
    x[0, 0, 2, 3] = float("nan")
    sparse = sparsify(model, x, measure=False)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [model(inputs[0]), sparse(inputs[1])]
    assert torch.equal(outputs[0].isnan(), outputs[1].isnan())
    for output in outputs:
        output.nan_to_num().sum().backward()
    close(inputs[1].grad.nan_to_num(), inputs[0].grad.nan_to_num(), 1e-12)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize(
    ("pool", "size"),
    [
        (nn.MaxPool2d(1), (4, 4)),
        (nn.MaxPool2d(2), (6, 4)),
        (nn.MaxPool2d(2, 3), (7, 9)),
        (nn.MaxPool2d(3, 2, 1, 2), (9, 8)),
        (nn.MaxPool2d((5, 1), 1, (2, 0)), (3, 5)),
        (nn.MaxPool2d(5, 1, 2), (6, 11)),
        (nn.MaxPool2d(6, 1, 3), (1, 1)),
        (nn.MaxPool2d((26, 1), 1, (13, 0)), (4, 3)),
        (nn.MaxPool2d(6, 3, 3, 3), (20, 11)),
    ],
)
def test_max_pooling(pool: nn.MaxPool2d, size: tuple[int, int], batch: int, relu: bool) -> None:
    torch.manual_seed(0)
    model = pruned(nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU() if relu else nn.Identity(), pool))
    x = torch.randn(batch, 2, *size, dtype=torch.float64)
    sparse = sparsify(model, x, measure=False)
    results = []
    for each in (model, sparse):
        inputs = x.clone().requires_grad_()
        y = each(inputs)
        torch.manual_seed(1)
        factors = torch.randn(y.shape, dtype=y.dtype, requires_grad=True)
        (gradient,) = torch.autograd.grad(y, inputs, factors, create_graph=True)
        (second,) = torch.autograd.grad(gradient, factors, torch.randn(x.shape, dtype=x.dtype))
        (without,) = torch.autograd.grad(each(inputs), inputs, factors.detach())
        with torch.no_grad():
            results.append((y, gradient, second, without, each(x)))
    for actual, expected in zip(results[1], results[0], strict=True):
        close(actual, expected, 1e-12)


def test_max_pooling_of_windows_without_a_position() -> None:
    model = pruned(nn.Sequential(nn.Conv2d(2, 3, 1), nn.MaxPool2d(2, 1, 1, 3)))
    x = torch.randn(5, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    y = sparsify(model, x, measure=False)(x)
    assert torch.equal(y, model(x)) and bool(y.isinf().all())
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert not gradient.any()


def test_within_another_module() -> None:
    model = pruned(MODELS["pooled"]()).eval()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    whole, other = nn.Sequential(sparsify(model, x, measure=False)), nn.Sequential(model)
    assert set(whole.state_dict()) == set(other.state_dict())
    whole.load_state_dict(other.state_dict())
    with torch.inference_mode():
        close(torch.compile(whole, backend="eager")(x), other(x), 1e-12)


@pytest.mark.parametrize("training", [False, True])
def test_gradients_enabled_within_inference_mode(training: bool) -> None:
    model = pruned(MODELS["residual"]()).train(training)
    x = torch.randn(3, 3, 7, 7, dtype=torch.float64)
    sparse = sparsify(model, x, measure=False)
    with torch.inference_mode(), torch.enable_grad():
        close(sparse(x), model(x), 1e-12)


@pytest.mark.parametrize("training", [False, True])
def test_hooks_within_get_tensors(training: bool) -> None:
    model = pruned(MODELS["residual"]()).train(training)
    x = torch.randn(3, 3, 7, 7, dtype=torch.float64)
    seen: list[torch.Tensor] = []

    def see(module: nn.Module, *values: object) -> None:
        tensors = [value for each in values for value in (each if isinstance(each, tuple) else (each,))]
        assert all(isinstance(tensor, torch.Tensor) for tensor in tensors)
        seen.extend(tensor.detach().clone() for tensor in tensors)

    hooked = model[1], model[1].norms[0], model[2]
    for part in hooked:
        part.register_forward_pre_hook(see)
        part.register_forward_hook(see)
        part.register_full_backward_hook(see)
    sparse = sparsify(model, x, measure=False)
    runs = []
    for each in (model, sparse, densify(sparse)):
        seen.clear()
        each(x.clone().requires_grad_()).square().sum().backward()
        runs.append(list(seen))
    for other in runs[1:]:
        for actual, expected in zip(other, runs[0], strict=True):
            close(actual, expected, 1e-11)
    assert sum(len(part._forward_hooks) for part in densify(sparse).modules()) == len(hooked)


def test_code_that_asks_for_tensors() -> None:
    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 2, 3, padding=1), nn.Conv2d(5, 2, 3, padding=1)

        def joined(self, x: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([x] if isinstance(x, torch.Tensor) else x, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.joined(self.first(x))
            return self.joined([y, self.second(self.joined([x, y]))])

    model = pruned(Dense())
    x = torch.randn(5, 3, 4, 4, dtype=torch.float64)
    close(sparsify(model, x, measure=False)(x), model(x), 1e-12)


def test_programs_and_transforms() -> None:
    model = pruned(MODELS["pooled"]()).eval()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    sparse, expected = sparsify(model, x, measure=False), model(x)
    for strict in (False, True):
        with pytest.warns(UserWarning, match=r"holds dense weights .*: serve the model by jacsparse.freeze"):
            program = torch.export.export(sparse, (x,), strict=strict)
        close(program.module()(x), expected, 1e-12)
    close(torch.func.vmap(lambda each: sparse(each[None])[0])(x), expected, 1e-12)
    v = torch.randn_like(x)
    close(torch.func.jvp(sparse, (x,), (v,))[1], torch.func.jvp(model, (x,), (v,))[1], 1e-12)
    J, reference = jacobian(sparse, x), jacobian(densify(sparse), x)
    assert J.pattern.nnz == reference.pattern.nnz
    close(J.vjp(expected), reference.vjp(expected), 1e-12)


def test_what_later_inputs_may_be() -> None:
    model = pruned(MODELS["pooled"]()).eval()
    sparse = sparsify(model, torch.ones(2, 3, 8, 8, dtype=torch.float64), measure=False)
    for batch in (0, 1, 19):
        x = torch.randn(batch, 3, 8, 8, dtype=torch.float64, requires_grad=True)
        y = sparse(x)
        close(y, model(x), 1e-12)
        y.sum().backward()
        assert x.grad.shape == x.shape
    for dtype in (torch.int64, torch.float16):
        with pytest.raises(TypeError, match=f"x is {dtype}; expected float32 or float64"):
            sparse(torch.ones(2, 3, 8, 8, dtype=dtype))


def test_what_is_pruned_counts_for_nothing() -> None:
    layer = nn.Linear(4, 3)
    prune.l1_unstructured(layer, "weight", 0.5)
    with torch.no_grad():
        layer.weight_orig[layer.weight_mask == 0] = float("nan")
    sparse = sparsify(layer, torch.ones(2, 4), measure=False)
    assert sparse(torch.ones(2, 4)).isfinite().all() and densify(sparse).weight.isfinite().all()


def test_errors() -> None:
    with pytest.raises(TypeError, match=r"module is a function; expected a torch.nn.Module"):
        sparsify(lambda x: x, torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"x is of shape \(0, 3\); expected a batch of at least one input"):
        sparsify(nn.Linear(3, 2), torch.ones(0, 3))
    with pytest.raises(TypeError, match="x is a list; expected a tensor: a batch of inputs"):
        sparsify(nn.Linear(3, 2), [torch.ones(1, 3)])
    with pytest.raises(TypeError, match="training is a str; expected a bool"):
        sparsify(nn.Linear(3, 2), torch.ones(1, 3), training="yes")
    with pytest.raises(TypeError, match="measure is a NoneType; expected a bool"):
        sparsify(nn.Linear(3, 2), torch.ones(1, 3), measure=None)
    with pytest.raises(TypeError, match=r"module is an int; expected a torch.nn.Module"):
        densify(1)
    layer = nn.Linear(3, 2)
    nn.init.constant_(layer.weight[0], float("nan"))
    model = nn.Sequential(prune.custom_from_mask(layer, "weight", torch.tensor([[1] * 3, [0] * 3])))
    with pytest.raises(ValueError, match="0: the weight holds 3 NaN where the mask leaves it"):
        sparsify(model, torch.ones(1, 3), measure=False)
    with pytest.raises(ValueError, match="weight is on meta; sparse layers run on the CPU alone"):
        sparsify(nn.Linear(3, 2, device="meta"), torch.ones(1, 3))


def test_saved_for_a_model_that_was_never_pruned() -> None:
    sparse = sparsify(pruned(MODELS["pooled"]()).eval(), torch.ones(2, 3, 8, 8, dtype=torch.float64), measure=False)
    plain = MODELS["pooled"]().double().eval()
    plain.load_state_dict(densify(sparse, masks=False).state_dict())
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    close(plain(x), sparse(x), 1e-12)
    again = sparsify(plain, x, measure=False)
    assert [each.left for each in again.report().layers] == [each.left for each in sparse.report().layers]


def test_one_layer() -> None:
    layer = nn.Linear(3, 2)
    prune.l1_unstructured(layer, "weight", 0.5)
    sparse = sparsify(layer, torch.ones(1, 3), measure=False)
    assert isinstance(sparse, SparseModel) and isinstance(sparse.model, SparseLinear)
    assert isinstance(densify(sparse), nn.Linear)
    close(sparse(torch.ones(1, 3)), layer(torch.ones(1, 3)), 1e-5)


class Copied(nn.Linear):
    """Counts its copies."""

    copies = 0

    def __deepcopy__(self, memo: dict[int, object]) -> Copied:
        Copied.copies += 1
        copied = self.__reduce_ex__(4)
        module = copied[0](*copied[1])
        module.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return module


@pytest.mark.parametrize(("share", "copies"), [(1.0, 2), (0.3, 2)])
def test_one_copy_decides(share: float, copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one is given away; the model that is given keeps its statistics, and its weights."""
    monkeypatch.setattr(Copied, "copies", 0)
    model = pruned(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), share)
    model.append(Copied(6, 4).double())
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(5, 6, dtype=torch.float64)
    sparse = sparsify(model, x, measure=False)
    assert Copied.copies == copies
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert all(torch.equal(value, sparse.state_dict()[name]) for name, value in before.items() if "running" in name)
    close(sparse(x), copy.deepcopy(model)(x), 1e-12)
