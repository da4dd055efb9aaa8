"""``jacsparse simulate``: which way of training in parallel pays for a model, on up to a million workers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from .inputs import announcements, check_outputs, echo, layer_input, load_part, parse_numbers
from .options import Checkpoint, Data, Input, Model, Prune, Seed, Training, Trust


def simulate(
    model: Model,
    input: Input = None,
    prune: Prune = 0.0,
    checkpoint: Checkpoint = None,
    trust: Trust = False,
    part: Annotated[
        str | None,
        typer.Option(help="Submodule to simulate. Default: all; vgg11: features; bitstream, irmas: rnn."),
    ] = None,
    data: Data = "random",
    batch: Annotated[int, typer.Option(min=1, help="Samples of the mini-batch.")] = 16,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of a recurrent layer's input to take. Default: all.")
    ] = None,
    workers: Annotated[
        str, typer.Option(help="Numbers of workers, as in 1,4,16, or their powers of two, as in 1..1024.")
    ] = "1..1048576",
    method: Annotated[
        list[str] | None,
        typer.Option(help="bp, ranks, gpipe, 1f1b (PipeDream) or ddg; repeatable. Default: all."),
    ] = None,
    latency: Annotated[float, typer.Option(help="Seconds until a message begins to arrive.")] = 1e-5,
    bandwidth: Annotated[float, typer.Option(help="Bytes of a message per second.")] = 1e10,
    rate: Annotated[
        float | None, typer.Option(help="Count FLOP, at so many per second of each worker. Default: measure here.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw time and memory over workers into this file.")] = None,
    training: Training = False,
    seed: Seed = 0,
) -> None:
    """Predict time, memory and messages of training on many workers, by each way of parallel training."""
    from torch import nn

    from ..figures import check_figure
    from ..simulation import simulate as simulate_methods
    from ..terminal import console

    check_outputs(json, plot)
    if plot is not None:
        check_figure(plot)
    counts = _parse_workers(workers)
    analysed, x, path, name = load_part(model, input, prune, checkpoint, seed, trust, part, data, batch, training)
    if steps is not None and not isinstance(analysed, nn.RNNBase):
        raise ValueError(f"--steps {steps} is of no use: {path or model} is no recurrent layer")
    x = layer_input(analysed, x, steps)
    if not any(parameter.requires_grad for parameter in analysed.parameters()):
        echo(f"{name} has no weight to train; its figures are without weights' gradients")
    with announcements("simulating") as announce:
        simulation = simulate_methods(
            analysed,
            x,
            workers=counts,
            methods=method or None,
            latency=latency,
            bandwidth=bandwidth,
            rate=rate,
            progress=announce,
        )
    settings = {
        "model": model, "part": path, "data": data, "prune": prune, "seed": seed,
        "checkpoint": None if checkpoint is None else str(checkpoint),
    }  # fmt: skip
    simulation = replace(simulation, name=name, settings=settings)
    console().print(simulation)
    if json is not None:
        simulation.save_json(json)
    if plot is not None:
        simulation.plot(plot)


def _parse_workers(text: str) -> tuple[int, ...]:
    """Numbers separated by commas; or, of ``a..b``, a times all powers of two up to b."""
    expected = "numbers of workers, as in 1,4,16 or 1..1024"
    ends = re.fullmatch(r"([0-9]+)\.\.([0-9]+)", text)
    if ends is None:
        return parse_numbers("--workers", text, expected)
    first, last = map(int, ends.groups())
    if not 0 < first <= last:
        raise ValueError(f"--workers is {text!r}; expected {expected}")
    return tuple(first << power for power in range((last // first).bit_length()))
