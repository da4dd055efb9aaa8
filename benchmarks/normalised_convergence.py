"""Training networks with batch normalisation by each way of going back, from one seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from jacsparse.models import Dataset
from torch import nn

from examples.ways_back import WAYS, ResNet, ResNet20, Training, digits, train, vgg11

from ._context import Context, one_thread
from ._curves import averaged
from ._experiment import Comparison, Experiment, Row

__all__ = ["NormalisedConvergence"]

#: What the losses of the same gradients in float64 may differ by: rounding, which training magnifies.
_TOLERANCE = 1e-9
#: What the others are compared with, and the way of which other losses are expected.
_BASELINE, _DELAYED = "back-propagation", "delayed gradients, 2 modules"


@dataclass(frozen=True)
class NormalisedConvergence(Experiment):
    """Losses of trainings in float64, and how far they are from back-propagation's."""

    #: Networks with the height and width to which the digits' images are averaged.
    networks: tuple[tuple[str, Callable[[], nn.Module], int], ...] = (
        ("VGG-11 with batch normalisation, an eighth of its channels", partial(vgg11, 8), 32),
        ("ResNet-20", ResNet20, 16),
        ("a ResNet of one's own", ResNet, 32),
    )
    epochs: int = 3
    batch: int = 64

    name = "normalised_convergence"
    title = "Training networks with batch normalisation by each way of going back"
    source = "the four papers' ways of training, on scikit-learn's digits"

    def run(self, context: Context) -> list[Row]:
        try:
            data = digits()
        except ImportError as error:
            return [Row.missing(self.title, str(error))]
        rows: list[Row] = []
        for name, build, side in self.networks:
            group = f"{name}: {self.epochs} epochs of digits, {side} × {side}, batch {self.batch}, float64"
            rows += self._rows(context.under(name), build, averaged(data, side), group)
        return rows

    def _rows(self, context: Context, build: Callable[[], nn.Module], data: Dataset, group: str) -> list[Row]:
        rows, expected = list[Row](), Training()
        for way in WAYS:
            context.say(way)
            with one_thread():
                training = train(way, build, data, epochs=self.epochs, batch=self.batch)
            expected = training if way == _BASELINE else expected
            difference = max(abs(one - other) for one, other in zip(training.losses, expected.losses, strict=True))
            exact = way not in (_BASELINE, _DELAYED)
            loss, accuracy = training.tests[-1]
            row = Row.of_value(
                way,
                training.losses[-1],
                "last loss",
                group=group,
                role="peer" if way == _BASELINE else "ours",
                note=f"test loss {loss:.3g}, accuracy {accuracy:.1%}, {training.seconds:.0f} s of training",
                data={"training": asdict(training)},
            )
            text = f"largest difference of the losses / {_TOLERANCE:g}"
            compared = (Comparison(text, difference / _TOLERANCE, at_most=1),) if exact else ()
            rows.append(replace(row, comparisons=compared))
        return rows

    def figure(self, rows: Sequence[Row], path: Path) -> None:
        from jacsparse.figures import BLUE, GREEN, ORANGE, PURPLE, SKY, new_figure, save_figure

        drawn = [row for row in rows if row.data]
        groups = list(dict.fromkeys(row.group for row in drawn))
        figure, _ = new_figure(10.0, 1.2 + 2.8 * len(groups), rows=max(1, len(groups)), columns=2)
        colours = dict(zip(WAYS, (ORANGE, BLUE, GREEN, SKY, "black", PURPLE), strict=True))
        for number, group in enumerate(groups):
            losses, differences = figure.axes[2 * number : 2 * number + 2]
            trainings = {row.label: row.data["training"]["losses"] for row in drawn if row.group == group}
            for place, (way, curve) in enumerate(trainings.items()):
                _draw(losses, differences, way, colours[way], curve, trainings[_BASELINE], place)
            losses.set_title(group, fontsize=8, loc="left")
            losses.set_ylim(bottom=0)
            losses.set_ylabel("loss of each batch", fontsize=8)
            differences.set_yscale("log")
            differences.set_ylabel(f"difference from {_BASELINE}'s", fontsize=8)
            for axes in (losses, differences):
                axes.set_xlabel("iteration", fontsize=8)
                axes.tick_params(labelsize=7)
                axes.grid(alpha=0.25)
        if groups:
            handles, labels = figure.axes[0].get_legend_handles_labels()
            figure.legend(
                handles, labels, fontsize=8, frameon=False, loc="outside lower center", ncols=3, handlelength=5
            )
        figure.suptitle(self.title, fontsize=10)
        save_figure(figure, path)


def _draw(
    losses: Any, differences: Any, way: str, colour: str, curve: Sequence[float], expected: Sequence[float], place: int
) -> None:
    """Draw a training's losses; dashes of different lengths show curves that lie on each other."""
    style: Any = "-" if way == _BASELINE else (4.0 * place, (4, 12)) if way != _DELAYED else ":"
    losses.plot(curve, color=colour, linestyle=style, linewidth=3 if way == _BASELINE else 1.6, label=way)
    distances = [abs(one - other) for one, other in zip(curve, expected, strict=True)]
    if any(distances):
        differences.plot([each or float("nan") for each in distances], color=colour, linewidth=1)
