"""The networks that several experiments run on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from jacsparse.models import VGG11, Dataset, default_settings, load_data, prune_weights, train
from torch import nn

from examples.demo import vgg11_settings
from examples.ways_back import Block


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


def whole_pruned_vgg11(share: float = 0.97) -> nn.Module:
    """VGG-11 with random weights, a share of each convolution's pruned, the smallest, and a dense classifier."""
    torch.manual_seed(0)
    model = VGG11(dropout=0.0)
    prune_weights(model.get_submodule("features"), share, rescale=True)
    return model


def equal_layers(depth: int, units: int, activation: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    """Linear layers of equal width, each followed by an activation; the weights are the same at each call."""
    torch.manual_seed(0)
    return nn.Sequential(*[part for _ in range(depth) for part in (nn.Linear(units, units), activation())])


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """A network in evaluation mode, with weights that are the same at each call."""
    torch.manual_seed(0)
    return build().eval()


def pruned_resnet18() -> nn.Module:
    """ResNet-18 for images of 32 × 32 with random weights, the smallest 95 % of each convolution pruned."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    channels = 64
    for width in (64, 128, 256, 512):
        layers += [Block(channels, width, 1 if width == 64 else 2), Block(width, width)]
        channels = width
    features = nn.Sequential(*layers)
    prune_weights(features, 0.95)
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def published_iterations(task: str, data: Dataset) -> int:
    """How many iterations the paper's training of a task takes on data."""
    settings = default_settings(task)
    return math.ceil(settings.epochs * len(data.train_labels) / settings.batch)


def retrained_vgg11(say: Callable[[str], None], data_name: str | None = None) -> Trained:
    """The same part of a VGG-11 that is trained, pruned and retrained.

    Without the name of other data it is trained on scikit-learn's digits, as in the demo; on those as in the thesis.
    """
    settings = vgg11_settings() if data_name is None else replace(default_settings("vgg11"), data=data_name)
    data = load_data(settings.data)
    result = train(settings, data=data, progress=lambda now: say(f"{now.phase}, epoch {now.epoch} of {now.epochs}"))
    return Trained(result.model.get_submodule("features"), data.test_inputs[:4], result.accuracy)
