"""Residual networks for images of 32 × 32."""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from .arguments import check_counts

# Channels of the stem and of each group.
_CHANNELS = (16, 16, 32, 64)


class ResidualUnit(nn.Module):
    """A basic residual unit: two convolutions of 3 × 3, each normalised, and a shortcut from the input.

    Where the unit halves the image, the shortcut takes every other pixel and pads new channels with zeros, so that it
    has no parameters (He et al., 2016, section 3.3, option A).

    Parameters
    ----------
    into, out : int
        Channels of the input and of the output.
    """

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.stride, self.added = (1, 0) if into == out else (2, out - into)
        self.body = nn.Sequential(
            nn.Conv2d(into, out, 3, self.stride, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The unit's output, for float images ``(batch, into, height, width)``."""
        shortcut = x
        if self.added:
            every_other = x[:, :, :: self.stride, :: self.stride]
            shortcut = functional.pad(every_other, (0, 0, 0, 0, self.added // 2, self.added - self.added // 2))
        return functional.relu(self.body(x) + shortcut)


class _ResNet(nn.Sequential):
    """`stem`, three groups of residual units, `pool`, `flatten` and `classifier`."""

    #: Residual units in each group.
    units: ClassVar[tuple[int, int, int]]

    def __init__(self, num_classes: int = 10, in_channels: int = 3) -> None:
        options = check_counts(num_classes=num_classes, in_channels=in_channels)
        into, *widths = _CHANNELS
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        parts["stem"] = nn.Sequential(
            nn.Conv2d(in_channels, into, 3, padding=1, bias=False), nn.BatchNorm2d(into), nn.ReLU()
        )
        for number, (width, count) in enumerate(zip(widths, self.units, strict=True), start=1):
            parts[f"group{number}"] = nn.Sequential(
                *(ResidualUnit(into if place == 0 else width, width) for place in range(count))
            )
            into = width
        parts.update(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), classifier=nn.Linear(into, num_classes))
        super().__init__(parts)
        self.options = options
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")


class ResNet8(_ResNet):
    """ResNet-8 (Huo et al., 2018, *Decoupled parallel backpropagation*, Table 2): one residual unit in each group.

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
    """

    units = (1, 1, 1)


class ResNet56(_ResNet):
    """ResNet-56 (He et al., 2016, section 4.2): nine residual units in each group; parameters as for `ResNet8`."""

    units = (9, 9, 9)


class ResNet110(_ResNet):
    """ResNet-110 (He et al., 2016, section 4.2): 18 residual units in each group; parameters as for `ResNet8`."""

    units = (18, 18, 18)
