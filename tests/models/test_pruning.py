"""Pruning: fractions, scopes, and masks that stay."""

from __future__ import annotations

import copy

import pytest
import torch
from jacsparse.models import LeNet5, prunable, prune_weights, pruned_fraction
from torch import nn
from torch.nn.utils import prune

import jacsparse


def weights(module: nn.Module) -> list[torch.Tensor]:
    return [part.weight.detach() for _, part in prunable(module)]


def zeros(weight: torch.Tensor) -> int:
    return int((weight == 0).sum())


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.5, 0.97])
def test_each_layer_as_pytorch_prunes_it(fraction: float) -> None:
    module, reference = LeNet5(), LeNet5()
    reference.load_state_dict(module.state_dict())
    prune_weights(module, fraction)
    for _, part in prunable(reference):
        prune.l1_unstructured(part, "weight", fraction)
    for actual, expected in zip(weights(module), weights(reference), strict=True):
        assert zeros(actual) == round(fraction * actual.numel())
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.97])
def test_globally_as_pytorch_prunes_it(fraction: float) -> None:
    module, reference = LeNet5(), LeNet5()
    reference.load_state_dict(module.state_dict())
    prune_weights(module, fraction, "global")
    prune.global_unstructured(
        [(part, "weight") for _, part in prunable(reference)], prune.L1Unstructured, amount=fraction
    )
    assert sum(map(zeros, weights(module))) == round(fraction * sum(weight.numel() for weight in weights(module)))
    for actual, expected in zip(weights(module), weights(reference), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_masks_stay_through_training(scope: str, optimizer: type[torch.optim.Optimizer]) -> None:
    module = LeNet5()
    prune_weights(module, 0.9, scope)
    before = [weight == 0 for weight in weights(module)]
    changing = optimizer(module.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        module(torch.randn(4, 3, 32, 32)).square().sum().backward()
        changing.step()
        changing.zero_grad()
    module(torch.randn(1, 3, 32, 32))
    for weight, mask in zip(weights(module), before, strict=True):
        assert torch.equal(weight == 0, mask)


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_pruning_again_gives_the_fraction_of_all_weights(scope: str) -> None:
    module = LeNet5()
    prune_weights(module, 0.5, scope)
    before, parameters = [weight == 0 for weight in weights(module)], list(module.parameters())
    prune_weights(module, 0.8, scope)
    assert pruned_fraction(module) == pytest.approx(0.8, abs=1e-4)
    for weight, mask in zip(weights(module), before, strict=True):
        assert not weight[mask].any()
    for after, parameter in zip(module.parameters(), parameters, strict=True):
        assert after is parameter


def test_pruning_twice_alike_changes_nothing() -> None:
    module = LeNet5()
    prune_weights(module, 0.7)
    before = [weight.clone() for weight in weights(module)]
    prune_weights(module, 0.7)
    for weight, expected in zip(weights(module), before, strict=True):
        assert torch.equal(weight, expected)


def test_pruned_weights_do_not_come_back() -> None:
    module = LeNet5()
    prune_weights(module, 0.9)
    with pytest.raises(ValueError, match=r"the fraction to prune is 0.5, but of features.0, 0.9 is pruned already"):
        prune_weights(module, 0.5)
    with pytest.raises(ValueError, match=r"but of the module, 0\.9"):
        prune_weights(module, 0.5, "global")
    assert pruned_fraction(module) == pytest.approx(0.9, abs=1e-3)


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_rescaling_keeps_each_layers_norm(scope: str) -> None:
    module = LeNet5()
    before = [weight.norm() for weight in weights(module)]
    prune_weights(module, 0.9, scope, rescale=True)
    for weight, norm in zip(weights(module), before, strict=True):
        torch.testing.assert_close(weight.norm(), norm)
    module(torch.randn(1, 3, 32, 32))
    for weight, norm in zip(weights(module), before, strict=True):
        torch.testing.assert_close(weight.norm(), norm)


def test_masks_that_others_made_are_kept() -> None:
    module = nn.Sequential(nn.Linear(10, 10))
    prune.random_unstructured(module[0], "weight", 0.3)
    before = module[0].weight == 0
    prune_weights(module, 0.6)
    assert zeros(module[0].weight) == 60
    assert not module[0].weight[before].any()


@pytest.mark.parametrize("fraction", [1.0, 1, -0.1, 97, float("nan"), float("inf"), "0.5", None, True])
def test_bad_fractions(fraction: float) -> None:
    module = LeNet5()
    with pytest.raises(ValueError, match=r"the fraction to prune is .*; expected a number in \[0, 1\)"):
        prune_weights(module, fraction)
    assert not prune.is_pruned(module)


def test_bad_scope_and_nothing_to_prune() -> None:
    with pytest.raises(ValueError, match="scope is 'channel'; expected one of global, layer"):
        prune_weights(LeNet5(), 0.5, "channel")
    with pytest.raises(ValueError, match="ReLU has no convolution and no linear layer"):
        prune_weights(nn.ReLU(), 0.5)


def test_masked_attention_trains() -> None:
    """Attention reads its output projection's weight, and never calls the layer whose hook sets it."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    prune_weights(model, 0.9)
    copied = copy.deepcopy(model)
    projection, optimizer = model.self_attn.out_proj, torch.optim.SGD(model.parameters(), lr=0.1)
    before = projection.weight.detach().clone()
    model(torch.randn(2, 3, 8)).square().sum().backward()
    assert projection.weight_orig.grad.any()
    optimizer.step()
    model(torch.randn(2, 3, 8))
    after = projection.weight.detach()
    assert not torch.equal(after, before) and torch.equal(after != 0, projection.weight_mask != 0)
    copied(torch.randn(2, 3, 8)).square().sum().backward()
    assert copied.self_attn.out_proj.weight_orig.grad.any()
    prune_weights(model, 0.95)
    assert len(model.self_attn._forward_pre_hooks) == 1


def test_pruning_leaves_the_dense_count_as_it_is() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
    dense = [jacsparse.count_flop(model, (3, 8)).backpropagation[0].weights]
    prune_weights(model, 0.9)
    dense.append(jacsparse.count_flop(model, (3, 8)).backpropagation[0].weights)
    assert dense[0] == dense[1] > 0
