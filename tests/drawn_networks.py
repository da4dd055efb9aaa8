"""Networks as users bring them: torchvision's own where it imports, else their architectures built here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

try:
    from torchvision import models as torchvision
except Exception:
    # Its compiled operators fail in more than one way where they do not fit PyTorch's build.
    torchvision = None


def conv(into: int, out: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(into, out, kernel, stride, kernel // 2, groups=groups, bias=False)


class BasicBlock(nn.Module):
    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(into, out, 3, stride), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = conv(out, out, 3), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        changes = stride > 1 or into != out
        self.downsample = nn.Sequential(conv(into, out, 1, stride), nn.BatchNorm2d(out)) if changes else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet18(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        widths = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        blocks = [BasicBlock(*width) for into, out, stride in widths for width in ((into, out, stride), (out, out, 1))]
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(512, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.flatten(functional.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1), 1))


class DenseLayer(nn.Module):
    def __init__(self, into: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(into), conv(into, 128, 1)
        self.norm2, self.conv2 = nn.BatchNorm2d(128), conv(128, 32, 3)

    def forward(self, features: list[torch.Tensor]) -> torch.Tensor:
        bottleneck = self.conv1(functional.relu(self.norm1(torch.cat(features, 1)), inplace=True))
        return self.conv2(functional.relu(self.norm2(bottleneck), inplace=True))


class DenseBlock(nn.ModuleList):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        for layer in self:
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    def __init__(self, classes: int, counts: tuple[int, ...] = (6, 12, 24, 16)) -> None:
        super().__init__()
        parts: list[nn.Module] = [conv(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        width = 64
        for number, count in enumerate(counts, 1):
            parts.append(DenseBlock(DenseLayer(width + 32 * place) for place in range(count)))
            width += 32 * count
            if number < len(counts):
                parts += [nn.BatchNorm2d(width), nn.ReLU(inplace=True), conv(width, width // 2, 1), nn.AvgPool2d(2)]
                width //= 2
        self.features = nn.Sequential(*parts, nn.BatchNorm2d(width))
        self.classifier = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = functional.relu(self.features(x), inplace=True)
        return self.classifier(torch.flatten(functional.adaptive_avg_pool2d(out, (1, 1)), 1))


class SqueezeExcitation(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = max(8, (channels // 4 + 4) // 8 * 8)
        self.fc1, self.fc2 = nn.Conv2d(channels, inner, 1), nn.Conv2d(inner, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.fc2(functional.relu(self.fc1(functional.adaptive_avg_pool2d(x, 1))))
        return functional.hardsigmoid(scale) * x


class InvertedResidual(nn.Module):
    def __init__(self, into: int, kernel: int, wide: int, out: int, squeeze: bool, hard: bool, stride: int) -> None:
        super().__init__()
        activation = nn.Hardswish if hard else nn.ReLU
        parts: list[nn.Module] = []
        if wide != into:
            parts += [conv(into, wide, 1), nn.BatchNorm2d(wide), activation(inplace=True)]
        parts += [conv(wide, wide, kernel, stride, groups=wide), nn.BatchNorm2d(wide), activation(inplace=True)]
        parts += [SqueezeExcitation(wide)] if squeeze else []
        self.block = nn.Sequential(*parts, conv(wide, out, 1), nn.BatchNorm2d(out))
        self.adds = stride == 1 and into == out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) + x if self.adds else self.block(x)


# Kernel, expanded channels, output channels, squeeze-and-excitation, hard swish, stride.
_MOBILE = (
    (3, 16, 16, True, False, 2), (3, 72, 24, False, False, 2), (3, 88, 24, False, False, 1),
    (5, 96, 40, True, True, 2), (5, 240, 40, True, True, 1), (5, 240, 40, True, True, 1),
    (5, 120, 48, True, True, 1), (5, 144, 48, True, True, 1), (5, 288, 96, True, True, 2),
    (5, 576, 96, True, True, 1), (5, 576, 96, True, True, 1),
)  # fmt: skip


class MobileNetV3Small(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        parts: list[nn.Module] = [conv(3, 16, 3, 2), nn.BatchNorm2d(16), nn.Hardswish(inplace=True)]
        into = 16
        for kernel, wide, out, squeeze, hard, stride in _MOBILE:
            parts.append(InvertedResidual(into, kernel, wide, out, squeeze, hard, stride))
            into = out
        self.features = nn.Sequential(*parts, conv(into, 576, 1), nn.BatchNorm2d(576), nn.Hardswish(inplace=True))
        self.classifier = nn.Sequential(
            nn.Linear(576, 1024), nn.Hardswish(inplace=True), nn.Dropout(0.2, inplace=True), nn.Linear(1024, classes)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.flatten(functional.adaptive_avg_pool2d(self.features(x), 1), 1))


class Fire(nn.Module):
    def __init__(self, into: int, narrow: int, wide: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(into, narrow, 1)
        self.one, self.three = nn.Conv2d(narrow, wide, 1), nn.Conv2d(narrow, wide, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.squeeze(x))
        return torch.cat([self.relu(self.one(x)), self.relu(self.three(x))], 1)


class SqueezeNet(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        pool = lambda: nn.MaxPool2d(3, 2, ceil_mode=True)  # noqa: E731
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 3, 2), nn.ReLU(inplace=True), pool(), Fire(64, 16, 64), Fire(128, 16, 64), pool(),
            Fire(128, 32, 128), Fire(256, 32, 128), pool(), Fire(256, 48, 192), Fire(384, 48, 192), Fire(384, 64, 256),
            Fire(512, 64, 256),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Dropout(0.5), nn.Conv2d(512, classes, 1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d((1, 1))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.flatten(self.classifier(self.features(x)), 1)


class EncoderBlock(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.ln_1, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, heads, batch_first=True)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Dropout(0.0), nn.Linear(hidden, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.ln_1(tokens)
        x, _ = self.attention(x, x, x, need_weights=False)
        x = x + tokens
        return x + self.mlp(self.ln_2(x))


class VisionTransformer(nn.Module):
    """ViT-Tiny's 192 channels and 3 heads, of two blocks."""

    def __init__(self, classes: int, image: int, patch: int = 8, width: int = 192, blocks: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(EncoderBlock(width, 3, 4 * width) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(x).flatten(2).permute(0, 2, 1)
        tokens = torch.cat([self.class_token.expand(x.shape[0], -1, -1), tokens], dim=1) + self.positions
        return self.head(self.norm(self.blocks(tokens))[:, 0])


def _of(name: str, build: Callable[..., nn.Module], **options: Any) -> nn.Module:
    if torchvision is not None and name:
        return getattr(torchvision, name)(num_classes=5)  # type: ignore[no-any-return]
    return build(5, **options)


#: How each is made, and the shape of its samples.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet18": (lambda: _of("resnet18", ResNet18), (3, 32, 32)),
    "densenet121": (lambda: _of("densenet121", DenseNet), (3, 32, 32)),
    "densenet": (lambda: DenseNet(5, (2, 2)), (3, 32, 32)),
    "mobilenet_v3_small": (lambda: _of("mobilenet_v3_small", MobileNetV3Small), (3, 32, 32)),
    "squeezenet": (lambda: _of("squeezenet1_1", SqueezeNet), (3, 32, 32)),
    "vit_tiny": (lambda: _of("", VisionTransformer, image=16), (3, 16, 16)),
    "encoder_layer": (lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), (6, 32)),
}
