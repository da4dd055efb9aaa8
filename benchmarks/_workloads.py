"""The network that several experiments run on."""

from __future__ import annotations

import torch
from jacsparse.models import VGG11, prune_weights
from torch import nn

__all__ = ["pruned_vgg11"]


def pruned_vgg11() -> nn.Module:
    """VGG-11's convolutional part, 21 stages: random weights from one seed, the smallest 97 % of each layer pruned."""
    torch.manual_seed(0)
    features = VGG11().get_submodule("features")
    prune_weights(features, 0.97)
    return features.eval()
