"""Loss curves of trainings side by side: over the same batches, from the same weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jacsparse.models import Dataset
from torch import nn
from torch.nn import functional

from ._context import Timing
from ._experiment import Comparison, Row, compare

__all__ = ["TEST_EVERY", "Curve", "curve_rows", "train_side_by_side"]

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


def train_side_by_side(
    build: Callable[[], nn.Module],
    scanned: Callable[[Any], nn.Module],
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    data: Dataset,
    iterations: int,
    *,
    batch: int,
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Curve, Curve, Curve]:
    """Train a model by back-propagation and by scan.

    And once more by back-propagation, with the samples of each batch in another order: what the order of a sum, and so
    rounding, does to a training.

    Parameters
    ----------
    build : callable
        Makes the model; weights are drawn from `seed`.
    scanned : callable
        Makes of it what is trained by scan.
    optimizer : callable
        Takes the parameters.
    data : Dataset
        What to train on, in the type of the weights.
    iterations : int
        Steps, each with a batch drawn anew.
    batch : int
        Samples of a step.
    seed : int
        Of the weights and the batches.
    say : callable
        Takes a line about the progress.

    Returns
    -------
    baseline, scan, reordered : Curve
    """
    models = []
    for _ in range(3):
        torch.manual_seed(seed)
        models.append(build())
    models[1] = scanned(models[1])
    optimizers = [optimizer(list(model.parameters())) for model in models]
    curves = (Curve(), Curve(), Curve())
    generator = torch.Generator().manual_seed(seed)
    for iteration in range(iterations):
        say(f"iteration {iteration + 1} of {iterations}")
        chosen = torch.randint(len(data.train_labels), (batch,), generator=generator)
        orders = (chosen, chosen, chosen.flip(0))
        for model, each, curve, order in zip(models, optimizers, curves, orders, strict=True):
            if iteration % TEST_EVERY == 0:
                curve.test.append(_test_loss(model, data))
            begin = time.perf_counter()
            curve.train.append(_step(model, each, data.train_inputs[order], data.train_labels[order]))
            curve.seconds.append(time.perf_counter() - begin)
    return curves


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    loss = functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def _test_loss(model: nn.Module, data: Dataset) -> float:
    return functional.cross_entropy(model(data.test_inputs), data.test_labels).item()


def curve_rows(
    baseline: Curve,
    scan: Curve,
    reordered: Curve,
    *,
    name: str,
    group: str,
    tolerance: float,
    falls_to: float,
    published: dict[str, float] | None = None,
) -> list[Row]:
    """How far the losses differ, how far they fall, and how long an iteration takes.

    Parameters
    ----------
    baseline, scan, reordered : Curve
        As `train_side_by_side` returns them.
    name, group : str
        Of the rows.
    tolerance : float
        By how much losses may differ.
    falls_to : float
        To which share of its first value the loss should fall.
    published : dict, optional
        Of the ratio of the iterations' times.
    """
    difference = _difference(baseline, scan)
    # A single batch's loss goes up and down: the mean of a few says where training stands.
    few = max(1, min(10, len(scan.train) // 2))
    left = sum(scan.train[-few:]) / sum(scan.train[:few])
    # The first iteration plans.
    seconds = [curve.seconds[1:] or curve.seconds for curve in (baseline, scan)]
    times = [Timing(own, len(own)) for own in seconds]
    by_back_propagation = Row.timed(f"iteration by back-propagation, {name}", times[0], group=group, role="peer")
    by_scan = Row.timed(f"iteration by scan, {name}", times[1], group=group)
    curves = {
        "baseline": {"train": baseline.train, "test": baseline.test, "seconds": baseline.seconds},
        "scan": {"train": scan.train, "test": scan.test, "seconds": scan.seconds},
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
        Row.of_value(
            f"back-propagation's own, samples of each batch in another order, {name}",
            _difference(baseline, reordered),
            "loss",
            group=group,
            role="reference",
        ),
        Row.of_value(
            f"loss of the last {few} iterations over that of the first {few}, {name}",
            left,
            "ratio",
            group=group,
            note=f"{scan.train[0]:.4f} at first, {scan.train[-1]:.4f} at last",
            comparisons=(Comparison("last / first", left, at_most=falls_to),),
        ),
        by_back_propagation,
        replace(
            by_scan,
            comparisons=compare("back-propagation / scan", by_back_propagation, by_scan, **(published or {})),
        ),
    ]


def _difference(one: Curve, other: Curve) -> float:
    """The largest between the losses of two trainings."""
    return max(abs(a - b) for a, b in zip(one.train, other.train, strict=True))
