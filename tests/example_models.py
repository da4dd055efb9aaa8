"""Networks of the tests, initialised so that no gradient vanishes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import prune


def kaiming(module: nn.Module) -> nn.Module:
    for part in module.modules():
        if isinstance(part, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(part.weight)
            nn.init.normal_(part.bias, std=0.1)
    return module


def vgg_features(share: float = 0.97) -> nn.Sequential:
    """The convolutional part of VGG-11, pruned; what is left is scaled up so that its variance is kept."""
    layers: list[nn.Module] = []
    channels = 3
    for size in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        if size:
            layers += [nn.Conv2d(channels, size, 3, padding=1), nn.ReLU(inplace=True)]
            channels = size
        else:
            layers.append(nn.MaxPool2d(2))
    module = kaiming(nn.Sequential(*layers))
    for part in module:
        if isinstance(part, nn.Conv2d):
            prune.l1_unstructured(part, "weight", share)
            with torch.no_grad():
                part.weight_orig.mul_(2)
    return module


def lenet() -> nn.Sequential:
    return kaiming(
        nn.Sequential(
            nn.Sequential(
                nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)
            ),
            nn.Flatten(),
            nn.Sequential(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
        )
    )


def small() -> nn.Sequential:
    """A little of everything: overlapping windows, average pooling, normalisation, dropout."""
    norm = nn.BatchNorm2d(4)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    return kaiming(
        nn.Sequential(
            nn.Conv2d(2, 4, 3, padding="same"),
            norm,
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
            nn.Dropout(0.3),
            nn.Conv2d(4, 3, 2, dilation=2),
            nn.AvgPool2d(2, 1),
            nn.Flatten(),
            nn.Linear(12, 6),
            nn.ReLU(),
            nn.Linear(6, 3),
        )
    ).eval()
