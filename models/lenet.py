"""LeNet-5 for images of 32 × 32."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from .arguments import check_counts


class LeNet5(nn.Sequential):
    """LeNet-5 with ReLU and max-pooling: `features`, the convolutional part, `flatten` and `classifier`.

    Parameters
    ----------
    num_classes : int
        Number of outputs.
    in_channels : int
        Channels of the images, ``(batch, in_channels, 32, 32)``.

    Raises
    ------
    ValueError
        Where an argument is no integer of at least 1.

    Notes
    -----
    LeCun et al. (1998), as the thesis trains it on CIFAR-10 (section 3.5). Weights are drawn by PyTorch's defaults.

    Examples
    --------
    >>> import torch
    >>> LeNet5(num_classes=100)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 100])
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 3) -> None:
        options = check_counts(num_classes=num_classes, in_channels=in_channels)
        features = nn.Sequential(
            nn.Conv2d(in_channels, 6, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        classifier = nn.Sequential(
            nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, num_classes)
        )
        super().__init__(OrderedDict(features=features, flatten=nn.Flatten(), classifier=classifier))
        self.options = options
