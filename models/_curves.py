"""Loss curves: kept through a training, written as text and as a picture."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from jacsparse.patterns._files import replacing

__all__ = ["PHASES", "Point", "from_tensor", "plot_curves", "save_csv", "to_tensor"]

PHASES = ("train", "retrain")


@dataclass(frozen=True)
class Point:
    """One iteration.

    Attributes
    ----------
    phase : {"train", "retrain"}
        Before or after pruning.
    epoch : int
        Of the phase, from 1.
    iteration : int
        Of the whole training, from 1.
    seconds : float
        Spent in iterations so far, tests and files left out.
    train_loss : float
        Of the iteration's batch, before its step.
    test_loss, test_accuracy : float
        On the test images after the step, where it ends an epoch; else NaN.
    """

    phase: str
    epoch: int
    iteration: int
    seconds: float
    train_loss: float
    test_loss: float = math.nan
    test_accuracy: float = math.nan


def to_tensor(points: Sequence[Point]) -> torch.Tensor:
    """Points as float64, a row each."""
    rows = [(PHASES.index(point.phase), *astuple(point)[1:]) for point in points]
    return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), len(fields(Point)))


def from_tensor(rows: torch.Tensor) -> list[Point]:
    """Points from what `to_tensor` made of them."""
    return [
        Point(PHASES[int(phase)], int(epoch), int(iteration), *values)
        for phase, epoch, iteration, *values in rows.tolist()
    ]


def save_csv(points: Iterable[Point], path: Path) -> None:
    """Write a line for each iteration; what was not measured is left empty."""
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(field.name for field in fields(Point))
        writer.writerows(
            ["" if isinstance(value, float) and math.isnan(value) else value for value in astuple(point)]
            for point in points
        )


def plot_curves(points: Sequence[Point], path: Path, title: str) -> None:
    """Draw training and test loss, and where weights were pruned: over iterations, and over time (Figures 3.4, 5.1)."""
    from jacsparse._figures import new_figure, save_figure

    figure, panels = new_figure(10.0, 4.2, columns=2)
    for axes, place, label in zip(panels, ("iteration", "seconds"), ("iterations", "seconds of training"), strict=True):
        _draw(axes, points, place)
        axes.set_xlabel(label)
        axes.margins(y=0.08)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("cross-entropy loss")
    panels[0].legend(fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path)


def _draw(axes: Any, points: Sequence[Point], place: str) -> None:
    from jacsparse._figures import BLUE, ORANGE

    places = [getattr(point, place) for point in points]
    axes.plot(places, [point.train_loss for point in points], color=BLUE, linewidth=0.8, label="training, each batch")
    tests = [point for point in points if not math.isnan(point.test_loss)]
    axes.plot(
        [getattr(point, place) for point in tests],
        [point.test_loss for point in tests],
        color=ORANGE,
        marker="o",
        markersize=4,
        label="test, each epoch",
    )
    first = next((number for number, point in enumerate(points) if point.phase == "retrain"), 0)
    if first:
        between = (places[first - 1] + places[first]) / 2
        axes.axvline(between, color="black", linestyle="--", linewidth=0.8, label="pruning")
