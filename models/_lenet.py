"""LeNet-5 for images of 32 × 32."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from ._checks import check_images

__all__ = ["LeNet5"]


class LeNet5(nn.Sequential):
    """LeNet-5 with ReLU and max-pooling: `features`, the convolutional part, `flatten` and `classifier`.

    Parameters
    ----------
    num_classes : int
        Outputs.
    in_channels : int
        Of the images, ``(batch, in_channels, 32, 32)``.

    Raises
    ------
    ValueError
        Where an argument does not fit.

    Notes
    -----
    LeCun et al. (1998), as the thesis trains it on CIFAR-10 (section 3.5). Weights are drawn as PyTorch does.

    Examples
    --------
    >>> import torch
    >>> LeNet5(num_classes=100)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 100])
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 3) -> None:
        options = check_images(num_classes, in_channels)
        super().__init__(
            OrderedDict(features=_features(in_channels), flatten=nn.Flatten(), classifier=_classifier(num_classes))
        )
        self.options = options


def _features(channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


def _classifier(num_classes: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, num_classes))
