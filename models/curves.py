"""Loss curves of a training, as tensors, text and pictures."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from ..runtime import replacing

PHASES = ("train", "retrain")


@dataclass(frozen=True)
class Point:
    """The losses of one iteration."""

    # "train" before pruning, "retrain" after it.
    phase: str
    # Both count from 1: the epoch within its phase, the iteration within the whole training.
    epoch: int
    iteration: int
    # Seconds of all iterations so far, without tests and file writes.
    seconds: float
    # The loss of the iteration's batch, before its step.
    train_loss: float
    # The loss and accuracy on the test images after the last step of an epoch; else NaN.
    test_loss: float = math.nan
    test_accuracy: float = math.nan


def to_tensor(points: Sequence[Point]) -> torch.Tensor:
    """Points as a float64 tensor with a row for each."""
    rows = [(PHASES.index(point.phase), *astuple(point)[1:]) for point in points]
    return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), len(fields(Point)))


def from_tensor(rows: torch.Tensor) -> list[Point]:
    """The points that `to_tensor` wrote."""
    return [
        Point(PHASES[int(phase)], int(epoch), int(iteration), *values)
        for phase, epoch, iteration, *values in rows.tolist()
    ]


def save_csv(points: Iterable[Point], path: Path) -> None:
    """Write a line for each iteration, with empty fields for NaN."""
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(field.name for field in fields(Point))
        writer.writerows(
            ["" if isinstance(value, float) and math.isnan(value) else value for value in astuple(point)]
            for point in points
        )


def plot_curves(points: Sequence[Point], path: Path, title: str) -> None:
    """Draw training and test loss over iterations and over time, with a line at pruning (Figures 3.4 and 5.1)."""
    from ..figures import new_figure, save_figure

    figure, panels = new_figure(10.0, 4.2, columns=2)
    losses = [loss for point in points for loss in (point.train_loss, point.test_loss) if math.isfinite(loss)]
    # By the losses: the limits that matplotlib finds for a flat curve have it on the frame.
    highest = max(losses, default=0.0) or 1.0
    labels = {"iteration": "iterations", "seconds": "seconds of training"}
    for axes, (abscissa, label) in zip(panels, labels.items(), strict=True):
        _draw(axes, points, abscissa)
        axes.set_xlabel(label)
        axes.set_ylim(0, 1.08 * highest)
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("cross-entropy loss")
    panels[0].legend(fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path)


def _draw(axes: Any, points: Sequence[Point], abscissa: str) -> None:
    from ..figures import BLUE, ORANGE

    x = [getattr(point, abscissa) for point in points]
    axes.plot(x, [point.train_loss for point in points], color=BLUE, linewidth=0.8, label="training, each batch")
    tests = [number for number, point in enumerate(points) if not math.isnan(point.test_loss)]
    losses = [points[number].test_loss for number in tests]
    axes.plot([x[number] for number in tests], losses, color=ORANGE, marker="o", markersize=4, label="test, each epoch")
    first = next((number for number, point in enumerate(points) if point.phase == "retrain"), 0)
    if first:
        axes.axvline((x[first - 1] + x[first]) / 2, color="black", linestyle="--", linewidth=0.8, label="pruning")
