"""VGG-11 for images of 32 × 32."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from .arguments import check_counts, check_number

# Output channels of each convolution; None is a max-pooling.
_FEATURES = (64, None, 128, None, 256, 256, None, 512, 512, None, 512, 512, None)


class VGG11(nn.Sequential):
    """VGG-11 without batch normalisation: `features`, the convolutional part, `flatten` and `classifier`.

    Parameters
    ----------
    num_classes : int
        Number of outputs.
    in_channels : int
        Channels of the images, ``(batch, in_channels, 32, 32)``.
    dropout : float
        Share of the classifier's hidden units that each training step drops, in [0, 1).

    Raises
    ------
    ValueError
        Where an argument is out of range.

    Notes
    -----
    Configuration A of Simonyan and Zisserman (2015). The five poolings reduce a 32 × 32 image to 512 features, so the
    classifier's hidden layers have 512 units rather than 4096. Weights are drawn as in He et al. (2015), since signals
    would otherwise vanish in eleven layers without normalisation. `features` is the chain of 21 stages that the thesis
    scans.

    Examples
    --------
    >>> import jacsparse
    >>> len(jacsparse.chain(VGG11().features, (3, 32, 32)))
    21
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 3, dropout: float = 0.5) -> None:
        options = check_counts(num_classes=num_classes, in_channels=in_channels)
        options["dropout"] = check_number("dropout", dropout, 0, 1)
        features = _features(in_channels)
        hidden = [(nn.Linear(512, 512), nn.ReLU(), nn.Dropout(dropout)) for _ in range(2)]
        classifier = nn.Sequential(*hidden[0], *hidden[1], nn.Linear(512, num_classes))
        super().__init__(OrderedDict(features=features, flatten=nn.Flatten(), classifier=classifier))
        self.options = options
        for part in self.modules():
            if isinstance(part, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(part.weight, nonlinearity="relu")
                assert part.bias is not None
                nn.init.zeros_(part.bias)


def _features(channels: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in _FEATURES:
        if width is None:
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
    return nn.Sequential(*layers)
