"""Models of any forward pass, cut where one tensor carries everything, against the same models as nn.Sequential."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from jacsparse.training import DelayedGradients, partition
from jacsparse.training.stretches import stretches_of
from tests.helpers import FLOAT, drawn

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Block(nn.Module):
    def __init__(self, channels: int, wide: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, wide, 3, padding=1, bias=False), nn.BatchNorm2d(wide)
        self.conv2, self.bn2 = nn.Conv2d(wide, wide, 3, padding=1, bias=False), nn.BatchNorm2d(wide)
        self.shortcut = nn.Identity() if channels == wide else nn.Conv2d(channels, wide, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """As people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.layer1 = nn.Sequential(Block(3, 3), Block(3, 3))
        self.layer2 = self._layer(3, 4)
        self.fc, self.scale = nn.Linear(4, 3), nn.Parameter(torch.ones(3))

    def _layer(self, channels: int, wide: int) -> nn.Sequential:
        return nn.Sequential(Block(channels, wide), Block(wide, wide))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        x = functional.adaptive_avg_pool2d(x, 1)
        return self.fc(torch.flatten(x, 1)) * self.scale


class Scaled(nn.Module):
    def __init__(self, scale: nn.Parameter) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def as_sequential(model: ResNet) -> nn.Sequential:
    """The same layers, and the same names of none of them."""
    return nn.Sequential(
        model.conv1, model.bn1, nn.ReLU(), *model.layer1, *model.layer2, nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        model.fc, Scaled(model.scale),
    )  # fmt: skip


def resnet() -> ResNet:
    torch.manual_seed(0)
    return ResNet().double()


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    images = [torch.randn(4, 2, 4, 4, generator=generator, dtype=FLOAT) for _ in range(count)]
    return [(x, torch.randint(3, (4,), generator=generator)) for x in images]


@pytest.mark.parametrize(
    ("cuts", "places"),
    [
        (["layer1"], [3]),
        (["layer2.1"], [6]),
        (["layer1.1", "fc"], [4, 9]),
        (["bn1", "layer1", "layer2"], [1, 3, 5]),
    ],
)
def test_trained_as_the_same_layers_in_sequence(cuts: list[str], places: list[int]) -> None:
    ours = resnet()
    theirs = as_sequential(copy.deepcopy(ours))
    names = list(ours.state_dict())
    trainers = [
        DelayedGradients(model, modules=modules, optimizer=SGD) for model, modules in ((ours, cuts), (theirs, places))
    ]
    for x, y in batches(5):
        losses = [trainer.step(x, y) for trainer in trainers]
        assert torch.equal(*losses)
    assert list(ours.state_dict()) == names
    expected = theirs.state_dict()
    for value, other in zip(as_sequential(ours).state_dict().values(), expected.values(), strict=True):
        assert torch.equal(value, other)


def test_a_layer_that_is_called_again_has_stretches_of_numbered_names() -> None:
    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(self.layer(x)))

    assert list(stretches_of(Repeated())) == ["layer", "layer:2", "layer:3"]


def test_one_part_is_back_propagation() -> None:
    ours, theirs = resnet(), resnet()
    trainer, optimizer = DelayedGradients(ours, modules=1, optimizer=SGD), SGD(theirs.parameters())
    for x, y in batches(3):
        trainer.step(x, y)
        optimizer.zero_grad()
        functional.cross_entropy(theirs(x), y).backward()
        optimizer.step()
    for value, other in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        assert torch.equal(value, other)


def test_parts_of_equal_cost() -> None:
    for example in (None, batches(1)[0][0]):
        parts = partition(resnet(), 3, example=example)
        assert len(parts) == 3 and all(sum(p.numel() for p in part.parameters()) for part in parts)
    with pytest.raises(ValueError, match=r"modules is 20; expected 1 to .*: conv1, bn1, layer1\.0, layer1\.1,"):
        partition(resnet(), 20)
    with pytest.raises(ValueError, match=r"'layer1\.0\.conv2' is inside 'layer1\.0'"):
        partition(resnet(), ["layer1.0.conv2"])


class Recurrent(nn.Module):
    """A network that does not read all that its layer returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(3, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps, _ = self.layer(x)
        return self.head(steps[:, -1])


class LastStep(nn.GRU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)[0][:, -1]


def test_recurrent_layers() -> None:
    torch.manual_seed(0)
    ours = Recurrent().double()
    layer = LastStep(3, 5, batch_first=True).double()
    layer.load_state_dict(ours.layer.state_dict())
    theirs = nn.Sequential(layer, copy.deepcopy(ours.head))
    trainers = [DelayedGradients(model, modules=2, optimizer=SGD) for model in (ours, theirs)]
    for seed in range(4):
        x, y = drawn(4, 6, 3, seed=seed), torch.tensor([0, 1, 2, 0])
        assert torch.equal(*(trainer.step(x, y) for trainer in trainers))
    for value, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(value, other)


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(self.linear(x), 0.5, training=self.training)


class Writes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[:, 0].mul_(3)
        return y


class Two(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


class Hooked(ResNet):
    def __init__(self) -> None:
        super().__init__()
        self.layer1[0].register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Branches, "a Branches cannot be cut into parts, as torch.fx cannot trace it: .* write it without branches"),
        (Drops, "a Drops depends on self.training elsewhere .* as nn.Dropout in the place of F.dropout"),
        (Writes, "a Writes does not use what mul_ returns"),
        (Two, "a Two takes or returns more than one tensor"),
        (Hooked, r"'layer1\.0' has hooks, which its parts would not call"),
        (lambda: torch.relu, "the model is a .*; expected an nn.Module"),
    ],
)
def test_what_cannot_be_cut(model: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        partition(model(), 2)
