"""Training LeNet-5 by back-propagation and by scan from one seed: Figure 3.4, on digits instead of CIFAR-10."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from jacsparse.models import Dataset, LeNet5, load_data
from torch import nn
from torch.nn import functional

from jacsparse.nn import Scan

from ._context import Context, Timing
from ._experiment import Comparison, Experiment, Row, compare

__all__ = ["Curve", "LenetConvergence", "loss_curves"]

# The thesis' settings.
LEARNING_RATE, MOMENTUM, BATCH = 0.001, 0.9, 256
#: The loss on the test data is taken once in so many iterations.
TEST_EVERY = 20


@dataclass
class Curve:
    """One training.

    Attributes
    ----------
    train : list of float
        The loss of each iteration's batch, before its step.
    test : list of float
        The loss on the test data before iterations 0, 20, 40, ...
    seconds : list of float
        How long each iteration took: forward, backward and step.
    """

    train: list[float] = field(default_factory=list)
    test: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def loss_curves(
    iterations: int,
    dtype: torch.dtype,
    *,
    batch: int = BATCH,
    schedule: str = "blelloch",
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Curve, Curve, Curve]:
    """Train LeNet-5 on digits, from the same weights over the same batches: by back-propagation and by scan.

    And once more by back-propagation, with the samples of each batch in another order: what the order of a sum, and so
    rounding, does to a training.

    Parameters
    ----------
    iterations : int
        Steps of SGD, each with a batch drawn anew.
    dtype : torch.dtype
        float32 or float64.
    batch : int
        Samples of a step.
    schedule : str
        Of the scan.
    seed : int
        Of the weights and the batches.
    say : callable
        Takes a line about the progress.

    Returns
    -------
    baseline, scan, reordered : Curve
    """
    data = load_data("digits")
    data = replace(data, train_inputs=data.train_inputs.to(dtype), test_inputs=data.test_inputs.to(dtype))
    models = (_lenet5(dtype, seed), Scan(_lenet5(dtype, seed), schedule=schedule), _lenet5(dtype, seed))
    optimizers = [torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM) for model in models]
    curves = (Curve(), Curve(), Curve())
    generator = torch.Generator().manual_seed(seed)
    for iteration in range(iterations):
        say(f"{dtype}: iteration {iteration + 1} of {iterations}")
        chosen = torch.randint(len(data.train_labels), (batch,), generator=generator)
        orders = (chosen, chosen, chosen.flip(0))
        for model, optimizer, curve, order in zip(models, optimizers, curves, orders, strict=True):
            if iteration % TEST_EVERY == 0:
                curve.test.append(_test_loss(model, data))
            begin = time.perf_counter()
            curve.train.append(_step(model, optimizer, data.train_inputs[order], data.train_labels[order]))
            curve.seconds.append(time.perf_counter() - begin)
    return curves


def _lenet5(dtype: torch.dtype, seed: int) -> LeNet5:
    torch.manual_seed(seed)
    return LeNet5().to(dtype)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor) -> float:
    loss = functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def _test_loss(model: nn.Module, data: Dataset) -> float:
    return functional.cross_entropy(model(data.test_inputs), data.test_labels).item()


@dataclass(frozen=True)
class LenetConvergence(Experiment):
    """Losses of both trainings, float32 and float64.

    Attributes
    ----------
    iterations : int
        Of each training.
    batch : int
        Samples of a step.
    """

    iterations: int = 1000
    batch: int = BATCH

    name = "lenet_convergence"
    title = "Training LeNet-5 by back-propagation and by scan"
    source = "thesis, Figure 3.4, on scikit-learn's digits instead of CIFAR-10"

    def run(self, context: Context) -> list[Row]:
        rows: list[Row] = []
        for dtype, tolerance in ((torch.float32, 1e-3), (torch.float64, 1e-9)):
            name = str(dtype).removeprefix("torch.")
            settings = f"batch {self.batch}, SGD, learning rate {LEARNING_RATE}, momentum {MOMENTUM}"
            group = f"{name}: {self.iterations:,} iterations, {settings}"
            try:
                curves = loss_curves(self.iterations, dtype, batch=self.batch, say=context.say)
            except ImportError as error:
                rows.append(Row.missing("losses", str(error), group=group))
                continue
            rows += _rows(*curves, name, group, tolerance)
        return rows

    def figure(self, rows: Sequence[Row], path: Path) -> None:
        from jacsparse._figures import BLUE, ORANGE, new_figure, save_figure

        # float32's: in a picture, float64's are the same.
        row = next(row for row in rows if row.data)
        figure, axes = new_figure()
        for kind, shade, every in (("train", 0.55, 1), ("test", 1.0, TEST_EVERY)):
            for name, label, style, colour in (
                ("baseline", "back-propagation", "-", ORANGE),
                ("scan", "scan", "--", BLUE),
            ):
                losses = row.data[name][kind]
                places = range(0, every * len(losses), every)
                axes.plot(places, losses, style, color=colour, alpha=shade, label=f"{label}, {kind}")
        axes.set(xlabel="iteration", ylabel="loss", ylim=(0, None))
        axes.set_title(f"LeNet-5 on digits, {row.group}", fontsize=9)
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8, frameon=False)
        save_figure(figure, path)


def _difference(one: Curve, other: Curve) -> float:
    """The largest between the losses of two trainings."""
    return max(abs(a - b) for a, b in zip(one.train, other.train, strict=True))


def _rows(baseline: Curve, scan: Curve, reordered: Curve, name: str, group: str, tolerance: float) -> list[Row]:
    difference = _difference(baseline, scan)
    rounding = Row.of_value(
        f"back-propagation's own, samples of each batch in another order, {name}",
        _difference(baseline, reordered),
        "loss",
        group=group,
        role="reference",
    )
    # A single batch's loss goes up and down: the mean of a few says where training stands.
    few = max(1, min(10, len(scan.train) // 2))
    left = sum(scan.train[-few:]) / sum(scan.train[:few])
    # The first iteration plans.
    times = [Timing(curve.seconds[1:] or curve.seconds, len(curve.seconds)) for curve in (baseline, scan)]
    by_back_propagation = Row.timed(f"iteration by back-propagation, {name}", times[0], group=group, role="peer")
    by_scan = Row.timed(f"iteration by scan, {name}", times[1], group=group)
    curves = {
        "baseline": {"train": baseline.train, "test": baseline.test},
        "scan": {"train": scan.train, "test": scan.test},
    }
    return [
        Row.of_value(
            f"largest difference of the losses, {name}",
            difference,
            "loss",
            group=group,
            comparisons=(Comparison(f"difference / {tolerance:g}", difference / tolerance, at_most=1),),
            data=curves,
        ),
        rounding,
        Row.of_value(
            f"loss of the last {few} iterations over that of the first {few}, {name}",
            left,
            "ratio",
            group=group,
            note=f"{scan.train[0]:.4f} at first, {scan.train[-1]:.4f} at last",
            comparisons=(Comparison("last / first", left, at_most=0.5),),
        ),
        by_back_propagation,
        replace(by_scan, comparisons=compare("scan / back-propagation", by_scan, by_back_propagation)),
    ]
