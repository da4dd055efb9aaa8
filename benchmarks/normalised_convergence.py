"""Training networks with batch normalisation by each way of going back, from one seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from torch import nn

from examples.ways_back import WAYS, ResNet, ResNet20, Training, digits, train, vgg11
from jacsparse.figures import BLUE, GREEN, ORANGE, PURPLE, SKY

from ._context import Context
from ._curves import averaged
from ._experiment import Grid
from ._figures import Line, Panel, Picture
from ._rows import Group, Row

#: What the losses of the same gradients in float64 may differ by: rounding, which training magnifies.
_TOLERANCE = 1e-9
#: What the others are compared with, and the way of which other losses are expected.
_BASELINE, _DELAYED = "back-propagation", "delayed gradients, 2 modules"


@dataclass(frozen=True)
class NormalisedConvergence(Grid):
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
    single_thread = True

    def cases(self, context: Context) -> Iterable[tuple[str, Callable[[], nn.Module], int]]:
        return self.networks

    def measure(self, case: tuple[str, Callable[[], nn.Module], int], context: Context) -> list[Row]:
        name, build, side = case
        data, expected = averaged(digits(), side), Training()
        rows = Group(f"{name}: {self.epochs} epochs of digits, {side} × {side}, batch {self.batch}, float64")
        for way in WAYS:
            context.under(name).say(way)
            training = train(way, build, data, epochs=self.epochs, batch=self.batch)
            expected = training if way == _BASELINE else expected
            difference = max(abs(one - other) for one, other in zip(training.losses, expected.losses, strict=True))
            loss, accuracy = training.tests[-1]
            note = f"test loss {loss:.3g}, accuracy {accuracy:.1%}, {training.seconds:.0f} s of training"
            role, data_of_way = "peer" if way == _BASELINE else "ours", {"training": asdict(training)}
            rows.value(way, training.losses[-1], "last loss", role=role, note=note, data=data_of_way)
            if way not in (_BASELINE, _DELAYED):
                text = f"largest difference of the losses / {_TOLERANCE:g}"
                rows.beside(way, text, difference / _TOLERANCE, at_most=1)
        return rows.rows()

    def picture(self, rows: Sequence[Row]) -> Picture:
        colours, panels = dict(zip(WAYS, (ORANGE, BLUE, GREEN, SKY, "black", PURPLE), strict=True)), list[Panel]()
        drawn = [row for row in rows if row.data]
        for group in dict.fromkeys(row.group for row in drawn):
            trainings = {row.label: row.data["training"]["losses"] for row in drawn if row.group == group}
            losses, differences = [], []
            for place, (way, curve) in enumerate(trainings.items()):
                # Dashes of different lengths show curves that lie on each other.
                style: Any = "-" if way == _BASELINE else (4.0 * place, (4, 12)) if way != _DELAYED else ":"
                options = {"linewidth": 3 if way == _BASELINE else 1.6}
                losses.append(Line(range(len(curve)), curve, way, colours[way], style, options=options))
                distances = [abs(one - other) for one, other in zip(curve, trainings[_BASELINE], strict=True)]
                if any(distances):
                    shown = [each or float("nan") for each in distances]
                    differences.append(Line(range(len(shown)), shown, "", colours[way]))
            settings = {"ylim": (0, None)}
            panels += [
                Panel(losses, group, "iteration", "loss of each batch", settings=settings, size=8),
                Panel(differences, "", "iteration", f"difference from {_BASELINE}'s", "y", size=8),
            ]
        return Picture(self.title, panels, (10.0, 1.2 + 1.4 * len(panels)), columns=2, legend=3)
