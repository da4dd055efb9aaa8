"""The networks that several experiments run on."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jacsparse.models import VGG11, load_data, prune_weights, train, vgg11_settings
from torch import nn

__all__ = ["Trained", "pruned_vgg11", "retrained_vgg11"]


class Trained(NamedTuple):
    """A trained network."""

    module: nn.Module
    #: Four test samples.
    inputs: torch.Tensor
    #: The share of all test samples that the network classifies rightly, by phase of the training.
    accuracy: dict[str, float]


def pruned_vgg11() -> nn.Module:
    """VGG-11's convolutional part, 21 stages, with random weights, the smallest 97 % of each layer pruned."""
    torch.manual_seed(0)
    features = VGG11().get_submodule("features")
    prune_weights(features, 0.97)
    return features.eval()


def retrained_vgg11(say: Callable[[str], None]) -> Trained:
    """The same part of a VGG-11 that is trained on scikit-learn's digits, pruned and retrained, as in the demo."""
    settings = vgg11_settings()
    data = load_data(settings.data)
    result = train(settings, data=data, progress=lambda now: say(f"{now.phase}, epoch {now.epoch} of {now.epochs}"))
    return Trained(result.model.get_submodule("features"), data.test_inputs[:4], result.accuracy)
