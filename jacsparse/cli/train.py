"""``jacsparse train``: train a model."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer


def train(
    task: Annotated[
        str,
        typer.Argument(
            help="bitstream, irmas, lenet5, resnet8, resnet56, resnet110 or vgg11; defaults are the papers'."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="Checkpoint (.safetensors); beside it go the curves, as .csv and .png, and .training, to resume from."
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            help="digits, cifar10:DIR, cifar100:DIR, bitstream:STEPS, irmas:DIR, tones, or a file of yours with "
            "tensors inputs and labels (.safetensors, .pt)."
        ),
    ] = None,
    features: Annotated[str | None, typer.Option(help="Features of sounds: S, M or L (Table 4.2).")] = None,
    skip_damaged: Annotated[bool, typer.Option("--skip-damaged", help="Leave out damaged sound files.")] = False,
    backward: Annotated[str, typer.Option(help="Back-propagation (bp), ddg, leapfrog or scan.")] = "bp",
    schedule: Annotated[str | None, typer.Option(help="Schedule of the scan, as for jacsparse flop.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of leapfrog.")] = None,
    modules: Annotated[
        str | None, typer.Option(help="Modules of ddg: how many, or first layers, as in group2,group3.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs of training.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples per iteration.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="Optimizer: sgd or adam.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    decay: Annotated[str | None, typer.Option(help="Learning rate: constant, cosine, steps or diminishing.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Momentum of SGD.")] = None,
    prune: Annotated[
        float | None, typer.Option(help="Share of all weights to prune after training, as in 0.97.")
    ] = None,
    scope: Annotated[str | None, typer.Option(help="Where --prune counts its share: layer or global.")] = None,
    engine: Annotated[
        str | None, typer.Option(help="What retrains: dense, with masks, or sparse, with the weights that are left.")
    ] = None,
    retrain_epochs: Annotated[int | None, typer.Option(help="Epochs of training after pruning.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 1, help="Seed of weights, order, augmentation and dropout.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted training, with the same settings.")
    ] = False,
) -> None:
    """Train a model, and prune and retrain it.

    Under torchrun, ddg has a process for each module, and scan of a recurrent network one for each part of its steps.
    """
    from .. import models

    if data is not None and ":" not in data and Path(data).suffix in (".pt", ".safetensors"):
        data = f"file:{data}"
    options = {
        "data": data, "features": features, "skip_damaged": skip_damaged or None, "backward": backward,
        "schedule": schedule, "threads": threads, "modules": _modules(modules), "epochs": epochs, "batch": batch,
        "optimizer": optimizer, "lr": lr, "decay": decay, "momentum": momentum, "prune": prune, "scope": scope,
        "engine": engine, "retrain_epochs": retrain_epochs, "seed": seed, "out": out,
    }  # fmt: skip
    changes: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if prune == 0:
        changes.setdefault("retrain_epochs", 0)
    settings = replace(models.default_settings(task), **changes)
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(models.progress_bar()) if _is_last_rank() else None
        result = models.train(settings, resume=resume, progress=progress)
    if not _is_last_rank():
        return
    for phase, accuracy in result.accuracy.items():
        typer.echo(f"{phase}: {accuracy:.1%} of the test samples right")
    for path in settings.outputs:
        typer.echo(path)


def _modules(text: str | None) -> int | list[str] | None:
    if text is None:
        return None
    return int(text) if text.lstrip("-").isdecimal() else text.split(",")


def _is_last_rank() -> bool:
    """Whether this process speaks for all that torchrun has started."""
    return int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1
