"""``jacsparse simulate``: which way of training in parallel pays for a model, on up to a million workers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .inputs import announcements, check_outputs, echo, layer_input, load_part, parse_numbers
from .options import Checkpoint, Data, Input, Model, Prune, Seed, Training, Trust

if TYPE_CHECKING:
    from ..flop import CountEstimate
    from ..simulation import TrainingMethod


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
        typer.Option(
            help="bp, bppsa, cyclic_reduction, ranks, gpipe, 1f1b (PipeDream), ddg or leapfrog; repeatable. "
            "Default: all."
        ),
    ] = None,
    schedule: Annotated[
        str,
        typer.Option(
            help="Schedule of bppsa: linear, blelloch, blelloch:LEVELS, chunked:LENGTH, or auto, the fastest."
        ),
    ] = "auto",
    microbatches: Annotated[
        int | None, typer.Option(min=1, help="Micro-batches of gpipe. Default: as many as workers, or as samples.")
    ] = None,
    latency: Annotated[float, typer.Option(help="Seconds until a message begins to arrive.")] = 1e-5,
    bandwidth: Annotated[float, typer.Option(help="Bytes of a message per second.")] = 1e10,
    rate: Annotated[
        float | None, typer.Option(help="Count FLOP, at so many per second of each worker. Default: measure here.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the lines of the table to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw time and memory over workers into this file.")] = None,
    training: Training = False,
    seed: Seed = 0,
) -> None:
    """Predict time, memory and messages of training on many workers, by each way of parallel training."""
    from torch import nn

    from ..figures import check_figure
    from ..simulation import simulate as simulate_methods
    from ..terminal import console

    check_outputs(json, csv, plot)
    if plot is not None:
        check_figure(plot)
    counts = _parse_workers(workers)
    methods = _methods(method, schedule, microbatches)
    analysed, x, path, name = load_part(model, input, prune, checkpoint, seed, trust, part, data, batch, training)
    if steps is not None and not isinstance(analysed, nn.RNNBase):
        raise ValueError(f"--steps {steps} is of no use: {path or model} is no recurrent layer")
    x = layer_input(analysed, x, steps)
    if not any(parameter.requires_grad for parameter in analysed.parameters()):
        echo(f"{name} has no weight to train; its figures are without weights' gradients")
    notes: list[str] = []
    scans = {"bppsa", "cyclic_reduction", "ranks"}.intersection(method or ())

    def accept(estimate: CountEstimate) -> bool:
        """Whether to multiply matrices, which is asked for or takes little."""
        if not estimate.is_long:
            return True
        if scans:
            echo(f"the products of {' and '.join(sorted(scans))} take {estimate}; without --method they are left out")
            return True
        notes.append(
            f"Products of Jacobians: left out, as to count them takes {estimate}. Ask for them by the name of a "
            "method, as in --method bppsa."
        )
        return False

    with announcements("simulating") as announce:
        simulation = simulate_methods(
            analysed,
            x,
            workers=counts,
            methods=methods,
            latency=latency,
            bandwidth=bandwidth,
            rate=rate,
            progress=announce,
            accept=accept,
        )
    settings = {
        "model": model, "part": path, "data": data, "prune": prune, "seed": seed, "schedule": schedule,
        "microbatches": microbatches,
        "checkpoint": None if checkpoint is None else str(checkpoint),
    }  # fmt: skip
    simulation = replace(simulation, name=name, settings=settings, note=" ".join(notes))
    console().print(simulation)
    if json is not None:
        simulation.save_json(json)
    if csv is not None:
        simulation.save_csv(csv)
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


def _methods(names: list[str] | None, schedule: str, microbatches: int | None) -> list[TrainingMethod | str]:
    """The methods with their options; ValueError where there is no method for an option."""
    from ..simulation import TRAINING_METHODS, Bppsa, GPipe

    chosen = list(dict.fromkeys(names or TRAINING_METHODS))
    for option, name, unused in (
        (f"--schedule {schedule}", "bppsa", schedule == "auto"),
        (f"--microbatches {microbatches}", "gpipe", microbatches is None),
    ):
        if not unused and name not in chosen:
            raise ValueError(f"{option} is of no use: add --method {name}")
    options = {"bppsa": Bppsa(schedule), "gpipe": GPipe(microbatches)}
    return [options.get(name, name) for name in chosen]
