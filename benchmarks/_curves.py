"""Loss curves of trainings side by side: over the same batches, from the same weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from jacsparse.models import Dataset
from torch import nn
from torch.nn import functional

from ._context import Timing
from ._experiment import Comparison, Row, compare

__all__ = ["BASELINE", "REORDERED", "TEST_EVERY", "Curve", "curve_rows", "train_side_by_side"]

#: Trainings by autograd; the other one takes the samples of each batch in another order.
BASELINE, REORDERED = "back-propagation", "back-propagation in another order"

_TENSORS = ("train_inputs", "train_labels", "test_inputs", "test_labels")

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
    variants: Mapping[str, Callable[[Any], nn.Module]],
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    data: Dataset,
    iterations: int,
    *,
    batch: int,
    seed: int = 0,
    device: str = "cpu",
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Curve]:
    """Train a model by back-propagation and in other ways.

    And once more by back-propagation, with the samples of each batch in another order: what the order of a sum, and so
    rounding, does to a training.

    Parameters
    ----------
    build : callable
        Makes the model; weights are drawn from `seed`.
    variants : mapping of str to callable
        By name, what makes of it what is trained in another way.
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
    device : str
        Where, as PyTorch calls it.
    say : callable
        Takes a line about the progress.

    Returns
    -------
    dict of str to Curve
        By `BASELINE`, the variants' names, and `REORDERED`.
    """
    curves = {name: Curve() for name in (BASELINE, *variants, REORDERED)}
    trained = []
    for name in curves:
        torch.manual_seed(seed)
        model = build().to(device)
        model = variants[name](model) if name in variants else model
        trained.append((model, optimizer(list(model.parameters()))))
    data = replace(data, **{name: getattr(data, name).to(device) for name in _TENSORS})
    generator = torch.Generator().manual_seed(seed)
    for iteration in range(iterations):
        say(f"iteration {iteration + 1} of {iterations}")
        chosen = torch.randint(len(data.train_labels), (batch,), generator=generator).to(device)
        for (model, each), (name, curve) in zip(trained, curves.items(), strict=True):
            order = chosen.flip(0) if name == REORDERED else chosen
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
    curves: Mapping[str, Curve],
    *,
    name: str,
    group: str,
    tolerance: float,
    falls_to: float,
    published: Mapping[str, float] | None = None,
) -> list[Row]:
    """How far the losses differ, how far they fall, and how long an iteration takes.

    Parameters
    ----------
    curves : mapping of str to Curve
        As `train_side_by_side` returns them.
    name, group : str
        Of the rows.
    tolerance : float
        By how much losses may differ.
    falls_to : float
        To which share of its first value the loss should fall.
    published : mapping, optional
        By variant, the ratio of the iterations' times.
    """
    noise = Row.of_value(
        f"largest difference of the losses, {REORDERED}, {name}",
        _difference(curves[BASELINE], curves[REORDERED]),
        "loss",
        group=group,
        role="reference",
        data={"curves": {label: asdict(curve) for label, curve in curves.items()}},
    )
    baseline = Row.timed(f"iteration by {BASELINE}, {name}", _iterations(curves[BASELINE]), group=group, role="peer")
    rows = [noise, baseline]
    for label, curve in curves.items():
        if label in (BASELINE, REORDERED):
            continue
        difference = _difference(curves[BASELINE], curve)
        compared = [Comparison(f"difference / {tolerance:g}", difference / tolerance, at_most=1)]
        compared += compare(f"difference / {REORDERED}", replace(noise, median=difference, fastest=None), noise)
        rows.append(
            Row.of_value(
                f"largest difference of the losses, {label}, {name}",
                difference,
                "loss",
                group=group,
                comparisons=tuple(compared),
            )
        )
        # A single batch's loss goes up and down: the mean of a few says where training stands.
        few = max(1, min(10, len(curve.train) // 2))
        left = sum(curve.train[-few:]) / sum(curve.train[:few])
        rows.append(
            Row.of_value(
                f"loss of the last {few} iterations over that of the first {few}, {label}, {name}",
                left,
                "ratio",
                group=group,
                note=f"{curve.train[0]:.4f} at first, {curve.train[-1]:.4f} at last",
                comparisons=(Comparison("last / first", left, at_most=falls_to),),
            )
        )
        timed = Row.timed(f"iteration by {label}, {name}", _iterations(curve), group=group)
        targets = {"published": published[label]} if published and label in published else {}
        rows.append(replace(timed, comparisons=compare(f"{BASELINE} / {label}", baseline, timed, **targets)))
    return rows


def _iterations(curve: Curve) -> Timing:
    """How long they took, but for the first one, which plans."""
    seconds = curve.seconds[1:] or curve.seconds
    return Timing(seconds, len(seconds))


def _difference(one: Curve, other: Curve) -> float:
    """The largest between the losses of two trainings."""
    return max(abs(a - b) for a, b in zip(one.train, other.train, strict=True))
