"""Attention whose projections are sparse, against `torch.nn`'s with masks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune

from jacsparse.sparse import SparseLinear, densify, freeze, sparsify
from jacsparse.sparse.attention import UnpackedAttention

from ..helpers import close


def pruned(model: nn.Module, masks: bool = True) -> nn.Module:
    """The model in float64, with a third of the weights of its attentions and linear layers."""
    model.double()
    for part in model.modules():
        name = {nn.MultiheadAttention: "in_proj_weight"}.get(type(part), "weight")
        if isinstance(part, (nn.Linear, nn.MultiheadAttention)) and getattr(part, name) is not None:
            with torch.no_grad():
                prune.custom_from_mask(part, name, torch.rand(getattr(part, name).shape) < 0.3)
            if not masks:
                prune.remove(part, name)
    return model


def gradients_of(model: nn.Module, *inputs: torch.Tensor, **options: object) -> tuple[object, list[torch.Tensor]]:
    """The outputs, and the gradients of the inputs."""
    leaves = {id(each): each.clone().requires_grad_() for each in inputs}
    torch.manual_seed(3)
    outputs = model(*[leaves[id(each)] for each in inputs], **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    present = [each for each in outputs if each is not None]
    total = sum(
        (each * torch.linspace(-1, 1, each.numel(), dtype=each.dtype).view(each.shape)).sum() for each in present
    )
    return outputs, list(torch.autograd.grad(total, list(leaves.values())))


MASKS = {
    "none": lambda n, h, t, s: {},
    "excluded": lambda n, h, t, s: {"attn_mask": torch.rand(t, s) < 0.3, "key_padding_mask": torch.rand(n, s) < 0.3},
    "added": lambda n, h, t, s: {"attn_mask": torch.randn(n * h, t, s).double(), "average_attn_weights": False},
    "padded": lambda n, h, t, s: {"key_padding_mask": torch.randn(n, s).double()},
    "causal": lambda n, h, t, s: {"attn_mask": torch.ones(t, s).triu(1).bool(), "is_causal": True},
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    ("batch_first", "bias", "is_self"), [(True, True, True), (False, False, True), (False, True, False)]
)
def test_attention(name: str, need_weights: bool, batch_first: bool, bias: bool, is_self: bool) -> None:
    torch.manual_seed(0)
    attention = pruned(nn.MultiheadAttention(12, 3, 0.2, bias, batch_first=batch_first))
    other = UnpackedAttention(copy.deepcopy(attention))
    assert other.state_dict().keys() == attention.state_dict().keys()
    shape = (2, 5, 12) if batch_first else (5, 2, 12)
    query = torch.randn(shape, dtype=torch.float64)
    key = query if is_self else torch.randn(7, 2, 12, dtype=torch.float64)
    options = MASKS[name](2, 3, 5, 5 if is_self else 7)
    options["need_weights"] = need_weights
    for part in (other.in_proj, other.out_proj):
        layer = SparseLinear.from_dense(part)
        other._modules["in_proj" if part is other.in_proj else "out_proj"] = layer
    for training in (True, False):
        inputs = (query, key, key)
        expected, gradients = gradients_of(attention.train(training), *inputs, **options)
        outputs, ours = gradients_of(other.train(training), *inputs, **options)
        for actual, wanted in zip([*outputs, *ours], [*expected, *gradients], strict=True):
            assert (actual is None) == (wanted is None)
            if wanted is not None:
                # What is not reached by any key is no number in both.
                close(actual.nan_to_num(), wanted.nan_to_num(), 1e-12)
    with torch.no_grad():
        expected, actual = (each(*inputs, **options)[0].nan_to_num() for each in (attention, other))
        close(actual, expected, 1e-12)


def test_one_sequence_without_a_batch() -> None:
    attention = pruned(nn.MultiheadAttention(12, 3, batch_first=True))
    other, x = UnpackedAttention(copy.deepcopy(attention)), torch.randn(5, 12, dtype=torch.float64)
    options = {"key_padding_mask": torch.randn(5).double(), "attn_mask": torch.randn(3, 5, 5).double()}
    for actual, expected in zip(other(x, x, x, **options), attention(x, x, x, **options), strict=True):
        close(actual, expected, 1e-12)


def test_masks_that_do_not_fit() -> None:
    attention, x = UnpackedAttention(nn.MultiheadAttention(4, 2)), torch.randn(3, 1, 4)
    with pytest.raises(ValueError, match="is_causal is a hint about attn_mask, which is None"):
        attention(x, x, x, is_causal=True)
    with pytest.raises(TypeError, match=r"key_padding_mask is a Tensor of torch.int64; expected a tensor of bool"):
        attention(x, x, x, key_padding_mask=torch.ones(1, 3, dtype=torch.int64))


@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_encoder(masks: bool, training: bool) -> None:
    layer = nn.TransformerEncoderLayer(12, 2, 16, batch_first=True)
    model = pruned(nn.TransformerEncoder(layer, 2), masks).train(training)
    before, x = repr(model), torch.randn(3, 5, 12, dtype=torch.float64)
    sparse = sparsify(model, x, measure=False)
    assert [each.path for each in sparse.report().layers][:4] == [
        f"layers.0.{name}" for name in ("self_attn.in_proj", "self_attn.out_proj", "linear1", "linear2")
    ]
    assert all(each.is_sparse for each in sparse.report().layers) and repr(model) == before
    expected, gradients = gradients_of(model, x)
    outputs, ours = gradients_of(sparse, x)
    close(outputs[0], expected[0], 1e-12)
    close(ours[0], gradients[0], 1e-12)
    # In evaluation mode PyTorch's layers have one kernel for all of their parts, which multiplies by zeros.
    calls = []
    for each in sparse.modules():
        if isinstance(each, SparseLinear):
            each.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        torch.manual_seed(3)
        y = sparse(x)
        torch.manual_seed(3)
        close(y, model(x), 1e-12)
        assert len(calls) == 8
        dense = densify(sparse)
        torch.manual_seed(3)
        close(dense(x), y, 1e-12)
        assert repr(dense) == before and vars(dense)["use_nested_tensor"] == model.use_nested_tensor
        assert vars(dense.layers[0]).keys() == vars(model.layers[0]).keys()
    if masks:
        assert sparse.state_dict().keys() == model.state_dict().keys()
        model.load_state_dict(sparse.state_dict())
        sparse.load_state_dict(model.state_dict())
    if not training:
        close(freeze(sparse, x)(x), model(x), 1e-12)


def test_padding_in_an_encoder() -> None:
    layer = nn.TransformerEncoderLayer(12, 2, 16, batch_first=True)
    model = pruned(nn.TransformerEncoder(layer, 2), False).eval()
    x, padding = torch.randn(2, 5, 12, dtype=torch.float64), torch.tensor([[0, 0, 0, 1, 1], [0] * 5]).bool()
    sparse = sparsify(model, x, measure=False)
    with torch.no_grad():
        y, expected = (each(x, src_key_padding_mask=padding) for each in (sparse, model))
    close(y[~padding], expected[~padding], 1e-12)


def test_padding_of_the_models_own() -> None:
    class Padding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(12, 2, 16, batch_first=True)
            self.encoder, self.attention = nn.TransformerEncoder(layer, 2), nn.MultiheadAttention(12, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            padding = x[..., 0].abs() > 10
            y = self.encoder(x, src_key_padding_mask=padding)[~padding].unsqueeze(1)
            of = self.attention
            weights = (of.in_proj_weight, of.in_proj_bias, of.bias_k, of.bias_v, of.add_zero_attn)
            options = (0.0, of.out_proj.weight, of.out_proj.bias, False)
            return functional.multi_head_attention_forward(y, y, y, 12, 2, *weights, *options)[0]

    model, x = pruned(Padding(), False).eval(), torch.randn(2, 5, 12, dtype=torch.float64)
    x[0, 3:] = 20.0
    sparse = sparsify(model, x, measure=False)
    dense = [each for each in sparse.report().layers if not each.is_sparse]
    assert [each.path for each in dense] == ["attention.in_proj", "attention.out_proj"]
    with torch.no_grad():
        close(sparse(x), model(x), 1e-12)


class Decoder(nn.Module):
    """Attends to itself, and to what it remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(12, 2, 16, batch_first=True)
        self.register_buffer("memory", torch.randn(3, 7, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, self.memory)


def test_decoder() -> None:
    model, x = pruned(Decoder()).eval(), torch.randn(3, 5, 12, dtype=torch.float64)
    sparse = sparsify(model, x, measure=False)
    reasons = {each.path: each.reason for each in sparse.report().layers}
    assert reasons.pop("layer.multihead_attn.in_proj") == "it did not run on x, or not with one tensor alone"
    assert set(reasons.values()) == {"not measured"} and len(reasons) == 5
    close(sparse(x), model(x), 1e-12)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"add_zero_attn": True}, "adds keys of its own"), ({"kdim": 4, "vdim": 4}, "have another size")],
)
def test_attention_that_stays_dense(options: dict, reason: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(12, 3, batch_first=True, **options)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x[..., : self.attention.kdim]
            return self.attention(x, y, y)[0]

    model, x = Model().double(), torch.randn(2, 5, 12, dtype=torch.float64)
    prune.l1_unstructured(model.attention, "q_proj_weight" if "kdim" in options else "in_proj_weight", 0.5)
    prune.l1_unstructured(model.attention.out_proj, "weight", 0.5)
    sparse = sparsify(model, x, measure=False)
    first, second = sparse.report().layers
    assert first.path == "attention" and reason in first.reason and first.left < first.total
    assert second.reason == "its attention uses its weight itself, and stays dense"
    close(sparse(x), model(x), 1e-12)
