"""FLOP of networks whose samples depend on each other, as by batch normalisation in training mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from jacsparse.models import build
from torch import nn
from torch.nn import functional

import jacsparse
from jacsparse.flop import FlopReport


def vgg11(normalise: bool) -> nn.Sequential:
    """The convolutional part of VGG-11, on request with batch normalisation."""
    layers: list[nn.Module] = []
    for layer in build("vgg11").get_submodule("features").children():
        layers.append(layer)
        if normalise and isinstance(layer, nn.Conv2d):
            layers.append(nn.BatchNorm2d(layer.out_channels))
    return nn.Sequential(*layers)


def back_propagation(report: FlopReport, structure: str) -> float:
    return next(each.activations for each in report.backpropagation if each.structure == structure)


def test_vgg11_has_its_own_flop_and_those_of_normalisations() -> None:
    without, normalised = (
        jacsparse.count_flop(vgg11(normalise), (3, 32, 32), schedule="linear") for normalise in (False, True)
    )
    of_normalisations = [step for step in normalised.steps if step.couples]
    # An element of the gradient is read and one is written for each element of the result.
    sizes = [64 * 32**2, 128 * 16**2, 256 * 8**2, 256 * 8**2, 512 * 4**2, 512 * 4**2, 512 * 2**2, 512 * 2**2]
    assert [step.flop for step in of_normalisations] == [2.0 * size for size in reversed(sizes)]
    assert [step.executed for step in of_normalisations] == [step.flop for step in of_normalisations]
    assert normalised.total == without.total + 2 * sum(sizes)
    for structure in ("dense", "pruned"):
        expected = back_propagation(without, structure) + 2 * sum(sizes)
        assert back_propagation(normalised, structure) == expected
    assert [step.operator for step in normalised.baseline].count("couples samples") == 8
    layers = [[layer for layer in report.layers if layer["weights"]] for report in (without, normalised)]
    assert [layer["dense_step"] for layer in layers[0]] == [layer["dense_step"] for layer in layers[1]]


@pytest.mark.parametrize("schedule", ["linear", "blelloch", "blelloch:2", "chunked:3", "balanced:3"])
def test_steps_counted_are_the_steps_executed(schedule: str) -> None:
    net = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(12, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 4),
    )  # fmt: skip
    report = jacsparse.count_flop(net, (2, 8, 8), schedule=schedule)
    plan = jacsparse.nn.Scan(net, schedule=schedule).scanner((2, 8, 8)).schedule
    assert [(s.level, s.kind, s.live) for s in report.steps] == [(s.level, s.kind, s.live) for s in plan.products]
    assert report.schedule == plan.name
    assert [step.couples for step in report.steps].count(True) == 2
    assert "1, couples samples" in page(report)


def page(report: FlopReport) -> str:
    from jacsparse.flop import Page
    from jacsparse.terminal import text

    return text(Page(report, True))


class Block(nn.Module):
    """A residual block as people write it."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), norm(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), norm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + x)


def test_within_a_residual_block_convolutions_count_as_elsewhere() -> None:
    training, evaluation = (
        jacsparse.count_flop(net, (4, 8, 8), schedule="linear")
        for net in (Block(nn.BatchNorm2d), Block(nn.BatchNorm2d).eval())
    )
    # In evaluation mode a normalisation is a diagonal, which takes as much.
    assert training.backpropagation == evaluation.backpropagation
    assert training.layers == evaluation.layers


def test_observed_gradients_are_full_behind_a_normalisation() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    report = jacsparse.count_flop(net, (4,), schedule="linear", structure="observed", inputs=torch.randn(5, 4))
    assert report.samples == 5
    assert report.input_gradient is not None
    assert report.input_gradient.flop == 2 * 4 * 6
    # ReLU leaves out the samples' zeros.
    assert report.steps[1].flop < 2 * 6


def test_products_of_samples_by_each_other_are_counted_for_three() -> None:
    class Weighed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ x.flip(0).T).softmax(0).T @ x

    report = jacsparse.count_flop(nn.Sequential(nn.Linear(4, 6), Weighed(), nn.Linear(6, 2)), (4,), schedule="linear")
    (step,) = (step for step in report.steps if step.couples)
    # Two products of 3 × 6 × 3 multiply-adds for three samples, each with two gradients.
    assert step.flop >= 2 * 2 * 2 * 6 * 3


def test_samples_along_another_axis_are_not_observed() -> None:
    """A recurrent layer takes their first axis for time, so that its calls are as many as there are samples."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.RNN(4, 6), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.layer(x)[0])

    with pytest.raises(jacsparse.UnsupportedOperatorError, match=r"depends on the number of samples.*batch_first=True"):
        jacsparse.count_flop(Classifier(), inputs=torch.randn(2, 5, 4), structure="observed", schedule="linear")
