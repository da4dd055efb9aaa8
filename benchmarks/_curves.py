"""Loss curves of trainings over the same batches, from the same weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jacsparse.models import Dataset
from torch import nn
from torch.nn import functional

from ._context import Timing
from ._rows import Comparison, Group, Row, compare

#: The labels of two trainings by autograd; the second takes the samples of each batch in another order.
BASELINE, REORDERED = "back-propagation", "back-propagation in another order"

#: Iterations between two losses on the test data.
TEST_EVERY = 20


@dataclass
class Curve:
    """The losses and times of one training."""

    #: The loss of each iteration's batch, before its step.
    train: list[float] = field(default_factory=list)
    #: The loss on the test data before iterations 0, 20, 40, ...
    test: list[float] = field(default_factory=list)
    #: Seconds of each iteration: forward, backward and step.
    seconds: list[float] = field(default_factory=list)


def train_side_by_side(
    build: Callable[[], nn.Module],
    variants: Mapping[str, Callable[[Any], nn.Module]],
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    data: Dataset,
    iterations: int,
    *,
    batch: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Curve]:
    """Train the model of `build` by back-propagation, and what each variant makes of it; return the curves by name.

    Another training by back-propagation takes the samples of each batch in another order: it shows how much the order
    of a sum, and so rounding, changes a training. All weights and batches are drawn from one seed.
    """
    curves = {name: Curve() for name in (BASELINE, *variants, REORDERED)}
    trained = []
    for name in curves:
        torch.manual_seed(0)
        model = build().to(device, dtype)
        model = variants[name](model) if name in variants else model
        trained.append((model, optimizer(list(model.parameters()))))
    inputs, labels = data.train_inputs.to(device, dtype), data.train_labels.to(device)
    test = data.test_inputs.to(device, dtype), data.test_labels.to(device)
    generator = torch.Generator().manual_seed(0)
    for iteration in range(iterations):
        say(f"iteration {iteration + 1} of {iterations}")
        samples = torch.randint(len(labels), (batch,), generator=generator).to(device)
        for (model, its_optimizer), (name, curve) in zip(trained, curves.items(), strict=True):
            order = samples.flip(0) if name == REORDERED else samples
            if iteration % TEST_EVERY == 0:
                curve.test.append(_test_loss(model, *test))
            begin = time.perf_counter()
            curve.train.append(_step(model, its_optimizer, inputs[order], labels[order]))
            curve.seconds.append(time.perf_counter() - begin)
    return curves


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    loss = functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def _test_loss(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    return functional.cross_entropy(model(inputs), labels).item()


def curve_rows(
    curves: Mapping[str, Curve],
    *,
    name: str,
    group: str,
    tolerance: float,
    falls_to: float,
    published: Mapping[str, float] | None = None,
) -> list[Row]:
    """Rows of how much the losses differ, how far they fall, and how long an iteration takes.

    Losses may differ by `tolerance`, and should fall to the share `falls_to`; `published` has the ratio of the
    iterations' times, by variant.
    """
    rows, curves_data = Group(group), {label: asdict(curve) for label, curve in curves.items()}
    noise = rows.value(
        f"largest difference of the losses, {REORDERED}, {name}", _difference(curves[BASELINE], curves[REORDERED]),
        "loss", role="reference", data={"curves": curves_data},
    )  # fmt: skip
    baseline = rows.timed(f"iteration by {BASELINE}, {name}", _iterations(curves[BASELINE]), role="peer")
    for label, curve in curves.items():
        if label in (BASELINE, REORDERED):
            continue
        difference = _difference(curves[BASELINE], curve)
        row = rows.value(f"largest difference of the losses, {label}, {name}", difference, "loss")
        beside = Comparison(f"difference / {tolerance:g}", difference / tolerance, at_most=1)
        rows.add(row.beside(beside, *compare(f"difference / {REORDERED}", row, noise)))
        # The loss of single batches fluctuates: a mean over several shows the progress.
        window = max(1, min(10, len(curve.train) // 2))
        ratio = sum(curve.train[-window:]) / sum(curve.train[:window])
        text = f"loss of the last {window} iterations over that of the first {window}, {label}, {name}"
        note = f"{curve.train[0]:.4f} at first, {curve.train[-1]:.4f} at last"
        rows.value(text, ratio, "ratio", note=note, comparisons=(Comparison("last / first", ratio, at_most=falls_to),))
        timed = rows.timed(f"iteration by {label}, {name}", _iterations(curve))
        target = (published or {}).get(label)
        rows.compare(f"{BASELINE} / {label}", baseline.label, timed.label, published=target)
    return rows.rows()


def _iterations(curve: Curve) -> Timing:
    """The timing of all iterations except the first, which plans."""
    seconds = curve.seconds[1:] or curve.seconds
    return Timing(seconds, len(seconds))


def _difference(one: Curve, other: Curve) -> float:
    """The largest difference between the losses of two trainings."""
    return max(abs(a - b) for a, b in zip(one.train, other.train, strict=True))


def averaged(data: Dataset, side: int) -> Dataset:
    """The data with images averaged to `side` × `side`."""
    resize = partial(functional.adaptive_avg_pool2d, output_size=side)
    return replace(data, train_inputs=resize(data.train_inputs), test_inputs=resize(data.test_inputs))
