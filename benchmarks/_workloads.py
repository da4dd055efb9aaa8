"""The networks and data that experiments run on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune

__all__ = ["Digits", "digits", "lenet5", "pruned_vgg11"]

_VGG11 = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")


def pruned_vgg11(share: float = 0.97, seed: int = 0) -> nn.Sequential:
    """The convolutional part of VGG-11, 21 stages; in each layer the smallest weights, a share of them, are pruned."""
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


def lenet5(dtype: torch.dtype, seed: int = 0) -> nn.Sequential:
    """LeNet-5 for images of 3 × 32 × 32, with ReLU and max-pooling, as the thesis trains it."""
    torch.manual_seed(seed)
    layers = (
        nn.Conv2d(3, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )
    return nn.Sequential(*layers).to(dtype)


@dataclass(frozen=True)
class Digits:
    """Images ``(n, 3, 32, 32)`` between -1 and 1, and labels; every fifth is for testing."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def digits(dtype: torch.dtype) -> Digits:
    """scikit-learn's handwritten digits, 8 × 8, enlarged to CIFAR-10's size.

    Raises
    ------
    ImportError
        Where scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("scikit-learn is not installed: pip install scikit-learn") from error
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float64)[:, None] / 8 - 1
    images = functional.interpolate(images, size=(32, 32), mode="bilinear", align_corners=False)
    images, labels = images.expand(-1, 3, -1, -1).to(dtype).contiguous(), torch.tensor(data.target)
    test = torch.arange(len(labels)) % 5 == 4
    return Digits(images[~test], labels[~test], images[test], labels[test])
