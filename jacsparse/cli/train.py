"""``jacsparse train``: train a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer


def train(
    task: Annotated[
        str, typer.Argument(help="bitstream, irmas, lenet5 or vgg11. Options left out are as in the thesis.")
    ],
    out: Annotated[
        Path, typer.Option(help="Checkpoint (.safetensors); curves are written beside it as .csv and .png.")
    ],
    data: Annotated[
        str | None, typer.Option(help="digits, cifar10:DIR, cifar100:DIR, bitstream:STEPS, irmas:DIR or tones.")
    ] = None,
    features: Annotated[str | None, typer.Option(help="Features of sounds: S, M or L (Table 4.2).")] = None,
    skip_damaged: Annotated[bool, typer.Option("--skip-damaged", help="Leave out damaged sound files.")] = False,
    backward: Annotated[str, typer.Option(help="Back-propagation (bp), leapfrog or scan.")] = "bp",
    schedule: Annotated[str | None, typer.Option(help="Schedule of the scan, as for jacsparse flop.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of leapfrog.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs of training.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples per iteration.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="Optimizer: sgd or adam.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Momentum of SGD.")] = None,
    prune: Annotated[
        float | None, typer.Option(help="Share of all weights to prune after training, as in 0.97.")
    ] = None,
    scope: Annotated[str | None, typer.Option(help="Where --prune counts its share: layer or global.")] = None,
    retrain_epochs: Annotated[int | None, typer.Option(help="Epochs of training after pruning.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 1, help="Seed of weights, order, augmentation and dropout.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint.")] = False,
) -> None:
    """Train a model, by back-propagation, leapfrogging or scan; prune and retrain it."""
    from .. import models

    options = {
        "data": data, "features": features, "skip_damaged": skip_damaged or None, "backward": backward,
        "schedule": schedule, "threads": threads, "epochs": epochs, "batch": batch, "optimizer": optimizer,
        "lr": lr, "momentum": momentum, "prune": prune, "scope": scope, "retrain_epochs": retrain_epochs, "seed": seed,
        "out": out,
    }  # fmt: skip
    changes: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if prune == 0:
        changes.setdefault("retrain_epochs", 0)
    settings = replace(models.default_settings(task), **changes)
    with models.progress_bar() as progress:
        result = models.train(settings, resume=resume, progress=progress)
    for phase, accuracy in result.accuracy.items():
        typer.echo(f"{phase}: {accuracy:.1%} of the test samples right")
    for path in settings.outputs:
        typer.echo(path)
