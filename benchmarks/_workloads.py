"""The networks and data that experiments run on."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import prune

__all__ = ["pruned_vgg11"]

_VGG11 = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")


def pruned_vgg11(share: float = 0.97, seed: int = 0) -> nn.Sequential:
    """The convolutional part of VGG-11, 21 stages, of whose weights a share is pruned in each layer, the smallest first."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    channels = 3
    for width in _VGG11:
        if isinstance(width, str):
            layers.append(nn.MaxPool2d(2))
            continue
        convolution = nn.Conv2d(channels, width, 3, padding=1)
        prune.l1_unstructured(convolution, "weight", share)
        layers += [convolution, nn.ReLU()]
        channels = width
    return nn.Sequential(*layers).eval()
