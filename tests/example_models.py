"""Networks of the tests, initialised so that no gradient vanishes."""

from __future__ import annotations

from collections import OrderedDict

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


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (y + self.downsample(x)).relu()


def resnet18(width: int = 64) -> nn.Module:
    """ResNet-18 with torchvision's names and sizes, without its last average where images are small."""
    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(3, width, 7, 2, 3, bias=False),
        "bn1": nn.BatchNorm2d(width),
        "relu": nn.ReLU(),
        "maxpool": nn.MaxPool2d(3, 2, 1),
    }
    widths = [width, width, 2 * width, 4 * width, 8 * width]
    for number in range(1, 5):
        first = _Block(widths[number - 1], widths[number], 1 if number == 1 else 2)
        layers[f"layer{number}"] = nn.Sequential(first, _Block(widths[number], widths[number], 1))
    layers |= {"avgpool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(8 * width, 1000)}
    return nn.Sequential(OrderedDict(layers))


def thin_resnet18() -> nn.Module:
    """A ResNet-18 of an eighth of the width."""
    return resnet18(8)


def cut_in_two() -> nn.Module:
    """A network of which a layer has no weight left, by its mask."""
    module = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    prune.custom_from_mask(module[2], "weight", torch.zeros(4, 6))
    return module
