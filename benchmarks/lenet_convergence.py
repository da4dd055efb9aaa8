"""Training LeNet-5 by back-propagation and by scan from one seed: Figure 3.4."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from jacsparse.models import Dataset, LeNet5, load_data

import jacsparse
from jacsparse.figures import BLUE, ORANGE
from jacsparse.nn import Scan
from jacsparse.schedule import blelloch

from ._context import Context
from ._curves import BASELINE, REORDERED, TEST_EVERY, Curve, curve_rows, train_side_by_side
from ._experiment import Grid
from ._figures import Line, Panel, Picture
from ._rows import Row
from ._workloads import published_iterations

# The settings of the thesis.
LEARNING_RATE, MOMENTUM, BATCH = 0.001, 0.9, 256


def loss_curves(
    iterations: int,
    dtype: torch.dtype,
    *,
    data: str | Dataset = "digits",
    batch: int = BATCH,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Curve]:
    """The curves of `train_side_by_side` for LeNet-5, by back-propagation and by Algorithm 1.

    All of its products of matrices are taken: by the name ``blelloch``, each would wait for a vector in this network.
    """
    data = load_data(data) if isinstance(data, str) else data
    stages = len(jacsparse.chain(LeNet5(), data.train_inputs.shape[1:]))
    return train_side_by_side(
        LeNet5,
        {"scan, blelloch": lambda model: Scan(model, schedule=blelloch(stages))},
        lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM),
        data,
        iterations,
        batch=batch,
        dtype=dtype,
        say=say,
    )


@dataclass(frozen=True)
class LenetConvergence(Grid):
    """Losses of both trainings, in float32 and in float64."""

    data: str = "digits"
    #: Iterations of each training; as many as in the thesis where it is None.
    iterations: int | None = 1000
    #: Samples per batch.
    batch: int = BATCH

    name = "lenet_convergence"
    title = "Training LeNet-5 by back-propagation and by scan"
    source = "thesis, Figure 3.4, on scikit-learn's digits, or with --data on CIFAR-10"

    def on(self, data: str) -> LenetConvergence:
        return replace(self, data=data, iterations=None)

    def cases(self, context: Context) -> Iterable[tuple[torch.dtype, float]]:
        return ((torch.float32, 1e-3), (torch.float64, 1e-9))

    def measure(self, case: tuple[torch.dtype, float], context: Context) -> list[Row]:
        dtype, tolerance = case
        data, name = load_data(self.data), str(dtype).removeprefix("torch.")
        iterations = self.iterations or published_iterations("lenet5", data)
        settings = f"batch {self.batch}, SGD, learning rate {LEARNING_RATE}, momentum {MOMENTUM}"
        group = f"{name}: {iterations:,} iterations on {data.source}, {settings}"
        curves = loss_curves(iterations, dtype, data=data, batch=self.batch, say=context.under(name).say)
        return curve_rows(curves, name=name, group=group, tolerance=tolerance, falls_to=0.5)

    def picture(self, rows: Sequence[Row]) -> Picture:
        # The curves of float32; in a picture, those of float64 look the same.
        row = next(row for row in rows if row.data)
        curves = {label: Curve(**curve) for label, curve in row.data["curves"].items()}
        reordered, losses, differences = curves.pop(REORDERED, None), [], []
        for (label, curve), style, colour in zip(curves.items(), ("-", "--"), (ORANGE, BLUE), strict=True):
            for kind, alpha, every in (("train", 0.55, 1), ("test", 1.0, TEST_EVERY)):
                values = getattr(curve, kind)
                places = range(0, every * len(values), every)
                losses.append(Line(places, values, f"{label}, {kind}", colour, style, options={"alpha": alpha}))
        baseline, (label, scan) = curves[BASELINE], [*curves.items()][1]
        for name, other, colour in ((REORDERED, reordered, ORANGE), (label, scan, BLUE)):
            if other is not None:
                distances = [abs(a - b) for a, b in zip(other.train, baseline.train, strict=True)]
                differences.append(Line(range(len(distances)), distances, name, colour, options={"linewidth": 1}))
        log = "y" if any(max(line.y) > 0 for line in differences) else ""
        panels = [
            Panel(losses, "", "iteration", "loss (cross entropy)", settings={"ylim": (0, None)}),
            Panel(differences, "", "iteration", f"difference from {BASELINE}'s loss", log),
        ]
        return Picture(f"LeNet-5, {row.group}", panels)
