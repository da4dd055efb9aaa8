"""``jacsparse compare``: solvers of the triangular system that a model's back-propagation is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from .inputs import announcements, check_outputs, layer_input, load_part, parse_numbers
from .options import Checkpoint, Data, Input, Model, Prune, Seed, Trust


def compare(
    model: Model,
    input: Input = None,
    prune: Prune = 0.0,
    checkpoint: Checkpoint = None,
    trust: Trust = False,
    part: Annotated[
        str | None,
        typer.Option(help="Submodule to compare on. Default: all; vgg11: features; bitstream, irmas: rnn."),
    ] = None,
    data: Data = "random",
    batch: Annotated[int, typer.Option(min=1, help="Samples of the mini-batch.")] = 1,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of a recurrent layer's input to take. Default: all.")
    ] = None,
    workers: Annotated[str, typer.Option(help="Count for these numbers of workers, as in 1,4,16.")] = "1,4,16,64",
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="A solver, as jacobi; repeatable. Default: all but richardson, and what takes long to count."
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
    seed: Seed = 0,
) -> None:
    """Compare ways of back-propagation in parallel: steps, work, memory and time of each."""
    from torch import nn

    from ..solvers import compare as compare_solvers
    from ..terminal import console

    check_outputs(json)
    counts = parse_numbers("--workers", workers, "numbers of workers, as in 1,4,16")
    analysed, x, path, name = load_part(model, input, prune, checkpoint, seed, trust, part, data, batch, False)
    if steps is not None and not isinstance(analysed, nn.RNN):
        raise ValueError(f"--steps {steps} is of no use: {path or model} is no recurrent layer")
    x = layer_input(analysed, x, steps)
    with announcements("solving by") as announce:
        comparison = compare_solvers(analysed, x, workers=counts, methods=method or None, progress=announce)
    settings = {
        "model": model, "part": path, "data": data, "prune": prune, "seed": seed,
        "checkpoint": None if checkpoint is None else str(checkpoint),
    }  # fmt: skip
    comparison = replace(comparison, name=name if data == "random" else f"{name} on {data}", settings=settings)
    console().print(comparison)
    if json is not None:
        comparison.save_json(json)
