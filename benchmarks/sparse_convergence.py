"""Retraining the demo's pruned VGG-11 by dense layers with masks and by sparse layers: losses and accuracy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from jacsparse.models import TrainSettings, train

from examples.demo import vgg11_settings
from jacsparse.figures import BLUE, ORANGE

from ._context import Context
from ._experiment import Experiment
from ._figures import Line, Panel, Picture
from ._rows import Group, Row

ENGINES = ("dense", "sparse")


@dataclass(frozen=True)
class SparseConvergence(Experiment):
    """Training, pruning and retraining from several seeds, each with both engines of retraining."""

    #: The settings of a seed.
    settings: Callable[[int], TrainSettings] = lambda seed: vgg11_settings(seed=seed)
    seeds: tuple[int, ...] = (0, 1, 2)

    name = "sparse_convergence"
    title = "Retraining a pruned VGG-11 by dense and by sparse layers"
    source = "the demo's network on scikit-learn's digits"

    def run(self, context: Context) -> list[Row]:
        settings = self.settings(0)
        epochs = f"{settings.epochs} epochs, {settings.prune:.0%} pruned, {settings.retrain_epochs} epochs"
        rows = Group(f"{settings.task} on {settings.data}: {epochs}, batch {settings.batch}")
        accuracy = {engine: list[float]() for engine in ENGINES}
        for seed, engine in itertools.product(self.seeds, ENGINES):
            context.under(f"seed {seed}, {engine}").say("training")
            result = train(replace(self.settings(seed), engine=engine))
            retrained, note = result.accuracy["retrained"], f"{result.accuracy['pruned']:.4f} right after pruning"
            accuracy[engine].append(retrained)
            points = [_known(asdict(point)) for point in result.points if point.phase == "retrain"]
            label, role = f"accuracy after retraining, {engine}, seed {seed}", "ours" if engine == "sparse" else "peer"
            rows.value(label, retrained, "share", role=role, note=note, data={"engine": engine, "points": points})
        _add_difference(rows, accuracy)
        return rows.rows()

    def picture(self, rows: Sequence[Row]) -> Picture:
        losses, accuracies = list[Line](), list[Line]()
        for row in (row for row in rows if row.data):
            engine, points = row.data["engine"], row.data["points"]
            label, look = f"{engine} layers", (ORANGE, "-") if engine == "dense" else (BLUE, "--")
            first = points[0]["iteration"]
            trained, tested = (
                [(point["iteration"] - first, point[name]) for point in points if name in point]
                for name in ("train_loss", "test_accuracy")
            )
            losses.append(Line.through(trained, label, *look, linewidth=1, alpha=0.8))
            accuracies.append(Line.through(tested, label, *look, marker="o"))
        x = "iteration of retraining"
        panels = [Panel(losses, "", x, "loss of the batch", "y"), Panel(accuracies, "", x, "accuracy on test images")]
        return Picture(f"{rows[0].group}, {len(self.seeds)} seeds", panels)


def _known(point: dict[str, Any]) -> dict[str, Any]:
    """A point of the curves without what was not measured there."""
    return {name: value for name, value in point.items() if value == value}


def _add_difference(rows: Group, accuracy: dict[str, list[float]]) -> None:
    """Add the difference of the mean accuracies, beside twice the standard error of such a difference between seeds."""
    dense, sparse = (np.array(accuracy[engine]) for engine in ENGINES)
    difference = abs(float(sparse.mean() - dense.mean()))
    error = math.sqrt((dense.var() + sparse.var()) / max(1, len(dense) - 1))
    note = f"dense {dense.mean():.4f}, sparse {sparse.mean():.4f}; standard error {error:.4f}"
    row = rows.value("difference of the mean accuracies", difference, "share", note=note)
    if error:
        rows.beside(row.label, "difference / two standard errors", difference / (2 * error), at_most=1)
