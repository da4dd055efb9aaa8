"""Networks as people write them, batch normalisation included, trained by each way of going back.

``python -m examples.ways_back`` trains a residual network on digits, in float64. All ways but delayed gradients of
several modules compute the gradients of back-propagation, so that their losses differ by rounding alone.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from jacsparse.models import Dataset, ResNet8, evaluate, load_data
from torch import nn
from torch.nn import functional

from jacsparse.nn import Leapfrog, Scan, Solve
from jacsparse.terminal import console, new_table, short_time
from jacsparse.training import Backpropagation, DelayedGradients


class Block(nn.Module):
    """Two normalised convolutions, and what they are added to."""

    def __init__(self, channels: int, wide: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, wide, 3, stride, padding=1, bias=False), nn.BatchNorm2d(wide)
        self.conv2, self.bn2 = nn.Conv2d(wide, wide, 3, padding=1, bias=False), nn.BatchNorm2d(wide)
        self.downsample: nn.Module | None = None
        if stride > 1:
            self.downsample = nn.Sequential(nn.Conv2d(channels, wide, 1, stride), nn.BatchNorm2d(wide))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(out)) + identity)


class ResNet(nn.Module):
    """A small residual network for images of 32 × 32, whose forward pass calls layers and functions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(Block(8, 8), Block(8, 8))
        self.layer2 = nn.Sequential(Block(8, 16, 2), Block(16, 16))
        self.fc1, self.fc2 = nn.Linear(16 * 4 * 4, 20), nn.Linear(20, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(functional.relu(self.bn1(self.conv1(x))), 2)
        x = self.layer2(self.layer1(x))
        x = torch.flatten(functional.avg_pool2d(x, 2), 1)
        return self.fc2(functional.relu(self.fc1(x)))


class ResNet20(ResNet8):
    """ResNet-20 (He et al., 2016, section 4.2): three residual units in each group."""

    units = (3, 3, 3)


def vgg11(width: int = 64) -> nn.Sequential:
    """VGG-11 with batch normalisation, for images of 32 × 32; its first convolution has `width` channels."""
    layers, channels = list[nn.Module](), 3
    for times in (1, 0, 2, 0, 4, 4, 0, 8, 8, 0, 8, 8, 0):
        if times:
            layers += [nn.Conv2d(channels, times * width, 3, padding=1), nn.BatchNorm2d(times * width), nn.ReLU(True)]
            channels = times * width
        else:
            layers.append(nn.MaxPool2d(2))
    classifier = nn.Sequential(nn.Linear(channels, channels), nn.ReLU(True), nn.Linear(channels, 10))
    return nn.Sequential(*layers, nn.Flatten(), classifier)


Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Trainer = Backpropagation | DelayedGradients


def _within(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module, Optimizer], Trainer]:
    return lambda model, optimizer: Backpropagation(wrap(model), optimizer=optimizer)


#: What trains a model by each way.
WAYS: Mapping[str, Callable[[nn.Module, Optimizer], Trainer]] = {
    "back-propagation": _within(lambda model: model),
    "scan, blelloch:1": _within(lambda model: Scan(model, schedule="blelloch:1")),
    "leapfrogging, 2 threads": _within(lambda model: Leapfrog(model, threads=2)),
    "cyclic reduction": _within(lambda model: Solve(model, method="cyclic_reduction")),
    "delayed gradients, 1 module": lambda model, optimizer: DelayedGradients(model, modules=1, optimizer=optimizer),
    "delayed gradients, 2 modules": lambda model, optimizer: DelayedGradients(model, modules=2, optimizer=optimizer),
}


@dataclass
class Training:
    """The loss of each batch, the loss and accuracy on test images after each epoch, and seconds of training."""

    losses: list[float] = field(default_factory=list)
    tests: list[tuple[float, float]] = field(default_factory=list)
    seconds: float = 0.0


def train(way: str, build: Callable[[], nn.Module], data: Dataset, *, epochs: int = 3, batch: int = 64) -> Training:
    """Train a network that `build` makes by a way of `WAYS`, in the dtype of the data."""
    torch.manual_seed(0)
    model, training = build().to(data.train_inputs.dtype), Training()
    trainer = WAYS[way](model, functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9))
    for _ in range(epochs):
        for numbers in torch.randperm(len(data.train_labels)).split(batch):
            begin = time.perf_counter()
            loss = trainer.step(data.train_inputs[numbers], data.train_labels[numbers])
            training.seconds += time.perf_counter() - begin
            assert loss is not None
            training.losses.append(loss.item())
        training.tests.append(evaluate(model, data.test_inputs, data.test_labels))
    return training


def digits(images: int | None = None) -> Dataset:
    """Scikit-learn's digits in float64, of which the first are trained on."""
    data = load_data("digits")
    return replace(
        data,
        train_inputs=data.train_inputs[:images].double(),
        train_labels=data.train_labels[:images],
        test_inputs=data.test_inputs.double(),
    )


def main(epochs: int = 3, images: int | None = None) -> None:
    """Print the losses of all ways."""
    data, first = digits(images), list[float]()
    table = new_table("A residual network of one's own, on scikit-learn's digits")
    for column in ("way back", "last loss", "largest difference", "test accuracy", "time"):
        table.add_column(column, justify="left" if column == "way back" else "right")
    for way in WAYS:
        training = train(way, ResNet, data, epochs=epochs)
        first = first or training.losses
        difference = max(abs(one - other) for one, other in zip(training.losses, first, strict=True))
        figures = f"{training.losses[-1]:.4f}", f"{difference:.1e}", f"{training.tests[-1][1]:.1%}"
        table.add_row(way, *figures, short_time(training.seconds))
    console().print(table)


if __name__ == "__main__":
    main()
